"""Do ranks have the same number of batches, and evaluate at the same points? `UnevenBatches`.

The rule (`protocol.rule`) proves it; here are the words, and evaluations that run beside the training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from countoff.core.checks.check import Check, Choices, FitStart, Others
from countoff.core.messages import count_of
from countoff.core.protocol.records import Records, SyncPoint, parse_count
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "DECISION",
    "EVALUATION",
    "UNEVEN_BATCHES",
    "WHO_EVALUATES",
    "UnevenCheck",
    "judge_batches",
    "uneven_apart",
]

DECISION, WHO_EVALUATES = "decision", "who evaluates"
"""Subjects for which one rank's loop decided: it has left the loop, or evaluates alone."""
EVALUATION = "evaluation"
"""The subject where evaluations differ in length. It is empty for train loaders."""

UNEVEN_BATCHES = VerdictKind(
    "UnevenBatches",
    "ranks have different numbers of batches, or evaluate at different points",
    default="raises; uneven evaluations warn",
    level="raise",
    restart="useless",
    causes={
        "": Cause(
            "The ranks' train loaders differ in length. From the next batch on, the job would average gradients of "
            "different batches, and then hang or fail."
        ),
        DECISION: Cause(
            "One rank left the loop where the others went on: a break, a limit, an exit or a condition of that rank "
            "alone.",
            "look for a break, a limit, an exit or a condition that only some ranks meet, and let all ranks decide "
            "together (all-reduce the flag before any rank acts on it).",
            restart="unknown",  # a clock may have decided
        ),
        EVALUATION: Cause(
            "The ranks' evaluation loaders differ in length. A metric that synchronises every batch hangs there."
        ),
        WHO_EVALUATES: Cause(
            "Not all ranks evaluate there. A collective of the evaluation would meet one of the training.",
            "let all ranks evaluate after the same batch.\n"
            "if only some ranks are to evaluate: uneven_eval='off', on every rank.",
            restart="unknown",
        ),
    },
)
"""**Cause.** The data was divided by files (7 files on 4 ranks), or by samples that do not divide by the number of
ranks. Or one rank left its loop alone: a `break`, a limit, early stopping on its own loss. Or only some ranks evaluate.

**Fix.** Use a `DistributedSampler` where the dataset is whole on every rank, and otherwise
[`uneven_train="stop"`](uneven-data.md). If one rank decides to stop, all-reduce the flag first. If only some ranks are
to evaluate: `uneven_eval="off"`; in a loop of your own, these ranks iterate the loader itself.
"""


class UnevenCheck(Check):
    """Compares the evaluations that have no place among the spans.

    Args:
        settings: The user's choices.
    """

    def __init__(self, settings: Choices) -> None:
        self._policy = settings.uneven_eval
        self._others: Others | None = None
        self._apart: Counter[str] = Counter()

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others = others

    def evaluated_apart(self, name: str, batches: int) -> None:
        """Compares an evaluation that ran beside the training, on another thread, with that of the other ranks.

        Args:
            name: Its name, equal on all ranks.
            batches: Batches of this rank, all that its loader has.
        """
        if self._others is None or self._policy == "allow":
            return
        self._apart[name] += 1

        def judge(records: Records) -> Iterator[Verdict | None]:
            found = uneven_apart(name, {rank: parse_count(each["batches"]) for rank, each in records.items()})
            yield found and replace(found, harmful=self._policy == "raise")

        self._others.report(f"apart/{name}/{self._apart[name]}", lambda: {"batches": batches}, judge, owed=False)


def judge_batches(divergence: Divergence, rank: int) -> Verdict:
    """Returns an `UnevenBatches` that names both ranks and both counts.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    logged, own = divergence.logged, divergence.own
    if own is not None:
        action = own.in_words
    else:
        verb = "asks for" if divergence.requested else "has" if logged.reason == "exhausted" else "has begun"
        action = f"{verb} batch {divergence.count}"
    sides = [(logged.rank, logged.in_words), (rank, action)]
    if own is not None and _ran_out_before(own, logged):
        sides.reverse()  # the loader that is known to have ended is what a reader needs first
    short = own is None and logged.reason == "exhausted"
    short = short or (own is not None and (_ran_out_before(own, logged) or _ran_out_before(logged, own)))
    return UNEVEN_BATCHES.found(
        f"{'; '.join(f'rank {who} {did}' for who, did in sides)}.",
        (sides[0][0], sides[1][0]),
        subject=_subject(divergence),
        time=logged.time,
        sync_index=divergence.sync_index,
        announced=divergence.announced,
        standing="ran out first" if short else "differ",
    )


def uneven_apart(name: str, batches: Mapping[int, int]) -> Verdict | None:
    """Returns an `UnevenBatches` if ranks had different numbers of batches in an evaluation beside the training.

    Args:
        name: The evaluation's name.
        batches: Batches of each rank, by rank.

    >>> uneven_apart("validation", {0: 4, 1: 3}).sentence
    'rank 1 ran out of data after 3 batches of validation; rank 0 after 4.'
    """
    fewest = min(batches, key=lambda rank: batches[rank], default=0)
    most = max(batches, key=lambda rank: batches[rank], default=0)
    if not batches or batches[fewest] == batches[most]:
        return None
    return UNEVEN_BATCHES.found(
        f"rank {fewest} ran out of data after {count_of(batches[fewest], 'batch')} of {name}; rank {most} after "
        f"{batches[most]}.",
        (fewest, most),
        subject=EVALUATION,
        standing="ran out first",
    )


def _ran_out_before(sync_point: SyncPoint, other: SyncPoint) -> bool:
    """Whether a rank's loader is known to have ended where another rank had more of the same span."""
    return (
        sync_point.reason == "exhausted"
        and (sync_point.kind, sync_point.span) == (other.kind, other.span)
        and sync_point.at < other.at
    )


def _subject(divergence: Divergence) -> str:
    if divergence.evaluation:
        return EVALUATION
    logged, own = divergence.logged, divergence.own
    if any(
        sync_point is not None and sync_point.kind == "eval_start" and sync_point.reason != "exhausted"
        for sync_point in (logged, own)
    ):
        return WHO_EVALUATES
    stopped = own is not None and own.kind == logged.kind and own.reason == "stopped"
    return DECISION if logged.reason != "exhausted" or stopped else ""
