"""rollmq: a durable, framework-neutral rollout queue for reinforcement learning of language models."""

from rollmq.rollout import (
    GenerationHyperparameters,
    Group,
    ModelRequest,
    ModelResponse,
    Trajectory,
    pad_tensors,
)

__version__ = "0.1.0"

__all__ = [
    "GenerationHyperparameters",
    "Group",
    "ModelRequest",
    "ModelResponse",
    "Trajectory",
    "__version__",
    "pad_tensors",
]
