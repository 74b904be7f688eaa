"""Which versions of a policy exist, which one is current, and what an engine's label means.

A label is `"{run epoch}.{version}"`. A label that was never published (or belongs to a lineage that a restored trainer
abandoned) is unknown: an engine that carries it gets no tasks and no result under it is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmq.messages import PolicyNews

REMEMBERED_VERSIONS = 64


@dataclass(slots=True)
class PolicyVersions:
    """The published versions of one policy, oldest first.

    Attributes:
        epoch: run epoch of the owner; raised by each new incarnation.
        news: the current version.
        known: label -> news of the versions still remembered.
    """

    epoch: int
    news: PolicyNews
    known: dict[str, PolicyNews] = field(default_factory=dict)

    @classmethod
    def initial(cls, policy: str, sequence: int) -> PolicyVersions:
        """Version 0: the weights that engines are launched with."""
        news = PolicyNews(policy=policy, epoch=0, version=0, source="", sequence=sequence)
        return cls(epoch=0, news=news, known={news.label: news})

    @property
    def version(self) -> int:
        """The current version."""
        return self.news.version

    def publish(self, version: int, source: str, sequence: int) -> PolicyNews:
        """Makes a new current version; the caller has checked that it grows."""
        self.news = PolicyNews(self.news.policy, self.epoch, version, source, sequence)
        self.known[self.news.label] = self.news
        while len(self.known) > REMEMBERED_VERSIONS:
            del self.known[next(iter(self.known))]
        return self.news

    def find(self, version: int) -> PolicyNews | None:
        """The newest publication of a version number, if remembered."""
        return next((news for news in reversed(self.known.values()) if news.version == version), None)

    def go_back(self, news: PolicyNews, sequence: int) -> PolicyNews:
        """Returns to an earlier publication; later versions are forgotten, so their labels become unknown."""
        self.known = {label: old for label, old in self.known.items() if old.version <= news.version}
        self.news = PolicyNews(news.policy, news.epoch, news.version, news.source, sequence)
        self.known[self.news.label] = self.news
        return self.news

    def version_of(self, label: str) -> int | None:
        """The version a label stands for, or None if it is unknown."""
        news = self.known.get(label)
        return None if news is None else news.version
