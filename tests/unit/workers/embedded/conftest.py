"""Tiny models made on the spot, plain forward passes to compare with, and schedulers that tests step by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.tiny_model import make_tiny_model
from workers.embedded.interface import Emission, Model
from workers.embedded.model import TorchModel, load_model
from workers.embedded.request import GenerateRequest, ModelLimits, SamplingParams
from workers.embedded.scheduler import Scheduler
from workers.embedded.sequence import SequenceState

DEADLINE = 60.0


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "a", seed=0)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "b", seed=1)


@pytest.fixture(scope="session")
def plain_network() -> Callable[[Path], Any]:
    """Loads a directory with nothing but transformers; cached."""
    networks: dict[Path, Any] = {}
    library: Any = transformers

    def load(directory: Path) -> Any:
        if directory not in networks:
            networks[directory] = library.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
        return networks[directory]

    return load


@pytest.fixture(scope="session")
def plain_logprobs(
    plain_network: Callable[[Path], Any],
) -> Callable[[Path, Sequence[int], Sequence[int]], torch.Tensor]:
    """`[output, vocab]` log-softmax of one uncached forward pass over prompt and output."""

    def compute(directory: Path, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = plain_network(directory)(input_ids=torch.tensor([[*prompt, *output]])).logits[0].float()
        return torch.log_softmax(logits[len(prompt) - 1 : len(prompt) + len(output) - 1], dim=-1)

    return compute


@pytest.fixture
def torch_model(model_a: Path) -> TorchModel:
    return load_model(str(model_a), dtype="float32", device="cpu", max_model_len=None)


_rids = itertools.count()


def build_request(input_ids: Sequence[int], max_new_tokens: int = 8, **params: Any) -> GenerateRequest:
    rid = params.pop("rid", f"r{next(_rids)}")
    if "stop_token_ids" in params:
        params["stop_token_ids"] = frozenset(params["stop_token_ids"])
    return GenerateRequest(rid, tuple(input_ids), SamplingParams(max_new_tokens=max_new_tokens, **params))


@pytest.fixture
def make_request() -> Callable[..., GenerateRequest]:
    return build_request


@pytest.fixture
def make_sequence() -> Callable[..., SequenceState]:
    def make(
        input_ids: Sequence[int], max_new_tokens: int = 8, *, eos: Iterable[int] = (), **params: Any
    ) -> SequenceState:
        request = build_request(input_ids, max_new_tokens, **params)
        return SequenceState(request, request.params.seed or 0, frozenset(eos))

    return make


class GatedModel:
    """A model whose decode steps happen only when a test permits them."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.name = inner.name
        self.limits: ModelLimits = inner.limits
        self.permits = 0

    def prefill(self, sequences: Sequence[SequenceState]) -> Iterable[Emission]:
        return self.inner.prefill(sequences)

    def decode(self) -> Iterable[Emission]:
        if self.permits == 0:
            return []
        self.permits -= 1
        return self.inner.decode()

    def remove(self, sequences: Collection[SequenceState]) -> Iterable[Emission]:
        return self.inner.remove(sequences)

    def next_step_at(self) -> float | None:
        return self.inner.next_step_at() if self.permits else None

    def load_weights(self, path: str) -> None:
        self.inner.load_weights(path)

    def set_weight_version(self, version: str) -> None:
        self.inner.set_weight_version(version)


class SteppedScheduler(Scheduler):
    """A scheduler over a gated model."""

    def __init__(self, model: Model, *, max_batch: int = 8) -> None:
        self.gate = GatedModel(model)
        super().__init__(self.gate, max_batch=max_batch, weight_version="0.0", seed=0)
        self.start()

    def advance(self, steps: int = 1) -> None:
        """Let exactly this many decode steps happen, one after the other."""
        for _ in range(steps):
            self.abort([]).result(DEADLINE)
            self.gate.permits = 1
            self.sync()

    def sync(self) -> None:
        """Return after every earlier command and the step that follows it."""
        self.abort([]).result(DEADLINE)
        self.abort([]).result(DEADLINE)


@pytest.fixture
def stepped() -> Iterator[Callable[..., SteppedScheduler]]:
    """Makes schedulers that are closed after the test."""
    made: list[SteppedScheduler] = []

    def make(model: Model, **options: Any) -> SteppedScheduler:
        made.append(SteppedScheduler(model, **options))
        return made[-1]

    yield make
    for scheduler in made:
        assert scheduler.close(DEADLINE)


@pytest.fixture
def free_running() -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers that run by themselves and are closed after the test."""
    made: list[Scheduler] = []

    def make(model: Model, *, max_batch: int = 8) -> Scheduler:
        made.append(Scheduler(model, max_batch=max_batch, weight_version="0.0", seed=0))
        made[-1].start()
        return made[-1]

    yield make
    for scheduler in made:
        assert scheduler.close(DEADLINE)
