"""Verdicts: what countoff found, the exceptions that carry it, and the text that every rank prints.

A verdict is a plain value. It imports nothing else of countoff, so that arithmetic and protocol can both return one.
The exceptions are named after what was found. All of them are `DivergenceError`, so one `except` catches any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "PlanMismatch",
    "UnevenBatches",
    "StepMismatch",
    "LearningRateMismatch",
    "RankMapError",
    "LostRank",
    "Stalled",
    "WrongLength",
    "Truncated",
    "Repeated",
    "DuplicateData",
    "DoubleSharded",
    "StreamsDiffer",
    "PeersDiffer",
    "SameOrder",
    "ResumeMismatch",
    "WeightsDiffer",
    "UnseenLoader",
    "WrongHorizon",
    "WrongTotal",
    "NotDistributed",
    "VersionMismatch",
    "SettingsMismatch",
    "LateRank",
]
"""The name of what was found. `VERDICTS` says what each one means."""

Standing = Literal["out of step", "ran out first", "differ"]
"""What is proved of the ranks that a verdict names: they are the minority; the first of them ran out of data before the
others; or two sides differ, and nobody can tell which is right."""

Restart = Literal["useless", "may_help", "unknown"]
"""Whether a job that a verdict has ended may end otherwise if it is started again as it is."""

DECISION, WHO_EVALUATES = "decision", "who evaluates"
"""Subjects of an `UnevenBatches` for which one rank's loop decided: it has left the loop, or evaluates alone."""
EXITED, LEFT = "exited", "left"
"""Subjects of a `LostRank` whose process was not lost: it has left by `sys.exit()`, or by the end of its program."""
ENDED = "ended"
"""The subject of a `Stalled` that ends the job; a warning has none."""

Remedies = Mapping[Kind, "str | Mapping[str, str]"]
"""What to do about each kind of verdict. Where that depends on the verdict's subject, it is a mapping from subjects to
remedies, in which the empty subject stands for all others."""

_REPEATS: frozenset[Kind] = frozenset(
    {"PlanMismatch", "UnevenBatches", "StepMismatch", "LearningRateMismatch", "RankMapError"}
)
"""Kinds that follow from the program, its configuration and its data."""

TABLE_ROWS = 16
_COLUMNS = ("rank", "host", "where", "batches", "fetched", "steps", "rate", "state")
_NAMED = re.compile(
    r"(?<!\w)rank(?:s (?P<many>\d+(?:–\d+)?(?:(?:, | and )\d+(?:–\d+)?)*)| (?P<one>\d+))(?!\w|(?:, \d+(?:–\d+)?)*, …)"
)
"""Ranks in a sentence, as `names_of` writes them, or two with an `and`; not those of a `dp_rank`, nor a folded list."""


class VerdictInfo(NamedTuple):
    """One row of the table of verdicts in the documentation.

    Attributes:
        meaning: What was found, in one clause.
        default: What countoff does about it with default settings.
    """

    meaning: str
    default: str


VERDICTS: dict[Kind, VerdictInfo] = {
    "PlanMismatch": VerdictInfo(
        "ranks start with different lengths, batch sizes, accumulation, limits or positions",
        "raises, before the first batch",
    ),
    "UnevenBatches": VerdictInfo(
        "ranks have different numbers of batches, or evaluate at different points",
        "raises; uneven evaluations warn",
    ),
    "StepMismatch": VerdictInfo(
        "ranks took different numbers of optimizer steps, after different batches, or with different numbers of "
        "micro-batches",
        "raises; different micro-batches warn",
    ),
    "LearningRateMismatch": VerdictInfo("ranks train with different learning rates", "raises"),
    "RankMapError": VerdictInfo(
        "the ranks' dp_ranks leave some data unread, or let several ranks read the same share",
        "raises, before the first batch",
    ),
    "LostRank": VerdictInfo(
        "a rank raised an exception, exited early, was killed or stopped, or its host no longer answers",
        "raises",
    ),
    "Stalled": VerdictInfo(
        "no rank has made progress for three minutes; the report shows where each rank is, in your own lines of code",
        "warns",
    ),
    "WrongLength": VerdictInfo(
        "`len(loader)` is not the number of batches of one rank, for example because it counts those of all ranks",
        "warns, and logs the true totals",
    ),
    "Truncated": VerdictInfo(
        'an epoch ended on every rank because one rank ran out of data, in Composer or with `uneven_train="stop"`; the '
        "report shows what the others had left",
        "warns",
    ),
    "Repeated": VerdictInfo(
        'with `uneven_train="repeat"`, a short rank repeated batches until the longest rank ran out of data',
        "warns",
    ),
    "DuplicateData": VerdictInfo("ranks that must read different data read the same data", "warns"),
    "DoubleSharded": VerdictInfo(
        "data that is already one rank's share is sharded again, so most of it is never read",
        "warns",
    ),
    "StreamsDiffer": VerdictInfo(
        "the framework deals one stream out to the ranks, but the ranks' streams are not the same: ranks read some "
        "samples several times, and others never",
        "warns",
    ),
    "PeersDiffer": VerdictInfo(
        "ranks that share a dp_rank, and so must read the same data, read different data",
        "warns",
    ),
    "SameOrder": VerdictInfo(
        "the sampler shuffles, but two epochs had the same order: `set_epoch` was not called",
        "warns",
    ),
    "ResumeMismatch": VerdictInfo(
        "a run that resumes from a checkpoint repeats or skips data, or its learning rate jumps",
        "warns",
    ),
    "WeightsDiffer": VerdictInfo(
        "ranks that must hold the same weights hold different ones; checked with `weights_every`",
        "warns",
    ),
    "UnseenLoader": VerdictInfo(
        "for 64 optimizer steps, no batch has come from the attached loader: the loop iterates another one",
        "warns",
    ),
    "WrongHorizon": VerdictInfo(
        "a learning-rate schedule ends before or after the run; the report shows at which step",
        "warns",
    ),
    "WrongTotal": VerdictInfo(
        "the Trainer's total batch size counts each batch once per process (`split_batches`)",
        "warns",
    ),
    "NotDistributed": VerdictInfo(
        "several processes were launched, but Accelerate treats each as the only one",
        "warns",
    ),
    "VersionMismatch": VerdictInfo("ranks run different versions of Python, torch, countoff or the framework", "warns"),
    "SettingsMismatch": VerdictInfo("ranks have different `tick_batches`", "warns"),
    "LateRank": VerdictInfo(
        "countoff is off on some rank, or has not started there yet",
        'warns; raises with `uneven_train` or `uneven_eval="stop"`',
    ),
}
"""All verdicts, the most severe first. README and docs list them from here, and a test compares the two."""


@dataclass(frozen=True)
class Verdict:
    """One finding about the ranks of a job.

    Attributes:
        kind: What was found; a key of `VERDICTS`.
        sentence: What happened, with ranks, span and both counts.
        ranks: The ranks that the proof names, the one out of step first.
        standing: What is proved of these ranks.
        why: The cause, where it is known.
        remedy: What to do about it. A verdict that was proved with one keeps it; any other gets the adapter's.
        rows: What each rank had counted when it received the verdict, the ranks out of step first.
        gone: Whether those ranks can no longer answer. Nothing waits for them.
        time: When the proof came to exist, in seconds since the epoch by the clock of the rank that found it.
        spread_seconds: Seconds from then until the last rank knew; None if not every rank reported that.
        counted: Ranks that answered, where they are more than the rows shown.
        world_size: Ranks that are compared; 0 if that is not known.
        part: Which ranks these are, if they are a part of the job.
        behind: Ranks that have not got as far as the point in dispute, where they might decide it.
        hosts: Names of the hosts of these ranks, by rank, where the job has more than one host; see `at_hosts`.
        mark_index: Index in the log's order of marks of the mark in dispute, or of the mark that opened the span whose
            end was announced; -1 if no mark is in dispute.
        announced: Whether that end was only announced.
        subject: What the verdict is about, where one kind can concern several things. A warning is printed once for
            each kind and subject.
        point: The name of the point at which learning rates were compared; empty for anything else.
        guess: Why this is a guess and no proof, as a clause; empty where it is proved. See `countoff.core.levels`.
    """

    kind: Kind
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
    standing: Standing = "out of step"
    world_size: int = field(default=0, compare=False)
    part: tuple[int, ...] = field(default=(), compare=False)
    behind: tuple[int, ...] = field(default=(), compare=False)
    point: str = field(default="", compare=False)
    hosts: Mapping[int, str] = field(default_factory=dict[int, str], compare=False)
    guess: str = field(default="", compare=False)

    @property
    def headline(self) -> str:
        """The kind and what happened, in one line."""
        return plain(f"{self.kind}: {self.sentence}")

    @property
    def restart(self) -> Restart:
        """Whether the job may end otherwise if it is started again with the same program, configuration and data.

        ``"useless"``: no, it follows from these. ``"may_help"``: a process, or a host with its processes, is gone.
        ``"unknown"``: anything else, as an exception or an exit of one rank, which may come again, or a stall: a file
        system may answer the next time, and a rank that has left its loop leaves it again.

        >>> Verdict("UnevenBatches", "rank 1 ran out of data.").restart
        'useless'
        """
        if self.kind in _REPEATS and self.subject not in (DECISION, WHO_EVALUATES):  # a clock may have decided these
            return "useless"
        lost = self.kind == "LostRank" and self.gone and self.subject not in (EXITED, LEFT)
        return "may_help" if lost else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON types, with the keys that docs/schedulers.md describes."""
        hosts = {str(rank): plain(name) for rank, name in self.hosts.items()}
        names = {host.partition(" (")[0] for host in hosts.values()}  # schedulers do not know the address behind one
        return {
            "kind": self.kind,
            "sentence": plain(self.sentence),
            "restart": self.restart,
            "ranks": list(self.ranks),
            "standing": self.standing,
            "world_size": self.world_size,
            **({"part": list(self.part)} if self.part else {}),
            "hosts": hosts,
            "leave_out": sorted(names) if self.restart == "may_help" else [],
            "rows": [
                {"ranks": 1, **{column: row[column] for column in (*_COLUMNS, "ranks") if column in row}}
                for row in self.rows
            ],
            "why": plain(self.why),
            "remedy": plain(self.remedy),
            "time": self.time,
            "time_utc": _in_utc(self.time),
        }

    def render(self) -> str:
        """The whole message: headline, who, table of ranks, cause, remedy, and where to read more.

        >>> print(Verdict("LostRank", "rank 2 is gone.", why="It was killed.").render())
        countoff: LostRank: rank 2 is gone.
          why: It was killed.
          more: countoff explain LostRank
        """
        lines = [f"countoff: {self.headline}"]
        if self._names_ranks():
            lines.append(f"  {self._named()}")
        if any(line.get("batches") for line in self.rows):
            lines += table(self.rows, self.counted, hosts=bool(self.hosts))
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.remedy:
            lines.append(f"  do:  {self.remedy}")
        if (self.why or self.remedy) and self.kind in VERDICTS:  # a reminder stays one line
            lines.append(f"  more: countoff explain {self.kind}")
        return "\n".join(plain(line) for line in lines)

    def _names_ranks(self) -> bool:
        """Whether a line says who: not where that is everybody, and not in a stall, which accuses nobody."""
        if not (self.rows and self.ranks) or self.kind == "Stalled":
            return False
        return self.standing != "out of step" or self.kind == "LostRank" or len(self.ranks) != self.world_size

    def _named(self) -> str:
        """Which ranks are out of step, of how many; or what is known of them, if that is not proved."""
        counted = max(self.counted, len(self.rows))
        silent = len(self.ranks) if self.gone else 0  # no row is due from those
        ranks = self.world_size or counted + silent
        label = {"LostRank": "lost", "LateRank": "missing"}.get(self.kind, self.standing)
        named = self.ranks[:1] if label == "ran out first" else self.ranks
        if label == "differ":  # no side comes first
            named = sorted(named)
        hosts = {self.hosts.get(rank) for rank in named} - {None}
        place = f", on {hosts.pop()}" if len(hosts) == 1 else ""  # of several, the sentence and the table tell
        every = names_of(self.part) if self.part else count_of(ranks, "rank")
        clauses = [f"{label}: {names_of(named)} of {every}{place}"]
        if self.behind:
            clauses.append(f"{names_of(self.behind)} {'has' if len(self.behind) == 1 else 'have'} not got so far")
        if counted + silent < ranks:
            clauses.append(f"{counted} of {count_of(ranks, 'rank')} reported")
        return "; ".join(clauses)


class DivergenceError(RuntimeError):
    """Ranks are out of step. Raised on every rank whose training thread runs Python code when that becomes known.

    Attributes:
        verdict: What was found.
    """

    def __init__(self, verdict: Verdict) -> None:
        # Two arguments: in an error with one, Accelerate looks for a lack of memory, and would try again.
        super().__init__(plain(verdict.sentence), verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        return plain(self.verdict.sentence)

    def __reduce__(self) -> tuple[type[DivergenceError], tuple[Verdict]]:
        return type(self), (self.verdict,)


class PlanMismatch(DivergenceError):
    """Ranks begin with different lengths, batch sizes, accumulation or positions."""


class UnevenBatches(DivergenceError):
    """Ranks have different numbers of batches, or evaluate at different places."""


class StepMismatch(DivergenceError):
    """Ranks read the same number of batches but applied optimizer steps after different ones."""


class LearningRateMismatch(DivergenceError):
    """Ranks train with different learning rates."""


class RankMapError(DivergenceError):
    """The ranks' dp_ranks leave data unread, or make ranks read each other's data."""


class LostRank(DivergenceError):
    """A rank failed, was killed, was stopped, or its host no longer answers."""


class Stalled(DivergenceError):
    """No rank has made progress for `stall_seconds`. Raised only with the level `raise` for this kind."""


_ERRORS: dict[str, type[DivergenceError]] = {
    leaf.__name__: leaf
    for leaf in (PlanMismatch, UnevenBatches, StepMismatch, LearningRateMismatch, RankMapError, LostRank, Stalled)
}


def error_for(verdict: Verdict) -> DivergenceError:
    """Returns the exception for a verdict.

    >>> type(error_for(Verdict("LostRank", "rank 2 is gone."))).__name__
    'LostRank'
    """
    return _ERRORS.get(verdict.kind, DivergenceError)(verdict)


def plain(text: str) -> str:
    r"""Escapes what could move a terminal's cursor or forge a line. Anybody can write to the store.

    >>> plain("rank 1 raised \x1b[31mValueError")
    'rank 1 raised \\x1b[31mValueError'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _in_utc(seconds: float) -> str:
    """A time since the epoch in UTC, as ISO 8601 writes it; empty if that is no year of a calendar.

    >>> _in_utc(0.5)
    '1970-01-01T00:00:00.500Z'
    """
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, ValueError, OSError):  # the store's word: another rank's clock, or not even that
        return ""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def count_of(number: int, noun: str) -> str:
    """A number and its noun: ``1 batch``, ``4 batches``, ``1 step``.

    >>> count_of(4, "batch"), count_of(1, "step")
    ('4 batches', '1 step')
    """
    plural = noun + ("es" if noun.endswith("batch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def number_of(value: float, digits: int = 3) -> str:
    """A number as a person writes it: few digits, and an exponent without zeros.

    Args:
        value: The number.
        digits: Significant digits, at least 1.

    >>> number_of(0.00031711500169576796), number_of(0.1), number_of(0.03251, digits=4)
    ('3.17e-4', '0.1', '0.03251')
    """
    if value != value or abs(value) == float("inf") or value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ranks as runs of consecutive ones, each from its first to its last, in the order of the list.

    >>> runs_of([8, 9, 10, 2, 5, 6])
    [(8, 10), (2, 2), (5, 6)]
    """
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def names_of(ranks: Sequence[int]) -> str:
    """Ranks as a person lists them: three or more in a row as a range, and the rest folded past eight.

    >>> names_of([1]), names_of([0, 2, 3]), names_of([0, *range(8, 16)])
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 8–15')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """The ranks of `names_of` without the word.

    >>> listed([0, 1, 4, 5, 6])
    '0, 1, 4–6'
    """
    items: list[str] = []
    for first, last in runs_of(ranks):
        items += [f"{first}–{last}"] if last - first > 1 else map(str, range(first, last + 1))
    folded = f", … ({len(ranks)} in all)" if len(items) > 8 else ""
    return ", ".join(items[:8]) + folded


def at_hosts(verdict: Verdict, hosts: Mapping[int, str]) -> Verdict:
    """Returns the verdict with the names of hosts: in its sentence, behind the first mention of each rank.

    A host that the sentence names already is not named again, so a second call changes nothing.

    Args:
        verdict: The verdict.
        hosts: Names of hosts, by rank; empty where the job has one host. Only those of the named ranks count.

    >>> at_hosts(Verdict("LostRank", "rank 3 is gone; rank 3 had 4 batches.", (3,)), {3: "node-1"}).sentence
    'rank 3 on node-1 is gone; rank 3 had 4 batches.'
    """
    hosts = {rank: hosts[rank] for rank in verdict.ranks if rank in hosts}
    sentence, named = verdict.sentence, set[int]()
    told = {host for host in hosts.values() if re.search(rf"\b(?:on|host) {re.escape(host)}(?!\w)", sentence)}

    def place(match: re.Match[str]) -> str:
        groups: dict[str, list[int]] = {}
        for rank in _ranks_in(match["one"] or match["many"]):
            if rank not in hosts or rank in named or hosts[rank] in told:
                return match[0]
            groups.setdefault(hosts[rank], []).append(rank)
        named.update(*groups.values())
        if len(groups) == 1:
            return f"{match[0]} on {min(groups)}"
        return " and ".join(f"{names_of(there)} on {host}" for host, there in groups.items())

    return replace(verdict, sentence=_NAMED.sub(place, sentence), hosts={**verdict.hosts, **hosts})


def _ranks_in(text: str) -> Iterator[int]:
    """The ranks of a list in a sentence; a hostile one may have no end that is worth reaching."""
    for item in re.split(", | and ", text):
        first, _, last = item.partition("–")
        yield from range(int(first), int(last or first) + 1)


def table(rows: Sequence[Mapping[str, Any]], counted: int = 0, *, hosts: bool = False) -> list[str]:
    """Returns the table of ranks as aligned lines, folded past `TABLE_ROWS` rows.

    Args:
        rows: One mapping from column to cell per rank, or per class of ranks that have counted the same.
        counted: Ranks in all, if that is more than `rows` has.
        hosts: Whether to show each rank's host.
    """
    if not rows:
        return []
    shown = {"host": hosts, "rate": any("rate" in line for line in rows)}
    columns = [column for column in _COLUMNS if shown.get(column, True)]
    cells = [columns, *([str(line.get(column, "")) for column in columns] for line in rows[:TABLE_ROWS])]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    folded = max(counted, len(rows)) - sum(line.get("ranks", 1) for line in rows[:TABLE_ROWS])
    if folded > 0:
        lines.append(f"  … and {count_of(folded, 'rank')} more")
    return [line.rstrip() for line in lines]
