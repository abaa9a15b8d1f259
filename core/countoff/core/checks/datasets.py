"""Where samplers deal one dataset out to the ranks, do all ranks hold that one? `DatasetsDiffer`.

Compared once, when the fit has begun: what each rank's objects store about the size, the columns and the choice of
rows of its datasets. Nothing is read of the rows themselves. What the ranks then read is a question of `streams`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.checks.plan import ROWS, SAME_DATASET, each_on, rows_on
from countoff.core.protocol.records import Records, parse_count, record_text
from countoff.core.verdict import Cause, Standing, Verdict, VerdictKind
from countoff.core.words import clip, count_of, names_of, ranks_by

__all__ = ["DATASETS_DIFFER", "DatasetCheck", "HeldDataset", "judge_datasets"]

DATASETS_DIFFER = VerdictKind(
    "DatasetsDiffer",
    "a sampler deals one dataset out to the ranks, but the ranks' datasets have different rows or columns",
    causes={
        "": Cause(
            "A sampler gives each rank its share of one dataset, and takes every rank to hold the same one. Otherwise "
            "some rows are read several times and others never, and ranks may have different numbers of batches.",
            f"{SAME_DATASET} If they are to differ: levels={{'DatasetsDiffer': 'off'}}.",
        )
    },
)
_MOST = 3
_NAME, _COLUMNS = 24, 96
"""What of a record of 1 KiB one rank uses at most: the train dataset and two others, some 500 bytes."""
_OTHER_COLUMNS = 3
"""Columns that a sentence names at most."""


class HeldDataset(NamedTuple):
    """What one rank's objects store about a dataset that a sampler deals out to all ranks.

    Attributes:
        name: Name of the evaluation; empty for the train dataset.
        rows: Rows that this rank's dataset has; None if that is not known.
        share: Rows of it that the sampler gives each rank, where `rows` is not known; None if that is not known either.
        columns: Names of its columns; None if it has none, or if they are not known.
        ends: The first and the last row of another dataset, where this one is a choice of such rows; None if not.
    """

    name: str
    rows: int | None = None
    share: int | None = None
    columns: Sequence[str] | None = None
    ends: tuple[int, int] | None = None

    def to_json(self) -> list[Any]:
        """What is told of it, as JSON types."""
        ends = None if self.ends is None else list(self.ends)
        return [clip(self.name, _NAME), self.rows, self.share, _columns_of(self.columns), ends]


class DatasetCheck(Check):
    """Compares the ranks' datasets once the roll call is over.

    Attributes:
        found: Whether the ranks' train datasets are known to differ. Known on the first rank alone.
    """

    def __init__(self) -> None:
        self.found = False
        self._others: Others | None = None
        self._held: Sequence[HeldDataset] = ()
        self._named = False

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others, self._held, self.found, self._named = others, start.datasets[:_MOST], False, False

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        rows = next((each.rows for each in start.datasets if not each.name), None)
        return {} if rows is None else {ROWS: rows}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Sequence[Verdict]:  # noqa: D102
        self._named = refused and bool(rows_on(reports))  # the difference of the plans that follows from it has said it
        return ()

    def counted_off(self) -> None:  # noqa: D102
        held, self._held = self._held, ()
        if self._others is not None:
            self._others.report("datasets", {"held": [each.to_json() for each in held]}, self._judge)

    def _judge(self, records: Records) -> list[Verdict]:
        found = judge_datasets(records)
        if found is None:
            return []
        self.found = not found.subject
        return [] if self._named and self.found else [found]


def judge_datasets(records: Records) -> Verdict | None:
    """Returns a `DatasetsDiffer` if ranks hold other data than the sampler takes them to hold, the train data first.

    Args:
        records: What each rank has told, by rank.

    Raises:
        KeyError, TypeError, ValueError: If a record is none.

    Example:
        >>> told = {rank: {"held": [HeldDataset("", rows=96 - 8 * (rank == 2)).to_json()]} for rank in range(4)}
        >>> judge_datasets(told).sentence
        'the train dataset has 88 rows on rank 2, 96 rows on ranks 0, 1, 3.'
    """
    by_name: dict[str, dict[int, _Told]] = {}
    for rank, record in records.items():
        for held in record["held"][:_MOST]:
            told = _Told.from_json(held)
            by_name.setdefault(told.name, {})[rank] = told
    for name, told in sorted(by_name.items()):
        what = f"the {name or 'train'} dataset"
        for differ in (_rows_differ, _shares_differ, _columns_differ, _ends_differ):
            found = differ(what, told)
            if found is not None:
                return _verdict(*found, name)
    return None


class _Told(NamedTuple):
    """What one rank has told of a dataset; as in `HeldDataset`.

    Attributes:
        columns: The names, or a digest of them where they are too long; None if they are not known.
    """

    name: str
    rows: int | None
    share: int | None
    columns: tuple[str, ...] | str | None
    ends: tuple[int, int] | None

    @classmethod
    def from_json(cls, record: Any) -> _Told:
        """Reads what another rank has told; that may be anything.

        Raises:
            TypeError, ValueError: If it is something else.
        """
        name, rows, share, columns, ends = record
        first, last = (None, None) if ends is None else ends
        return cls(
            clip(str(name), _NAME),
            None if rows is None else parse_count(rows),
            None if share is None else parse_count(share),
            _parse_columns(columns),
            None if first is None else (parse_count(first), parse_count(last)),
        )


_Differ = tuple[str, list[list[int]]]
"""In what ranks differ, and these ranks in groups that do not, the smallest group first."""


def _rows_differ(what: str, told: Mapping[int, _Told]) -> _Differ | None:
    return _differ(told, lambda each: each.rows, lambda rows: count_of(rows, "row"), f"{what} has")


def _shares_differ(what: str, told: Mapping[int, _Told]) -> _Differ | None:
    unknown = {rank: each for rank, each in told.items() if each.rows is None}
    begin = f"the sampler's shares of {what} differ, so their datasets have different lengths: a share has"
    return _differ(unknown, lambda each: each.share, lambda rows: count_of(rows, "row"), begin)


def _ends_differ(what: str, told: Mapping[int, _Told]) -> _Differ | None:
    def in_words(ends: tuple[int, int]) -> str:
        return f"row {ends[0]} to row {ends[1]}"

    return _differ(told, lambda each: each.ends, in_words, f"{what} is chosen from another one by other indices: from")


def _columns_differ(what: str, told: Mapping[int, _Told]) -> _Differ | None:
    groups = ranks_by({rank: each.columns for rank, each in told.items() if each.columns is not None})
    if len(groups) < 2:
        return None
    (few, fewest), (most, others) = groups[0], groups[-1]
    sentence = f"{what} has other columns on {names_of(fewest)} than on {names_of(others)}"
    if isinstance(few, tuple) and isinstance(most, tuple):
        one, other = set(few), set(most)
        parts = [
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing on {names_of(ranks)}"
            for missing, ranks in ((other - one, fewest), (one - other, others))
            if missing
        ]
        sentence += f": {', '.join(parts)}" if parts else ""
    return sentence, [ranks for _, ranks in groups]


def _differ(
    told: Mapping[int, _Told], value_of: Callable[[_Told], Any], in_words: Callable[[Any], str], begin: str
) -> _Differ | None:
    groups = ranks_by({rank: value for rank, each in told.items() if (value := value_of(each)) is not None})
    if len(groups) < 2:
        return None
    return f"{begin} {each_on([(in_words(value), ranks) for value, ranks in groups])}", [ranks for _, ranks in groups]


def _verdict(sentence: str, groups: list[list[int]], name: str) -> Verdict:
    *few, most = groups
    others = sorted(rank for ranks in few for rank in ranks)
    minority = len(others) < len(most)
    standing: Standing = "out of step" if minority else "differ"
    named = others if minority else sorted([*others, *most])
    return DATASETS_DIFFER.found(f"{sentence}.", named, subject=name, standing=standing)


def _columns_of(columns: Sequence[str] | None) -> list[str] | str | None:
    """The names if they fit into the record, or a digest of them."""
    if columns is None:
        return None
    names = sorted(columns)
    text = record_text({"": names})
    return names if len(text) <= _COLUMNS else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _parse_columns(value: Any) -> tuple[str, ...] | str | None:
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(clip(str(name), _COLUMNS) for name in value[:_COLUMNS])
    return clip(str(value), _COLUMNS)


def _listed(names: set[str]) -> str:
    named = sorted(names)
    return ", ".join(named[:_OTHER_COLUMNS]) + (", …" if len(named) > _OTHER_COLUMNS else "")
