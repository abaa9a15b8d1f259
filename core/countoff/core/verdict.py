"""What was found, and how it is said: the verdict, its exceptions, and the text of every message.

A verdict travels between ranks as JSON and is put into words by each of them, so every rank prints the same text.
The exceptions are named after what was found; all of them are `DivergenceError`, so one `except` catches any.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.log import Divergence, Mark, parse_count

TABLE_ROWS = 16
_DECISION = "decision"
_TOGETHER = (
    "look for a break, a limit or a condition that only some ranks meet, and let all ranks decide together (all-reduce "
    "the flag before anybody acts on it)."
)
_COLUMNS = ("rank", "where", "batches", "fetched", "steps", "state")


@dataclass(frozen=True)
class Verdict:
    """One finding about the ranks of a job.

    Attributes:
        kind: That of an exception below, or of a warning: `Stalled`, `WrongLength`, `Truncated`, `VersionMismatch`,
            `LateRank`, `SettingsMismatch`, `WrongHorizon`, `WrongTotal`, `NotDistributed`, `DuplicateData`,
            `PeersDiffer`, `SameOrder`, `UnseenLoader`.
        sentence: What happened, with ranks, span and both counts.
        ranks: The ranks that the proof names, the odd one first.
        why: The cause, where it can be told.
        remedy: What to do about it.
        rows: What each rank had counted when the verdict reached it, the odd ones first.
        gone: Whether those ranks can no longer speak: nothing is awaited of them.
        time: When the proof came to exist, in seconds since the epoch by the clock of the rank that found it.
        spread_seconds: Time from then until the last rank knew; None if not every rank said.
        counted: Ranks that answered, where they are more than the rows that are shown.
        mark_index: Number of the ledger's mark in dispute, or of the one that opened the span whose end was announced.
        announced: Whether that end was only announced.
        subject: What it is about, where a kind may be found of several things: a warning is given once for each.
    """

    kind: str
    sentence: str
    ranks: tuple[int, ...] = ()
    why: str = ""
    remedy: str = ""
    rows: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    gone: bool = False
    time: float = 0.0
    spread_seconds: float | None = None
    counted: int = field(default=0, compare=False)
    subject: str = ""
    mark_index: int = -1
    announced: bool = False

    @property
    def headline(self) -> str:
        """The kind and what happened, in one line."""
        return plain(f"{self.kind}: {self.sentence}")

    def render(self) -> str:
        """The whole message: headline, table of ranks, cause, remedy.

        >>> print(Verdict("LostRank", "rank 2 is gone.", why="It was killed.").render())
        countoff: LostRank: rank 2 is gone.
          why: It was killed.
        """
        lines = [f"countoff: {self.headline}"]
        if self.rows and self.ranks:
            counted = max(self.counted, len(self.rows)) + (len(self.ranks) if self.gone else 0)  # the dead have no row
            lines.append(f"  out of step: {names_of(self.ranks)} of {count_of(counted, 'rank')}")
        if any(line.get("batches") for line in self.rows):
            lines += table(self.rows, self.counted)
        if self.spread_seconds is not None:
            lines.append(f"  known on every rank {self.spread_seconds * 1000:.1f} ms after it could be proved")
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.remedy:
            lines.append(f"  do:  {self.remedy}")
        return "\n".join(plain(line) for line in lines)

    def to_json(self) -> dict[str, Any]:
        """What the other ranks need to say the same; the table is gathered afterwards."""
        return {
            "kind": self.kind,
            "sentence": clip(self.sentence, 420),
            "ranks": list(self.ranks[:8]),
            "why": clip(self.why, 240),
            "gone": self.gone,
            "time": self.time,
            "subject": clip(self.subject, 40),
            "mark_index": self.mark_index,
            "announced": self.announced,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], remedies: Mapping[str, str]) -> Verdict:
        """Reads a verdict that another rank wrote, and adds the remedy in this adapter's words.

        Raises:
            KeyError, TypeError, ValueError: If the record is not a verdict.
        """
        verdict = cls(
            kind=str(record["kind"]),
            sentence=str(record["sentence"]),
            ranks=tuple(parse_count(rank) for rank in record["ranks"]),
            why=str(record["why"]),
            gone=bool(record["gone"]),
            time=float(record["time"]),
            subject=str(record["subject"]),
            mark_index=int(record["mark_index"]),
            announced=bool(record["announced"]),
        )
        return replace(verdict, remedy=remedy_for(verdict, remedies))


class DivergenceError(RuntimeError):
    """Ranks are out of step; raised on every rank that is in Python when it becomes known.

    Attributes:
        verdict: What was found.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        return plain(self.verdict.sentence)


class PlanMismatch(DivergenceError):
    """Ranks begin with different lengths, batch sizes, accumulation or positions."""


class UnevenBatches(DivergenceError):
    """Ranks have different numbers of batches, or evaluate at different places."""


class StepMismatch(DivergenceError):
    """Ranks read as many batches but applied optimizer steps at other places."""


class LearningRateMismatch(DivergenceError):
    """Ranks train with different learning rates."""


class RankMapError(DivergenceError):
    """The ranks' dp_ranks leave data unread, or let ranks read each other's."""


class LostRank(DivergenceError):
    """A rank failed, was killed, was stopped, or can no longer be heard."""


_ERRORS: dict[str, type[DivergenceError]] = {
    leaf.__name__: leaf
    for leaf in (PlanMismatch, UnevenBatches, StepMismatch, LearningRateMismatch, RankMapError, LostRank)
}


def error_for(verdict: Verdict) -> DivergenceError:
    """The exception that says this verdict.

    >>> type(error_for(Verdict("LostRank", "rank 2 is gone."))).__name__
    'LostRank'
    """
    return _ERRORS.get(verdict.kind, DivergenceError)(verdict)


def plain(text: str) -> str:
    r"""A text without what could move a terminal's cursor or forge a line: the store is open to everybody.

    >>> plain("rank 1 raised \x1b[31mValueError")
    'rank 1 raised \\x1b[31mValueError'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def remedy_for(verdict: Verdict, remedies: Mapping[str, str]) -> str:
    """What to do about a verdict in the adapter's words, a decision of some ranks alone before their loaders."""
    decided = verdict.kind == "UnevenBatches" and verdict.subject == _DECISION
    known = remedies.get(verdict.kind, "")
    if not decided:
        return known
    return f"{_TOGETHER} Or else: {known}" if known else _TOGETHER


def clip(text: str, length: int) -> str:
    """Shortens a text until it takes at most `length` characters as JSON, so that a record fits into the store.

    >>> clip("shard 3 is torn", 100), clip("ä" * 50, 20)
    ('shard 3 is torn', 'ää…')
    """
    if len(json.dumps(text)) <= length:
        return text
    while text and len(json.dumps(text + "…")) > length:
        text = text[: len(text) * 9 // 10]
    return text + "…"


def count_of(number: int, noun: str) -> str:
    """A number and its noun: ``1 batch``, ``4 batches``, ``1 step``.

    >>> count_of(4, "batch"), count_of(1, "step")
    ('4 batches', '1 step')
    """
    plural = noun + ("es" if noun.endswith("batch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def names_of(ranks: Sequence[int]) -> str:
    """Ranks as a person lists them, folded past eight.

    >>> names_of([1]), names_of([0, 2, 3])
    ('rank 1', 'ranks 0, 2, 3')
    """
    listed = ", ".join(str(rank) for rank in ranks[:8])
    folded = f", … ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}{folded}"


def describe_mark(mark: Mark) -> str:
    """What the rank did that passed this mark, as the rest of a sentence that begins with its name."""
    batches = count_of(mark.at, "batch")
    if mark.reason == "exited":
        return "left the job (sys.exit)" + (f" in batch {mark.at} of {mark.span}" if mark.kind != "fit_end" else "")
    if mark.kind in ("train_end", "eval_end"):
        listed = f" ({' + '.join(str(count) for count in mark.counts)})" if len(mark.counts) > 1 else ""
        verb = "ran out of data" if mark.reason == "exhausted" else "stopped"
        return f"{verb} after {batches}{listed} of {mark.span}"
    if mark.kind == "eval_start":
        return f"began {mark.span}" + (f" after {count_of(mark.at, 'train batch')}" if mark.at else "")
    if mark.kind == "train_start":
        return f"began {mark.span}"
    return "ended the fit" if mark.kind == "fit_end" else "began the fit"


def judge(divergence: Divergence, rank: int) -> Verdict:
    """Puts a finding of this rank into a verdict that names both ranks and both counts.

    Args:
        divergence: What the ledger proved.
        rank: The rank that found it.
    """
    standing, own = divergence.standing, divergence.own
    for left, leaver, other in ((standing, standing.rank, rank), (own, rank, standing.rank)):
        if left is not None and left.reason == "exited":
            sentence, why = (
                f"rank {leaver} {describe_mark(left)}, where rank {other} goes on.",
                "The others wait for it in vain.",
            )
            return Verdict("LostRank", sentence, (leaver,), why=why, gone=True, time=standing.time)
    if divergence.kind == "StepMismatch":
        theirs, mine = count_of(standing.steps, "optimizer step"), count_of(divergence.count, "optimizer step")
        where = f"after {count_of(standing.at, 'batch')} of {standing.span}"
        sentence = f"{where}, rank {standing.rank} had applied {theirs} and rank {rank} {mine}"
        sentence += "." if standing.steps != divergence.count else ", but after other batches."
        return Verdict(
            "StepMismatch", sentence, (standing.rank, rank), time=standing.time, mark_index=divergence.mark_index
        )
    if own is None:
        verb = "asks for" if divergence.requested else "has" if standing.reason == "exhausted" else "has begun"
        action = f"{verb} batch {divergence.count}"
    else:
        action = describe_mark(own)
    sentence = f"rank {standing.rank} {describe_mark(standing)}; rank {rank} {action}."
    subject = _DECISION if not divergence.evaluation and _decided(divergence) else ""
    return Verdict(
        "UnevenBatches",
        sentence,
        (standing.rank, rank),
        why=_why(divergence),
        time=standing.time,
        subject=subject,
        mark_index=divergence.mark_index,
        announced=divergence.announced,
    )


def lost_rank(rank: int, describe_mark: str, why: str = "", *, gone: bool = True) -> Verdict:
    """The verdict that a rank is gone, stopped or silent, or (not `gone`) that it has failed and says so itself."""
    return Verdict("LostRank", f"rank {rank} {describe_mark}.", (rank,), why=why, gone=gone, time=time.time())


def _why(divergence: Divergence) -> str:
    if divergence.evaluation:
        return "The ranks' evaluation loaders differ in length; a metric that synchronises per batch hangs there."
    if not _decided(divergence):
        return (
            "The ranks' loaders differ in length. Every gradient from here on would average batches of different "
            "places, until a collective without a partner hangs."
        )
    return "The ranks took different decisions from the same counts (a break, a limit, or a condition of one rank)."


def _decided(divergence: Divergence) -> bool:
    """Whether a rank went another way although its loader held more."""
    standing, own = divergence.standing, divergence.own
    return standing.reason != "exhausted" or (own is not None and own.kind == standing.kind and own.reason == "stopped")


def row(rank: int, tally: SpanCounters | None, steps: int, state: str) -> dict[str, Any]:
    """One rank's line in the table, as JSON types."""
    where, started, fetched = ("no span", 0, 0) if tally is None else (tally.name, tally.started, tally.fetched)
    return {"rank": rank, "where": where, "batches": started, "fetched": fetched, "steps": steps, "state": state}


def odd_ranks(rows: Iterable[Mapping[str, Any]], proven: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the minority: of those that are with the mark in dispute and those that are against it, the fewer.

    Args:
        rows: One row per rank that answered; its `side` is None for a rank that has not got there.
        proven: The two ranks of the proof, one of each side, which are named where either side could still become the
            fewer.

    >>> odd_ranks([{"rank": rank, "side": rank == 2} for rank in range(4)], (2, 0))
    (2,)
    """
    sides = {int(line["rank"]): line.get("side") for line in rows}
    party = [sorted(rank for rank, side in sides.items() if side is which) for which in (True, False)]
    fewer, more = sorted(party, key=len)
    undecided = len(sides) - len(fewer) - len(more)
    return tuple(fewer) if fewer and len(fewer) + undecided < len(more) else tuple(proven)


def table(rows: Sequence[Mapping[str, Any]], counted: int = 0) -> list[str]:
    """The table of ranks as aligned lines, folded past `TABLE_ROWS` rows; `counted` ranks in all, if that is more."""
    if not rows:
        return []
    cells = [_COLUMNS, *(tuple(str(line.get(column, "")) for column in _COLUMNS) for line in rows[:TABLE_ROWS])]
    widths = [max(len(line[index]) for line in cells) for index in range(len(_COLUMNS))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    folded = max(counted, len(rows)) - min(len(rows), TABLE_ROWS)
    if folded > 0:
        lines.append(f"  … and {count_of(folded, 'rank')} more")
    return [line.rstrip() for line in lines]
