"""Records: what ranks write into the job's store for one another, and how it is read back.

The store has no authentication, so everything that comes back is checked here before anything else sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, cast, get_args

from countoff.core.messages import clip, count_of
from countoff.core.protocol.rates import parse_rates
from countoff.core.verdict import Standing, Verdict

SyncKind = Literal["fit_start", "train_start", "eval_start", "eval_end", "train_end", "fit_end"]
Reason = Literal["", "exhausted", "stopped", "exited", "interrupted"]

RECORD_BYTES = 1024
"""A record in the store has at most as many bytes."""
_TEXT_BYTES = 700
"""The texts of a verdict take at most as many bytes, so that its record fits into the store."""

_COUNTS_BYTES, COUNTED_STEPS = 320, 512
"""Micro-batches since the last comparison take at most as many bytes in a record, and are kept for so many steps."""

_LISTED_RANKS, _RUNS, _MOST_RANKS = 8, 12, 1 << 17
"""A record lists as many ranks, has as many runs of them where they are more, and as many ranks in them at most."""

Records = dict[int, dict[str, Any]]
"""One record of each rank, by rank."""


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """What one rank begins a fit with.

    All ranks must agree on it, except on `dp_rank`, `loader_position` and `own_batches_per_epoch`. None means that this
    rank does not know, and it is compared with nothing; in `max_epochs` and `max_steps` it means that there is no such
    limit. Every value must be one of JSON.

    Attributes:
        batches_per_epoch: Batches per rank and epoch, as this rank's framework reports them.
        proven_batches_per_epoch: Batches per rank and epoch that arithmetic proves.
        batch_size: Samples per dp_rank and batch.
        gradient_accumulation_steps: Batches per dp_rank and optimizer step.
        max_epochs: Epochs after which the run ends.
        max_steps: Optimizer steps after which the run ends.
        position: Where a resumed run continues, as numbers in an order that the adapter chooses, such as
            ``[epoch, batch in the epoch, step]``. Where there are several numbers, the last one is the optimizer steps
            of the whole run.
        dp_degree: Number of dp_ranks.
        dp_rank: This rank's share of the data, from 0 up to `dp_degree`; each belongs to the same number of ranks.
        loader_position: The dp_rank and the dp_degree by which this rank's loader really shards its data.
        evaluations: Checksum of the proven lengths of all evaluation loaders.
        own_batches_per_epoch: Batches of this rank's loader per epoch, where the framework ends an epoch on all ranks
            with the shortest loader. Ranks may differ in it: a warning tells what the longer ones lose.
        batches_between_evaluations: Train batches from one evaluation within an epoch to the next, where the framework
            computes them from the length of this rank's loader.
        runs_to_end: Whether every train epoch goes on to the end of its loader or to a known limit, as that of a
            framework's trainer does. A loop that a person writes may leave it anywhere: lengths that differ
            then prove nothing before a rank gets there.
        why_equal_lengths: Why ranks must not differ in `batches_per_epoch`, as one sentence, where that is known.
        dataset_rows: Rows of the train dataset, where a sampler deals it out to all ranks. A difference is a warning.
        sampler: What that sampler, or a dataset that deals itself out, was made with, by the names of its arguments.
            Likewise.
        limits: Limits of a train epoch of the framework's trainer, by its own names: what the lengths may follow from.
        evaluation_intervals: After how many batches or epochs it evaluates, likewise.
    """

    batches_per_epoch: int | None = None
    proven_batches_per_epoch: int | None = None
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_epochs: int | None = None
    max_steps: int | None = None
    position: Sequence[int] | None = None
    dp_degree: int | None = None
    dp_rank: int | None = None
    loader_position: Sequence[int] | None = None
    evaluations: int | None = None
    own_batches_per_epoch: int | None = None
    batches_between_evaluations: int | None = None
    runs_to_end: bool = True
    why_equal_lengths: str | None = None
    dataset_rows: int | None = None
    sampler: Mapping[str, Any] | None = None
    limits: Mapping[str, Any] | None = None
    evaluation_intervals: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types."""
        return asdict(self)

    @property
    def steps_before(self) -> int:
        """Optimizer steps before the checkpoint from which the run resumes; 0 where its position does not tell them."""
        return self.position[-1] if self.position is not None and len(self.position) > 1 else 0


@dataclass(frozen=True)
class MicroCounts:
    """The micro-batches of one rank's optimizer steps, as ticks and sync points compare them.

    Attributes:
        hash: Hash of the micro-batches of all steps since the fit began; 0 where none have been counted.
        since: Optimizer steps before those that `counts` is about.
        counts: Micro-batches of each later step; the last ones may be missing.
        batches: First and last batch of each of these steps. Not in the record.
        span: The span of these batches. Not in the record.
        sharded: Whether they are forward passes of a sharded model, and no micro-batches.
    """

    hash: int = 0
    since: int = 0
    counts: tuple[int, ...] = ()
    batches: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    span: str = field(default="", compare=False)
    sharded: bool = False

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON types, equal ones as one; nothing where no micro-batches have been counted.

        >>> MicroCounts(7, 64, (4, 4, 4, 5)).to_json()
        {'micro': {'hash': 7, 'since': 64, 'counts': '4*3,5'}}
        """
        if not self.hash:
            return {}
        text = ""
        for count, equal in groupby(self.counts):
            times = len(list(equal))
            longer = f"{text}{',' if text else ''}{count}{f'*{times}' if times > 1 else ''}"
            if len(longer) > _COUNTS_BYTES:
                break
            text = longer
        kind = {"sharded": True} if self.sharded else {}
        return {"micro": {"hash": self.hash, "since": self.since, "counts": text, **kind}}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MicroCounts:
        """Reads what is in the tick or the sync point of another rank; another version may not write it.

        Raises:
            KeyError, TypeError, ValueError: If it is there, and is something else.
        """
        if "micro" not in record:
            return cls()
        micro = record["micro"]
        text = micro["counts"]
        if not isinstance(text, str) or not _COUNTS.fullmatch(text):
            raise ValueError(f"expected micro-batches of steps, got {text!r}")
        counts: list[int] = []
        for run in filter(None, text.split(",")):
            count, _, times = run.partition("*")
            parse_count(len(counts) + int(times or 1), COUNTED_STEPS + 1)
            counts += [int(count)] * int(times or 1)
        sharded = micro.get("sharded") is True
        return cls(parse_count(micro["hash"]), parse_count(micro["since"]), tuple(counts), sharded=sharded)

    def differ(self, other: MicroCounts) -> bool:
        """Whether two ranks ran different numbers of them; False where one of them has counted none, or other ones."""
        return self.hash != other.hash and bool(self.hash and other.hash) and self.sharded == other.sharded


NO_MICRO_COUNTS = MicroCounts()
"""Where no micro-batches are counted, or none are compared."""
_COUNTS = re.compile(r"(?:[0-9]{1,9}(?:\*[0-9]{1,3})?(?:,(?!$)|$))*", re.ASCII)


@dataclass(frozen=True)
class SyncPoint:
    """A point that every rank passes, with the counts that must be equal there.

    Attributes:
        kind: What opens or closes.
        span: Name of the span that it opens or closes.
        at: Batches started in the span in which the sync point stands (for `eval_start`, the train span around it).
        reason: For a closing, whether the loader was `exhausted`, the pass was `stopped` (a limit, a break, early
            stopping), or the rank `exited` the job in the middle of it; for `eval_start`, `exhausted` if the train
            loader is known to hold no more.
        steps: Optimizer steps applied since the fit began.
        step_hash: Hash of the batches after which they were applied.
        counts: Batches per loader of a closed evaluation, if it read more than one.
        rank: The rank that wrote the sync point.
        time: Seconds since the epoch at which that rank passed it, by its own clock.
        micro: The micro-batches of the steps before it. Evaluations end without: their counts need the space.
        steps_known: Whether the steps can be compared here; see `Evidence.knows_steps`.
        rates: The first eight learning rates in force, in a train epoch; empty elsewhere, and where they are not known.
        at_known: Whether `at` tells how far training has come: not where a pass was stopped whose batches another
            thread takes ahead of the training.
    """

    kind: SyncKind
    span: str
    at: int = 0
    reason: Reason = ""
    steps: int = 0
    step_hash: int = 0
    counts: tuple[int, ...] = ()
    rank: int = 0
    time: float = 0.0
    micro: MicroCounts = NO_MICRO_COUNTS
    rates: tuple[float, ...] = ()
    steps_known: bool = True
    at_known: bool = True

    @property
    def in_words(self) -> str:
        """What the rank that passed this sync point did, as the rest of a sentence that begins with its name."""
        batches = count_of(self.at, "batch")
        if self.reason == "exited":
            where = f" in batch {self.at} of {self.span}" if self.kind != "fit_end" else ""
            return f"left the job (sys.exit){where}"
        if self.kind in ("train_end", "eval_end"):
            listed = f" ({' + '.join(str(count) for count in self.counts)})" if len(self.counts) > 1 else ""
            verb = "ran out of data" if self.reason == "exhausted" else "stopped"
            return f"{verb} after {batches}{listed} of {self.span}"
        if self.kind == "eval_start":
            return f"began {self.span}" + (f" after {count_of(self.at, 'train batch')}" if self.at else "")
        if self.kind == "train_start":
            return f"began {self.span}" + (f" after {batches} of it" if self.at else "")
        return "ended the fit" if self.kind == "fit_end" else "began the fit"

    def to_json(self) -> dict[str, Any]:
        """The sync point as JSON types; `from_json` is its inverse."""
        rare = ("micro", "rates", "steps_known", "at_known")
        values = {name: value for name, value in vars(self).items() if name not in rare}
        told: dict[str, Any] = {"rates": list(self.rates)} if self.rates else {}
        told |= {name: False for name in ("steps_known", "at_known") if not getattr(self, name)}
        return {**values, "counts": list(self.counts), **told, **self.micro.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SyncPoint:
        """Reads a sync point that another rank wrote.

        Raises:
            KeyError, TypeError, ValueError: If the record is not a sync point.
        """
        return cls(
            kind=cast("SyncKind", one_of(record["kind"], get_args(SyncKind))),
            span=str(record["span"]),
            at=parse_count(record["at"]),
            reason=cast("Reason", one_of(record["reason"], get_args(Reason))),
            steps=parse_count(record["steps"]),
            step_hash=parse_count(record["step_hash"]),
            counts=tuple(parse_count(count) for count in record["counts"]),
            rank=parse_count(record["rank"]),
            time=float(record["time"]),
            micro=MicroCounts.from_json(record),
            rates=parse_rates(record),
            steps_known=record.get("steps_known", True) is not False,
            at_known=record.get("at_known", True) is not False,
        )


@dataclass(frozen=True)
class Absence:
    """What is known of a rank that may take part no more.

    Attributes:
        rank: The rank.
        event: What happened to it, as the rest of a sentence that begins with its name.
        why: The cause, where it is known.
        subject: That of the verdict if it is lost; empty where an exception has left its loop.
        begun: Train batches that it had begun in the fit; None if that is not known.
        certain: Whether it cannot come back.
    """

    rank: int
    event: str
    why: str = ""
    subject: str = ""
    begun: int | None = None
    certain: bool = False


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """What the other ranks need to print the same verdict; the table of ranks is gathered afterwards.

    Of a remedy, half a sentence could do harm: it is there as a whole, or not at all.
    """
    ranks = ranks_to_json(verdict.ranks)
    texts = {"sentence": clip(verdict.sentence, 420), "subject": clip(verdict.subject, 40)}
    if verdict.point:
        texts["point"] = clip(verdict.point, 40)
    left = _TEXT_BYTES - sum(len(json.dumps(part)) for part in (*texts.values(), ranks.get("runs", "")))
    texts["why"] = clip(verdict.why, min(400, left))
    left -= len(json.dumps(texts["why"]))
    return {
        "kind": verdict.kind,
        **texts,
        "remedy": verdict.remedy if len(json.dumps(verdict.remedy)) <= left else "",
        **ranks,
        "standing": verdict.standing,
        "gone": verdict.gone,
        "time": verdict.time,
        "sync_index": verdict.sync_index,
        "announced": verdict.announced,
        **({} if verdict.begun is None else {"begun": verdict.begun}),
    }


def verdict_from_json(record: Mapping[str, Any]) -> Verdict:
    """Reads a verdict that another rank wrote; it has no table yet, and a remedy only if it was proved with one.

    Raises:
        KeyError, TypeError, ValueError: If the record is not a verdict.
    """
    return Verdict(
        kind=str(record["kind"]),  # an adapter of the user's own may have kinds of its own
        sentence=str(record["sentence"]),
        ranks=ranks_from_json(record),
        why=str(record["why"]),
        remedy=str(record.get("remedy", "")),  # another version may not write it
        gone=bool(record["gone"]),
        time=float(record["time"]),
        subject=str(record["subject"]),
        point=str(record.get("point", "")),  # another version may not write it
        sync_index=int(record["sync_index"]),
        announced=bool(record["announced"]),
        standing=parse_standing(record.get("standing")),
        begun=None if record.get("begun") is None else parse_count(record["begun"]),  # another version may not write it
    )


def ranks_to_json(ranks: Sequence[int]) -> dict[str, Any]:
    """The ranks that a verdict names as a part of a record: as runs of evenly spaced ones too where they are many."""
    runs = {"runs": _runs_of(ranks)[:_RUNS]} if len(ranks) > _LISTED_RANKS else {}
    return {"ranks": list(ranks[:_LISTED_RANKS]), **runs}


def _runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as runs of evenly spaced ones: the first, the last and the step of each.

    The first rank stays the first one. Parallel layouts make groups of neighbours, and of every n-th rank.

    >>> _runs_of([4, 0, 2, 6, 9])
    [[4, 4, 1], [0, 2, 2], [6, 9, 3]]
    """
    first, *others = ranks
    runs: list[list[int]] = [[first, first, 1]]
    for rank in sorted(others):
        begin, last, step = runs[-1]
        if len(runs) > 1 and rank > last and (begin == last or rank - last == step):
            runs[-1] = [begin, rank, rank - last]
        else:
            runs.append([rank, rank, 1])
    return runs


def ranks_from_json(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads the ranks that another rank's verdict names.

    Raises:
        KeyError, TypeError, ValueError: If the record has none.
    """
    if "runs" not in record:
        return tuple(parse_count(rank) for rank in record["ranks"])
    runs = [
        range(parse_count(first), parse_count(last) + 1, parse_count(step))
        for first, last, step in record["runs"][:_RUNS]
    ]
    parse_count(sum(map(len, runs)), _MOST_RANKS)
    return tuple(rank for run in runs for rank in run)


def parse_standing(value: object) -> Standing:
    """Reads what is proved of a verdict's ranks; another version may not write it, or have other words."""
    return cast("Standing", value) if value in get_args(Standing) else "out of step"


def record_text(record: Mapping[str, Any]) -> str:
    """A record as text, as it is in the store."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True)


def sync_entry(index: int, sync_point: SyncPoint) -> dict[str, Any]:
    """The log's entry for a sync point that this rank is the first to pass."""
    return {"type": "sync_point", "index": index, "sync_point": sync_point.to_json()}


def announcement_entry(opened: int, closing: SyncPoint) -> dict[str, Any]:
    """The log's entry that announces at which count this rank will close the span opened by sync point `opened`."""
    return {"type": "announcement", "opened": opened, "sync_point": closing.to_json()}


def verdict_entry(kind: Literal["end", "notice"], verdict: Verdict) -> dict[str, Any]:
    """The log's entry for a verdict that ends the fit, or for a warning, which ends nothing."""
    return {"type": kind, "verdict": verdict_to_json(verdict)}


def goodbye_entry(rank: int) -> dict[str, Any]:
    """The log's entry of a rank that closes its guard before the fit has ended."""
    return {"type": "goodbye", "rank": rank}


def absence_entry(absence: Absence) -> dict[str, Any]:
    """The log's entry about a rank that may take part no more."""
    return {"type": "absence", **asdict(absence), "event": clip(absence.event, 420), "why": clip(absence.why, 240)}


def absence_from_entry(entry: Mapping[str, Any], ranks: Sequence[int]) -> Absence:
    """Reads what the log says about a rank that may take part no more.

    Raises:
        KeyError, TypeError, ValueError: If it is not that.
    """
    return Absence(
        rank=parse_rank(entry["rank"], ranks),
        event=clip(str(entry["event"]), 420),
        why=clip(str(entry["why"]), 240),
        subject=clip(str(entry["subject"]), 40),
        begun=None if entry["begun"] is None else parse_count(entry["begun"]),
        certain=bool(entry["certain"]),
    )


def return_entry(rank: int) -> dict[str, Any]:
    """The log's entry of a rank that has caught its exception, and whose loop goes on."""
    return {"type": "return", "rank": rank}


def parse_count(value: object, below: int = 1 << 53) -> int:
    """Reads a count out of a record.

    Raises:
        ValueError: If it is no integer from 0 up to, but not including, `below`.
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"expected a whole number below {below}, got {value!r}")
    return value


def parse_rank(value: object, ranks: Sequence[int]) -> int:
    """Reads a rank out of a record.

    Args:
        value: What stands there.
        ranks: The ranks that a guard compares.

    Raises:
        ValueError: If it is none of them.
    """
    if type(value) is not int or value not in ranks:
        raise ValueError(f"expected one of {len(ranks)} ranks, got {value!r}")
    return value


def one_of(value: object, known: tuple[str, ...]) -> str:
    """Reads a word out of a record.

    Raises:
        ValueError: If it is none of the known ones.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"expected one of {known}, got {value!r}")
    return value
