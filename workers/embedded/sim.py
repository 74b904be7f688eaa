"""The `sim:` model: an engine without a model, for load and fault tests on any machine.

Its tokens are a function of the sim's seed, the whole prefix of prompt and output, and the number in the weight
version's label ("1.17" -> 17); sampled requests mix in their seed. So a request that is aborted and resumed with
its partial output goes on exactly as if nothing had happened. It plans an answer when the request starts and
reveals it at the set pace, hence the cost is per token and per event, not per step and sequence.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from workers.embedded.hashing import MASK64, mix64
from workers.embedded.interface import Emission
from workers.embedded.request import ModelLimits
from workers.embedded.sequence import SequenceState
from workers.embedded.sim_options import SimOptions

logger = logging.getLogger(__name__)

CRASH_EXIT_CODE = 13
_REPORT_INTERVAL_NS = 50_000_000
_REMEMBERED_PARTIALS = 4096
_FNV_PRIME = 0x100000001B3
_FNV_OFFSET = 0xCBF29CE484222325


@dataclass(slots=True)
class _Plan:
    """The rest of one answer; token i is revealed at step `first_step + i`. A hung request has no tokens."""

    sequence: SequenceState
    token_ids: list[int]
    logprobs: list[float]
    answer_ends: bool
    answered_before: int
    first_step: int = 0
    revealed: int = 0

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.token_ids) - 1

    def reveal(self, until: int) -> Emission:
        """The tokens from the last reveal up to `until` of them."""
        until = max(self.revealed, min(until, len(self.token_ids)))
        start, self.revealed = self.revealed, until
        return Emission(
            self.sequence,
            self.token_ids[start:until],
            self.logprobs[start:until],
            answer_ended=self.answer_ends and until == len(self.token_ids),
        )


class SimModel:
    """Deterministic tokens at a set pace, with set faults. Implements `interface.Model`."""

    def __init__(self, options: SimOptions, *, name: str = "sim:") -> None:
        self.name = name
        self.limits = ModelLimits(vocab_size=options.vocab, max_model_len=options.max_len)
        self._options = options
        self._step_ns = round(options.tpot_ms * 1e6)
        self._epoch_ns = time.monotonic_ns()
        self._reported_ns = self._epoch_ns
        self._version_salt = 0
        self._plans: dict[SequenceState, _Plan] = {}
        self._due: list[tuple[int, int, _Plan]] = []
        self._tie_breaker = count()
        self._partials: OrderedDict[int, int] = OrderedDict()
        self.set_weight_version("0.0")

    def prefill(self, sequences: Sequence[SequenceState]) -> Iterable[Emission]:
        """Plan answers; with no pace they are complete at once."""
        emissions = []
        for sequence in sequences:
            fault = self._start_fault(sequence)
            if fault is not None:
                emissions.append(Emission(sequence, [], [], fault=fault))
                continue
            plan = self._plan(sequence)
            self._plans[sequence] = plan
            if not plan.token_ids:
                continue
            if self._step_ns == 0:
                emissions.append(plan.reveal(len(plan.token_ids)))
                continue
            plan.first_step = -(-self._elapsed_ns() // self._step_ns) + 1
            heapq.heappush(self._due, (plan.last_step, next(self._tie_breaker), plan))
        return emissions

    def decode(self) -> Iterable[Emission]:
        """Give the answers that are complete by now, and now and then the progress of all."""
        if self._step_ns == 0:
            return []
        step = self._elapsed_ns() // self._step_ns
        emissions = []
        while self._due and self._due[0][0] <= step:
            plan = heapq.heappop(self._due)[2]
            if self._plans.get(plan.sequence) is plan:
                emissions.append(plan.reveal(len(plan.token_ids)))
        if time.monotonic_ns() - self._reported_ns >= _REPORT_INTERVAL_NS:
            self._reported_ns = time.monotonic_ns()
            unfinished = (plan for plan in self._plans.values() if plan.last_step > step)
            emissions.extend(plan.reveal(step - plan.first_step + 1) for plan in unfinished)
        return emissions

    def remove(self, sequences: Collection[SequenceState]) -> Iterable[Emission]:
        """Let sequences go with what is revealed by now, remembering how far unfinished answers came."""
        emissions = []
        for sequence in sequences:
            plan = self._plans.pop(sequence, None)
            if plan is None or sequence.is_finished or not plan.token_ids:
                continue
            step = self._elapsed_ns() // self._step_ns if self._step_ns else plan.last_step
            emission = plan.reveal(step - plan.first_step + 1)
            self._remember(plan, [*sequence.tokens, *emission.token_ids])
            emissions.append(emission)
        return emissions

    def next_step_at(self) -> float | None:
        """The next completion or progress report."""
        if self._step_ns == 0 or not self._due:
            return None
        completion_ns = self._epoch_ns + self._due[0][0] * self._step_ns
        return min(completion_ns, self._reported_ns + _REPORT_INTERVAL_NS) / 1e9

    def load_weights(self, path: str) -> None:
        """Accept any path: there are no weights, the version's label stands for them."""
        logger.info("sim weights: %s", path)

    def set_weight_version(self, version: str) -> None:
        """From now on tokens are those of this version's number."""
        self._version_salt = mix64(version_number(version) ^ mix64(self._options.seed))

    def _elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._epoch_ns

    def _start_fault(self, sequence: SequenceState) -> str | None:
        if self._chance("crash", sequence) < self._options.crash:
            logger.error("sim crash at request %r: exit code %d", sequence.request.rid, CRASH_EXIT_CODE)
            logging.shutdown()
            os._exit(CRASH_EXIT_CODE)
        if self._chance("fail", sequence) < self._options.fail:
            return f"sim fault (fail={self._options.fail})"
        return None

    def _chance(self, fault: str, sequence: SequenceState) -> float:
        """A number in [0, 1), the same for the same sim seed, fault and rid."""
        text = f"{fault}:{sequence.request.rid}".encode()
        return mix64(zlib.crc32(text) ^ mix64(self._options.seed)) / 2.0**64

    def _plan(self, sequence: SequenceState) -> _Plan:
        prefix = self._prefix_hash(sequence.tokens)
        produced = len(sequence.output_ids)
        answered = self._partials.get(prefix, produced)
        if self._chance("hang", sequence) < self._options.hang:
            return _Plan(sequence, [], [], answer_ends=False, answered_before=answered)
        params = sequence.request.params
        left = max(1, self._options.tokens - answered, params.min_new_tokens - produced)
        budget = params.max_new_tokens - produced
        limit = budget if params.ignore_eos else min(left, budget)
        tokens, logprobs = self._continue(sequence, prefix, limit)
        answer_ends = not params.ignore_eos and len(tokens) == left
        return _Plan(sequence, tokens, logprobs, answer_ends, answered)

    def _continue(self, sequence: SequenceState, prefix: int, limit: int) -> tuple[list[int], list[float]]:
        """Up to `limit` further tokens, ending at a stop id, and their logprobs in [-4, 0)."""
        params = sequence.request.params
        salt = self._version_salt if params.is_greedy else self._version_salt ^ mix64(sequence.seed ^ 0x5EED)
        stops, vocab = params.stop_token_ids, self._options.vocab
        unmasked_from = params.min_new_tokens - len(sequence.output_ids)
        tokens: list[int] = []
        logprobs: list[float] = []
        for index in range(limit):
            bits = mix64(prefix ^ salt)
            token = bits % vocab
            while index < unmasked_from and token in stops:
                token = (token + 1) % vocab
            tokens.append(token)
            # Few binary digits, so that they are short in JSON.
            logprobs.append(-((bits >> 56) + 1) / 64)
            if token in stops:
                break
            prefix = ((prefix ^ (token + 1)) * _FNV_PRIME) & MASK64
        return tokens, logprobs

    def _remember(self, plan: _Plan, tokens: list[int]) -> None:
        if plan.revealed == 0 and not plan.answered_before:
            return
        self._partials[self._prefix_hash(tokens)] = plan.answered_before + plan.revealed
        while len(self._partials) > _REMEMBERED_PARTIALS:
            self._partials.popitem(last=False)

    @staticmethod
    def _prefix_hash(tokens: Iterable[int]) -> int:
        """FNV-1a over whole ids: extending the prefix by one token is one step of it."""
        value = _FNV_OFFSET
        for token in tokens:
            value = ((value ^ (token + 1)) * _FNV_PRIME) & MASK64
        return value


def version_number(label: str) -> int:
    """The number in a label like "1.17"; a checksum of the text for labels of another form."""
    number = label.rpartition(".")[2]
    return int(number) if number.isascii() and number.isdigit() else zlib.crc32(label.encode()) + (1 << 32)
