"""Free TCP ports, and how to see that a server lost the race for one."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable

_BIND_FAILURE = re.compile(r"address already in use|EADDRINUSE|\[Errno 98\]|Errno 48", re.IGNORECASE)


def free_port(host: str) -> int:
    """A port that nobody listened on a moment ago; it can be taken before the server binds it."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(host: str, port: int) -> bool:
    """Whether the port can be bound right now (ports in TIME_WAIT count as free, as they do for servers)."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def says_bind_failed(log_lines: Iterable[str]) -> bool:
    """Whether a server's log says that its port was taken."""
    return any(_BIND_FAILURE.search(line) for line in log_lines)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
