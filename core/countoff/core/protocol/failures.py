"""What ranks raised by themselves, as one account: those that raised the same are told of together."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Failure", "alike", "told_as_one"]

_OWN = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|\d+")
"""What may differ between ranks in the text of one mistake: the name of a file, a number, an address."""


@dataclass(frozen=True)
class Failure:
    """An exception of a rank's own: one that does not come from the loss of another rank.

    Attributes:
        words: Its type and the first line of its text.
        place: The line of the user's own code, as ``train.py:41``; empty if that is not known.
        where: The batch and span, in words.
        time: When it was raised, in seconds since the epoch by this rank's clock.
    """

    words: str
    place: str = ""
    where: str = ""
    time: float = field(default=0.0, compare=False)

    @property
    def event(self) -> str:
        """What happened, as the rest of a sentence that begins with the rank.

        >>> Failure("ValueError: torn", "train.py:41", "in batch 4").event
        'raised ValueError: torn at train.py:41 (in batch 4)'
        """
        return (
            f"raised {self.words}{f' at {self.place}' if self.place else ''}{f' ({self.where})' if self.where else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """The failure as JSON types; `from_json` is its inverse."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any] | str) -> Failure:
        """Reads what another rank has written.

        Raises:
            KeyError, TypeError, ValueError: If it is no failure.
        """
        if isinstance(record, str):  # of another version
            return cls(record.removeprefix("raised "))
        texts = (str(record[name]) for name in ("words", "place", "where"))
        return cls(*texts, time=float(record["time"]))


def alike(failures: Mapping[int, Failure], first: int | None = None) -> list[list[int]]:
    """Groups ranks that raised the same: one type at one line, with texts that differ in names and numbers at most.

    Args:
        failures: What each rank raised, by rank.
        first: The rank whose group comes first, where it is known to have failed first. The others follow by time.

    Returns:
        The ranks of each group, ascending.

    >>> alike({0: Failure("KeyError: 'a'"), 1: Failure("ValueError"), 2: Failure("KeyError: 'b'")}, first=1)
    [[1], [0, 2]]
    """
    groups: dict[tuple[str, str, int], list[int]] = {}
    for rank in sorted(failures, key=lambda each: (each != first, failures[each].time, each)):
        failure = failures[rank]
        kind = _OWN.sub("…", failure.words), failure.place, len(_OWN.findall(failure.words))
        groups.setdefault(kind, []).append(rank)
    return [sorted(ranks) for ranks in groups.values()]


def told_as_one(failures: Mapping[int, Failure]) -> str:
    """Returns what ranks raised alike, as the rest of a sentence that begins with them.

    Args:
        failures: What each of them raised, by rank; at least one.

    >>> told_as_one({rank: Failure(f"OSError: 'shard-{rank}.npy'", "train.py:41", "in batch 4") for rank in range(2)})
    "raised OSError: 'shard-…' at train.py:41 (in batch 4)"
    """
    rank = min(failures)
    failure = failures[rank]
    at_one_place = all(each.where == failure.where for each in failures.values())
    where = failure.where if at_one_place or not failure.where else f"rank {rank} {failure.where}"
    own = [_OWN.findall(each.words) for each in failures.values()]
    common = map(_common, zip(*own, strict=True))
    return replace(failure, words=_OWN.sub(lambda _: next(common), failure.words), where=where).event


def _common(texts: Sequence[str]) -> str:
    """What the texts of all ranks have in common, with an ellipsis for the rest."""
    first, *others = texts
    if all(each == first for each in others):
        return first
    quote = first[0] if first[0] in "'\"" and all(each[0] == first[0] for each in others) else ""
    return f"{os.path.commonprefix(texts)}…{quote}" if quote else "…"  # noqa: RUF071  (they are texts, no paths)
