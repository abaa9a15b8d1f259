"""The roll call: every rank reports, rank 0 compares and publishes what all need, and no rank blocks another.

Records lie in the store under one key per rank. Rank 0 looks, without waiting, whether all of them are there
(`Gathering.poll`). It publishes only what all ranks need, so that bytes grow with world_size and not with its square.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from countoff.core.checks.rank_map import judge_dp_ranks
from countoff.core.ending import shutdown
from countoff.core.liveness.heartbeats import begin_fit
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.credits import Credits
from countoff.core.protocol.judgement import unprotected
from countoff.core.protocol.plan_comparison import (
    agreed_fields,
    even_record,
    judge_even_settings,
    judge_lengths,
    judge_plans,
    judge_tick_batches,
    judge_versions,
    shortest_and_longest,
)
from countoff.core.protocol.records import FitPlan, Records, parse_count
from countoff.core.protocol.schedule_plans import SchedulePlan, judge_schedules
from countoff.core.protocol.state import State
from countoff.core.protocol.ticks import COMPARED_STEPS, step_key, tick_keys
from countoff.core.protocol.truncation import UnusedBatches, repeated, truncated
from countoff.core.store.gathering import Awaiting, Gathering
from countoff.core.verdict import Verdict, names_of

if TYPE_CHECKING:
    from countoff.core.store.channel import Channel
    from countoff.core.threads.speaker import Speaker

SETTLE_SECONDS = 5.0
SLOW_SECONDS = 1.0
_SLOW_NAME_SERVER = (
    "turn countoff on there too, by the same call at the same place as on the other ranks. If it is on, connecting may "
    "be slow: torch looks up the name of each peer, and an answer that the name server loses costs 5 s. "
    "RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
)


class RollCall:
    """The roll calls of one guard: at the fit's start, which training waits for, and at the end of each span.

    Args:
        state: This rank's state.
        speaker: This rank's speaker.

    Attributes:
        metrics: What the closed spans have shown, on rank 0.
        agreed: Names of the plan's values that are the same on all ranks, once the plan has been compared.
        lengths: The fewest and the most batches per epoch of any rank, where ranks take the same number and those of
            every rank are proven; empty otherwise.
        lengths_now: The same of what `len` of each rank's train loader gives, where that may change later.
    """

    def __init__(self, state: State, speaker: Speaker) -> None:
        self.metrics: dict[str, float] = {}
        self.agreed: frozenset[str] = frozenset()
        self.lengths: tuple[int, ...] = ()
        self._first_steps = list(range(1, COMPARED_STEPS + 1))
        self.lengths_now: tuple[int, ...] = ()
        self._open: set[str] = set()
        self._settled = threading.Event()
        self._state = state
        self._speaker = speaker

    def count_off(
        self,
        plan: FitPlan,
        versions: Mapping[str, str],
        own_batches: int | None = None,
        schedules: Sequence[SchedulePlan] = (),
        *,
        own_length: int | None = None,
    ) -> threading.Event:
        """Reports this rank's plan. Collective: every rank must call it.

        Rank 0 compares. A rank that does not report in time is named, and training goes on.

        Args:
            plan: What all ranks must agree on.
            versions: Versions of what computes.
            own_batches: Batches per epoch that are proven of this rank's loader, where ranks may differ in them.
            schedules: This rank's learning-rate schedules, as far as they are known; as many as the record has room
                for.
            own_length: What `len` of that loader gives now, where that is right now.

        Returns:
            An event that is set once rank 0 has compared, and found no verdict.
        """
        state, speaker, answered = self._state, self._speaker, threading.Event()
        deadline = time.monotonic() + state.settings.deadline_seconds
        record = {
            "plan": plan.to_json(),
            "versions": dict(versions),
            "ticks": state.settings.tick_batches,
            **even_record(state.settings, own_batches, own_length),
        }
        record = _with_schedules(record, schedules)

        def write(channel: Channel) -> None:
            begin_fit(channel, state.rank)
            channel.set(f"plan/{state.rank}", record)

        speaker.hand(write)

        def compare(records: Records, missing: list[int]) -> None:
            self._judge(records)
            state.present = sorted(records)
            if missing and state.settings.keeps_even:
                state.propose(self._cannot_agree(missing))
            elif missing:
                self._warn_of_missing(missing, "training goes on without comparing with it")
            agreed = () if missing else agreed_fields({rank: each["plan"] for rank, each in records.items()})
            answer = {"compared": len(records), "agreed": list(agreed), "refused": state.proposed is not None}
            for key, name in (("lengths", "length"), ("lengths_now", "now")):
                answer[key] = shortest_and_longest([record.get(name) for record in records.values()])
            speaker.hand(lambda channel: channel.set("plan", answer))
            release(answer)

        def release(result: Mapping[str, Any]) -> None:
            self.agreed = frozenset(str(name) for name in result["agreed"])
            self.lengths = tuple(parse_count(length) for length in result.get("lengths", ()))
            self.lengths_now = tuple(parse_count(length) for length in result.get("lengths_now", ()))
            state.complete = complete = result["compared"] == state.world_size
            if state.settings.keeps_even and not result["compared"]:
                state.propose(unprotected(state.rank, f"rank {state.ranks[0]} has stopped comparing"))
            # Every rank introduces itself before it reports.
            find = speaker.line.heartbeats.find_neighbours
            speaker.hand(lambda channel: find(channel.whole, complete=complete))
            if not result.get("refused"):  # else this rank waits for the verdict, which may come after the answer
                speaker.hand(lambda _: answered.set())

        if state.leads:
            speaker.poll(Gathering("plan", state.ranks, deadline, compare, self._warn_of_missing))
        else:
            speaker.poll(Awaiting("plan", release))
        return answered

    def span_closed(
        self, span: SpanCounters, closed: float, notice: Verdict | None = None, credits: Credits | None = None
    ) -> None:
        """Reports this rank's times of a closed span, in the background.

        Args:
            span: The span's counters.
            closed: When it closed, in seconds since the epoch.
            notice: A warning that rank 0 gives once all ranks have closed the span alike.
            credits: Its credits, where ranks took the same number of batches.
        """
        record = {"closed": closed, "loader": span.loader_seconds, "unused": span.unused}
        if span.repeated:
            record["repeated"] = span.repeated

        compared = [] if span.evaluation else [step for step in self._first_steps if step <= self._state.steps]
        self._first_steps = [step for step in self._first_steps if step not in compared]

        def forget(channel: Channel) -> None:
            if not span.evaluation:
                for key in (*map(step_key, compared), *tick_keys(span, self._state.settings.tick_batches)):
                    channel.delete(key)
            if credits is not None:
                for key in credits.left_keys(self._state.ranks):
                    channel.delete(key)

        def done(records: Records, missing: list[int]) -> None:
            if records and not missing:  # without records, rank 0 has gone on before it knew who is present
                self._measure(records, span)
                self._speaker.hand(forget)
                if credits is not None:
                    self._forget_entries(credits, min(record["read"] for record in records.values()))
                self._warn_of_span(span, records, notice)

        line = self._speaker.line
        self.report(f"span/{span.opened}", record, done, also=lambda: {} if credits is None else {"read": line.read})

    def _forget_entries(self, credits: Credits, read: int) -> None:
        """Deletes the log's entries about a span that every rank has read.

        Args:
            credits: The span's credits.
            read: Entries of the log that every rank has read, at least.
        """
        left = [index for index in credits.left_entries() if index < read]

        def forget(channel: Channel) -> None:
            for index in left:
                channel.whole.delete(f"log/{index}")

        self._speaker.hand(forget)

    def report(
        self,
        name: str,
        record: Mapping[str, Any],
        done: Callable[[Records, list[int]], None],
        *,
        also: Callable[[], Mapping[str, Any]] = dict,
        owed: bool = True,
    ) -> None:
        """Reports one record of this rank, in the background. Every rank that is present must, at its own time.

        Args:
            name: What is reported; equal on all ranks, and used once.
            record: The record.
            done: Called on rank 0, by the speaker, with the records that came and the ranks that are missing.
            also: Returns what the record has besides, as it is when the record is written.
            owed: Whether `settle` waits for it. False for what not every rank need report.
        """
        state, speaker = self._state, self._speaker

        def write(channel: Channel) -> None:
            speaker.line.settle()
            channel.set(f"{name}/{state.rank}", {**record, **also()})

        # Handed over in two steps, so that it goes behind the warnings that the marks before it put into the outbox:
        # once rank 0 has all reports, everything that these ranks found is in the log.
        speaker.hand(lambda _: speaker.hand(write))
        if not state.leads:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            done(records, missing)
            self._open.discard(name)
            self._settled.set()

        if owed:
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

        if self._state.leads:
            self._speaker.hand(print_what_is_left)
            while not printed.wait(0.02) and worth_waiting():
                pass

    def _judge(self, records: Records) -> None:
        """Compares all plans: the first mismatch becomes a verdict, differences that may be meant become warnings."""
        plans = {rank: record["plan"] for rank, record in records.items()}
        verdict = judge_even_settings(records) or judge_plans(plans)
        if verdict is None and len(plans) == self._state.world_size:
            verdict = judge_dp_ranks(plans)
        if verdict is None:
            verdict = judge_schedules({rank: record.get("schedules", ()) for rank, record in records.items()})
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
        if consequence:
            late = self._missing(missing, f" ({consequence})")
        else:
            hint = "A slow name server delays it too: RES_OPTIONS='timeout:1 attempts:1' on all ranks bounds that."
            late = replace(self._missing(missing, f" {hint} (waiting)"), remedy="")
        shutdown.print_warning(self._state, late)

    def _missing(self, missing: list[int], more: str = "") -> Verdict:
        verb = "has" if len(missing) == 1 else "have"
        sentence = f"{names_of(missing)} {verb} not counted off: is countoff on there?{more}"
        return Verdict("LateRank", sentence, tuple(missing), remedy=_SLOW_NAME_SERVER)

    def _cannot_agree(self, missing: list[int]) -> Verdict:
        late = self._missing(missing)
        why = (
            "With uneven_train='stop' or 'repeat', or uneven_eval='stop', every rank must tell the others which "
            "batches it has. The job would wait for a rank that does not."
        )
        remedy = f"{late.remedy} If ranks start minutes apart, raise deadline_seconds."
        return replace(late, why=why, remedy=remedy, time=time.time())

    def _warn_of_span(self, span: SpanCounters, records: Records, notice: Verdict | None) -> None:
        """Warns of a span that all ranks have closed: that it was cut short, or else what the adapter found."""
        state = self._state
        if state.end is not None or state.proposed is not None:
            return
        unused = {rank: UnusedBatches(*record["unused"]) for rank, record in records.items() if record["unused"]}
        by_countoff = (state.settings.uneven_eval if span.evaluation else state.settings.uneven_train) == "stop"
        cut = None
        if len(unused) == len(records):
            cut = truncated(span.name, span.started, unused, by_countoff=by_countoff)
        longer = repeated(span.name, span.started, {rank: each.get("repeated", 0) for rank, each in records.items()})
        if longer is not None:
            state.note(longer)
        if cut is None:
            if notice is not None:
                state.note(notice)
        elif not span.evaluation or state.settings.uneven_eval in ("warn", "stop"):
            state.note(cut)
        elif state.settings.uneven_eval == "raise":
            state.propose(replace(cut, kind="UnevenBatches"))

    def _measure(self, records: Records, span: SpanCounters) -> None:
        closed = {rank: float(record["closed"]) for rank, record in records.items()}
        loader = {rank: float(record["loader"]) for rank, record in records.items()}
        late, slow = max(closed, key=closed.__getitem__), max(loader, key=loader.__getitem__)
        metrics = {
            **self.metrics,
            "countoff/spread_seconds": closed[late] - min(closed.values()),
            "countoff/late_rank": late,
            "countoff/loader_seconds": loader[self._state.rank],
            "countoff/loader_seconds_max": loader[slow],
            "countoff/loader_rank": slow,
        }
        policy = "raise" if span.evaluation else self._state.settings.uneven_train
        if policy == "stop":
            left = [UnusedBatches(*record["unused"]).batches for record in records.values() if record["unused"]]
            metrics["countoff/batches_left"] = sum(left)
        elif policy == "repeat":
            metrics["countoff/batches_repeated"] = sum(record.get("repeated", 0) for record in records.values())
        self.metrics = metrics  # at once: the training thread reads it
        if self._state.observer is not None:
            self._state.observer.rolled(span.name, closed)


def _with_schedules(record: dict[str, Any], schedules: Sequence[SchedulePlan]) -> dict[str, Any]:
    """Returns a rank's report with as many of its schedules as it has room for."""
    from countoff.core.store.channel import RECORD_BYTES  # imports torch: only where there is another rank

    for schedule in schedules:
        longer = {**record, "schedules": [*record.get("schedules", ()), schedule.to_json()]}
        if len(json.dumps(longer, separators=(",", ":"))) > RECORD_BYTES:
            break
        record = longer
    return record
