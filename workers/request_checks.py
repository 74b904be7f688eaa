"""What is checked before a request leaves for an engine: one bad id has been known to end a whole server."""

from __future__ import annotations

from rollmq.errors import RequestRejected
from rollmq.rollout import ModelRequest
from workers.backends.base import ModelLimits


def check_request(request: ModelRequest, limits: ModelLimits) -> None:
    """Refuses ids outside the vocabulary and lengths beyond the model.

    Raises:
        RequestRejected: naming the id or the numbers, and the limit.
    """
    if request.gconfig.n_samples != 1:
        raise RequestRejected(
            f"n_samples is {request.gconfig.n_samples}; one engine request is one sample: submit a group instead"
        )
    _check_ids("input_ids", request.input_ids, limits.vocab_size)
    _check_ids("stop_token_ids", request.gconfig.stop_token_ids, limits.vocab_size)
    prompt, output = len(request.input_ids), request.gconfig.max_new_tokens
    if prompt + output > limits.max_model_len:
        raise RequestRejected(
            f"prompt of {prompt} tokens + max_new_tokens {output} = {prompt + output} is more than the model's "
            f"{limits.max_model_len}; shorten the prompt or lower max_new_tokens"
        )


def _check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"{name}[{position}] is {token}, outside the model's vocabulary [0, {vocab_size}); "
                "use the tokenizer of the model that the worker serves"
            )
