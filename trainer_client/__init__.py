"""The trainer's client: submit prompts, take trajectories within the staleness bound, publish weights.

Imports neither torch nor an engine, and only `rollmq` of our own packages.
"""

from trainer_client.aio import AsyncRolloutClient
from trainer_client.batches import GroupFailure
from trainer_client.client import RolloutClient
from trainer_client.weights import DiskWeights

__all__ = ["AsyncRolloutClient", "DiskWeights", "GroupFailure", "RolloutClient"]
