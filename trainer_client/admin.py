"""One question to a broker, asked in a session of its own: for command lines and scripts."""

from __future__ import annotations

import json
import os
import queue
from typing import Any

import zmq

from rollmq.errors import DeadlineExceeded, Refused, RollmqError
from rollmq.messages import Hello, Message, Query, Refusal, Report, Role, TaskState, Welcome
from rollmq.session import Session
from trainer_client.transport import DealerTransport, check_address


class _Asker:
    """Handler of a session that asks once."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Message] = queue.Queue()

    def hello(self) -> Hello:
        return Hello(Role.ADMIN, f"admin-{os.getpid()}", os.urandom(16), pid=os.getpid())

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def opened(self, welcome: Welcome) -> None:
        pass

    def received(self, message: Message) -> None:
        self.answers.put(message)

    def lost(self, reason: str, error: RollmqError | None) -> None:
        pass


def query(
    address: str,
    what: str,
    *,
    state: TaskState | None = None,
    task_id: int = 0,
    limit: int = 100,
    timeout_s: float = 10.0,
) -> Any:
    """The document a broker answers with.

    Raises:
        DeadlineExceeded: no answer in time; names the address.
        Refused: the broker does not know such a report.
    """
    asker = _Asker()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    session = Session(lambda: DealerTransport(context, check_address(address)), asker, "rollmq-admin")
    session.start()
    try:
        session.wait_open(timeout_s)
        session.send(Query(session.id, 1, what, state, task_id, limit))
        answer = asker.answers.get(timeout=timeout_s)
    except (queue.Empty, DeadlineExceeded) as error:
        raise DeadlineExceeded(f"no broker answered at {address} within {timeout_s:g} s") from error
    finally:
        session.close()
        context.term()
    if isinstance(answer, Refusal):
        raise Refused(answer.code, answer.message)
    if not isinstance(answer, Report):
        raise RollmqError(f"the broker at {address} answered {type(answer).__name__} to a question for {what}")
    return json.loads(answer.bodies[0])
