"""A situation for each message that countoff can print, made up but possible, for the golden files of messages.

Each verdict is made by the code that makes it in a job, goes through a record of the store, gets its remedy from the
adapter, and its table from what rank 0 would publish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from countoff._torchtitan.config import wrong_horizons
from countoff.core import LoaderFacts, Settings, Verdict, software
from countoff.core.arithmetic.schedules import Ending
from countoff.core.arithmetic.totals import Totals
from countoff.core.checks import data as identity
from countoff.core.checks import judge, late, once, resume, short, splits, versions, weights
from countoff.core.checks.check import FitStart
from countoff.core.checks.even import EvenCheck, judge_lengths, truncated
from countoff.core.checks.framework import judge_length, judge_steps
from countoff.core.checks.horizon import Horizon, RunLength, run_out, wrong_horizon
from countoff.core.checks.learning_rates import base_mismatch, judge_schedules, rate_mismatch
from countoff.core.checks.lost import (
    DIED,
    LEFT,
    STOPPED,
    lost_host,
    lost_rank,
    lost_store,
    raised,
    unprotected,
    victim,
)
from countoff.core.checks.micro_batches import compare_micro_batches
from countoff.core.checks.model import judge_models
from countoff.core.checks.plan import PlanCheck, judge_plans, judge_settings
from countoff.core.checks.rank_map import judge_dp_ranks
from countoff.core.checks.stalled import ENDED, judge_before_fit, judge_stall
from countoff.core.checks.steps import compare_steps
from countoff.core.checks.streams import StreamFacts, judge_streams
from countoff.core.checks.versions import judge_versions
from countoff.core.ending.shutdown import print_to_stderr, print_warning
from countoff.core.ending.table import publish_table, with_table
from countoff.core.levels import effect
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.fit_records import SchedulePlan, SharedModel
from countoff.core.protocol.records import FitPlan, MicroCounts, SyncPoint, verdict_entry
from countoff.core.protocol.resume_record import ResumeRecord, ScheduleState
from countoff.core.protocol.rows import row
from countoff.core.protocol.rule import Divergence
from countoff.core.session.state import State
from countoff.plan.readers import torchtitan_toml
from tests.adapters import EVEN, MESSAGES, ONLY
from tests.fake_store import FakeStore

EPOCH = "train epoch 0"
ALL = tuple(MESSAGES)
_COUNT_MICRO_BATCHES = ["torch", "accelerate", "transformers", "lightning", "fabric"]
_COUNT_PASSES = ["torch", "accelerate", "transformers", "fabric", "torchtitan", "lingua"]
_FRAMEWORKS = {"lightning": "Lightning", "composer": "Composer", "transformers": "the Trainer"}


def module_of(adapter: str) -> ModuleType:
    """The module with the adapter's messages."""
    return import_module(f"countoff._{adapter}.messages")


@dataclass(frozen=True)
class Situation:
    """What has happened in a job.

    Attributes:
        kind: The kind of the verdict.
        title: What has happened, in words.
        make: Makes the verdict, for an adapter.
        rows: What each rank has counted by then; none for what is printed without a table.
        adapters: The adapters in which it can happen.
    """

    kind: str
    title: str
    make: Callable[[str], Verdict | None]
    rows: Sequence[Mapping[str, Any]] = ()
    adapters: Sequence[str] = ALL

    def message(self, adapter: str, capsys: pytest.CaptureFixture[str]) -> str:
        """The message as rank 0 prints it, without the rank."""
        remedies = MESSAGES[adapter].remedies
        made = self.make(adapter)
        if made is None:  # it prints by itself
            return _plain(capsys)
        assert made.kind == self.kind
        world_size = max(len(self.rows) + made.gone * len(made.ranks), 2)
        state = State(0, world_size, Settings(), remedies)
        entry = verdict_entry("end", replace(made, time=0.0))
        state.receive(json.loads(json.dumps(entry)))
        assert state.end is not None
        found = replace(state.end, rows=made.rows)
        if self.rows:
            store = FakeStore()
            rows = {int(line["rank"]): {"known": 0.0, "failure": "", "side": None, **line} for line in self.rows}
            publish_table(store, found, rows, complete=False)
            found = with_table(store, found, remedies, world_size)
        print_to_stderr(found, 0, goes_on=effect(found, {}) != "raise")
        return _plain(capsys)


def _plain(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip("\n").splitlines()
    return "\n".join(line.removeprefix("[rank 0] ") for line in lines)


def counted(rank: int, started: int, fetched: int, state: str, *, side: bool | None = None, **more: Any) -> Any:
    """One rank's row in the table."""
    span = SpanCounters(more.get("span", EPOCH), started=started, prefetched=fetched)
    return {**row(rank, span, more.get("steps", started - 1), state), "side": side}


def closing(rank: int, at: int, reason: Any, **more: Any) -> SyncPoint:
    """The sync point with which a rank closes its train epoch."""
    return SyncPoint("train_end", EPOCH, at=at, reason=reason, rank=rank, **more)


def uneven(standing: SyncPoint, count: int, rank: int, own: SyncPoint | None = None, **more: Any) -> Verdict:
    """The verdict of a rank about another's sync point."""
    return judge(Divergence("UnevenBatches", standing, count, own, sync_index=1, **more), rank)


def evaluated(rank: int, at: int) -> SyncPoint:
    return SyncPoint("eval_end", "validation", at=at, reason="exhausted", rank=rank)


TWO_UNEVEN = [counted(1, 4, 4, "ran out", side=True), counted(0, 5, 5, "in batch 5", side=False)]


def unevens() -> Iterator[Situation]:
    def short(rank: int, other: int, announced: bool = False) -> Callable[[str], Verdict]:
        return lambda _: uneven(closing(rank, 4, "exhausted"), 5, other, announced=announced)

    yield Situation("UnevenBatches", "a rank's train loader is short, on 2 ranks", short(1, 0), TWO_UNEVEN)
    four = [counted(rank, 4, 4 + (rank != 3), "in batch 4", side=rank == 3) for rank in range(4)]
    yield Situation("UnevenBatches", "a rank's train loader is short, on 4 ranks", short(3, 2, True), four)
    some = [
        counted(0, 4, 4, "in batch 4", side=True),
        counted(2, 4, 5, "in batch 4", side=False),
        *(counted(rank, 3, 4, "in batch 3") for rank in (1, 3)),
    ]
    yield Situation("UnevenBatches", "the same, where two ranks have not got so far", short(0, 2, True), some)
    left = [counted(1, 3, 3, "stopped", side=True), counted(0, 4, 4, "in batch 4", side=False)]
    yield Situation(
        "UnevenBatches", "a rank leaves the loop alone", lambda _: uneven(closing(1, 3, "stopped"), 4, 0), left
    )
    yield Situation(
        "UnevenBatches",
        "evaluations of different lengths, as a warning",
        lambda _: uneven(evaluated(1, 2), 3, 0, evaluation=True),
    )
    alone = [
        counted(0, 0, 0, "in batch 0", side=True, span="evaluation", steps=8),
        counted(1, 1, 1, "in batch 1", side=False, span="train epoch 1", steps=8),
    ]
    yield Situation(
        "UnevenBatches",
        "rank 0 evaluates alone",
        lambda _: uneven(SyncPoint("eval_start", "evaluation"), 0, 1, SyncPoint("train_start", "train epoch 1")),
        alone,
    )


PLANS: Mapping[str, tuple[Any, Any]] = {
    "batches_per_epoch": (24, 23),
    "batch_size": (32, 16),
    "gradient_accumulation_steps": (4, 2),
    "max_epochs": (3, 2),
    "max_steps": (1000, 500),
    "position": ([1, 4, 7], [0, 9, 5]),
}
_PLANNED = {
    "accelerate": {"batch_size", "gradient_accumulation_steps", "max_epochs", "max_steps", "position"},
    "fabric": {"batch_size", "gradient_accumulation_steps", "position"},
    "lingua": {"batch_size", "gradient_accumulation_steps", "max_steps", "position"},
    "torchtitan": {"batch_size", "gradient_accumulation_steps", "max_steps", "position"},
    "torch": {"batch_size", "gradient_accumulation_steps", "position"},
}


def plans() -> Iterator[Situation]:
    rows = [row(rank, None, 0, "between spans") for rank in range(2)]
    for name, (first, second) in PLANS.items():
        adapters = [adapter for adapter in ALL if name in _PLANNED.get(adapter, PLANS)]
        made = judge_plans({0: {name: first}, 1: {name: second}})
        yield Situation("PlanMismatch", f"{name} differs, on 2 ranks", lambda _, made=made: made, rows, adapters)
    halves = judge_plans({0: {"batches_between_evaluations": 4}, 1: {"batches_between_evaluations": 2}})
    title = "half of an epoch is another number of batches on each rank, with uneven_train='stop'"
    yield Situation("PlanMismatch", title, lambda _: halves, rows, ["lightning"])
    rows = [row(rank, None, 0, "between spans") for rank in range(3)]
    one = judge_plans({0: {"batch_size": 8}, 1: {"batch_size": 4}, 2: {"batch_size": 8}})
    yield Situation("PlanMismatch", "batch_size differs, on 3 ranks", lambda _: one, rows, ["torch"])
    reports = {
        rank: {"plan": FitPlan(batches_per_epoch=12 - (rank == 2), dataset_rows=96 - 8 * (rank == 2)).to_json()}
        for rank in range(3)
    }
    yield Situation(
        "PlanMismatch",
        "the ranks' datasets have different lengths",
        lambda _: next(PlanCheck(0).compare_reports(reports, complete=True, refused=False)),
        rows,
        ["lightning", "composer", "transformers"],
    )


def steps() -> Iterator[Situation]:
    rows = [counted(0, 10, 10, "ran out", steps=10), counted(1, 10, 10, "ran out", steps=9)]
    standing = closing(0, 10, "exhausted", steps=10)
    yield Situation(
        "StepMismatch",
        "a rank has skipped a step, found at the end of the epoch",
        lambda _: judge(Divergence("StepMismatch", standing, 9, closing(1, 10, "exhausted"), sync_index=1), 1),
        rows,
    )
    record = {"rank": 0, "steps": 32, "step_hash": 5}
    where = "batch 64 of train epoch 0"
    rows = [counted(rank, 64, 64, "in batch 64", steps=32) for rank in range(2)]
    other = compare_steps({**record, "rank": 1, "step_hash": 6}, where)(record, (0, 1))
    yield Situation("StepMismatch", "steps after other batches, found at a tick", lambda _: other, rows)
    mine = MicroCounts(8, 30, (5, 4), ((61, 62), (63, 64)), EPOCH)
    of_rank_0 = MicroCounts(7, 30, (4, 4)).to_json()
    extra = compare_micro_batches(mine, f"at {where}", 32)(of_rank_0, (0, 1))
    title = "a rank has run an extra micro-batch, found at a tick"
    yield Situation("StepMismatch", title, lambda _: extra, adapters=_COUNT_MICRO_BATCHES)
    alone = compare_micro_batches(replace(mine, sharded=True), f"at {where}", 32)(
        MicroCounts(7, 30, (4, 4), sharded=True).to_json(), (0, 1)
    )
    title = "a rank has run a forward pass of a sharded model alone, found at a tick"
    yield Situation("StepMismatch", title, lambda _: alone, adapters=_COUNT_PASSES)
    both = [0.00031711500169576796] * 2, [0.0003] * 2
    rates = rate_mismatch(f"at {where}", "tick/1/64", (0, 1), *both)
    able = [adapter for adapter in ALL if "LearningRateMismatch" in MESSAGES[adapter].kinds]
    of_both = [{**line, "rates": own} for line, own in zip(rows, both, strict=True)]
    yield Situation(
        "LearningRateMismatch",
        "schedules of different lengths",
        lambda _: rates,
        of_both,
        able,
    )
    lengths = {
        rank: [SchedulePlan.of("OneCycleLR", Ending("error", steps), begin=0, calls=300).to_json()]
        for rank, steps in enumerate((300, 308))
    }
    yield Situation(
        "LearningRateMismatch",
        "schedules of different lengths, before the first batch",
        lambda _: judge_schedules(lengths),
        [row(rank, None, 0, "between spans") for rank in range(2)],
        able,
    )
    step = "at optimizer step 1 (batch 1 of train epoch 0)"
    apart = base_mismatch(step, "step/1", (0, 1), ([0.001], [0.002]), ((), ()), first=True)
    of_one = [{**counted(rank, 1, 1, "in batch 1"), "rates": [0.001 * (1 + rank)]} for rank in range(2)]
    yield Situation(
        "LearningRateMismatch", "a learning rate of its own, without a schedule", lambda _: apart, of_one, able
    )
    higher = {
        rank: [SchedulePlan.of("OneCycleLR", Ending("error", 300, peak=peak), begin=0, calls=300).to_json()]
        for rank, peak in enumerate((0.001, 0.002))
    }
    yield Situation(
        "LearningRateMismatch",
        "schedules of different learning rates, before the first batch",
        lambda _: judge_schedules(higher),
        [row(rank, None, 0, "between spans") for rank in range(2)],
        able,
    )


def rank_maps() -> Iterator[Situation]:
    able = [adapter for adapter in ALL if "RankMapError" in MESSAGES[adapter].kinds]
    wrong = [rank // 4 * 2 + rank % 4 for rank in range(8)]
    made = judge_dp_ranks({rank: {"dp_rank": share, "dp_degree": 8} for rank, share in enumerate(wrong)})
    rows = [row(rank, None, 0, "between spans") for rank in range(8)]
    yield Situation("RankMapError", "dp_ranks of a wrong factor, on 2 × 4 ranks", lambda _: made, rows, able)
    read = {rank: {"dp_rank": rank // 2, "dp_degree": 2, "loader_position": [rank, 4]} for rank in range(4)}
    yield Situation(
        "RankMapError", "a sampler that counts every rank", lambda _: judge_dp_ranks(read), rows[:4], ["torch"]
    )


def losses() -> Iterator[Situation]:
    rows = [counted(rank, 4, 4, "in batch 4") for rank in range(2)]
    yield Situation(
        "LostRank",
        "a rank has raised an exception",
        lambda _: lost_rank(
            1, "raised ValueError: shard 3 is torn at train.py:41 (in batch 4 of train epoch 0)", gone=False
        ),
        rows,
    )
    label = "raised KeyError: 'label' at train.py:31 (in batch 1 of train epoch 0)"
    early = [counted(rank, 1, 1, "in batch 1") for rank in range(3)]
    yield Situation("LostRank", "all 3 ranks have raised the same", lambda _: raised([((0, 1, 2), label)], 3), early)
    yield Situation(
        "LostRank",
        "2 of 3 ranks have raised, each another exception",
        lambda _: raised([((2,), "raised MemoryError at data.py:7 (in batch 1 of train epoch 0)"), ((0,), label)], 3),
        early,
    )
    yield Situation(
        "LostRank",
        "a rank was killed, on 4 ranks",
        lambda _: lost_rank(2, "is gone (pid 4242)", "It was killed, or it crashed.", subject=DIED),
        [counted(rank, 4, 4, "in batch 4") for rank in (0, 1, 3)],
    )
    yield Situation(
        "LostRank",
        "a rank has ended its fit before the others",
        lambda _: lost_rank(
            1,
            "has ended its fit, and rank 0 has not: rank 0 raised RuntimeError: Connection closed by peer, as happens "
            "when another rank is lost",
            "A warning came before that: rank 1 ran out of data after 9 batches of train epoch 0; rank 0 has batch 10.",
            subject=LEFT,
        ),
        rows,
    )
    yield Situation(
        "LostRank",
        "a rank is stopped",
        lambda _: lost_rank(1, "is stopped (pid 4242, SIGSTOP)", "It will not go on by itself.", subject=STOPPED),
        rows[:1],
    )
    yield Situation(
        "LostRank",
        "a host does not answer, on 2 hosts of 2 ranks",
        lambda _: lost_host("node-1", (2, 3), 15.0),
        [counted(rank, 4, 4, "in batch 4") for rank in range(2)],
    )
    yield Situation(
        "LostRank", "the host of the job's store does not answer", lambda _: lost_store("192.0.2.7", 15.0), ()
    )
    yield Situation(
        "LostRank",
        "a rank has lost its connection to another one, and nothing shows to which",
        lambda _: victim(1, "RuntimeError: Connection closed by peer"),
        rows,
    )
    exited = SyncPoint("train_end", EPOCH, at=3, reason="exited", rank=1)
    yield Situation(
        "LostRank",
        "a rank has left by sys.exit",
        lambda _: judge(Divergence("UnevenBatches", exited, 4, sync_index=1), 0),
        rows[:1],
    )


def stalls() -> Iterator[Situation]:
    def record(rank: int, batches: int, state: str, place: str, collectives: int, epoch: int = 0) -> Any:
        line = counted(rank, batches, batches, state, span=f"train epoch {epoch}", steps=4)
        return {**line, "frames": [place], "collectives": {"0": collectives}}

    reader = {
        0: record(0, 5, "in a collective", "train.py:31 in main", 5),
        1: record(1, 4, "in its loader", "train.py:16 in __getitem__", 4),
    }
    yield Situation("Stalled", "a rank's loader never returns", lambda _: judge_stall(reader, 180))
    ahead = {
        0: record(0, 5, "in a collective", "train.py:31 in main", 9),
        1: record(1, 1, "in a collective", "train.py:31 in main", 9, epoch=1),
    }
    yield Situation("Stalled", "a rank is an epoch ahead", lambda _: judge_stall(ahead, 180))
    elsewhere = {
        0: record(0, 5, "in a collective", "train.py:31 in main", 9) | {"last": {"0": "all_reduce of [650]"}},
        1: record(1, 4, "in a collective", "train.py:52 in validate", 9) | {"last": {"0": "broadcast of [1]"}},
    }
    yield Situation("Stalled", "a rank has left its loop", lambda _: judge_stall(elsewhere, 180))
    sync = "distributed.py:213 in _sync_ddp < ddp.py:367 in reduce < result.py:248 in compute"
    fetch = "training_epoch_loop.py:265 in _broadcast_sigterm_tensor < fit_loop.py:469 in advance"
    in_fit = {
        rank: record(rank, 5, "in a collective", "train.py:18 in main", 9) | {"inside": f"lightning at {place}"}
        for rank, place in enumerate((sync, fetch))
    }
    title = "ranks are in different collectives of the framework"
    yield Situation("Stalled", title, lambda _: judge_stall(in_fit, 180), adapters=("lightning",))
    alone = {
        0: record(0, 5, "in a collective", "train.py:52 in validate", 9) | {"buffers": True},
        1: record(1, 5, "in a collective", "train.py:40 in main", 9),
    }
    yield Situation("Stalled", "a rank evaluates in a DDP alone", lambda _: judge_stall(alone, 180))
    extra = {
        rank: record(rank, 12, "in a collective", f"train.py:{33 if rank else 40} in main", 9)
        | {"steps": 12 - rank, "micro": ["train epoch 0", 12, 12, 5 * rank, 4 - 4 * rank]}
        for rank in range(2)
    }
    yield Situation("Stalled", "a rank is in an extra micro-batch", lambda _: judge_stall(extra, 180))
    passes = {
        rank: record(rank, 12, "in a collective", "train.py:33 in main", 9)
        | {"steps": 11, "passes": ["train epoch 0", [11, 11, 5], [12, 12, 5 + rank]]}
        for rank in range(2)
    }
    title = "a rank has run a forward pass of a sharded model alone"
    yield Situation("Stalled", title, lambda _: judge_stall(passes, 180), adapters=_COUNT_PASSES)
    under_nccl = {
        rank: record(rank, 5, "in its code" if rank == 2 else "waiting for NCCL", place, 9)
        for rank, place in enumerate(["train.py:33 in main", "train.py:33 in main", "report.py:8 in upload"])
    }
    yield Situation(
        "Stalled", "ranks wait under NCCL for one that is in its code", lambda _: judge_stall(under_nccl, 180)
    )
    barrier = {"call": "torch.distributed.barrier", "at": "train.py:33 in main", "seconds": 190}
    loads = {
        rank: {"call": "", "at": "data.py:80 in load", "seconds": 190} if rank == 5 else barrier for rank in range(8)
    }
    yield Situation("Stalled", "a rank loads alone, and no fit has begun", lambda _: judge_before_fit(loads, 180))
    apart = {0: barrier, 1: {**barrier, "call": "torch.distributed.broadcast", "at": "train.py:40 in main"}}
    yield Situation("Stalled", "ranks wait in different calls before the fit", lambda _: judge_before_fit(apart, 180))
    yield Situation(
        "Stalled",
        "a stall ends the job",
        lambda _: replace(judge_stall(reader, 180), subject=ENDED),
        list(reader.values()),
    )


def lengths() -> Iterator[Situation]:
    able = [adapter for adapter in ALL if "WrongLength" in MESSAGES[adapter].kinds]

    def wrong(adapter: str, reported: int = 16, fixes: bool = False, length: int | None = None) -> Verdict:
        facts = LoaderFacts(
            reported_batches=reported,
            batch_size=4,
            drop_last=False,
            samples_per_rank=32,
            max_epochs=3,
            sampling="distributed",
        )
        module, totals = module_of(adapter), Totals(facts, dp_degree=2)
        effect = module.consequences(totals.own, epochs=3) if adapter == "composer" else None
        found = judge_length(totals.own, counted_by=_FRAMEWORKS.get(adapter, "len(loader)"), consequences=effect)
        assert found is not None
        if adapter == "lightning":
            return module.with_remedy(found, totals.plan, fixes=fixes)
        if adapter == "composer" and length is None:
            limit = "Trainer(train_subset_num_batches=N)"
            return replace(found, remedy=module.remedy_of_length(totals.plan, limit=limit, fixes=fixes))
        return found if length is None else module.with_correction(found, length)

    yield Situation("WrongLength", "len(loader) counts the batches of both ranks", wrong, adapters=able)
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("len(loader) is too short", {"reported": 4}, able),
        ("totals='fix', and the true length is not proven", {"fixes": True}, ["lightning", "composer"]),
        ("totals='fix' has set the length", {"fixes": True, "length": 8}, ["composer"]),
    ]
    for title, how, adapters in cases:
        yield Situation("WrongLength", title, lambda adapter, how=how: wrong(adapter, **how), adapters=adapters)
    for mode in ("raise", "stop"):

        def by_length(adapter: str, mode: str = mode) -> Verdict | None:
            why = module_of(adapter).why_equal_lengths(mode)
            return judge_plans({rank: {"batches_per_epoch": 8 - rank, "why_equal_lengths": why} for rank in range(2)})

        title = f"lengths differ, with uneven_train='{mode}'"
        yield Situation("PlanMismatch", title, by_length, adapters=["transformers"])
    for why in ("equal_for_schedule", "equal_for_interval"):

        def unequal(adapter: str, why: str = why) -> Verdict | None:
            reason = getattr(module_of(adapter), why)("1dur")
            return judge_plans(
                {rank: {"batches_per_epoch": 8 - rank, "why_equal_lengths": reason} for rank in range(2)}
            )

        yield Situation("PlanMismatch", f"lengths differ: {why}", unequal, adapters=["composer"])
    own = judge_lengths({rank: {"own_batches_per_epoch": 8 - rank} for rank in range(2)})
    yield Situation("Truncated", "the ranks' loaders differ in length", lambda _: own, adapters=["composer"])
    lost = truncated(EPOCH, 7, {0: UnusedBatches(1, 4, False), 1: UnusedBatches(0)})
    yield Situation("Truncated", "Composer ends all ranks at the shortest", lambda _: lost, adapters=["composer"])
    yield Situation(
        "Truncated",
        "a StreamingDataset that gives ranks different numbers of batches",
        lambda adapter: module_of(adapter).uneven_by_design("device_per_stream", (3, 4)),
        adapters=["composer"],
    )


def evens() -> Iterator[Situation]:
    """What is said where ranks with different numbers of batches are to take the same number."""
    able = [adapter for adapter in ALL if ONLY[adapter].get("Truncated") == EVEN]

    def situation(kind: str, title: str, made: Verdict | None, rows: Sequence[Any] = ()) -> Situation:
        return Situation(kind, title, lambda _: made, rows, able)

    left = {rank: UnusedBatches(4, 16, False) for rank in range(3)} | {3: UnusedBatches(0)}
    stopped = truncated(EPOCH, 90, left, by_countoff=True)
    yield situation("Truncated", "uneven_train='stop' ends all ranks with the shortest", stopped)
    empty = truncated(EPOCH, 0, {0: UnusedBatches(4, 16, False), 1: UnusedBatches(0)}, by_countoff=True)
    yield situation("Truncated", "uneven_train='stop', and a rank without data", empty)
    part = {0: UnusedBatches(0), 1: UnusedBatches(2, None)}
    evaluated = truncated("validation", 3, part, by_countoff=True)
    yield situation("Truncated", "uneven_eval='stop' ends an evaluation with the shortest", evaluated)
    alone = unprotected(1, "the job's store does not answer")
    yield situation("LostRank", "a rank can no longer agree on batches", alone)
    rows = [row(rank, None, 0, "between spans") for rank in range(2)]
    on = Settings(uneven_train="stop")
    for name, one, other in (
        ("uneven_train", on, Settings()),
        ("uneven_eval", Settings(uneven_eval="stop"), Settings(uneven_eval="allow")),
    ):
        reports = {
            rank: EvenCheck(State(rank, 2, each, {})).report(FitStart(FitPlan(), {}), 500)
            for rank, each in enumerate((one, other))
        }
        made = judge_settings(reports)
        yield situation("PlanMismatch", f"{name} differs, on 2 ranks", made, rows)
    yield situation("LateRank", "with uneven_train, a rank does not come to the roll call", late.needed([1]), rows[:1])


def data() -> Iterator[Situation]:
    def able(kind: str) -> list[str]:
        return [adapter for adapter in ALL if kind in MESSAGES[adapter].kinds]

    read = {"first": 1, "prints": ["5e", "a1"], "informative": True, "is_sharded": False}
    other = {**read, "prints": ["0b", "c4"]}
    all_alike = {rank: {**read, "dp_rank": rank} for rank in range(2)}
    some_alike = {rank: {**(read if rank % 2 else other), "dp_rank": rank} for rank in range(4)}
    peers = {rank: {**(other if rank == 3 else read), "dp_rank": rank // 2} for rank in range(4)}
    peers[0]["prints"] = peers[1]["prints"] = ["77", "78"]
    for title, records in (("all ranks read the same", all_alike), ("some ranks read the same", some_alike)):
        yield Situation(
            "DuplicateData",
            title,
            lambda _, records=records: identity.judge_data(EPOCH, records)[0],
            adapters=able("DuplicateData"),
        )
    yield Situation(
        "DuplicateData",
        "the workers of a loader read the same",
        lambda _: identity.same_on_workers(EPOCH, 0, ["5e", "5e", "a1", "a1"], 2),
        adapters=able("DuplicateData"),
    )
    yield from dealt()
    yield Situation(
        "PeersDiffer",
        "ranks that share a batch read different ones",
        lambda _: identity.judge_data(EPOCH, peers)[0],
        adapters=able("PeersDiffer"),
    )
    yield Situation(
        "SameOrder",
        "set_epoch is never called",
        lambda _: identity.same_order("train epoch 1", (0, 1)),
        adapters=able("SameOrder"),
    )
    read = once.Reading(rows=64, samples=32, difference=5, repeated=0, dropped=0)
    marks = {0: once.Marks(0xFFFFFFFF, 0), 1: once.Marks(0xFFFFFFFF << 16, 0)}
    for title, verdict in {
        "set_epoch is called on one rank alone": once.judge_once(EPOCH, {0: read, 1: read._replace(dp_rank=1)}, marks),
        "each epoch skips what was trained on": once.judge_skipped("train epoch 2", 10),
    }.items():
        yield Situation("NotReadOnce", title, lambda _, verdict=verdict: verdict, adapters=able("NotReadOnce"))
    held = {
        "a weight is changed on one of four ranks": [("5e", "a1")] * 2 + [("5e", "b0"), ("5e", "a1")],
        "a weight is changed on one of two ranks": [("5e", "a1"), ("5e", "b0")],
    }
    for title, digests in held.items():
        yield Situation(
            "WeightsDiffer",
            title,
            lambda _, digests=digests: weights.judge_weights(20, dict(enumerate(digests)), ["layers.3.weight"]),
            adapters=able("WeightsDiffer"),
        )
    yield Situation(
        "WeightsDiffer",
        "no_sync() is around the last micro-batch of a step",
        lambda _: weights.judge_weights(2, {0: ["a1"], 1: ["b0"]}, ["layers.3.weight"], unaveraged=1),
        adapters=["torch", "accelerate", "transformers", "fabric"],
    )


def models() -> Iterator[Situation]:
    """Models that are not the same on all ranks that average their gradients."""
    whole = [(256 if part else 16, "(16, 16) torch.float32", True) for _ in range(4) for part in range(2)]
    frozen = [(numbers, form, number < 6) for number, (numbers, form, _) in enumerate(whole)]
    half = [(numbers, form.replace("float32", "bfloat16"), needs) for numbers, form, needs in whole]
    cases = {"a rank has frozen a layer after wrapping": frozen, "a rank has another dtype": half}
    for title, odd in {**cases, "a rank has no head": whole[:-2]}.items():
        held = {rank: SharedModel.of_ranks(range(4), odd if rank == 2 else whole) for rank in range(4)}
        yield Situation("PlanMismatch", title, lambda _, held=held: judge_models(held))


def held() -> Iterator[Situation]:
    """Datasets that samplers deal out, and that are not the same on all ranks."""
    able = [adapter for adapter in ALL if "SplitLeak" in MESSAGES[adapter].kinds]
    plans = {rank: {"dataset_rows": 90112 if rank == 2 else 90000} for rank in range(4)}
    yield Situation("PlanMismatch", "a host has an old file", lambda _: judge_plans(plans), adapters=able)


def leaks() -> Iterator[Situation]:
    """Splits of one dataset, with a seed of each rank."""
    able = [adapter for adapter in ALL if "SplitLeak" in MESSAGES[adapter].kinds]
    samples = {
        rank: splits.SplitSample.of_places("", 4, set(range(2048)) - evaluated, evaluated)
        for rank, evaluated in enumerate([{6, 8, 85}, {7, 9, 11}])
    }
    yield Situation("SplitLeak", "a random split without a seed", lambda _: splits.judge_splits(samples), adapters=able)


def dealt() -> Iterator[Situation]:
    """Streams that a framework deals out, in the words of that framework."""
    dealers = {"accelerate": "Accelerate", "transformers": "Accelerate", "lightning": _WRAPPER, "fabric": _WRAPPER}
    share = {"shares": 2, "said_by": "split_dataset_by_node"}
    streaming = {"shares": 2, "said_by": "StreamingDataset"}

    def digests(*numbers: int) -> str:
        return "".join(f"{number:08x}" for number in numbers)

    def streams(adapter: str, *facts: Mapping[str, Any]) -> Verdict | None:
        dealer = dealers.get(adapter, "DistributedSampler")
        return judge_streams(EPOCH, {rank: StreamFacts(dealer, len(facts), **each) for rank, each in enumerate(facts)})

    prepared, wrapped = ["accelerate", "transformers"], list(dealers)
    begins = [{"prints": digests(*range(first, first + 12))} for first in (0, 100)]
    indices = [{**begin, "sampler": True, "length": 48, "whole": 96} for begin in begins]
    rows = [{"contents": digests(first, first + 1), "length": 48, "whole": 96} for first in (0, 100)]
    shuffled = [{**each, "whole": 48} for each in rows]
    seeds = [{"seed": digests(seed)} for seed in (7, 7, 7, 8)]
    filtered = [{**begins[rank], "sampler": True, "shuffled": True, "length": 96 - rank} for rank in range(2)]
    overlapping = [{"prints": digests(*range(first, first + 12))} for first in (0, 4)]
    cases: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
        ("DoubleSharded", "a share by split_dataset_by_node", [share, share], prepared),
        ("DoubleSharded", "a share, read by rank 0 for all", [{**share, "first_only": True}] * 2, prepared),
        ("DoubleSharded", "a StreamingDataset", [streaming] * 2, prepared),
        (
            "DoubleSharded",
            "a StreamingDataset, dispatched",
            [{**streaming, "first_only": True}] * 2,
            prepared,
        ),
        ("DoubleSharded", "a rank in the sampler", indices, wrapped),
        (
            "DoubleSharded",
            "rows of each rank's own",
            rows,
            [adapter for adapter in ALL if "DoubleSharded" in MESSAGES[adapter].kinds],
        ),
        ("StreamsDiffer", "a shuffle with other seeds", seeds, prepared),
        ("StreamsDiffer", "another order", overlapping, prepared),
        ("StreamsDiffer", "datasets of other lengths, shuffled", filtered, wrapped),
        (
            "StreamsDiffer",
            "rows in another order",
            shuffled,
            [adapter for adapter in ALL if "StreamsDiffer" in MESSAGES[adapter].kinds],
        ),
    ]
    for kind, title, facts, adapters in cases:
        yield Situation(
            kind,
            title,
            lambda adapter, facts=facts: streams(adapter, *facts),
            adapters=adapters,
        )


_WRAPPER = "Lightning's DistributedSamplerWrapper"


RESUME_RECORD = ResumeRecord(
    epoch=1,
    batches=3,
    stepped=3,
    left=3,
    steps=9,
    dp_rank=0,
    dp_degree=2,
    batch_size=8,
    accumulation=1,
    schedule=ScheduleState((0.085,), (0.1,), (9,)),
    start_rates=((0.01,), (0.04,)),
    prints=("5e", "a1"),
    informative=True,
    last="c4",
    order=(1, 1, 96, 0),
)
"""What a rank has kept in a checkpoint in the middle of an epoch."""


def resumes() -> Iterator[Situation]:
    able = [adapter for adapter in ALL if "ResumeMismatch" in MESSAGES[adapter].kinds]
    record = RESUME_RECORD
    plan = FitPlan(batch_size=8, dp_degree=2)
    exact = resume.Restored(exact=True)
    begun_again = ScheduleState((0.01,), (0.1,), (0,)), ScheduleState((0.04,), (0.1,), (1,))
    changed = [ScheduleState((0.05,), (0.1,), (9,))] * 2
    found: dict[str, Verdict | None] = {
        "the epoch begins again": resume.judge_resumed_data(record, resume.Observed(("5e", "a1"), True, 1), 1),
        "one batch too few is skipped": resume.judge_resumed_data(record, resume.Observed(("c4", "d5"), True, 1), 1),
        "the framework restores another batch": resume.judge_resumed_position(record, plan, 1, 5, exact),
        "the framework restores another epoch": resume.judge_resumed_position(record, plan, 3, 0, exact),
        "there are more ranks": resume.judge_resumed_position(record, FitPlan(batch_size=8, dp_degree=4), 1, 3, exact),
        "the steps are not restored": resume.judge_resumed_steps(record, resume.Restored(steps=0)),
        "the sampler's epoch is not set": resume.judge_resumed_order(record, (0, 2, 96, 0)),
        "the epoch goes on in another order": resume.judge_resumed_rows(record, 3),
        "the sampler has another seed": resume.judge_resumed_seed(record, (1, 1, 96, 5), 48),
        "the schedule begins again": resume.judge_resumed_rates(record, begun_again),
        "another learning rate": resume.judge_resumed_rates(record, changed),
        "the record is torn": resume.unreadable(KeyError("epoch")),
    }
    for title, verdict in found.items():
        yield Situation("ResumeMismatch", title, lambda _, verdict=verdict: verdict, adapters=able)


def shorts() -> Iterator[Situation]:
    """Runs that end by themselves too early."""
    able = [adapter for adapter in ALL if "ShortRun" in MESSAGES[adapter].kinds]
    ends = {
        "a loader that was restored at its end": short.EpochEnd(1, 0, 40, resumed=True, restored=True),
        "a dataset that is read only once": short.EpochEnd(1, 0, 40),
    }
    for title, end in ends.items():
        epochs = short.ShortEpochs()
        epochs.add(end)
        found = short.judge_run(epochs, steps=40, planned=80)
        yield Situation("ShortRun", title, lambda _, found=found: found, adapters=able)


def schedules() -> Iterator[Situation]:
    decay = Ending("zero", at=600, rate=0.0, peak=0.1, warmup=20)
    per_process = Horizon("LambdaLR", decay, Fraction(2), "once per process")

    def at_start(adapter: str) -> Verdict | None:
        return wrong_horizon(per_process, RunLength(600, processes=2), why=module_of(adapter).CALLS)

    def later(adapter: str) -> Verdict | None:
        return run_out(per_process, RunLength(), calls=600, span="train epoch 1", why=module_of(adapter).CALLS)

    yield Situation("WrongHorizon", "a schedule made in steps", at_start, adapters=["accelerate"])
    yield Situation("WrongHorizon", "a schedule that has ended before an epoch", later, adapters=["accelerate"])
    one_epoch = RunLength(1800, steps_per_epoch=600, epochs=3)
    accumulated = RunLength(150, steps_per_epoch=50, epochs=3, gradient_accumulation_steps=4)
    milestones = Ending("minimum", at=80, rate=1e-4, peak=0.1, stepwise=True)
    whole = Ending("zero", at=1800, rate=0.0, peak=0.1)
    found = {
        "a schedule of one epoch": (Horizon("LambdaLR", decay), one_epoch),
        "a schedule of batches": (Horizon("OneCycleLR", Ending("error", 600, 1e-6, 0.1)), accumulated),
        "a schedule of epochs": (Horizon("MultiStepLR", milestones), RunLength(9000, steps_per_epoch=100, epochs=90)),
        "a schedule of steps, stepped once per epoch": (
            Horizon("CosineAnnealingLR", whole, Fraction(1, 600)),
            one_epoch,
        ),
        "a rate that vanishes": (Horizon("ExponentialLR", Ending("vanished", 132, 1e-7, 0.1)), one_epoch),
        "a rate that rises again": (Horizon("CosineAnnealingLR", replace(decay, rises=True)), one_epoch),
        "an error": (Horizon("OneCycleLR", Ending("error", 600, 1e-6, 0.1)), one_epoch),
        "a warm-up that is longer than the run": (
            Horizon("LinearLR", Ending("full", 5000, 0.1, 0.1, warmup=5000)),
            one_epoch,
        ),
        "a schedule that a resumed run has not restored": (Horizon("LambdaLR", whole, before=(600, 0)), one_epoch),
        "a schedule of steps, stepped after every batch": (
            Horizon("LambdaLR", replace(decay, at=150), Fraction(4), "once per batch"),
            accumulated,
        ),
    }
    able = [adapter for adapter in ALL if "WrongHorizon" in MESSAGES[adapter].kinds and adapter != "torchtitan"]
    for title, (horizon, run) in found.items():
        yield Situation(
            "WrongHorizon",
            title,
            lambda adapter, horizon=horizon, run=run: wrong_horizon(horizon, run, stepping=MESSAGES[adapter].stepping),
            adapters=able,
        )
    job = torchtitan_toml.read({"training": {"steps": 100}, "lr_scheduler": {"warmup_steps": 10, "total_steps": 50}})
    yield Situation(
        "WrongHorizon",
        "a schedule that is shorter than the run",
        lambda _: wrong_horizons(job, 4)[0],
        adapters=["torchtitan"],
    )


def processes() -> Iterator[Situation]:
    def not_distributed(_: str) -> Verdict | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            patch.setenv("RANK", "0")
            process = import_module("countoff._accelerate.process")
            patch.setattr(process, "warned", set())
            return process.not_distributed(SimpleNamespace(num_processes=1))

    able = [adapter for adapter in ALL if "NotDistributed" in MESSAGES[adapter].kinds]
    yield Situation("NotDistributed", "torchrun on CPUs without a flag", not_distributed, adapters=able)
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        accelerator_config=SimpleNamespace(split_batches=True),
    )
    yield Situation(
        "WrongTotal",
        "split_batches on 2 processes",
        lambda _: import_module("countoff._transformers.trainer").total_warning(args, 2),
        adapters=["transformers"],
    )
    yield Situation(
        "WrongTotal",
        "each batch is stepped",
        lambda _: judge_steps(EPOCH, 120, 4, batches=120, passes=120),
        adapters=["accelerate"],
    )
    yield Situation(
        "WrongTotal",
        "each part of the last batch is stepped",
        lambda _: judge_steps(EPOCH, 129, 10, batches=120, passes=1200),
        adapters=["accelerate"],
    )


def others() -> Iterator[Situation]:
    def missing(adapter: str) -> None:
        print_warning(State(0, 2, Settings(), MESSAGES[adapter].remedies), late.goes_on_without([1]))

    found = judge_versions({0: {"torch": "2.7.0"}, 1: {"torch": "2.8.0"}, 2: {"torch": "2.7.0"}})
    yield Situation("VersionMismatch", "another torch on one host", lambda _: found)
    yield from hosts_differ()
    weights = judge_settings({rank: PlanCheck(5 * rank).report(FitStart(FitPlan(), {}), 500) for rank in range(2)})
    yield Situation("PlanMismatch", "weights_every is set on one host", lambda _: weights)
    yield Situation("LateRank", "a rank does not come to the roll call", missing)


def hosts_differ() -> Iterator[Situation]:
    """Hosts that do not run the same, of three with one rank each."""

    def told(patch: pytest.MonkeyPatch, rank: int, variables: Mapping[str, str], **facts: Any) -> dict[str, Any]:
        for group in software.VARIABLES.values():
            for each in group:
                patch.delenv(each.name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(software, "libraries", lambda: {"torch": "2.7.0", "NCCL": facts.get("nccl", "2.27.3")})
        return {**versions.record_of(), "name": f"node-{rank}"}

    def judged(variables: Mapping[str, str], facts: Mapping[str, str]) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            records = {rank: told(patch, rank, {}) for rank in range(2)}
            records[2] = told(patch, 2, variables, **facts)
        return next(versions.judge_hosts(records))

    cases: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
        "a host has another NCCL": ({}, {"nccl": "2.26.2"}),
        "a host has another variable": ({"NCCL_ALGO": "Ring"}, {}),
    }
    for title, case in cases.items():
        yield Situation("VersionMismatch", title, lambda _, case=case: judged(*case))


SITUATIONS: Sequence[Situation] = [
    *plans(),
    *unevens(),
    *steps(),
    *rank_maps(),
    *losses(),
    *stalls(),
    *lengths(),
    *evens(),
    *data(),
    *resumes(),
    *shorts(),
    *models(),
    *held(),
    *leaks(),
    *schedules(),
    *processes(),
    *others(),
]
