"""The trainer's side of the protocol without I/O: messages in, messages out, and what the front ends ask of it.

Shared by the asyncio and the blocking client. It holds open requests, the inbox, credit, versions and the fates of
tasks. Time, sockets and threads belong to `trainer_client.connection`; so it must be used from one thread.

A trajectory goes to the user through `take` (directly or by `collect`), which marks it taken at that instant. The
broker learns of it lazily, by `flush_consumed`, when the user comes back: a trainer that dies while it uses a batch
gets that batch again, unless its stored state says that it had it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

from rollmq.bodies import decode_trajectory
from rollmq.errors import TaskFailed
from rollmq.messages import (
    Cancel,
    Consumed,
    Deliver,
    Done,
    Ended,
    EndedItem,
    Grant,
    HandBack,
    HeartbeatAck,
    Message,
    OnStale,
    PolicyNews,
    PolicySettings,
    Publish,
    Published,
    Refusal,
    Report,
    Resume,
    Resumed,
    Settled,
    Submit,
    SubmitOutcome,
    Submitted,
    TaskState,
    Watch,
    Welcome,
)
from rollmq.rollout import Trajectory
from trainer_client.credit import Credit
from trainer_client.inbox import Arrival, Inbox
from trainer_client.requests import Answered, Request, RequestTable

log = logging.getLogger(__name__)

IDS_PER_MESSAGE = 100
"""Task ids in one CONSUMED, HANDBACK, CANCEL or WATCH."""
REMEMBERED_FATES = 65536
REMEMBERED_TAKEN = 65536
OVER = frozenset({TaskState.CONSUMED, TaskState.CANCELLED, TaskState.EXPIRED, TaskState.STALE, TaskState.DEAD})


class ClientCore:
    """See the module.

    Args:
        policy: name of the policy, to pick its news.
        settings: its bounds, for the freshness check.
        credit: how much may be delivered ahead.
    """

    def __init__(self, policy: str, settings: PolicySettings, credit: Credit | None = None) -> None:
        self.inbox = Inbox()
        self.requests = RequestTable()
        self.session = 0
        self.welcome: Welcome | None = None
        self.restored = False
        self.touched: set[int] = set()
        self._policy = policy
        self._settings = settings
        self._credit = credit or Credit()
        self._news: PolicyNews | None = None
        self._outgoing: list[Message] = []
        self._granting = False
        self._expected: Counter[int] = Counter()
        self._claimed: dict[int, int] = {}
        self._fates: OrderedDict[int, EndedItem] = OrderedDict()
        self._unconfirmed: dict[int, None] = {}
        self._confirming: set[int] = set()
        self._had: OrderedDict[int, None] = OrderedDict()

    # --- facts ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy's current version, as far as is known here."""
        return self._news.version if self._news else 0

    @property
    def epoch(self) -> int:
        """The policy's run epoch in this session."""
        return self.welcome.policy_epoch if self.welcome else 0

    @property
    def has_begun(self) -> bool:
        """Whether anything was asked for yet; before that no trajectory can come."""
        return self._granting

    @property
    def unclaimed(self) -> list[int]:
        """Held trajectories of tasks that nobody submitted or waited for in this client."""
        return [a.item.task_id for a in self.inbox if a.item.task_id not in self._claimed]

    def is_unclaimed(self, task_id: int) -> bool:
        """Whether this one is held and unclaimed."""
        return task_id in self.inbox and task_id not in self._claimed

    def is_stale(self, arrival: Arrival) -> bool:
        """Whether a held trajectory is older than the bound at the version of this moment.

        A version whose PUBLISH is under way counts: the broker may have it, and run again what it makes too old.
        """
        version = max(self.version, self.requests.publishing)
        if arrival.vouched >= version:
            return False
        return version - arrival.item.head_version > self._settings.max_head_offpolicyness

    # --- the session ----------------------------------------------------------------------------------------------

    def opened(self, welcome: Welcome) -> None:
        """A session began: everything unanswered is sent again, then credit is granted afresh."""
        self.session, self.welcome = welcome.session, welcome
        self._outgoing.clear()
        self._credit.reset()
        self._learn(welcome.policies)
        # Until RESUME is answered, the floor does not yet know of what will be rewound.
        if not self.requests.has_open(Resume):
            self.inbox.raise_floor(welcome.floor)
        for request in self.requests:
            if isinstance(request.template, Watch):
                self.requests.abandon(request.number)  # Asked anew below, for what is awaited now.
            elif not self._is_published(request.template):
                self._outgoing.append(request.message(self.session))
        self._watch(list(self._expected))
        self.grant()

    def lost(self) -> None:
        """The session ended; another may follow."""
        self.session = 0
        self._outgoing.clear()

    def outgoing(self) -> list[Message]:
        """Messages to send now, in order; they are handed out once."""
        messages, self._outgoing = self._outgoing, []
        return messages

    def received(self, message: Message) -> None:
        """Acts on one message of the broker."""
        match message:
            case Deliver():
                self._deliver(message)
            case Ended():
                self._end(message.items)
                self.requests.answer(message.request, message)
            case HeartbeatAck():
                self._learn(message.policies)
            case Published() | Resumed():
                self._learn((message.news,))
                self.requests.answer(message.request, message)
            case Submitted() | Settled() | Done() | Report():
                self.requests.answer(message.request, message)
            case Refusal():
                if not self.requests.answer(message.request, message):
                    log.warning("the broker refused something: %s: %s", message.code, message.message)
            case _:
                log.warning("the broker sent a %s, which is not for trainers; ignored", type(message).__name__)
        self.grant()

    def _learn(self, policies: Iterable[PolicyNews]) -> None:
        before = self.version
        for news in policies:
            if news.policy == self._policy and (self._news is None or news.sequence > self._news.sequence):
                self._news = news
        if self.version != before:
            self._sweep()

    def _sweep(self) -> None:
        """Hands back at once what a new version made too old, so that it is run again early."""
        if self._settings.on_stale is not OnStale.DELIVER:
            self.hand_back([a.item.task_id for a in self.inbox if self.is_stale(a)])

    def _is_published(self, template: Request) -> bool:
        """Whether an unanswered PUBLISH turns out to be done; sending it again would be refused as not growing."""
        news = self._news
        if not isinstance(template, Publish) or news is None:
            return False
        if (news.epoch, news.version, news.source) != (self.epoch, template.version, template.source):
            return False
        return self.requests.answer(template.request, Published(self.session, template.request, news))

    # --- requests -------------------------------------------------------------------------------------------------

    def request(self, kind: type[Request], answered: Answered, **values: Any) -> int:
        """Asks something; the answer comes to `answered`. Returns the number, to `abandon` it by."""
        request = self.requests.add(kind, answered, **values)
        if self.session:
            self._outgoing.append(request.message(self.session))
        return request.number

    def abandon(self, number: int) -> None:
        """Who asked gave up; a late answer is dropped."""
        self.requests.abandon(number)

    @property
    def unconfirmed(self) -> tuple[int, ...]:
        """Tasks whose trajectories the user has, as far as the broker has not acknowledged that it knows."""
        return tuple(sorted({*self._unconfirmed, *self._confirming}))

    def restore(self, cursor: int, taken: Iterable[int], unconfirmed: Iterable[int]) -> None:
        """Starts from a stored position; RESUME must follow before anything else is asked."""
        self.inbox.restore(cursor, taken)
        self._note_taken(unconfirmed)
        self.restored = True

    def forget_restored(self) -> None:
        """The broker refused to RESUME: starts like a client without a stored position."""
        self.inbox.restore(max(0, self.welcome.floor - 1) if self.welcome else 0, ())
        self._unconfirmed.clear()
        self._had.clear()
        self.restored = False

    def begin(self) -> None:
        """The user asked for something: from now on trajectories may come."""
        self._granting = True
        self.grant()

    def grant(self) -> None:
        """Grants credit if there is enough to grant."""
        if not self.session or not self._granting:
            return
        blocked = any(task_id not in self.inbox for task_id in self._expected)
        totals = self._credit.next_grant(len(self.inbox), self.inbox.held_bytes, blocked)
        if totals is not None:
            self._outgoing.append(Grant(self.session, *totals))

    # --- tasks ----------------------------------------------------------------------------------------------------

    def submitted(self, outcomes: Iterable[SubmitOutcome]) -> None:
        """Notes the tasks of an answered SUBMIT."""
        for outcome in outcomes:
            if outcome.code is not None:
                continue
            if outcome.state in OVER:
                text = f"it had ended as {outcome.state} before it was submitted again under the same key"
                self._end([EndedItem(outcome.task_id, outcome.state, text)])
            else:
                self._claimed[outcome.task_id] = self.session

    def expect(self, task_ids: Iterable[int]) -> None:
        """The user waits for these now. What this session has not been told of is asked about."""
        unknown: list[int] = []
        for task_id in task_ids:
            self._expected[task_id] += 1
            known = task_id in self.inbox or task_id in self._fates
            if not known and (not self.session or self._claimed.get(task_id) != self.session):
                unknown.append(task_id)
        self._watch(unknown)
        self.begin()

    def unexpect(self, task_ids: Iterable[int]) -> None:
        """The user no longer waits for these."""
        for task_id in task_ids:
            self._expected[task_id] -= 1
            if self._expected[task_id] <= 0:
                del self._expected[task_id]

    def _watch(self, task_ids: list[int]) -> None:
        for part in _parts(task_ids):
            self._claimed.update(dict.fromkeys(part, self.session))
            if self.session:
                self.request(Watch, _log_refusal, tasks=part)

    def fate(self, task_id: int) -> EndedItem | None:
        """How a task ended without a trajectory, if it is known to have."""
        return self._fates.get(task_id)

    def collect(self, task_id: int) -> Trajectory | None:
        """Takes a task's trajectory if it is here and fresh.

        Raises:
            TaskFailed: the task ended without one.
            ProtocolError: its body is damaged.
        """
        fate = self._fates.get(task_id)
        if fate is not None:
            raise failure(fate)
        return self.take([task_id])[0] if self.is_available(task_id) else None

    def is_available(self, task_id: int) -> bool:
        """Whether a task's trajectory is held and may be taken; one that is too old is handed back."""
        arrival = self.inbox.get(task_id)
        if arrival is None:
            return False
        if self.is_stale(arrival) and self._settings.on_stale is not OnStale.DELIVER:
            self.hand_back([task_id])
            return False
        return True

    def take(self, task_ids: list[int]) -> list[Trajectory]:
        """Hands held trajectories to the user; all or none.

        Raises:
            ProtocolError: a body is damaged.
        """
        trajectories = [self._decode(task_id) for task_id in task_ids]
        self.inbox.take(task_ids)
        self._note_taken(task_ids)
        self.grant()
        return trajectories

    def _note_taken(self, task_ids: Iterable[int]) -> None:
        for task_id in task_ids:
            self._claimed.pop(task_id, None)
            self._unconfirmed[task_id] = None
            self._had[task_id] = None
        while len(self._had) > REMEMBERED_TAKEN:
            self._had.popitem(last=False)

    def _decode(self, task_id: int) -> Trajectory:
        arrival = self.inbox.get(task_id)
        assert arrival is not None
        item = arrival.item
        return decode_trajectory(
            arrival.body,
            task_id=task_id,
            group=item.group,
            member=item.member,
            sequence=item.sequence,
            stale=item.stale or self.is_stale(arrival),
        )

    def flush_consumed(self) -> None:
        """Tells the broker what the user has taken since the last time."""
        tasks, self._unconfirmed = list(self._unconfirmed), {}
        for part in _parts(tasks):
            self._confirming.update(part)
            self.request(Consumed, partial(self._confirmed, part), tasks=part)

    def _confirmed(self, part: tuple[int, ...], answer: Message) -> None:
        self._confirming.difference_update(part)
        if isinstance(answer, Refusal):
            _log_refusal(answer)
            self._unconfirmed.update(dict.fromkeys(part))

    def hand_back(self, task_ids: list[int]) -> None:
        """Returns trajectories that are too old; they come again, newer, or end as stale."""
        version = max(self.version, self.requests.publishing)
        for part in _parts(task_ids):
            sequences = [self.inbox.hand_back(task_id, version) for task_id in part]
            self.touched.update(part)
            self.request(HandBack, partial(self._handed_back, sequences), tasks=part)

    def _handed_back(self, sequences: list[int], answer: Message) -> None:
        _log_refusal(answer)
        self.inbox.handed_back(sequences)

    def cancel(self, task_ids: list[int]) -> None:
        """Withdraws tasks without waiting for the answer; here they are over at once."""
        for part in _parts(task_ids):
            self.request(Cancel, _log_refusal, tasks=part)
        self.cancelled(task_ids)

    def cancelled(self, task_ids: Iterable[int]) -> None:
        """Notes tasks that this trainer withdrew."""
        self._end([EndedItem(task_id, TaskState.CANCELLED, "cancelled by this trainer") for task_id in task_ids])

    def submits_open(self) -> bool:
        """Whether a SUBMIT is unanswered, so that tasks may be ours without our knowing."""
        return self.requests.has_open(Submit)

    # --- internal -------------------------------------------------------------------------------------------------

    def _deliver(self, message: Deliver) -> None:
        self._credit.received(len(message.items), sum(map(len, message.bodies)))
        fresh, repeated = self.inbox.receive(message)
        for task_id in fresh:
            if task_id in self._had:
                # The broker lost the session before it learned that the user has this one, found it too old, and ran
                # the task again under a new sequence.
                self.inbox.take([task_id])
                repeated.append(task_id)
                continue
            self._fates.pop(task_id, None)
            self.touched.add(task_id)
        for task_id in repeated:
            if task_id not in self._confirming:
                self._unconfirmed.setdefault(task_id)

    def _end(self, items: Iterable[EndedItem]) -> None:
        for item in items:
            if item.task_id in self._fates and item.state is TaskState.CANCELLED:
                continue  # Our own note says who cancelled it.
            self._claimed.pop(item.task_id, None)
            self.inbox.discard(item.task_id)
            self._fates[item.task_id] = item
            self._fates.move_to_end(item.task_id)
            self.touched.add(item.task_id)
        while len(self._fates) > REMEMBERED_FATES:
            self._fates.popitem(last=False)


def failure(fate: EndedItem) -> TaskFailed:
    """The exception for a task that ended without a trajectory."""
    if fate.state is None:
        return TaskFailed(fate.task_id, "unknown", fate.reason or "the broker knows no such task of this trainer")
    reason = fate.reason
    if fate.state is TaskState.CONSUMED:
        reason = "its trajectory was already taken by this trainer" + (f" ({reason})" if reason else "")
    return TaskFailed(fate.task_id, fate.state.value, reason)


def _parts(task_ids: list[int]) -> list[tuple[int, ...]]:
    """Ids in pieces that keep a message's head and its answer under their limits."""
    return [tuple(task_ids[at : at + IDS_PER_MESSAGE]) for at in range(0, len(task_ids), IDS_PER_MESSAGE)]


def _log_refusal(answer: Message) -> None:
    if isinstance(answer, Refusal):
        log.error("the broker refused: %s: %s", answer.code, answer.message)
