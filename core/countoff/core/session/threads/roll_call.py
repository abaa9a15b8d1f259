"""The roll call: every rank reports, the first one compares and publishes what all need, and no rank blocks another.

Records lie in the store under one key per rank. The first rank looks, without waiting, whether all of them are there
(`Gathering.poll`). It publishes only what all ranks need, so that bytes grow with world_size and not with its square.
What is in the records, and what follows from them, the checks decide.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.checks import Checks, late
from countoff.core.checks.check import FitStart
from countoff.core.checks.lost import unprotected
from countoff.core.checks.plan import agreed_fields, joined
from countoff.core.ending import shutdown
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, Records, record_text
from countoff.core.session.liveness.heartbeats import begin_fit
from countoff.core.session.state import State
from countoff.core.session.store.gathering import Awaiting, Deleted, Gathering
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel
    from countoff.core.session.threads.writer import Writer

SETTLE_SECONDS = 5.0
SLOW_SECONDS = 1.0


class RollCall:
    """The roll calls of one guard: at the fit's start, which training waits for, and at the end of each span.

    Args:
        state: This rank's state.
        writer: This rank's writer.
        checks: What is reported and compared.

    Attributes:
        metrics: What the closed spans have shown, on the first rank.
        agreed: Names of the plan's values that are the same on all ranks, once the plan has been compared.
    """

    def __init__(self, state: State, writer: Writer, checks: Checks) -> None:
        self.metrics: dict[str, float] = {}
        self.agreed: frozenset[str] = frozenset()
        self._open: dict[str, Gathering] = {}
        self._settled = threading.Event()
        self._state = state
        self._writer = writer
        self._checks = checks

    def count_off(self, start: FitStart) -> threading.Event:
        """Reports what this rank begins with. Collective: every rank must call it.

        The first rank compares. A rank that does not report in time is named, and training goes on.

        Args:
            start: What this rank begins with.

        Returns:
            An event that is set once the first rank has compared, and found no verdict.
        """
        state, writer, answered = self._state, self._writer, threading.Event()
        record: dict[str, Any] = {}
        for check in sorted(self._checks, key=lambda check: check.takes_the_rest):
            record |= check.report(start, RECORD_BYTES - len(record_text(record)))

        def write(channel: Channel) -> None:
            begin_fit(channel, state.rank)
            channel.report("plan", state.rank, record)

        def compare(records: Records, missing: list[int]) -> None:
            self._compare(records)
            state.present = sorted(records)
            if missing and state.settings.keeps_even:
                state.find(late.needed(missing))
            elif missing:
                shutdown.print_warning(state, late.goes_on_without(missing))
            answer: dict[str, Any] = {
                "compared": len(records),
                "agreed": [] if missing else agreed_fields({rank: each["plan"] for rank, each in records.items()}),
                "refused": state.proposed is not None,
            }
            for check in self._checks:
                answer |= check.answer(records)
            writer.submit(lambda channel: channel.set("plan", answer))
            release(answer)
            writer.submit(
                lambda channel: channel.forget("plan", list(records))
            )  # behind the answer, for which all ranks wait

        def release(answer: Mapping[str, Any]) -> None:
            self.agreed = frozenset(str(name) for name in answer["agreed"])
            for check in self._checks:
                check.answered(answer)
            state.complete = complete = answer["compared"] == state.world_size
            if state.settings.keeps_even and not answer["compared"]:
                state.find(unprotected(state.rank, f"rank {state.ranks[0]} has stopped comparing"))
            # Every rank registers before it reports.
            find = writer.session.heartbeats.find_neighbours
            writer.submit(lambda channel: find(channel.whole, complete=complete))
            if not answer.get("refused"):  # else this rank waits for the verdict, which may come after the answer
                writer.submit(lambda _: answered.set())

        writer.submit(write)
        if state.leads:
            deadline = time.monotonic() + state.settings.deadline_seconds
            writer.gather("plan", state.ranks, deadline, compare, self._warn_of_late, keep=True, awaited=True)
        else:
            writer.poll(Awaiting("plan", release), awaited=True)
        return answered

    def span_closed(self, span: SpanCounters, closed: float) -> None:
        """Reports this rank's times of a closed span, and what the checks have of it, in the background.

        Args:
            span: The span's counters.
            closed: When it closed, in seconds since the epoch.
        """
        times = {"closed": closed, "loader": span.loader_seconds}

        def record() -> dict[str, Any]:
            told: dict[str, Any] = {**times}
            for check in self._checks:
                told |= check.span_report(span)
            return told

        def done(records: Records, missing: list[int]) -> None:
            if records and not missing:  # without records, the first rank has gone on before it knew who is present
                self._measure(records, span)
                self._writer.forget(key for check in self._checks for key in check.left_keys(span))
                if self._state.end is None and self._state.proposed is None:
                    self._find(found for check in self._checks for found in check.compare_spans(span, records))

        self._report(f"span/{span.opened}", record, done)

    def report(
        self,
        name: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Records], Iterable[Verdict | None]],
        *,
        owed: bool = True,
        after: Sequence[str] = (),
    ) -> None:
        """Reports one record of this rank, in the background; see `countoff.core.checks.check.Others`."""

        def done(records: Records, missing: list[int]) -> None:
            del missing  # the ranks that answered can be compared
            self._find(judge(records))

        self._report(name, record, done, owed=owed, after=after)

    def settle(self) -> None:
        """Waits on the first rank until the roll calls of closed spans are complete and all warnings are printed.

        It waits for at most 5 s, and not for a store that takes over a second to answer.
        """
        worth_waiting = self._worth_waiting()
        while self._open and worth_waiting():
            self._settled.wait(0.02)
            self._settled.clear()
        if self._state.leads:  # a warning that another rank wrote before its report may not have come by the reader
            self._writer.catch_up_now(worth_waiting)

    def settle_report(self, name: str) -> None:
        """Waits until a report is judged; see `countoff.core.checks.check.Others`."""
        state, writer, worth_waiting, judged = self._state, self._writer, self._worth_waiting(), threading.Event()
        if state.leads:
            return  # `settle` has waited for all reports
        writer.submit(lambda _: writer.poll(Deleted([f"{name}/{state.rank}"], judged.set)))  # behind the report
        # Once the first rank has said goodbye, it judges nothing more.
        while not judged.wait(0.02) and worth_waiting() and state.left is None and not state.host_left_at:
            pass

    def _worth_waiting(self) -> Callable[[], bool]:
        """Returns what tells whether to go on waiting, from here on for 5 s at most."""
        state, session, deadline = self._state, self._writer.session, time.monotonic() + SETTLE_SECONDS

        def worth_waiting() -> bool:
            slow = session.busy_since != 0.0 and time.monotonic() - session.busy_since > SLOW_SECONDS
            return session.connected and state.end is None and not slow and time.monotonic() < deadline

        return worth_waiting

    def _report(
        self,
        name: str,
        record: Callable[[], Mapping[str, Any]],
        done: Callable[[Records, list[int]], None],
        *,
        owed: bool = True,
        after: Sequence[str] = (),
    ) -> None:
        """Reports one record of this rank, in the background. Every rank that is present must, at its own time.

        Args:
            name: What is reported; equal on all ranks, and used once.
            record: Returns the record as it is when it is written.
            done: Called on the first rank, by the writer, with the records that came and the ranks that are missing.
            owed: Whether `settle` waits for it. False for what not every rank need report.
            after: What is done before it, of what this rank has reported and owed.
        """
        state, writer = self._state, self._writer

        def write(channel: Channel) -> None:
            channel.report_long(name, state.rank, record())

        # Handed over in two steps, so that it goes behind the warnings that earlier sync points put into the outbox:
        # once the first rank has all reports, everything that these ranks found is in the log.
        writer.submit(lambda _: writer.submit(write))
        if not state.leads:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            done(records, missing)
            writer.submit(lambda channel: channel.forget(name, list(records)))  # behind what follows: `settle_report`
            self._open.pop(name, None)
            self._settled.set()

        deadline, earlier = time.monotonic() + state.settings.deadline_seconds, [*map(self._open.get, after)]
        gathering = Gathering(name, state.present, deadline, gathered, keep=True, after=[*filter(None, earlier)])
        if owed:
            self._open[name] = gathering
        writer.poll(gathering)

    def _compare(self, records: Records) -> None:
        """Compares all reports: the first mismatch becomes a verdict, differences that may be meant become warnings."""
        complete, found = len(records) == self._state.world_size, list[Verdict]()
        for check in self._checks:
            found += filter(None, check.compare_reports(records, complete=complete, refused=bool(found)))
        self._find(joined(found, self._state.settings.levels))

    def _find(self, found: Iterable[Verdict | None]) -> None:
        for verdict in found:
            if verdict is not None:
                self._state.find(verdict)

    def _warn_of_late(self, missing: list[int]) -> None:
        shutdown.print_warning(self._state, late.waits_for(missing))

    def _measure(self, records: Records, span: SpanCounters) -> None:
        closed = {rank: float(record["closed"]) for rank, record in records.items()}
        loader = {rank: float(record["loader"]) for rank, record in records.items()}
        last, slow = max(closed, key=closed.__getitem__), max(loader, key=loader.__getitem__)
        metrics = {
            **self.metrics,
            "countoff/spread_seconds": closed[last] - min(closed.values()),
            "countoff/late_rank": last,
            "countoff/loader_seconds": loader[self._state.rank],
            "countoff/loader_seconds_max": loader[slow],
            "countoff/loader_rank": slow,
        }
        for check in self._checks:
            metrics |= check.metrics(span, records)
        self.metrics = metrics  # at once: the training thread reads it
        if self._state.observer is not None:
            self._state.observer.rolled(span.name, closed)
