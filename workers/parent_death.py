"""Lets a process die with the one that started it, `kill -9` included."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends; ends it now if the parent is already gone.

    The kernel means the parent's *thread* that forked, so a parent must fork from a thread that lives as long as it.
    Elsewhere than on Linux only the check is made.

    Args:
        parent: pid of the process that started this one.
        number: the signal to get.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
