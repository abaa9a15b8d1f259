"""Do ranks with different numbers of batches take the same number, and what is lost by it? `Truncated`.

A framework may end each pass on all ranks with the shortest one, or countoff does so as the user has asked for. Then
nothing is out of step, but some ranks leave data unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff.core.checks.check import Check, FitStart, Others, RankState
from countoff.core.checks.plan import each_on, own_lengths
from countoff.core.messages import count_of, names_of, ranks_by
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.records import Reason, Records, parse_count
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["TRUNCATED", "EvenCheck", "judge_lengths", "truncated"]

_DIFFER = "The ranks' loaders differ in length, and "
_BY_FRAMEWORK = f"{_DIFFER}the framework stops all of them at the shortest without a message."
_BY_COUNTOFF = f"{_DIFFER}{{}}='stop' ends the loop on every rank with the shortest one."
_OPTIONS = {"train": "uneven_train", "evaluation": "uneven_eval"}
_ACCEPTED = "nothing, if you accept that these batches are not used."
_METRIC = "This is printed once in a fit; the metric countoff/batches_left has the number of each epoch."
_SHOWN = 4
"""Groups of ranks that a sentence names."""

TRUNCATED = VerdictKind(
    "Truncated",
    'an epoch ended on every rank because one rank ran out of data, by the framework or with `uneven_train="stop"`; '
    "the report shows what the others had left",
    ends=False,
    causes={"": Cause(_BY_FRAMEWORK)},
)
"""**Cause.** Composer always ends all ranks with the shortest one, and countoff does so with `uneven_train="stop"` or
`uneven_eval="stop"`. If the order of the data is the same in every epoch, what is left is never used.

**Fix.** If the loss is small, do nothing. Otherwise [make the ranks even](uneven-data.md).
"""


class EvenCheck(Check):
    """Learns the common number of batches at the roll call, and warns of what is left in each span.

    Args:
        state: This rank's state.

    Attributes:
        lengths: The fewest and the most batches per epoch of any rank, where ranks take the same number and those of
            every rank are proven; empty otherwise.
        shortest_now: The fewest that `len` of any rank's train loader gives now; None where that of some rank is not
            known.
    """

    def __init__(self, state: RankState) -> None:
        self.lengths: tuple[int, ...] = ()
        self.shortest_now: int | None = None
        self._settings = state.settings
        self._others: Others | None = None

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others = others

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        settings = self._settings
        if not settings.keeps_even:
            return {}
        return {
            "uneven_train": settings.uneven_train,
            "uneven_eval": settings.uneven_eval,
            "length": start.own_batches,
            "now": start.own_length,
        }

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        if not refused:
            yield judge_lengths({rank: report["plan"] for rank, report in reports.items()})

    def answer(self, reports: Records) -> Mapping[str, Any]:  # noqa: D102
        proven, now = _of_all(reports, "length"), _of_all(reports, "now")
        return {"lengths": [min(proven), max(proven)] if proven else [], "shortest_now": min(now, default=None)}

    def answered(self, answer: Mapping[str, Any]) -> None:  # noqa: D102
        self.lengths = tuple(parse_count(length) for length in answer.get("lengths", ()))
        now = answer.get("shortest_now")
        self.shortest_now = None if now is None else parse_count(now)

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        span.closed_credits = span.credits

    def span_report(self, span: SpanCounters) -> Mapping[str, Any]:  # noqa: D102
        if span.closed_credits is None or self._others is None:
            return {"unused": span.unused}
        return {"unused": span.unused, "read": self._others.entries_read()}

    def compare_spans(self, span: SpanCounters, reports: Records) -> Iterator[Verdict | None]:  # noqa: D102
        if span.closed_credits is not None and self._others is not None:
            self._others.all_have_read(min(report["read"] for report in reports.values()))
        yield self._judge_rest(span, reports)

    def metrics(self, span: SpanCounters, reports: Records) -> Mapping[str, float]:  # noqa: D102
        if span.evaluation or self._settings.uneven_train == "raise":
            return {}
        left = sum(UnusedBatches(*report["unused"]).batches for report in reports.values() if report["unused"])
        return {"countoff/batches_left": left}

    def left_keys(self, span: SpanCounters) -> Iterable[str]:  # noqa: D102
        return () if span.closed_credits is None else span.closed_credits.left_keys()

    def _judge_rest(self, span: SpanCounters, reports: Records) -> Verdict | None:
        """What is said of a span that was cut short on some ranks; the adapter's own notice if none was."""
        policy = self._settings.uneven_eval if span.evaluation else self._settings.uneven_train
        unused = {rank: UnusedBatches(*report["unused"]) for rank, report in reports.items() if report["unused"]}
        cut = None
        if len(unused) == len(reports):
            cut = truncated(span.name, span.started, unused, by_countoff=policy == "stop")
        if cut is None:
            return span.notice
        if not span.evaluation:
            return cut
        return {"allow": None, "raise": replace(cut, kind="UnevenBatches")}.get(policy, cut)


def judge_lengths(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `Truncated` warning if the framework will end every epoch early on some ranks, as others have less.

    >>> print(judge_lengths({0: {"own_batches_per_epoch": 8}, 1: {"own_batches_per_epoch": 7}}).sentence)
    a train epoch has 8 batches on rank 0, 7 batches on rank 1: it ends after 7 on all ranks, and what the others have \
beyond is not trained on.
    """
    lengths = own_lengths(plans)
    if len(lengths) < 2:
        return None
    words = each_on([(count_of(batches, "batch"), ranks) for batches, ranks in lengths])
    fewest, short = min(lengths)
    effect = f"it ends after {fewest} on all ranks, and what the others have beyond is not trained on."
    return TRUNCATED.found(f"a train epoch has {words}: {effect}", short, subject="plan")


def truncated(
    span: str, used: int, unused: Mapping[int, UnusedBatches], *, by_countoff: bool = False
) -> Verdict | None:
    """Returns a `Truncated` warning if some ranks' loaders had more when the span was ended on all of them.

    Args:
        span: The span's name.
        used: Batches that every rank used in it.
        unused: What each rank's loader had beyond that.
        by_countoff: Whether countoff has ended it, as it was told to, and not the framework.

    Returns:
        The warning; None if no loader had more, or all of them had, because then a limit ended the span.

    Example:
        >>> found = truncated("train epoch 0", 7, {0: UnusedBatches(1, 4), 1: UnusedBatches(0)})
        >>> print(found.sentence.partition(": ")[2])
        rank 0 lost 1 batch (4 samples).
    """
    short = [rank for rank in sorted(unused) if not unused[rank].batches and unused[rank].exact]
    losses = _in_order({rank: loss for rank, loss in unused.items() if loss.batches})
    if not short or not losses:
        return None
    subject = "train" if span.startswith("train") else "evaluation"
    verb, ended = ("left", "stopped") if by_countoff else ("lost", "ended")
    lost = _listed((f"{names_of(ranks)} {verb} {loss}", ranks) for loss, ranks in losses)
    return TRUNCATED.found(
        f"{span} {ended} on every rank after {count_of(used, 'batch')}, where {names_of(short)} ran out of data: "
        f"{lost}.",
        short,
        subject=subject if used else f"empty {subject}",  # reported also after one that was only cut
        why=_BY_COUNTOFF.format(_OPTIONS[subject]) if by_countoff else _BY_FRAMEWORK,
        remedy=_remedy(subject, used) if by_countoff else "",
    )


def _of_all(reports: Records, name: str) -> list[int]:
    """The length of this name that each rank has reported; empty if some rank has none."""
    known = [length for report in reports.values() if (length := report.get(name)) is not None]
    return known if len(known) == len(reports) else []


def _in_order(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """The values with their ranks, in the order of their first ranks."""
    return sorted(ranks_by(values), key=lambda group: group[1])


def _listed(groups: Iterable[tuple[str, Sequence[int]]]) -> str:
    clauses = [f"{clause}{' each' if len(ranks) > 1 else ''}" for clause, ranks in groups]
    return "; ".join([*clauses[:_SHOWN], *(["…"] if len(clauses) > _SHOWN else [])])


def _remedy(subject: str, used: int) -> str:
    """What to do about batches that countoff has left on some ranks."""
    if not used:
        return "give every rank data for at least one batch: as long as one rank has none, no rank takes any batch."
    if subject != "train":
        return f"{_ACCEPTED}\nto use all data, give every rank the same number of evaluation batches."
    return f"{_ACCEPTED} {_METRIC}\nto use all data, give every rank the same number of batches."
