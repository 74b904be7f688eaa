"""The client's small parts: state, weights, positions, submission, settings, import time."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmq.codec import decode, encode
from rollmq.errors import ConfigError, NotConnected
from rollmq.messages import RefusalCode, Resume, Submit, SubmitOutcome, Submitted, TaskState
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from trainer_client import AsyncRolloutClient, DiskWeights, RolloutClient, submission
from trainer_client.batches import BatchPlan
from trainer_client.positions import Positions
from trainer_client.state import BatchProgress, ClientState
from trainer_client.submission import Entry, TaskOptions
from trainer_client.transport import check_address

COUNTS = st.integers(0, 2**40)
REQUEST = ModelRequest([1], GenerationHyperparameters())


# --- state --------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        ClientState,
        trainer=st.just("math"),
        policy=st.just("default"),
        run=st.text("abcdef0123456789", min_size=1),
        version=COUNTS,
        epoch=COUNTS,
        cursor=COUNTS,
        taken=st.sets(COUNTS).map(lambda s: tuple(sorted(s))),
        unconfirmed=st.sets(COUNTS).map(lambda s: tuple(sorted(s))),
        batches=st.builds(
            BatchProgress, iteration=COUNTS, floor=COUNTS, settled=st.sets(COUNTS).map(lambda s: tuple(sorted(s)))
        ),
    )
)
def test_state_survives_json(state: ClientState) -> None:
    stored = json.loads(json.dumps(state.to_dict()))
    assert ClientState.from_dict(stored, trainer="math", policy="default") == state


GOOD = ClientState("math", "default", "r", 1, 1, 5, (7,), (), BatchProgress()).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"trainer": "code"}, "belongs to trainer 'code'"),
        ({"policy": "other"}, "belongs to policy 'other'"),
        ({"run": ""}, "run"),
        ({"cursor": -1}, "cursor -1"),
        ({"version": True}, "version True"),
        ({"taken": [1, "2"]}, "taken"),
        ({"batches": None}, "batches None"),
        ({"batches": {"iteration": 0, "floor": 1.5, "settled": []}}, "floor 1.5"),
    ],
)
def test_a_wrong_state_is_refused_and_names_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClientState.from_dict({**GOOD, **change}, trainer="math", policy="default")


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="format 'list'"):
        ClientState.from_dict([], trainer="math", policy="default")  # type: ignore[arg-type]


# --- positions and plan -------------------------------------------------------------------------------------------


@given(st.permutations(range(12)), st.integers(0, 12))
def test_positions_are_a_set_that_compacts(order: list[int], count: int) -> None:
    positions = Positions()
    for position in order[:count]:
        positions.add(position)
    added = set(order[:count])
    assert {p for p in range(20) if p in positions} == added
    assert positions.floor == next(n for n in range(13) if n not in added)
    restored = Positions(positions.floor, positions.beyond)
    assert (restored.floor, restored.beyond) == (positions.floor, positions.beyond)


def test_a_plan_resumes_after_settled_positions() -> None:
    plan = BatchPlan(batch_size=1, depth=9, settled=Positions(2, (3,)))
    assert plan.skip == 2
    groups = [plan.offer(REQUEST) for _ in range(3)]
    assert [g.position if g else None for g in groups] == [2, None, 4]


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_are_checked_before_they_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        DiskWeights(tmp_path / "none").source()
    with pytest.raises(ConfigError, match="holds no file ending in"):
        DiskWeights(tmp_path).source()
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path.parent)
    assert DiskWeights(tmp_path.name).source() == str(tmp_path)
    assert DiskWeights("sim:anything").source() == "sim:anything"
    assert DiskWeights("/elsewhere").source(check=False) == "/elsewhere"
    for path in ("", "/" + "x" * 2000):
        with pytest.raises(ConfigError):
            DiskWeights(path).source(check=False)


# --- submission ---------------------------------------------------------------------------------------------------


def entry(size: int) -> Entry:
    return Entry(submission.single(REQUEST, None, "k", TaskOptions()).item, b"x" * size)


@given(st.lists(st.integers(0, 3 * 1024 * 1024), max_size=40), st.integers(1, 200))
def test_pieces_keep_order_and_fit_a_message(sizes: list[int], most: int) -> None:
    body = bytes(3 * 1024 * 1024)
    entries = [Entry(entry(0).item, body[:size]) for size in sizes]
    pieces = list(submission.pieces(entries, most))
    assert [e for piece in pieces for e in piece] == entries
    for piece in pieces:
        assert len(piece) <= min(most, submission.ITEMS_PER_SUBMIT)
        assert len(piece) == 1 or sum(len(e.body) for e in piece) <= submission.BYTES_PER_SUBMIT


def test_the_largest_submit_and_its_longest_answer_fit_their_heads() -> None:
    count, huge = submission.ITEMS_PER_SUBMIT, 2**62
    items = tuple(entry(0).item for _ in range(count))
    assert decode(encode(Submit(huge, huge, items, (b"",) * count)))
    for state, code in ((TaskState.DELIVERED, None), (TaskState.DELIVERED, RefusalCode.CONFLICT)):
        assert decode(encode(Submitted(huge, huge, (SubmitOutcome(huge, huge, state, code),) * count)))


def test_a_resume_with_thousands_of_taken_sequences_fits() -> None:
    assert decode(encode(Resume(1, 1, 1, 0, tuple(range(2**33, 2**33 + 4096)))))


@pytest.mark.parametrize(
    ("request_", "data", "key", "options", "message"),
    [
        (ModelRequest([1], GenerationHyperparameters(n_samples=2)), None, "k", {}, "use `submit_group`"),
        (REQUEST, None, "k" * 241, {}, "1 to 240 characters"),
        (REQUEST, {"x": object()}, "k", {}, "cannot be sent"),
        (REQUEST, None, "k", {"workflow": ""}, "workflow"),
        (REQUEST, None, "k", {"deadline_s": 0}, "deadline_s is 0"),
        (REQUEST, None, "k", {"priority": "soon"}, "priority 'soon' must be one of train, eval"),
    ],
)
def test_a_wrong_submission_is_refused(request_: Any, data: Any, key: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submission.single(request_, data, key, TaskOptions(**options))


def test_a_body_over_the_brokers_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="body of 11 bytes, over the broker's 10"):
        submission.check_sizes([entry(11)], 10)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": "localhost:5555"}, "broker address 'localhost:5555'"),
        ({"trainer": ""}, "trainer is ''"),
        ({"consumer_batch_size": 0}, "consumer_batch_size is 0"),
        ({"max_head_offpolicyness": -1}, "max_head_offpolicyness is -1"),
        ({"max_concurrent_rollouts": 0}, "max_concurrent_rollouts is 0"),
        ({"on_stale": "ignore"}, "on_stale is 'ignore'; it must be one of retry, drop, deliver"),
        ({"keys": object()}, "no authentication yet"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], message: str) -> None:
    for kind in (AsyncRolloutClient, RolloutClient):
        with pytest.raises(ConfigError, match=message):
            kind(**{"address": "tcp://127.0.0.1:5555", **change})


@pytest.mark.parametrize("address", ["tcp://h:1", "tcp://127.0.0.1:65535", "tcp://[::1]:5", "ipc:///tmp/x"])
def test_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://h", "tcp://h:0", "tcp://h:65536", "ipc://", "http://h:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://host:port"):
        check_address(address)


# --- the blocking client ------------------------------------------------------------------------------------------


def test_the_constructor_fails_within_its_timeout_and_names_the_address() -> None:
    with pytest.raises(NotConnected, match=r"tcp://127\.0\.0\.1:9 within 0\.3 s"):
        RolloutClient("tcp://127.0.0.1:9", timeout=0.3)


def test_a_closed_client_says_so(auto_router: Any) -> None:
    client = RolloutClient(auto_router.address)
    task_id = client.submit(REQUEST)
    assert client.wait(task_id, timeout=20).task_id == task_id
    client.close()
    client.close()
    assert auto_router.model.count(TaskState.CONSUMED) == 1
    with pytest.raises(NotConnected, match="closed"):
        client.submit(REQUEST)


def _use_in_child(client: RolloutClient, found: Any) -> None:
    try:
        client.submit(REQUEST)
    except NotConnected as error:
        found.put(str(error))
    os._exit(0)


def test_a_forked_child_is_told_to_make_its_own_client(auto_router: Any) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    with RolloutClient(auto_router.address) as client:
        child = context.Process(target=_use_in_child, args=(client, found))
        child.start()
        child.join(20)
        assert "forked process" in found.get()


# --- import -------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, time
start = time.process_time()
import trainer_client
seconds = time.process_time() - start
heavy = {"torch", "numpy", "vllm", "sglang", "aiohttp", "pydantic", "yaml", "transformers"} & set(sys.modules)
print(seconds, sorted(heavy), sorted({"broker", "workers"} & set(sys.modules)))
"""


def test_importing_the_client_is_quick_and_light() -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(3)
    ]
    assert all(output.split(maxsplit=1)[1].strip() == "[] []" for output in outputs), outputs
    # Processor time, and the best of three: the machine may be busy with other things.
    assert min(float(output.split()[0]) for output in outputs) < 0.4, outputs
