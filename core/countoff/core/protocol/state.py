"""What one rank knows of its own fit, shared by the training thread and the three threads that watch.

The training thread reads one attribute per batch, `alarm`: the number of started batches at which it has to look up.
Everything else is touched at marks only, under one lock that is never held across I/O.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.log import Divergence, LogView, Mark, parse_count
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict, judge, remedy_for, row

NEVER = sys.maxsize


@dataclass
class State:
    """The shared state of one guard.

    Attributes:
        rank: This rank.
        world_size: Ranks in the job.
        settings: The user's choices.
        remedies: What to do about each kind of verdict, in the adapter's words.
        send: Hands an entry for the log to the speaker.
        say: Prints a warning, off the training thread.
        spans: Open spans, outermost first.
        steps: Optimizer steps applied since the fit began.
        chain: Hash of the batches after which they were applied.
        alarm: Batches started in the innermost span at which the training thread must look up.
        end: The verdict that ended the guard.
        ended: Set once `end` is known here.
        said: Set once the verdict has been printed here, with its table.
        answered: Set once the training thread has met the verdict (or has failed by itself).
        present: The ranks that have counted off; the others owe nothing. Known on rank 0.
        failure: What this rank's own exception was, if it has failed by itself.
        finished: Whether the fit's end has been passed here or read in the log: the store may go from then on.
        notices: Warnings that did not end anything, of all ranks.
        pid: The process that this rank is; one forked off it has nothing to say.
    """

    rank: int
    world_size: int
    settings: Settings
    remedies: Mapping[str, str]
    send: Callable[[dict[str, Any]], None]
    say: Callable[[Verdict], None]
    ledger: LogView = field(default_factory=LogView)
    lock: Any = field(default_factory=threading.RLock)
    spans: list[SpanCounters] = field(default_factory=list[SpanCounters])
    steps: int = 0
    chain: int = 0
    last_step: tuple[int, int] = (-1, -1)
    alarm: int = NEVER
    end: Verdict | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    said: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    present: list[int] = field(default_factory=list[int])
    failure: str = ""
    finished: bool = False
    proposed: Verdict | None = None
    printed: bool = False
    known_at: float = 0.0
    notices: list[Verdict] = field(default_factory=list[Verdict])
    pid: int = field(default_factory=os.getpid)
    _noted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _last_row: dict[str, Any] = field(default_factory=dict[str, Any])

    def receive(self, index: int, entry: Mapping[str, Any]) -> None:
        """Takes entry `index` of the log, from whichever thread met it first; a known one changes nothing.

        Raises:
            KeyError, TypeError, ValueError: If it is not an entry that countoff writes.
        """
        with self.lock:
            if index != self.ledger.read or self.end is not None:
                return
            self.ledger.read += 1
            kind, mark = entry["type"], None
            if kind in ("mark", "announcement"):
                mark = Mark.from_json(entry["mark"])
                parse_count(mark.rank, self.world_size)
            verdict = Verdict.from_json(entry["verdict"], self.remedies) if kind in ("end", "notice") else None
            # Before anything is compared: a batch begun in that moment is either compared here or sees the alarm.
            armed, self.alarm = self.alarm, 0
            if kind == "end" and verdict is not None:
                self.adopt(verdict)
            elif kind == "notice" and verdict is not None:
                self._hear(verdict)
            elif kind == "mark" and mark is not None:
                self.finished |= mark.kind == "fit_end"
                self._consider(self.ledger.receive_mark(parse_count(entry["number"]), mark, self.spans))
            elif kind == "announcement" and mark is not None:
                self._consider(self.ledger.receive_announcement(parse_count(entry["opened"]), mark, self.spans))
            elif kind == "goodbye":
                self.finished |= entry["rank"] == 0  # it may host the store
            if not (self.ledger.is_behind(self.spans) or self.proposed or self.end):
                self.alarm = armed

    def reach(self, mark: Mark, opens: SpanCounters | None = None) -> int:
        """Passes this rank's next mark, with the span that it opens or closes, in one step for all threads.

        What is wrong with it is proposed as the end, or noted.
        """
        with self.lock:
            number, divergence = self.ledger.reach(mark)
            self._consider(divergence)
            if mark.kind in ("train_end", "eval_end"):
                self.close_span({"exhausted": "ran out", "exited": "exited"}.get(mark.reason, "stopped"))
            elif opens is not None:
                opens.opened = number
                self.spans.append(opens)
            return number

    def need_not_tell(self, number: int) -> bool:
        """Whether a mark of this rank's need not go into the log: another stands there, or this rank has found a proof.

        What it passes beyond its own proof is a consequence, which must not be told first.
        """
        return self.proposed is not None or self.ledger.stands(number)

    def close_span(self, word: str) -> None:
        """Closes the innermost span, and keeps its counts for the table of a verdict that comes after it."""
        tally = self.spans.pop()
        self._last_row = row(self.rank, tally, self.steps, word)

    def look(self, last: bool = False) -> None:
        """Applies the rule to this rank's counters as they are; `last`: its loader is known to hold no more."""
        with self.lock:
            if last and self.spans:
                self.spans[-1].ends = True
            self._consider(self.ledger.prove(self.spans))

    def _consider(self, divergence: Divergence | None) -> None:
        if divergence is None or self.end is not None:
            return
        verdict = judge(divergence, self.rank)
        policy = self.settings.uneven_eval
        if not divergence.evaluation or policy == "raise":
            self.propose(verdict)
            return
        self.ledger.mute(self.spans)
        if policy == "warn":
            self.note(verdict)

    def note(self, verdict: Verdict) -> None:
        """Warns of something that ends nothing, once in the whole job for each kind and subject."""
        with self.lock:
            if (verdict.kind, verdict.subject) in self._noted:
                return
            self._noted.add((verdict.kind, verdict.subject))
        if self.world_size == 1:
            self.say(replace(verdict, remedy=remedy_for(verdict, self.remedies)))
        else:
            self.send({"type": "notice", "verdict": verdict.to_json()})

    def heard(self, entry: Mapping[str, Any]) -> bool:
        """Whether a notice of this kind and subject is in the log already."""
        told = entry["verdict"]["kind"], entry["verdict"]["subject"]
        return any((known.kind, known.subject) == told for known in self.notices)

    def _hear(self, verdict: Verdict) -> None:
        self._noted.add((verdict.kind, verdict.subject))
        if all((known.kind, known.subject) != (verdict.kind, verdict.subject) for known in self.notices):
            self.notices.append(verdict)
            if self.rank == 0:
                self.say(verdict)

    def propose(self, verdict: Verdict) -> None:
        """Asks for the end: the first one in the log is the one that every rank says."""
        with self.lock:
            if self.proposed is None and self.end is None:
                self.proposed = verdict = replace(verdict, remedy=remedy_for(verdict, self.remedies))
                self.alarm = 0
                self.send({"type": "end", "verdict": verdict.to_json()})

    def adopt(self, verdict: Verdict) -> None:
        """Takes the end as known here; later ones change nothing."""
        with self.lock:
            if self.end is None:
                self.end = verdict
                self.known_at = time.time()
                self.alarm = 0
                self.ended.set()

    def own_row(self) -> dict[str, Any]:
        """This rank's line in the table of a verdict."""
        with self.lock:
            if self.spans:
                tally = self.spans[-1]
                return row(self.rank, tally, self.steps, f"in batch {tally.started}")
            return self._last_row or row(self.rank, None, self.steps, "between spans")

    def last_words(self) -> dict[str, Any]:
        """This rank's line in the table of the end, with what rank 0 needs to tell who is out of step."""
        with self.lock:
            end = self.end
            side = self.ledger.side(self.rank, end.mark_index, end.announced, self.spans) if end is not None else None
            return {**self.own_row(), "known": self.known_at, "failure": self.failure, "side": side}

    def progress(self) -> tuple[int, int, int]:
        """Changes whenever this rank gets on; compared by the watchdog."""
        with contextlib.suppress(IndexError):  # a span may close on the training thread in between
            return self.ledger.next, self.spans[-1].started, self.steps
        return self.ledger.next, -1, self.steps
