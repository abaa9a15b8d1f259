"""The whole protocol in one process: 2 to 64 simulated ranks in random orders of events, against a model of them.

Ranks that do the same never get a verdict. If some ranks do something else, all ranks get the same verdict, which
names ranks that really differ. The environment variable COUNTOFF_TEST_EXAMPLES multiplies the number of examples.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from countoff.core import FitPlan
from tests.simulator import Epoch, Job, Program, Rank, play, verdict_with_table

seeds = st.integers(0, 2**32 - 1)
_TIMES = int(os.environ.get("COUNTOFF_TEST_EXAMPLES", "1"))


def examples(number: int) -> settings:
    return settings(
        max_examples=number * _TIMES,
        derandomize=_TIMES == 1,  # without the variable, every run has the same examples
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


world_sizes = st.sampled_from([2, 2, 2, 3, 3, 4, 5, 8, 16, 64])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """What all ranks of a healthy job do."""
    every, last = draw(st.integers(1, 3)), draw(st.booleans())
    evaluate_after = draw(st.sets(st.integers(0, 6), max_size=3))
    loaders = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple) | st.integers(1, 4).map(lambda n: (n,))
    )
    spare = draw(st.sampled_from([0, 0, 1, 3]))
    epochs: list[Epoch] = []
    for batches in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
        steps = frozenset(batch for batch in range(1, batches + 1) if batch % every == 0 or (last and batch == batches))
        evaluations = {batch: loaders for batch in evaluate_after if batch <= batches}
        epochs.append(Epoch(batches, steps, evaluations, spare))
    position = draw(st.integers(0, epochs[0].batches))
    epochs[0] = dataclasses.replace(epochs[0], position=position)
    return Program(
        tuple(epochs),
        plan=FitPlan(batches_per_epoch=epochs[0].batches, batch_size=8, position=[position]),
        sanity=draw(st.sampled_from([(), loaders])),
        eval_spare=draw(st.sampled_from([0, 0, 2])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs whose ranks agree where they must; how far each rank fetches ahead and when it warns may differ."""
    program = draw(programs())
    ranks = draw(world_sizes)
    aheads = draw(st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=3))
    impatient = draw(st.sampled_from([False, False, True]))
    warns = draw(st.frozensets(st.integers(1, 9), max_size=2))
    own = [
        dataclasses.replace(
            program,
            ahead=aheads[rank % len(aheads)],
            impatient=impatient and rank % 2 == 0,
            warns=warns if rank % 3 == 1 else frozenset(),
        )
        for rank in range(ranks)
    ]
    return Job(tuple(own), synced=draw(st.booleans()), tick_batches=draw(st.integers(1, 3)))


@st.composite
def legitimately_different(draw: st.DrawFn) -> Job:
    """Jobs whose ranks differ only where they may: in joined epochs, and in who evaluates."""
    job = draw(jobs())
    everybody, epochs = len(job.programs), len(job.programs[0].epochs)
    joined = draw(st.frozensets(st.integers(0, epochs - 1)))
    eval_ranks = draw(st.none() | st.lists(st.integers(0, everybody - 1), min_size=1, unique=True).map(tuple))
    own: list[Program] = []
    for rank, program in enumerate(job.programs):
        shares = [
            dataclasses.replace(epoch, joined=True, batches=epoch.batches + rank % 3) if number in joined else epoch
            for number, epoch in enumerate(program.epochs)
        ]
        evaluates = eval_ranks is None or rank in eval_ranks
        own.append(dataclasses.replace(program, epochs=tuple(shares), evaluates=evaluates))
    return dataclasses.replace(job, programs=tuple(own), uneven_eval="raise" if eval_ranks is None else "off")


@st.composite
def read_by_a_thread(draw: st.DrawFn) -> Job:
    """Jobs in which a thread of each rank reads the loader, and another one applies the steps, at a pace of its own."""
    job = draw(jobs())
    programs = [dataclasses.replace(program, reader=draw(seeds), ahead=0) for program in job.programs]
    return dataclasses.replace(job, programs=tuple(programs))


@dataclass(frozen=True)
class Fault:
    """A job in which some ranks differ from all others. The others are more, or as many in a job of two ranks."""

    job: Job
    odd: frozenset[int]


Change = Callable[[st.DrawFn, Job, Program], Program]


def change_epoch(draw: st.DrawFn, program: Program, **reason: Callable[[Epoch], Any]) -> Program:
    """The program with some attributes of one of its epochs changed."""
    number = draw(st.integers(0, len(program.epochs) - 1))
    epoch = program.epochs[number]
    changed = dataclasses.replace(epoch, **{name: make(epoch) for name, make in reason.items()})
    assume(changed != epoch)
    return dataclasses.replace(program, epochs=(*program.epochs[:number], changed, *program.epochs[number + 1 :]))


def other_length(draw: st.DrawFn, job: Job, program: Program) -> Program:
    more = draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))
    assume(more < 0 or not any(epoch.spare for epoch in program.epochs))  # a limit hides what a longer loader holds
    return change_epoch(
        draw, program, batches=lambda epoch: max(epoch.position, epoch.batches + more), spare=lambda _: 0
    )


def has_other_batches(fault: Fault) -> bool:
    both = zip(fault.job.programs[min(fault.odd)].epochs, healthy(fault).epochs, strict=True)
    return any(one.batches != other.batches for one, other in both)


def breaks(draw: st.DrawFn, job: Job, program: Program) -> Program:
    gone = draw(st.integers(1, 4))
    assume(all(epoch.batches - epoch.position > gone for epoch in program.epochs))
    return change_epoch(
        draw, program, batches=lambda epoch: epoch.batches - gone, spare=lambda epoch: epoch.spare + gone
    )


def other_evaluation(draw: st.DrawFn, job: Job, program: Program) -> Program:
    more = draw(st.sampled_from([-1, 1]))
    assume(more < 0 or not program.eval_spare)

    def uneven(epoch: Epoch) -> dict[int, tuple[int, ...]]:
        assume(owed(epoch))
        after = draw(st.sampled_from(sorted(owed(epoch))))
        first, *rest = epoch.evaluations[after]
        if rest and draw(st.booleans()):  # as many batches in all, but distributed differently
            rest[0] -= more
        return {**epoch.evaluations, after: (first + more, *rest)}

    return dataclasses.replace(
        change_epoch(draw, program, evaluations=uneven), eval_spare=0 if more < 0 else program.eval_spare
    )


def owed(epoch: Epoch) -> list[int]:
    """The batches after which this rank evaluates."""
    return [batch for batch in epoch.evaluations if batch == 0 or epoch.position < batch <= epoch.batches]


def skips(draw: st.DrawFn, job: Job, program: Program) -> Program:
    def skipped(epoch: Epoch) -> dict[int, tuple[int, ...]]:
        assume(owed(epoch))
        after = draw(st.sampled_from(sorted(owed(epoch))))
        return {batch: loaders for batch, loaders in epoch.evaluations.items() if batch != after}

    return change_epoch(draw, program, evaluations=skipped)


def evaluates_elsewhere(draw: st.DrawFn, job: Job, program: Program) -> Program:
    def moved(epoch: Epoch) -> dict[int, tuple[int, ...]]:
        places = {0, *range(epoch.position + 1, epoch.batches + 1)} - set(owed(epoch))
        assume(owed(epoch) and places)
        after, there = draw(st.sampled_from(sorted(owed(epoch)))), draw(st.sampled_from(sorted(places)))
        return {there if batch == after else batch: loaders for batch, loaders in epoch.evaluations.items()}

    return change_epoch(draw, program, evaluations=moved)


def taken(epoch: Epoch) -> list[int]:
    """The batches after which this rank applies a step."""
    return sorted(step for step in epoch.steps if epoch.position < step <= epoch.batches)


def misses_a_step(draw: st.DrawFn, job: Job, program: Program) -> Program:
    def missed(epoch: Epoch) -> frozenset[int]:
        assume(taken(epoch))
        return epoch.steps - {draw(st.sampled_from(taken(epoch)))}

    return change_epoch(draw, program, steps=missed)


def shifts_a_step(draw: st.DrawFn, job: Job, program: Program) -> Program:
    def shifted(epoch: Epoch) -> frozenset[int]:
        idle = sorted(set(range(epoch.position + 1, epoch.batches + 1)) - epoch.steps)
        assume(taken(epoch) and idle)
        return epoch.steps - {draw(st.sampled_from(taken(epoch)))} | {draw(st.sampled_from(idle))}

    return change_epoch(draw, program, steps=shifted)


def runs_an_extra_micro_batch(draw: st.DrawFn, job: Job, program: Program) -> Program:
    def extra(epoch: Epoch) -> frozenset[int]:
        assume(taken(epoch))
        return frozenset({draw(st.integers(epoch.position + 1, max(taken(epoch))))})

    return change_epoch(draw, program, extra=extra)


def resumes_elsewhere(draw: st.DrawFn, job: Job, program: Program) -> Program:
    first, *rest = program.epochs
    position = draw(st.integers(0, first.batches).filter(lambda position: position != first.position))
    epochs = (dataclasses.replace(first, position=position), *rest)
    return dataclasses.replace(program, epochs=epochs, plan=dataclasses.replace(program.plan, position=[position]))


def trains_other_epochs(draw: st.DrawFn, job: Job, program: Program) -> Program:
    less = len(program.epochs) > 1 and draw(st.booleans())
    last = dataclasses.replace(list(program.epochs)[-1], position=0)
    return dataclasses.replace(program, epochs=program.epochs[:-1] if less else (*program.epochs, last))


def other_rate(draw: st.DrawFn, job: Job, program: Program) -> Program:
    assume(any(epoch.position < batch <= epoch.batches for epoch in program.epochs for batch in epoch.steps))
    return dataclasses.replace(program, rate=draw(st.sampled_from([0.2, float("nan")])))


def other_batch_size(draw: st.DrawFn, job: Job, program: Program) -> Program:
    plan = dataclasses.replace(program.plan, batch_size=draw(st.sampled_from([4, 16])))
    return dataclasses.replace(program, plan=plan)


def train_batches(program: Program) -> int:
    """Number of batches at which `Program.ends` may lie, so that the other ranks start at least one more."""
    single = program.sanity if len(program.sanity) == 1 else ()
    number = sum(single)
    for epoch in program.epochs:
        number += epoch.batches - epoch.position
        number += sum(sum(epoch.evaluations[after]) for after in owed(epoch) if len(epoch.evaluations[after]) == 1)
    return number


def ends_early(reason: Literal["raise", "exit"]) -> Change:
    def ends(draw: st.DrawFn, job: Job, program: Program) -> Program:
        assume(train_batches(program))
        return dataclasses.replace(program, ends=(draw(st.integers(0, train_batches(program) - 1)), reason))

    return ends


@st.composite
def faults(draw: st.DrawFn, change: Change) -> Fault:
    """Jobs in which one rank, or a minority, does something that the others do not."""
    job = draw(jobs())
    everybody = len(job.programs)
    some = st.lists(st.integers(0, everybody - 1), min_size=1, max_size=max(1, (everybody - 1) // 2), unique=True)
    odd = frozenset(draw(st.integers(0, everybody - 1).map(lambda rank: [rank]) | some))
    changed = change(draw, job, job.programs[0])
    own = [
        dataclasses.replace(changed, ahead=program.ahead, impatient=program.impatient, warns=program.warns)
        if rank in odd
        else program
        for rank, program in enumerate(job.programs)
    ]
    return Fault(dataclasses.replace(job, programs=tuple(own)), odd)


def healthy(fault: Fault) -> Program:
    """What the ranks that do not differ do."""
    return fault.job.programs[min(set(range(len(fault.job.programs))) - fault.odd)]


FAULTS: dict[str, tuple[Change, set[str]]] = {
    # Different steps in the next epoch are a consequence, which a tick may report first.
    "other length": (other_length, {"UnevenBatches", "StepMismatch"}),
    "break": (breaks, {"UnevenBatches", "StepMismatch"}),
    "other evaluation": (other_evaluation, {"UnevenBatches"}),
    "skipped evaluation": (skips, {"UnevenBatches"}),
    "evaluation elsewhere": (evaluates_elsewhere, {"UnevenBatches"}),
    "missed step": (misses_a_step, {"StepMismatch"}),
    "shifted step": (shifts_a_step, {"StepMismatch"}),
    "resumed elsewhere": (resumes_elsewhere, {"PlanMismatch", "StepMismatch", "UnevenBatches"}),
    "other epochs": (trains_other_epochs, {"UnevenBatches"}),
    "other rate": (other_rate, {"LearningRateMismatch"}),
    "other batch size": (other_batch_size, {"PlanMismatch"}),
    "exception": (ends_early("raise"), {"LostRank"}),
    "sys.exit": (ends_early("exit"), {"LostRank"}),
}


def assert_silent(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.guard.verdict is rank.state.proposed is None
        assert rank.state.finished
        assert rank.over


@examples(40)
@given(jobs(), seeds)
def test_ranks_that_agree_never_get_a_verdict(job: Job, seed: int) -> None:
    ranks = play(job, seed)
    assert_silent(ranks)
    subjects = {notice.subject for notice in ranks[0].guard.notices}
    assert all({notice.subject for notice in rank.guard.notices} == subjects for rank in ranks)


@examples(40)
@given(legitimately_different(), seeds)
def test_legitimate_differences_never_get_a_verdict(job: Job, seed: int) -> None:
    """Ranks that differ only where they may, in joined epochs and in who evaluates, never get a verdict."""
    assert_silent(play(job, seed))


@examples(40)
@given(read_by_a_thread(), seeds)
def test_steps_of_another_thread_never_get_a_verdict(job: Job, seed: int) -> None:
    """How many steps are applied when a rank passes a sync point is a race; at the end of the fit, all are."""
    assert_silent(play(job, seed))


@pytest.mark.parametrize("change", [other_length, misses_a_step], ids=["length", "missed step"])
def test_ranks_that_differ_are_found_where_a_thread_reads_the_loader(change: Change) -> None:
    """Steps at the latest at the end of the fit. Where a pass was stopped, its thread may have been ahead."""

    @examples(15)
    @given(faults(change), seeds, seeds)
    def always(fault: Fault, seed: int, reader: int) -> None:
        programs = [
            dataclasses.replace(program, reader=reader + rank, ahead=0)
            for rank, program in enumerate(fault.job.programs)
        ]
        if change is other_length:  # a pass that was stopped is not compared
            stopped = any(epoch.spare for program in programs for epoch in program.epochs)
            assume(has_other_batches(fault) and not stopped)
        ranks = play(dataclasses.replace(fault.job, programs=tuple(programs)), seed)
        verdict = ranks[0].guard.verdict
        assert verdict is not None
        assert [rank.guard.verdict for rank in ranks] == [verdict] * len(ranks)
        assert verdict.kind in ("UnevenBatches", "StepMismatch")

    always()


@pytest.mark.parametrize("what", FAULTS)
def test_ranks_that_differ_are_always_found_and_named(what: str) -> None:
    change, kinds = FAULTS[what]

    @examples(25)
    @given(faults(change), seeds)
    def always(fault: Fault, seed: int) -> None:
        if what == "other length":
            assume(has_other_batches(fault))
        ranks = play(fault.job, seed)
        verdict = ranks[0].guard.verdict
        assert verdict is not None
        assert [rank.guard.verdict for rank in ranks] == [verdict] * len(ranks)
        assert verdict.kind in kinds
        found = verdict_with_table(ranks)
        named = set(found.ranks)
        assert named & fault.odd
        if len(ranks) == 2 and verdict.kind in ("UnevenBatches", "StepMismatch", "LearningRateMismatch"):
            assert found.standing != "out of step"  # of two ranks neither is the minority
        of_some = verdict.kind in ("LostRank", "PlanMismatch", "LearningRateMismatch")
        if len(ranks) > 2 and of_some and found.standing == "out of step":
            assert named <= fault.odd

    always()


def test_an_extra_micro_batch_ends_nothing_and_is_noted_once() -> None:
    """Every later tick and sync point differs too: each rank hears of it once, and goes on to the end."""

    @examples(25)
    @given(faults(runs_an_extra_micro_batch), seeds)
    def never(fault: Fault, seed: int) -> None:
        quiet = tuple(dataclasses.replace(program, warns=frozenset()) for program in fault.job.programs)
        ranks = play(dataclasses.replace(fault.job, programs=quiet), seed)
        assert_silent(ranks)
        (notice,) = ranks[0].guard.notices
        assert [rank.guard.notices for rank in ranks] == [(notice,)] * len(ranks)
        assert (notice.kind, notice.subject) == ("StepMismatch", "micro-batches")
        assert fault.odd & set(notice.ranks)

    never()


@pytest.mark.parametrize("tick_batches", [1, 2, 64])
def test_a_missed_step_after_an_extra_micro_batch_is_still_a_verdict(tick_batches: int) -> None:
    """Rank 1 runs a micro-batch more. Rank 2 misses a step later, and no other rank is ever alone on its side."""
    everything = frozenset(range(1, 5))

    def program(missed: int = 0, extra: int = 0) -> Program:
        odd = Epoch(4, everything - {missed}, extra=frozenset({extra} - {0}))
        return Program((odd, Epoch(4, everything)))

    programs = (program(), program(extra=1), program(missed=4), program())
    standings: set[str] = set()
    for seed in range(60):
        ranks = play(Job(programs, tick_batches=tick_batches), seed)
        verdict = ranks[0].guard.verdict
        assert verdict is not None
        assert (verdict.kind, verdict.subject) == ("StepMismatch", "")
        assert [rank.guard.verdict for rank in ranks] == [verdict] * len(ranks)
        found = verdict_with_table(ranks)
        assert 2 in found.ranks
        assert found.standing == "differ" or found.ranks == (2,)
        standings.add(found.standing)
    assert "out of step" in standings or tick_batches < 4  # of a tick there is no majority


def test_sync_points_after_a_proof_do_not_hide_the_cause() -> None:
    """A skipped step before the end of an evaluation is a consequence of the evaluation that began elsewhere."""

    def evaluating(after: int) -> Program:
        first = Epoch(1, frozenset({1}), {0: (2,), 1: (2,)})
        return Program((first, Epoch(2, frozenset({1, 2}), {0: (2,), after: (2,)})))

    job = Job((evaluating(1), evaluating(2)), tick_batches=1)
    kinds = {verdict.kind for seed in range(120) if (verdict := play(job, seed)[0].guard.verdict) is not None}
    assert kinds == {"UnevenBatches"}


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_different_epochs_are_not_compared(seed: int) -> None:
    """Where one rank skips an evaluation, the ranks' next epochs begin at sync points of the same index."""

    def program(evaluations: dict[int, tuple[int, ...]]) -> Program:
        short = Epoch(batches=1, steps=frozenset({1}))
        return Program((Epoch(batches=2, steps=frozenset({1, 2}), evaluations=evaluations), short, short))

    ranks = play(Job((program({}), program({2: (1,)})), tick_batches=1), seed)
    assert {rank.guard.verdict.kind for rank in ranks if rank.guard.verdict} == {"UnevenBatches"}


def test_a_limit_at_the_end_of_a_loader_has_no_side() -> None:
    """Ranks 0 and 2 stop after one batch of an evaluation and hold more; rank 1 has run out, and is always named."""

    def evaluating(last: int, spare: int) -> Program:
        epochs = tuple(Epoch(1, frozenset({1}), {0: (batches,)}) for batches in (1, last))
        return Program(epochs, eval_spare=spare, ahead=int(spare > 0))

    job = Job((evaluating(1, 2), evaluating(0, 0), evaluating(1, 2)), tick_batches=1)
    assert all(1 in verdict_with_table(play(job, seed)).ranks for seed in range(120))


@pytest.mark.parametrize(("policy", "notices"), [("warn", 1), ("allow", 0)])
def test_an_accepted_uneven_evaluation_ends_nothing(policy: Literal["warn", "allow"], notices: int) -> None:
    """An uneven evaluation that is no error ends nothing; `warn` notes it once on every rank, `allow` never."""

    @examples(12)
    @given(faults(other_evaluation), seeds)
    def never(fault: Fault, seed: int) -> None:
        quiet = tuple(dataclasses.replace(program, warns=frozenset()) for program in fault.job.programs)
        ranks = play(dataclasses.replace(fault.job, programs=quiet, uneven_eval=policy, synced=False), seed)
        assert_silent(ranks)
        assert [len(rank.guard.notices) for rank in ranks] == [notices] * len(ranks)
        for notice in itertools.chain.from_iterable(rank.guard.notices for rank in ranks):
            assert fault.odd & set(notice.ranks)

    never()
