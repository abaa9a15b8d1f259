"""Does a rank evaluate with what another rank trains on, because each has split the data in its own way? `SplitLeak`.

Compared once: when the fit has begun, or where the loaders of evaluations are made later, with the first one. All ranks
look at the same rows of the dataset that they split, every n-th one. Each tells in one bit per row whether it trains on
it, and in another one whether it evaluates with it. A row of both kinds, on different ranks, proves the leak. That
there is none proves nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.protocol.fit_records import SAMPLED, SplitSample
from countoff.core.protocol.records import Records
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["SPLIT_LEAK", "SplitCheck", "judge_splits"]

SPLIT_LEAK = VerdictKind(
    "SplitLeak",
    "ranks train one model and have split the data in different ways: a rank evaluates with rows on which another one "
    "trains",
    causes={
        "": Cause(
            "All ranks train one model, so it is evaluated with rows that it was trained on. The results look better "
            "than they are.",
            "split the data in the same way on every rank: with a fixed seed, such as random_split(…, "
            "generator=torch.Generator().manual_seed(7)) or train_test_split(seed=7).\n"
            "split it once, with indices that are saved.\n"
            "where it is meant: levels={'SplitLeak': 'off'}.",
        )
    },
)
"""**Cause.** A random split without a seed, or with one of each rank, before the sampler or `prepare()`. No loss shows
it.

**Fix.** Give the split a seed. Do not trust the results of the run so far, nor a checkpoint that was chosen by them.

It is found where a `Subset` or a `Dataset` of `datasets` stores the indices, and a sampler deals the train data out to
all ranks. Up to 2048 rows are compared. A rank that evaluates with rows on which it trains itself is not reported.
"""
_NAMED = 3


class SplitCheck(Check):
    """Compares how the ranks have split their data once the roll call is over.

    Attributes:
        found: Whether the ranks are known to have split it in different ways. Known on the first rank alone.
    """

    def __init__(self) -> None:
        self.found = False
        self._others: Others | None = None
        self._split: SplitSample | None = None

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others, self._split, self.found = others, start.split, False

    def counted_off(self) -> None:  # noqa: D102
        split, self._split = self._split, None
        if self._others is not None:
            self._others.report("splits", lambda: {} if split is None else split.to_json(), self._judge)

    def evaluates(self, split: SplitSample) -> None:
        """Compares a split that is known with the fit's first evaluation only. To be called once in a fit.

        Args:
            split: How this rank has split the data.
        """
        if self._others is not None:
            self._others.report("splits/evaluated", split.to_json, self._judge, owed=False)  # a rank may not evaluate

    def _judge(self, records: Records) -> list[Verdict]:
        found = judge_splits({rank: SplitSample.from_json(record) for rank, record in records.items() if record})
        self.found = found is not None
        return [] if found is None else [found]


def judge_splits(samples: Mapping[int, SplitSample]) -> Verdict | None:
    """Returns a `SplitLeak` if a rank evaluates with a row on which another rank trains, and none with its own.

    Args:
        samples: What each rank has told, by rank.

    Example:
        >>> one = SplitSample.of_places("", 10, train=[0, 1, 2], evaluated=[3])
        >>> other = SplitSample.of_places("", 10, train=[0, 1, 3], evaluated=[2])
        >>> judge_splits({0: one, 1: other}).sentence
        'row 30 validates on rank 0 and trains on rank 1: the ranks have split the data in different ways.'
        >>> judge_splits({0: one, 1: one}) is None
        True
    """
    if len({(each.of, each.step) for each in samples.values()}) != 1:
        return None
    if any(each.train & each.evaluated for each in samples.values()):
        return None  # a part of the train data is evaluated on purpose
    trained = functools.reduce(operator.or_, (each.train for each in samples.values()))
    rank = next((rank for rank, each in sorted(samples.items()) if each.evaluated & trained), None)
    if rank is None:
        return None
    evaluated, step = samples[rank].evaluated, samples[rank].step
    other = next(other for other, each in sorted(samples.items()) if each.train & evaluated)
    rows = [place * step for place in range(SAMPLED) if (samples[other].train & evaluated) >> place & 1]
    named = ", ".join(map(str, rows[:_NAMED])) + (", …" if len(rows) > _NAMED else "")
    noun, validate, train = ("rows", "validate", "train") if len(rows) > 1 else ("row", "validates", "trains")
    sentence = (
        f"{noun} {named} {validate} on rank {rank} and {train} on rank {other}: the ranks have split the data in "
        "different ways."
    )
    return SPLIT_LEAK.found(sentence, (rank, other), standing="differ")
