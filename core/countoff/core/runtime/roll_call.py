"""The roll call: every rank reports, rank 0 gathers and publishes what all need, nobody blocks on anybody.

Records lie under one key per rank. Rank 0 looks whether all are there without waiting (`Gathering.poll`) and
publishes what all ranks need, so that bytes grow with world_size and not with its square.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from countoff.core.arithmetic.dp_ranks import judge_dp_ranks
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.state import State
from countoff.core.protocol.truncation import UnusedBatches, truncated
from countoff.core.runtime import shutdown
from countoff.core.verdict import Verdict, names_of

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel
    from countoff.core.runtime.speaker import Speaker

SETTLE_SECONDS = 5.0
SLOW_SECONDS = 1.0
_PROOF_FIELDS = (
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batch_size",
    "gradient_accumulation_steps",
    "max_epochs",
    "max_steps",
    "position",
    "dp_degree",
)

Records = dict[int, dict[str, Any]]


class Gathering:
    """Records of many ranks, gathered behind training.

    Args:
        name: What is gathered; equal on all ranks.
        ranks: The ranks that owe a record.
        deadline: When to go on without the missing, by `time.monotonic()`.
        done: Called once, with the records that came and the ranks that are missing.
        missed: Called every ten seconds with the ranks that are missing.
        keep: Whether the records stay in the store, to be gathered again.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        deadline: float,
        done: Callable[[Records, list[int]], None],
        missed: Callable[[list[int]], None] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self._keep = keep
        self._name = name
        self._ranks = list(ranks)
        self._deadline = deadline
        self._done = done
        self._missed = missed
        self._next_word = time.monotonic() + 10

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has called `done`."""
        keys = {rank: f"{self._name}/{rank}" for rank in self._ranks}
        now = time.monotonic()
        everybody = channel.has(*keys.values()) if keys else True
        if not everybody and now < self._deadline:
            if self._missed is not None and now > self._next_word:
                self._next_word = now + 10
                self._missed([rank for rank, key in keys.items() if not channel.has(key)])
            return False
        present = self._ranks if everybody else [rank for rank, key in keys.items() if channel.has(key)]
        records = dict(zip(present, channel.get_many([keys[rank] for rank in present]), strict=True))
        for rank in () if self._keep else present:
            channel.delete(keys[rank])
        self._done(records, [rank for rank in self._ranks if rank not in records])
        return True


class Awaiting:
    """One key of another rank, awaited behind training.

    Args:
        key: The key.
        done: Called once, with the record, however late: nobody waits for it.
    """

    def __init__(self, key: str, done: Callable[[dict[str, Any]], None]) -> None:
        self._key = key
        self._done = done

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has called `done`."""
        if channel.has(self._key):
            self._done(channel.get(self._key))
            return True
        return False


def group_ranks_by_value(records: Mapping[int, Mapping[str, Any]], field: str) -> list[tuple[Any, list[int]]]:
    """The values of one field with the ranks that hold each, the fewest ranks first.

    >>> group_ranks_by_value({0: {"lr": 1}, 1: {"lr": 2}, 2: {"lr": 1}}, "lr")
    [(2, [1]), (1, [0, 2])]
    """
    found: list[tuple[Any, list[int]]] = []
    for rank, record in sorted(records.items()):
        value = record.get(field)
        for known, ranks in found:
            if known == value:
                ranks.append(rank)
                break
        else:
            found.append((value, [rank]))
    return sorted(found, key=lambda party: len(party[1]))


def compare_plans(
    records: Mapping[int, Mapping[str, Any]], fields: Sequence[str]
) -> tuple[str, tuple[int, ...]] | None:
    """The first of `fields` in which ranks differ, in words, with the ranks of the smallest party.

    >>> plan = {"batches_per_epoch": 5}
    >>> compare_plans({0: plan, 1: {"batches_per_epoch": 4}, 2: plan}, ["batches_per_epoch"])
    ('batches_per_epoch is 4 on rank 1, 5 on ranks 0, 2', (1,))
    """
    for name in fields:
        found = group_ranks_by_value(records, name)
        if len(found) > 1:
            words = ", ".join(f"{_value(value)} on {names_of(ranks)}" for value, ranks in found[:4])
            return f"{name} is {words}", tuple(found[0][1] if len(found[0][1]) < len(found[-1][1]) else sorted(records))
    return None


def judge_plans(records: Mapping[int, Mapping[str, Any]], fields: Sequence[str]) -> Verdict | None:
    """A `PlanMismatch` if the ranks' plans differ in one of `fields`."""
    difference = compare_plans(records, fields)
    if difference is None:
        return None
    sentence, ranks = difference
    return Verdict(
        "PlanMismatch",
        f"before the first batch, {sentence}.",
        ranks,
        why="Ranks that count to different numbers take different decisions at every limit, schedule and epoch's end.",
        time=time.time(),
    )


def _agreed(plans: Mapping[int, Mapping[str, Any]]) -> list[str]:
    names = sorted({name for plan in plans.values() for name in plan})
    first = next(iter(plans.values()), {})
    return [name for name in names if all(plan.get(name) == first.get(name) for plan in plans.values())]


def _value(value: Any) -> str:
    return "unknown" if value is None else str(value)


class RollCall:
    """The roll calls of one guard: the fit's start, which training waits for, and the closed spans, behind it.

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

    def count_off(self, record: dict[str, Any]) -> threading.Event:
        """Reports this rank's plan. Collective: every rank must call it.

        Rank 0 compares; whoever does not answer in time is named, and training goes on.

        Returns:
            An event that is set once rank 0 has compared.
        """
        state, speaker, answered = self._state, self._speaker, threading.Event()
        patience = time.monotonic() + state.settings.deadline_seconds
        full = {**record, "ticks": state.settings.tick_batches}
        speaker.hand(lambda channel: channel.set(f"plan/{state.rank}", full))

        def done(records: Records, missing: list[int]) -> None:
            self._judge(records)
            state.present = sorted(records)
            if missing:
                self._say_who_is_missing(missing, "training goes on without comparing with it")
            agreed = () if missing else _agreed({rank: each["plan"] for rank, each in records.items()})
            speaker.hand(lambda channel: channel.set("plan", {"compared": len(records), "agreed": list(agreed)}))
            release({"compared": len(records), "agreed": agreed})

        def release(found: Mapping[str, Any]) -> None:
            self.agreed = frozenset(str(name) for name in found["agreed"])
            complete = found["compared"] == state.world_size  # everybody has introduced itself before reporting
            speaker.hand(lambda channel: speaker.look_around(channel, complete=complete))
            speaker.hand(lambda _: answered.set())

        if state.rank == 0:
            speaker.poll(Gathering("plan", range(state.world_size), patience, done, self._say_who_is_missing))
        else:
            speaker.poll(Awaiting("plan", release))
        return answered

    def span_closed(self, tally: SpanCounters, closed: float, notice: Verdict | None = None) -> None:
        """Reports this rank's times of a closed span, behind training.

        Args:
            tally: The span.
            closed: When it closed, in seconds since the epoch.
            notice: A warning that rank 0 gives once all ranks have closed it alike.
        """
        record = {"closed": closed, "loader": tally.loader_seconds, "left": tally.left}
        every = self._state.settings.tick_batches

        def forget_ticks(channel: Channel) -> None:
            for at in range(every, tally.started + 1, every):
                channel.delete(f"tick/{tally.opened}/{at}")

        def done(records: Records, missing: list[int]) -> None:
            if records and not missing:  # without records, rank 0 has gone on before it knew who is present
                self._measure(records)
                if not tally.evaluation:
                    self._speaker.hand(forget_ticks)
                self._note(tally, records, notice)

        self.report(f"span/{tally.opened}", record, done)

    def report(self, name: str, record: Mapping[str, Any], done: Callable[[Records, list[int]], None]) -> None:
        """Reports one record of this rank, behind training. Every rank that is present must, at its own time.

        Args:
            name: What is reported; equal on all ranks, and used once.
            record: The record.
            done: Called on rank 0, by the speaker, with the records that came and the ranks that are missing.
        """
        state = self._state
        self._speaker.hand(lambda channel: channel.set(f"{name}/{state.rank}", record))
        if state.rank != 0:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            done(records, missing)
            self._open.discard(name)
            self._settled.set()

        self._open.add(name)
        patience = time.monotonic() + state.settings.deadline_seconds
        self._speaker.poll(Gathering(name, state.present, patience, gathered))

    def settle(self) -> None:
        """Waits on rank 0 until the roll calls of the closed spans are in and have been acted on.

        For 5 s at most, and for no store that takes over a second to answer.
        """
        patience = time.monotonic() + SETTLE_SECONDS

        def patient() -> bool:
            since = self._speaker.busy_since
            slow = since != 0.0 and time.monotonic() - since > SLOW_SECONDS
            alive = self._speaker.thread.is_alive() and self._state.end is None
            return alive and not slow and time.monotonic() < patience

        while self._open and patient():
            self._settled.wait(0.02)
            self._settled.clear()
        said = threading.Event()
        if self._state.rank == 0:
            self._speaker.hand(lambda _: said.set())  # behind a warning, which is then about to be printed
            while not said.wait(0.02) and patient():
                pass

    def _note(self, tally: SpanCounters, records: Records, notice: Verdict | None) -> None:
        """Gives the warning for a span that all ranks have closed: that it was cut short, or else the adapter's own."""
        state = self._state
        if state.end is not None or state.proposed is not None:
            return
        left = {rank: UnusedBatches(*record["left"]) for rank, record in records.items() if record["left"] is not None}
        cut = truncated(tally.name, tally.started, left) if len(left) == len(records) else None
        if cut is None:
            if notice is not None:
                state.note(notice)
        elif not tally.evaluation or state.settings.uneven_eval == "warn":
            state.note(cut)
        elif state.settings.uneven_eval == "raise":
            state.propose(replace(cut, kind="UnevenBatches"))

    def _judge(self, records: Records) -> None:
        plans = {rank: record["plan"] for rank, record in records.items()}
        verdict = judge_plans(plans, _PROOF_FIELDS)
        if verdict is None and len(plans) == self._state.world_size:
            verdict = judge_dp_ranks(plans)
        if verdict is not None:
            self._state.propose(verdict)
        ticks = compare_plans(
            {rank: {"tick_batches": record.get("ticks")} for rank, record in records.items()}, ["tick_batches"]
        )
        if ticks is not None:
            unmet = "steps and learning rates are compared only after batches at which all of them look."
            self._state.note(Verdict("SettingsMismatch", f"{ticks[0]}: {unmet}", ticks[1], time=time.time()))
        versions = {rank: record["versions"] for rank, record in records.items()}
        difference = compare_plans(versions, sorted({name for version in versions.values() for name in version}))
        if difference is not None:
            sentence, ranks = difference
            self._state.note(Verdict("VersionMismatch", f"{sentence}.", ranks, time=time.time()))

    def _say_who_is_missing(self, missing: list[int], then: str = "waiting") -> None:
        verb = "has" if len(missing) == 1 else "have"
        sentence = f"{names_of(missing)} {verb} not counted off: is countoff on there? ({then})"
        shutdown.print_to_stderr(Verdict("LateRank", sentence, tuple(missing)), self._state.rank)

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
