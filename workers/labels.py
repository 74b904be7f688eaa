"""Weight version labels: the string an engine stamps on tokens, `"{epoch}.{version}"`, and back."""

from __future__ import annotations

import re

from rollmq.errors import EngineVersionUnknown

_LABEL = re.compile(r"(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})")

LabelSpan = tuple[str, int, int]
"""(label, start, end): half open over output tokens."""


def parse_label(label: str | None) -> tuple[int, int]:
    """(epoch, version) of a label.

    Raises:
        EngineVersionUnknown: it is none of ours ("default", empty, absent): nobody knows what weights these are.
    """
    match = _LABEL.fullmatch(label or "")
    if match is None:
        raise EngineVersionUnknown(
            f"the engine reports weight version {label!r}, not one of the form epoch.version; tokens cannot be "
            "labelled with a version that did not produce them, so they are refused"
        )
    return int(match[1]), int(match[2])


def merge_spans(spans: list[LabelSpan], more: list[LabelSpan], offset: int) -> list[LabelSpan]:
    """`spans` followed by `more` shifted by `offset`; neighbours with one label become one, empty ones vanish."""
    merged = list(spans)
    for label, start, end in more:
        if start == end:
            continue
        if merged and merged[-1][0] == label and merged[-1][2] == start + offset:
            merged[-1] = (label, merged[-1][1], end + offset)
        else:
            merged.append((label, start + offset, end + offset))
    return merged
