"""Verdicts: what countoff found, the exceptions that carry it, and the text that every rank prints.

A verdict is a plain value, and stands below all that finds one. Its kind is made in the file of the check for it.
The exceptions are named after what was found. All of them are `DivergenceError`, so one `except` catches any.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal

from countoff.core.messages import count_of, names_of, plain

Standing = Literal["out of step", "ran out first", "differ"]
"""What is proved of the ranks that a verdict names: they are the minority; the first of them ran out of data before the
others; or two sides differ, and nobody can tell which is right."""

Restart = Literal["useless", "may_help", "unknown"]
"""Whether a job that a verdict has ended may end otherwise if it is started again as it is. Of a kind or a cause,
``may_help`` means that it may where a process or a host is gone."""

Level = Literal["raise", "warn", "off"]
"""What becomes of findings of one kind: an error on every rank, one warning on rank 0, or nothing."""

Remedies = Mapping[str, "str | Mapping[str, str]"]
"""What to do about each kind of verdict. Where that depends on the verdict's subject, it is a mapping from subjects to
remedies, in which the empty subject stands for all others."""

GOES_ON = "This is a warning: the job is not ended."
"""What the second line of a warning says."""
TABLE_ROWS = 16
_COLUMNS = ("rank", "host", "where", "batches", "fetched", "steps", "rate", "state")
_NAMED = re.compile(
    r"(?<!\w)rank(?:s (?P<many>\d+(?:–\d+)?(?:(?:, | and )\d+(?:–\d+)?)*)| (?P<one>\d+))(?!\w|(?:, \d+(?:–\d+)?)*, …)"
)
"""Ranks in a sentence, as `names_of` writes them, or two with an `and`; not those of a `dp_rank`, nor a folded list."""


@dataclass(frozen=True)
class Cause:
    """One way in which a kind of verdict comes about; its name is the verdict's subject.

    Attributes:
        why: The cause in a sentence or two; empty where each verdict has its own.
        remedy: What to do about it in any framework, a line for each alternative, the likeliest first; empty where only
            an adapter can say it.
        restart: As that of the kind; None: as that.
    """

    why: str = ""
    remedy: str = ""
    restart: Restart | None = None


@dataclass(frozen=True)
class VerdictKind:
    """One kind of verdict: all that is the same in each verdict of it.

    Attributes:
        name: Its name.
        meaning: What was found, in one clause.
        default: What countoff does about it with default settings, in words.
        level: The same as a level.
        ends: Whether it can end a job, if the user wants that.
        causes: By the verdict's subject; the empty one stands for all that are not listed.
        restart: Whether the job may end otherwise if it is started again.
        label: What the line about the ranks begins with; empty: with the verdict's `standing`.
        accuses: Whether that line is there at all.
    """

    name: str
    meaning: str
    default: str = "warns"
    level: Level = "warn"
    ends: bool = True
    causes: Mapping[str, Cause] = field(default_factory=dict[str, Cause])
    restart: Restart = "unknown"
    label: str = ""
    accuses: bool = True

    @property
    def accepts(self) -> tuple[Level, ...]:
        """The levels that can be chosen."""
        return ("raise", "warn", "off") if self.ends else ("warn", "off")

    def found(
        self, sentence: str, ranks: Iterable[int] = (), *, subject: str = "", why: str | None = None, **more: Any
    ) -> Verdict:
        """Returns a verdict of this kind, found now.

        Args:
            sentence: What happened, with ranks, span and both counts.
            ranks: The ranks that the proof names, the one out of step first.
            subject: What the verdict is about.
            why: The cause; None: that of the subject.
            more: Further attributes of the verdict.
        """
        known: dict[str, Any] = {"time": time.time(), **more}
        why = self.cause_of(subject).why if why is None else why
        return Verdict(self.name, sentence, tuple(ranks), why=why, subject=subject, **known)

    def cause_of(self, subject: str) -> Cause:
        """Returns the cause of a subject."""
        return self.causes.get(subject) or self.causes.get("") or Cause()


KINDS: dict[str, VerdictKind] = {}
"""All kinds by name, the most severe first. Each is made in the file of its check; `countoff.core.checks` has all."""


def kind_of(name: str) -> VerdictKind | None:
    """Returns the kind of a name; None for a kind of an adapter of the user's own."""
    if not KINDS:  # the checks stand above this: a program that only unpickles an error has imported none of them
        importlib.import_module("countoff.core.checks")
    return KINDS.get(name)


@dataclass(frozen=True)
class Verdict:
    """One finding about the ranks of a job.

    Attributes:
        kind: What was found; a key of `KINDS`, or a kind of an adapter of the user's own.
        sentence: What happened, with ranks, span and both counts.
        ranks: The ranks that the proof names, the one out of step first.
        standing: What is proved of these ranks.
        why: The cause, where it is known.
        remedy: What to do about it; see `alternatives`. A verdict that was proved with one keeps it; any other gets the
            adapter's.
        rows: What each rank had counted when it received the verdict, the ranks out of step first.
        gone: Whether those ranks can no longer answer. Nothing waits for them.
        time: When the proof came to exist, in seconds since the epoch by the clock of the rank that found it.
        spread_seconds: Seconds from then until the last rank knew; None if not every rank reported that.
        counted: Ranks that answered, where they are more than the rows shown.
        world_size: Ranks that are compared; 0 if that is not known.
        part: Which ranks these are, if they are a part of the job.
        behind: Ranks that have not got as far as the point in dispute, where they might decide it.
        hosts: Names of the hosts of these ranks, by rank, where the job has more than one host; see `at_hosts`.
        sync_index: Index, among the log's sync points, of the one in dispute, or of that which opened the span whose
            end was announced; -1 if no sync point is in dispute.
        announced: Whether that end was only announced.
        subject: What the verdict is about, where one kind can concern several things. A warning is printed once for
            each kind and subject.
        point: The name of the point at which learning rates were compared; empty for anything else.
        harmful: Whether training on would do harm, where that is not as with the kind: a difference may be legitimate.
        again: Where the attempt before has ended in the same way, in words; empty if it has not, or is not known.
        begun: Train batches that a rank had begun when it raised an exception, where that is what the verdict says.
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
    sync_index: int = -1
    announced: bool = False
    standing: Standing = "out of step"
    world_size: int = field(default=0, compare=False)
    part: tuple[int, ...] = field(default=(), compare=False)
    behind: tuple[int, ...] = field(default=(), compare=False)
    point: str = field(default="", compare=False)
    hosts: Mapping[int, str] = field(default_factory=dict[int, str], compare=False)
    harmful: bool | None = field(default=None, compare=False)
    again: str = field(default="", compare=False)
    begun: int | None = field(default=None, compare=False)

    @property
    def headline(self) -> str:
        """The kind and what happened, in one line."""
        return plain(f"{self.kind}: {self.sentence}")

    @property
    def restart(self) -> Restart:
        """Whether the job may end otherwise if it is started again with the same program, configuration and data.

        ``"useless"``: no, it follows from these, or it has come again at the same batch. ``"may_help"``: a process, or
        a host with its processes, is gone. ``"unknown"``: anything else, as an exception or an exit of one rank, which
        may come again, or a stall: a file system may answer the next time, and a rank that has left its loop leaves it
        again.

        >>> Verdict("UnevenBatches", "rank 1 ran out of data.").restart
        'useless'
        """
        if self.again:
            return "useless"
        kind = kind_of(self.kind)
        restart = "unknown" if kind is None else kind.cause_of(self.subject).restart or kind.restart
        return "unknown" if restart == "may_help" and not self.gone else restart

    @property
    def named(self) -> tuple[int, ...]:
        """Those of `ranks` that the message says are out of step.

        Where one ran out of data first, the others have only shown it. A stall accuses nobody.

        >>> Verdict("UnevenBatches", "rank 3 ran out of data.", (3, 1), standing="ran out first").named
        (3,)
        """
        kind = kind_of(self.kind)
        if kind is not None and not kind.accuses:
            return ()
        return self.ranks[:1] if self._label == "ran out first" else self.ranks

    @property
    def _label(self) -> str:
        """What the line about the ranks begins with."""
        kind = kind_of(self.kind)
        return (kind.label if kind is not None else "") or self.standing

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
            **({"again": plain(self.again)} if self.again else {}),
            "why": plain(self.why),
            "remedy": "\n".join(self.alternatives),
            "time": self.time,
            "time_utc": _in_utc(self.time),
        }

    @property
    def alternatives(self) -> list[str]:
        r"""The lines of the remedy: each can be done instead of the others, and the first one helps most often.

        A newline parts them, and nothing else does: any other character that ends a line is escaped.

        >>> Verdict("LostRank", "rank 2 is gone.", remedy="free memory.\nuse a larger host.").alternatives
        ['free memory.', 'use a larger host.']
        """
        return [plain(each) for each in self.remedy.split("\n") if each.strip()]

    @property
    def reasons(self) -> list[str]:
        """Whether it has happened before, the cause and what to do, as far as they are known: a line for each."""
        again = f"again: the same happened in the attempt before ({self.again}): a restart has not helped."
        told = {again: self.again, f"why: {self.why}": self.why}
        remedies = [f"{'or' if number else 'do'}:  {each}" for number, each in enumerate(self.alternatives)]
        return [*(line for line, known in told.items() if known), *remedies]

    def render(self, *, goes_on: bool = False) -> str:
        """The whole message: headline, who, table of ranks, cause, what to do, and where to read more.

        Args:
            goes_on: Whether this is a warning: then a line below the headline says so.

        >>> print(Verdict("LostRank", "rank 2 is gone.", why="It was killed.").render())
        countoff: LostRank: rank 2 is gone.
          why: It was killed.
          more: countoff explain LostRank
        """
        lines = [f"countoff: {self.headline}"]
        is_explained = bool(self.why or self.remedy)  # a reminder stays one line
        if goes_on and is_explained:
            lines.append(f"  {GOES_ON}")
        if self._names_ranks():
            lines.append(f"  {self._named()}")
        if any(line.get("batches") for line in self.rows):
            lines += table(self.rows, self.counted, hosts=bool(self.hosts))
        lines += [f"  {line}" for line in self.reasons]
        if is_explained and kind_of(self.kind) is not None:
            lines.append(f"  more: countoff explain {self.kind}")
        return "\n".join(plain(line) for line in lines)

    def _names_ranks(self) -> bool:
        """Whether a line says who: not where that is everybody, and not in a stall, which accuses nobody."""
        kind = kind_of(self.kind)
        if not (self.rows and self.ranks) or (kind is not None and not kind.accuses):
            return False
        told_apart = self.standing != "out of step" or len(self.ranks) != self.world_size
        return told_apart or (kind is not None and bool(kind.label))

    def _named(self) -> str:
        """Which ranks are out of step, of how many; or what is known of them, if that is not proved."""
        counted = max(self.counted, len(self.rows))
        silent = len(self.ranks) if self.gone else 0  # no row is due from those
        ranks = self.world_size or counted + silent
        label, named = self._label, self.named
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


def remedy_for(verdict: Verdict, remedies: Remedies) -> str:
    """Returns the verdict's own remedy, or else the adapter's, or else the general one.

    A remedy for the verdict's subject comes before one for the whole kind, whoever has it.

    Args:
        verdict: The verdict.
        remedies: The adapter's remedies.

    >>> remedy_for(Verdict("StepMismatch", "they differ."), {"StepMismatch": "step together."})
    'step together.'
    """
    if verdict.remedy:
        return verdict.remedy
    own, kind = remedies.get(verdict.kind, ""), kind_of(verdict.kind)
    by_subject = {"": own} if isinstance(own, str) else own
    causes = {} if kind is None else {subject: cause.remedy for subject, cause in kind.causes.items()}
    known = [each.get(subject, "") for subject in (verdict.subject, "") for each in (by_subject, causes)]
    return next(filter(None, known), "")
