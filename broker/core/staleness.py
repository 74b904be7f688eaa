"""How far generation may run ahead, and what is too old.

Admission follows AReaL's rule (arXiv 2505.24298, eq. 3) in the form that counts what is outstanding since the last
version instead of lifetime totals, so that varying batch sizes and restarts do not inflate it. All counts are in
groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmq.messages import PolicySettings


@dataclass(slots=True)
class StalenessController:
    """The admission budget and freshness rule of one policy.

    Attributes:
        settings: the policy's bounds.
        running: admitted groups with a member still to be generated.
        ready: admitted groups that are finished but not yet consumed.
        consumed_since_version: groups consumed since the current version was published, with what was consumed
            beyond B per version before.
    """

    settings: PolicySettings
    running: int = 0
    ready: int = 0
    consumed_since_version: int = 0

    def capacity(self) -> int:
        """How many more groups may start now; may be negative.

        min(max_concurrent - running, (eta + 1) * B - (running + ready + consumed since the last version)).
        """
        settings = self.settings
        budget = (settings.max_head_offpolicyness + 1) * settings.consumer_batch_size
        capacity = budget - (self.running + self.ready + self.consumed_since_version)
        if settings.max_concurrent_rollouts is not None:
            capacity = min(capacity, settings.max_concurrent_rollouts - self.running)
        return capacity

    def is_stale(self, head_version: int, consumer_version: int) -> bool:
        """Whether consumer version - head version exceeds eta."""
        return consumer_version - head_version > self.settings.max_head_offpolicyness

    def version_published(self) -> None:
        """A new version: B groups of what was consumed were its batch; what was consumed beyond counts on.

        Without the carry a trainer that takes more than B per version would be let further ahead than eta; a
        trainer that takes less earns nothing by it, since the carry is never negative.
        """
        batch, eta = self.settings.consumer_batch_size, self.settings.max_head_offpolicyness
        carry = max(0, self.consumed_since_version - batch)
        # More than eta * B can be left over only if the settings shrank meanwhile; a batch must stay possible.
        self.consumed_since_version = min(carry, eta * batch)

    def start_anew(self) -> None:
        """A new incarnation of the owner, or a way back to an earlier version: what was consumed feeds no batch."""
        self.consumed_since_version = 0
