"""The roll call: every rank reports, rank 0 compares and publishes what all need, and no rank blocks another.

Records lie in the store under one key per rank. Rank 0 looks, without waiting, whether all of them are there
(`Gathering.poll`). It publishes only what all ranks need, so that bytes grow with world_size and not with its square.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from countoff.core.arithmetic.dp_ranks import judge_dp_ranks
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.plan_comparison import (
    agreed_fields,
    judge_lengths,
    judge_plans,
    judge_tick_batches,
    judge_versions,
)
from countoff.core.protocol.records import FitPlan, Records
from countoff.core.protocol.state import State
from countoff.core.protocol.ticks import tick_keys
from countoff.core.protocol.truncation import UnusedBatches, truncated
from countoff.core.runtime import shutdown
from countoff.core.runtime.gathering import Awaiting, Gathering
from countoff.core.runtime.heartbeats import begin_fit
from countoff.core.verdict import Verdict, names_of

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel
    from countoff.core.runtime.speaker import Speaker

SETTLE_SECONDS = 5.0
SLOW_SECONDS = 1.0
_SLOW_NAME_SERVER = (
    "turn countoff on there too. If it is on, connecting may be slow: torch looks up the name of each peer, and an "
    "answer that the name server loses costs 5 s. RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
)


class RollCall:
    """The roll calls of one guard: at the fit's start, which training waits for, and at the end of each span.

    Args:
        state: This rank's state.
        speaker: This rank's speaker.

    Attributes:
        metrics: What the closed spans have shown, on rank 0.
        agreed: Names of the plan's values that are the same on all ranks, once the plan has been compared.
    """

    def __init__(self, state: State, speaker: Speaker) -> None:
        self.metrics: dict[str, float] = {}
        self.agreed: frozenset[str] = frozenset()
        self._open: set[str] = set()
        self._settled = threading.Event()
        self._state = state
        self._speaker = speaker

    def count_off(self, plan: FitPlan, versions: Mapping[str, str]) -> threading.Event:
        """Reports this rank's plan. Collective: every rank must call it.

        Rank 0 compares. A rank that does not report in time is named, and training goes on.

        Args:
            plan: What all ranks must agree on.
            versions: Versions of what computes.

        Returns:
            An event that is set once rank 0 has compared, and found no verdict.
        """
        state, speaker, answered = self._state, self._speaker, threading.Event()
        deadline = time.monotonic() + state.settings.deadline_seconds
        record = {"plan": plan.to_json(), "versions": dict(versions), "ticks": state.settings.tick_batches}

        def write(channel: Channel) -> None:
            begin_fit(channel, state.rank)
            channel.set(f"plan/{state.rank}", record)

        speaker.hand(write)

        def compare(records: Records, missing: list[int]) -> None:
            self._judge(records)
            state.present = sorted(records)
            if missing:
                self._warn_of_missing(missing, "training goes on without comparing with it")
            agreed = () if missing else agreed_fields({rank: each["plan"] for rank, each in records.items()})
            answer = {"compared": len(records), "agreed": list(agreed), "refused": state.proposed is not None}
            speaker.hand(lambda channel: channel.set("plan", answer))
            release(answer)

        def release(result: Mapping[str, Any]) -> None:
            self.agreed = frozenset(str(name) for name in result["agreed"])
            state.complete = complete = result["compared"] == state.world_size
            # Every rank introduces itself before it reports.
            find = speaker.line.heartbeats.find_neighbours
            speaker.hand(lambda channel: find(channel.whole, complete=complete))
            if not result.get("refused"):  # else this rank waits for the verdict, which may come after the answer
                speaker.hand(lambda _: answered.set())

        if state.rank == 0:
            speaker.poll(Gathering("plan", range(state.world_size), deadline, compare, self._warn_of_missing))
        else:
            speaker.poll(Awaiting("plan", release))
        return answered

    def span_closed(self, span: SpanCounters, closed: float, notice: Verdict | None = None) -> None:
        """Reports this rank's times of a closed span, in the background.

        Args:
            span: The span's counters.
            closed: When it closed, in seconds since the epoch.
            notice: A warning that rank 0 gives once all ranks have closed the span alike.
        """
        record = {"closed": closed, "loader": span.loader_seconds, "unused": span.unused}

        def forget_ticks(channel: Channel) -> None:
            for key in tick_keys(span, self._state.settings.tick_batches):
                channel.delete(key)

        def done(records: Records, missing: list[int]) -> None:
            if records and not missing:  # without records, rank 0 has gone on before it knew who is present
                self._measure(records)
                if not span.evaluation:
                    self._speaker.hand(forget_ticks)
                self._warn_of_span(span, records, notice)

        self.report(f"span/{span.opened}", record, done)

    def report(self, name: str, record: Mapping[str, Any], done: Callable[[Records, list[int]], None]) -> None:
        """Reports one record of this rank, in the background. Every rank that is present must, at its own time.

        Args:
            name: What is reported; equal on all ranks, and used once.
            record: The record.
            done: Called on rank 0, by the speaker, with the records that came and the ranks that are missing.
        """
        state, speaker = self._state, self._speaker

        def write(channel: Channel) -> None:
            channel.set(f"{name}/{state.rank}", record)

        # Handed over in two steps, so that it goes behind the warnings that the marks before it put into the outbox:
        # once rank 0 has all reports, everything that these ranks found is in the log.
        speaker.hand(lambda _: speaker.hand(write))
        if state.rank != 0:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            done(records, missing)
            self._open.discard(name)
            self._settled.set()

        self._open.add(name)
        deadline = time.monotonic() + state.settings.deadline_seconds
        speaker.poll(Gathering(name, state.present, deadline, gathered))

    def settle(self) -> None:
        """Waits on rank 0 until the roll calls of the closed spans are complete and all warnings are printed.

        It waits for at most 5 s, and not for a store that takes over a second to answer.
        """
        deadline = time.monotonic() + SETTLE_SECONDS

        def worth_waiting() -> bool:
            line = self._speaker.line
            slow = line.busy_since != 0.0 and time.monotonic() - line.busy_since > SLOW_SECONDS
            alive = line.connected and self._state.end is None
            return alive and not slow and time.monotonic() < deadline

        while self._open and worth_waiting():
            self._settled.wait(0.02)
            self._settled.clear()
        printed = threading.Event()

        def print_what_is_left(channel: Channel) -> None:
            # A warning that another rank wrote before its report may not have come by the listener yet.
            self._speaker.catch_up(channel)
            self._speaker.hand(lambda _: printed.set())

        if self._state.rank == 0:
            self._speaker.hand(print_what_is_left)
            while not printed.wait(0.02) and worth_waiting():
                pass

    def _judge(self, records: Records) -> None:
        """Compares all plans: the first mismatch becomes a verdict, differences that may be meant become warnings."""
        plans = {rank: record["plan"] for rank, record in records.items()}
        verdict = judge_plans(plans)
        if verdict is None and len(plans) == self._state.world_size:
            verdict = judge_dp_ranks(plans)
        if verdict is not None:
            self._state.propose(verdict)
        for warning in (
            None if verdict is not None else judge_lengths(plans),
            judge_tick_batches({rank: record.get("ticks") for rank, record in records.items()}),
            judge_versions({rank: record["versions"] for rank, record in records.items()}),
        ):
            if warning is not None:
                self._state.note(warning)

    def _warn_of_missing(self, missing: list[int], consequence: str = "") -> None:
        """Names the missing ranks: in one line while training waits for them, with a remedy once it goes on."""
        verb = "has" if len(missing) == 1 else "have"
        asked = f"{names_of(missing)} {verb} not counted off: is countoff on there?"
        if consequence:
            late = Verdict("LateRank", f"{asked} ({consequence})", tuple(missing), remedy=_SLOW_NAME_SERVER)
        else:
            hint = "A slow name server delays it too: RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
            late = Verdict("LateRank", f"{asked} {hint} (waiting)", tuple(missing))
        shutdown.print_to_stderr(late, self._state.rank)

    def _warn_of_span(self, span: SpanCounters, records: Records, notice: Verdict | None) -> None:
        """Warns of a span that all ranks have closed: that it was cut short, or else what the adapter found."""
        state = self._state
        if state.end is not None or state.proposed is not None:
            return
        unused = {rank: UnusedBatches(*record["unused"]) for rank, record in records.items() if record["unused"]}
        cut = truncated(span.name, span.started, unused) if len(unused) == len(records) else None
        if cut is None:
            if notice is not None:
                state.note(notice)
        elif not span.evaluation or state.settings.uneven_eval == "warn":
            state.note(cut)
        elif state.settings.uneven_eval == "raise":
            state.propose(replace(cut, kind="UnevenBatches"))

    def _measure(self, records: Records) -> None:
        closed = {rank: float(record["closed"]) for rank, record in records.items()}
        loader = {rank: float(record["loader"]) for rank, record in records.items()}
        late, slow = max(closed, key=closed.__getitem__), max(loader, key=loader.__getitem__)
        self.metrics = {
            "countoff/spread_seconds": closed[late] - min(closed.values()),
            "countoff/late_rank": late,
            "countoff/loader_seconds": loader[0],
            "countoff/loader_seconds_max": loader[slow],
            "countoff/loader_rank": slow,
        }
