"""The client side of a session, with time as an argument."""

from __future__ import annotations

import random

from rollmq.errors import Refused, SessionSuperseded
from rollmq.link import (
    LONGEST_PAUSE_S,
    OPEN_TIMEOUT_S,
    CloseTransport,
    Link,
    LinkState,
    Lost,
    Opened,
    OpenTransport,
    Received,
    Send,
)
from rollmq.messages import (
    Bye,
    ByeAck,
    Done,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refusal,
    RefusalCode,
    Resync,
    Role,
    Welcome,
)

WELCOME = Welcome(7, 1, heartbeat_s=2.0, dead_after_s=10.0, max_body_bytes=1, max_items=1)
HELLO = Hello(Role.WORKER, "w", b"n" * 16)


def make_link() -> Link:
    return Link(lambda: HELLO, lambda: (5, 2), random.Random(1))


def opened_link(now: float = 0.0) -> Link:
    link = make_link()
    link.poll(now)
    assert link.receive(WELCOME, now) == [Opened(WELCOME)]
    return link


def poll_until(link: Link, start: float, end: float) -> list[object]:
    """Polls each second, as the thread does, and returns all instructions."""
    return [i for second in range(int(start) + 1, int(end) + 1) for i in link.poll(float(second))]


def test_it_opens_a_fresh_transport_and_greets() -> None:
    assert make_link().poll(0.0) == [OpenTransport(), Send(HELLO)]


def test_it_beats_with_its_progress() -> None:
    link = opened_link()
    assert link.poll(1.9) == []
    assert link.poll(2.0) == [Send(Heartbeat(7, 5, 2))]
    assert link.deadline() == 4.0


def test_missed_beats_after_a_stall_are_not_sent_in_a_burst() -> None:
    link = opened_link()
    assert len(link.poll(9.0)) == 1
    assert link.poll(9.0) == []


def test_its_own_stall_is_not_taken_for_the_brokers_silence() -> None:
    link = opened_link()
    assert link.poll(100.0) == [Send(Heartbeat(7, 5, 2))]
    assert not any(isinstance(i, Lost) for i in poll_until(link, 100.0, 107.0))
    assert any(isinstance(i, Lost) for i in poll_until(link, 107.0, 109.0)), "the silence itself still counts"


def test_a_silent_broker_is_given_up_and_greeted_again_on_a_fresh_transport() -> None:
    link = opened_link()
    assert not any(isinstance(i, Lost) for i in poll_until(link, 0.0, 9.0))
    instructions = link.poll(10.0)
    assert isinstance(instructions[0], CloseTransport)
    assert isinstance(instructions[1], Lost)
    assert link.session == 0
    assert link.poll(link.deadline())[0] == OpenTransport()


def test_any_message_keeps_the_session() -> None:
    link = opened_link()
    poll_until(link, 0.0, 9.0)
    link.receive(HeartbeatAck(7), 9.0)
    assert not any(isinstance(i, Lost) for i in poll_until(link, 9.0, 18.0))


def test_pauses_grow_to_a_bound_and_start_anew_after_a_session() -> None:
    link = make_link()
    now, pauses = 0.0, []
    for _ in range(10):
        link.poll(now)
        now += OPEN_TIMEOUT_S
        link.poll(now)
        pauses.append(link.deadline() - now)
        now = link.deadline()
    assert pauses[0] <= 0.1 and pauses[0] < pauses[3] < pauses[6]
    assert max(pauses) <= LONGEST_PAUSE_S
    link.poll(now)
    link.receive(WELCOME, now)
    link.receive(Resync("restarted"), now)
    assert link.deadline() - now <= 0.1


def test_resync_opens_a_new_session_unless_it_is_final() -> None:
    link = opened_link()
    link.receive(Resync("unknown"), 1.0)
    assert link.state is LinkState.PAUSED
    link = opened_link()
    (_, lost) = link.receive(Resync("a newer one took over", final=True), 1.0)
    assert isinstance(lost, Lost) and isinstance(lost.error, SessionSuperseded)
    assert link.state is LinkState.CLOSED


def test_a_refused_hello_is_retried_only_when_that_can_help() -> None:
    link = make_link()
    link.poll(0.0)
    link.receive(Refusal(0, 0, RefusalCode.BUSY), 0.0)
    assert link.state is LinkState.PAUSED
    link = make_link()
    link.poll(0.0)
    (_, lost) = link.receive(Refusal(0, 0, RefusalCode.CONFLICT, "two owners"), 0.0)
    assert isinstance(lost, Lost) and isinstance(lost.error, Refused) and lost.error.code == "conflict"


def test_messages_before_the_welcome_are_not_delivered() -> None:
    link = make_link()
    link.poll(0.0)
    assert link.receive(Done(7, 1), 0.0) == []
    link.receive(WELCOME, 0.0)
    assert link.receive(Done(7, 1), 0.0) == [Received(Done(7, 1))]


def test_closing_says_goodbye_and_waits_only_so_long() -> None:
    link = opened_link()
    assert link.close(1.0) == [Send(Bye(7))]
    assert link.receive(ByeAck(7), 1.1) == [CloseTransport()]
    link = opened_link()
    link.close(1.0)
    assert link.poll(link.deadline()) == [CloseTransport()]
    assert link.state is LinkState.CLOSED
