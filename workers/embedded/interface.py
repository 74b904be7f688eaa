"""What the scheduler needs of a model. `model.TorchModel` and `sim.SimModel` are the two implementations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.embedded.request import ModelLimits
from workers.embedded.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Emission:
    """What one sequence gained in a step.

    Attributes:
        sequence: whose tokens these are.
        token_ids: new tokens, possibly none; never beyond a token that ends the sequence.
        logprobs: one per token.
        answer_ended: the model has nothing more to say.
        fault: why this sequence cannot go on; the others are not touched.
    """

    sequence: SequenceState
    token_ids: list[int]
    logprobs: list[float]
    answer_ended: bool = False
    fault: str | None = None


class Model(Protocol):
    """A model that many sequences share. Called from one thread only.

    A sequence is in the model from `prefill` until `remove`. Tokens come out of all three calls; the scheduler
    stamps them with the weight version that was current before the call. After `remove` a sequence may be
    prefilled again, which is how a pause freezes it and new weights recompute what it has so far.
    """

    name: str
    limits: ModelLimits

    def prefill(self, sequences: Sequence[SequenceState]) -> Iterable[Emission]:
        """Take sequences in: compute prompt and output so far, possibly give tokens."""

    def decode(self) -> Iterable[Emission]:
        """Advance the sequences that are in."""

    def remove(self, sequences: Collection[SequenceState]) -> Iterable[Emission]:
        """Let sequences go, giving what they gained since the last step."""

    def next_step_at(self) -> float | None:
        """When `decode` is worth calling: seconds of `time.monotonic`, 0 for now, None for not before a change."""

    def load_weights(self, path: str) -> None:
        """Replace the weights; only called while no sequence is in.

        Raises:
            BadModelDirectory: the old weights are untouched.
        """

    def set_weight_version(self, version: str) -> None:
        """Note the label of the present weights; only called while no sequence is in."""
