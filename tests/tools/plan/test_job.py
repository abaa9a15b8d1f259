"""Runs on a number of ranks, against enumerations of what the ranks read, and refused where they do not divide."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.arithmetic.samples import resumed_batches
from countoff.plan.job import Job, JobError, RunPlan
from countoff.plan.ramp import Ramp, ramped_steps
from countoff.plan.schedules import ConfiguredSchedule

DIMS = ("dp", "tp")


def job(**numbers: object) -> Job:
    return Job("", DIMS, (-1, 1), ("dp",), **numbers)  # pyright: ignore[reportArgumentType]


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
    st.none() | st.integers(1, 40),
)
def test_a_run_over_a_dataset_matches_an_enumeration(
    dp: int, tp: int, size: int, batch_size: int, accumulation: int, drop_last: bool, epochs: int, steps: int | None
) -> None:
    """The plan of a run over a dataset has the numbers of an enumeration of all batches of all ranks."""
    order = list(range(size))
    order += [order[place % size] for place in range(-size % dp)]
    shares = [order[dp_rank::dp] for dp_rank in range(dp)]
    cut = [
        [
            batch
            for batch in (share[at : at + batch_size] for at in range(0, len(share), batch_size))
            if len(batch) == batch_size or not drop_last
        ]
        for share in shares
    ]
    read, taken = 0, 0
    for _epoch in range(max(epochs, 1)):
        for number, batches in enumerate(zip(*cut, strict=True), start=1):
            if taken == steps:
                break
            read += sum(map(len, batches))
            taken += number % accumulation == 0 or number == len(cut[0])
    described = Job(
        "",
        DIMS,
        (dp, tp),
        ("dp",),
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        dataset_size=size,
        sequence_length=7,
        drop_last=drop_last,
        epochs=max(epochs, 1),
        steps=steps,
    )
    plan = RunPlan.of(described, world_size=dp * tp)
    assert plan.batches.total_steps == taken
    assert plan.batches.batches_per_epoch == len(cut[0])
    assert plan.batches.total_samples == read
    assert plan.batches.total_tokens == read * 7
    assert plan.batches.samples_per_rank == (sum(map(len, cut[0])), sum(map(len, cut[-1])))
    assert plan.batches.global_batch_size == batch_size * accumulation * dp


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_two_of_the_three_batch_numbers_give_the_third(
    size: int, accumulation: int, dp: int, micro: int, inside: bool, with_size: bool
) -> None:
    total = size * accumulation * dp * (1 if inside else micro)
    known = {"batch_size": size} if with_size else {"gradient_accumulation_steps": accumulation}
    plan = RunPlan.of(
        job(global_batch_size=total, pipeline_microbatches=micro, microbatches_inside=inside, **known), world_size=dp
    )
    assert (plan.batch_size, plan.gradient_accumulation_steps) == (size, accumulation)
    assert plan.batches.global_batch_size == total


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_a_global_batch_that_does_not_divide_is_refused(total: int, size: int, dp: int) -> None:
    """The error names the nearest global batches that divide."""
    described = job(global_batch_size=total, batch_size=size)
    if total % (size * dp) == 0:
        assert RunPlan.of(described, world_size=dp).gradient_accumulation_steps == total // (size * dp)
        return
    with pytest.raises(JobError, match="global_batch_size") as refused:
        RunPlan.of(described, world_size=dp)
    below = total // (size * dp) * size * dp
    assert f"{below or size * dp}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_identity_of_a_step_is_a_product() -> None:
    plan = RunPlan.of(job(batch_size=2, sequence_length=2048), world_size=4)
    assert plan.identity == "2 sequences × 2,048 tokens × 4 data ranks × 1 accumulation = 16,384 tokens per step"


def test_ranks_that_share_their_data_add_no_tokens() -> None:
    plan = RunPlan.of(Job("", DIMS, (-1, 2), ("dp",), batch_size=2, sequence_length=2048), world_size=4)
    assert plan.batches.tokens_per_step == 8192


@pytest.mark.parametrize(("inside", "tokens"), [(True, 65_536), (False, 262_144)])
def test_pipeline_micro_batches_cut_a_batch_or_multiply_it(inside: bool, tokens: int) -> None:
    described = job(batch_size=8, sequence_length=2048, pipeline_microbatches=4, microbatches_inside=inside)
    plan = RunPlan.of(described, world_size=4)
    assert plan.batches.tokens_per_step == tokens
    assert ("4 pipeline micro-batches" in plan.identity) == (not inside)


def test_an_error_about_tokens_counts_in_tokens() -> None:
    described = job(tokens_per_micro_batch=4096, tokens_per_step=100_000, microbatches_inside=False)
    with pytest.raises(JobError, match=r"= 32,768 tokens: 98,304 or 131,072 would do"):
        RunPlan.of(described, world_size=8)


def test_three_batch_numbers_that_disagree_are_refused() -> None:
    with pytest.raises(JobError, match=r"64 is not batch_size 4 × gradient_accumulation_steps 2 × 4 data ranks = 32"):
        RunPlan.of(job(batch_size=4, gradient_accumulation_steps=2, global_batch_size=64), world_size=4)


def test_what_is_not_known_stays_unknown() -> None:
    plan = RunPlan.of(job(sequence_length=8), world_size=4)
    assert (plan.batches.tokens_per_step, plan.batches.total_tokens, plan.batches.total_samples) == (None, None, None)
    assert plan.identity == "the batch size is not known: give --batch-size"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"steps": True}, "steps must be"),
        ({"pipeline_microbatches": 0}, "pipeline_microbatches must be"),
        ({"epochs": 0}, "epochs must be a number above 0, got 0"),
        ({"epochs": True}, "epochs must be"),
    ],
)
def test_a_number_outside_its_domain_is_refused(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**numbers)


def test_a_horizon_that_is_a_fraction_has_at_least_one_step() -> None:
    schedule = ConfiguredSchedule(horizon_part=0.4)
    assert [schedule.in_run(steps).at for steps in (1, 100)] == [1, 40]


def test_units_before_the_full_batch_take_more_steps() -> None:
    schedule = ConfiguredSchedule(warmup=100, horizon=1600, per_step=64, growth=((16, 10), (32, 5)))
    ending = schedule.in_run(50)
    assert (ending.warmup, ending.at) == (7, 10 + 5 + 20)


def test_a_refilled_dim_takes_the_ranks_left_over() -> None:
    """The dim that a framework changes takes the ranks that the other dims leave over."""
    described = Job("lingua", ("dp_replicate", "tp"), (3, 2), ("dp_replicate",), refilled_dim="dp_replicate")
    sizes = [described.rank_map(world_size).sizes for world_size in (6, 8, 2)]
    assert sizes == [(3, 2), (4, 2), (1, 2)]
    with pytest.raises(JobError, match="does not divide world_size 7"):
        described.rank_map(7)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 300))
def test_a_ramp_matches_a_loop_over_its_steps(start: int, increment: int, increments: int, samples: int) -> None:
    ramp = Ramp(start=start, increment=increment, samples=samples, global_batch_size=start + increment * increments)
    taken: list[int] = []
    seen = 0
    while True:
        # Megatron's formula, with its division of floats made exact.
        batch = ramp.global_batch_size
        if seen <= samples and increments:
            batch = start + int(seen * increments / samples) * increment
        if batch >= ramp.global_batch_size:
            break
        taken.append(batch)
        seen += batch
    assert [batch for batch, steps in ramp.pieces() for _ in range(steps)] == taken


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 5, 100, 32), "a ramp from 8 in increments of 5 does not reach 32"),
        ((8, 8, 100, 4), "does not reach 4"),
        ((0, 8, 100, 32), "start must be an integer of at least 1"),
    ],
)
def test_a_ramp_that_misses_the_full_batch_is_refused(numbers: tuple[int, int, int, int], message: str) -> None:
    start, increment, samples, total = numbers
    with pytest.raises(ValueError, match=message):
        Ramp(start=start, increment=increment, samples=samples, global_batch_size=total)


def test_a_ramp_that_does_not_divide_is_refused() -> None:
    """A ramp with a global batch that does not divide is refused, not rounded."""
    with pytest.raises(ValueError, match="the ramp's global batch 24 is no multiple of 16"):
        Ramp(start=16, increment=8, samples=1000, global_batch_size=32).pieces(divisor=16)


@given(st.integers(0, 300), st.integers(1, 5), st.integers(1, 5))
def test_a_run_resumes_only_between_two_batches(samples: int, batch_size: int, dp_degree: int) -> None:
    read = [list(range(start, start + batch_size * dp_degree)) for start in range(0, 300, batch_size * dp_degree)]
    done = [number for number in range(len(read) + 1) if sum(map(len, read[:number])) == samples]
    if done:
        assert resumed_batches(samples, batch_size=batch_size, dp_degree=dp_degree) == done[0]
    else:
        with pytest.raises(ValueError, match="resume after "):
            resumed_batches(samples, batch_size=batch_size, dp_degree=dp_degree)


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 3),
    st.none() | st.integers(1, 30),
)
def test_a_run_over_uneven_shares_matches_an_enumeration(
    dp: int, size: int, batch_size: int, accumulation: int, drop_last: bool, epochs: int, steps: int | None
) -> None:
    """In a run over uneven shares, the shortest share ends each epoch for all ranks."""
    shares = [list(range(size))[dp_rank::dp] for dp_rank in range(dp)]
    cut = [
        [
            batch
            for batch in (share[at : at + batch_size] for at in range(0, len(share), batch_size))
            if len(batch) == batch_size or not drop_last
        ]
        for share in shares
    ]
    lengths = {len(batches) for batches in cut}
    fewest = min(lengths)
    taken, read = 0, [0] * dp
    epoch: list[set[int]] = []
    for _epoch in range(epochs):
        epoch.append(set())
        for number in range(1, fewest + 1):
            if taken == steps:
                break
            for dp_rank, batches in enumerate(cut):
                read[dp_rank] += len(batches[number - 1])
                epoch[-1] |= set(batches[number - 1])
            taken += number % accumulation == 0 or number == fewest
    described = Job(
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        dataset_size=size,
        drop_last=drop_last,
        strided=True,
        epochs=epochs,
        steps=steps,
    )
    plan = RunPlan.of(described, world_size=dp).batches
    assert (plan.total_steps, plan.batches_per_epoch, plan.total_samples) == (taken, fewest, sum(read))
    assert plan.uneven_batches == (None if len(lengths) == 1 else (fewest, max(lengths)))
    shortest = [sum(map(len, batches[:fewest])) for batches in cut]
    assert plan.samples_per_rank == (min(shortest), max(shortest))
    assert (plan.samples_per_epoch, plan.samples_repeated) == (sum(shortest), 0)
    assert plan.samples_dropped == size - sum(shortest)
    if steps is None:
        assert len(epoch[0]) == plan.samples_unique


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 200), st.integers(1, 3), st.integers(1, 60)
)
def test_a_run_with_a_ramp_matches_a_loop(
    start: int, increment: int, increments: int, samples: int, unit: int, steps: int
) -> None:
    """The plan of a run that ramps up has the batches of a loop over its steps."""
    full = (start + increment * increments) * unit
    plan = RunPlan.of(Job(batch_size=1, global_batch_size=full, steps=steps), world_size=unit).batches
    pieces = ramped_steps(plan, start=start * unit, increment=increment * unit, samples=samples)
    batches: list[int] = []
    for _step in range(steps):
        seen, batch = sum(batches), full
        if seen <= samples and increments:
            batch = min(start + int(seen * increments / samples) * increment, start + increment * increments) * unit
        batches.append(batch)
    assert [batch for batch, count in pieces for _ in range(count)] == batches
    assert all(count for _, count in pieces)


def test_a_ramp_over_data_that_ends_is_refused() -> None:
    plan = RunPlan.of(Job(batch_size=2, global_batch_size=32, dataset_size=100, epochs=1), world_size=4).batches
    with pytest.raises(ValueError, match="a ramp is counted in steps over data without an end"):
        ramped_steps(plan, start=8, increment=8, samples=100)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 3), st.booleans(), st.data())
def test_a_position_is_the_samples_that_ranks_have_read(
    dp: int, other: int, size: int, batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    """A position in samples is what all ranks have read, and a run resumes from it between two batches."""
    order = list(range(size))
    order += [order[place % size] for place in range(-size % dp)]
    batches = [
        [share[at : at + batch_size] for at in range(0, len(share), batch_size)]
        for share in (order[dp_rank::dp] for dp_rank in range(dp))
    ]
    kept = [[batch for batch in mine if len(batch) == batch_size or not drop_last] for mine in batches]
    described = Job(batch_size=batch_size, dataset_size=size, drop_last=drop_last, epochs=3)
    plan = RunPlan.of(described, world_size=dp).batches
    length = len(kept[0])
    within = data.draw(st.integers(0, length))
    seen = sum(len(batch) for mine in kept for batch in mine[:within])
    assert plan.resumed_batches(seen) == within
    # On another number of data ranks, an endless stream can resume only between two batches.
    done = data.draw(st.integers(0, 3 * length))
    samples = done * batch_size * dp
    endless = RunPlan.of(Job(batch_size=batch_size), world_size=other).batches
    if done * dp % other:
        with pytest.raises(ValueError, match="resume after"):
            endless.resumed_batches(samples)
    else:
        assert endless.resumed_batches(samples) == done * dp // other


def test_a_position_beyond_the_epoch_is_refused() -> None:
    plan = RunPlan.of(Job(batch_size=4, dataset_size=30, epochs=2), world_size=2).batches
    assert plan.resumed_batches(30) == 4
    with pytest.raises(ValueError, match="an epoch has 30 samples, got 31: count samples from its start"):
        plan.resumed_batches(31)


@pytest.mark.parametrize(
    "ask",
    [
        lambda plan: plan.resumed_batches(8),
        lambda plan: ramped_steps(plan, start=1, increment=1, samples=1),
    ],
)
def test_without_a_batch_size_there_is_no_guess(ask: Callable[[BatchPlan], object]) -> None:
    with pytest.raises(ValueError, match="without the batch size"):
        ask(RunPlan.of(Job(), world_size=4).batches)
