"""The arithmetic of plans, against every row of the golden tables and enumerations of real index lists."""

import dataclasses
import itertools
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.batches import (
    batches_of_samples,
    distributed_samples_per_rank,
    limited_batches,
    size_for_length,
    strided_share,
)
from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts
from countoff.core.arithmetic.steps import batches_until_step, steps_in_epoch
from tests.golden_tables import Row, golden


def number(text: str) -> int | float:
    """A limit as the argument of the Trainer: 1 and 1.0 differ."""
    return float(text) if "." in text else int(text)


def distributed_indices(dataset_size: int, *, dp_degree: int, drop_last: bool) -> list[list[int]]:
    """The indices of every dp_rank, as in DistributedSampler: fill up or cut, then take turns."""
    order = list(range(dataset_size))
    if drop_last:
        order = order[: len(order) - len(order) % dp_degree]
    while len(order) % dp_degree:
        order.append(order[len(order) - dataset_size])
    return [order[dp_rank::dp_degree] for dp_rank in range(dp_degree)]


def cut(samples: list[int], *, batch_size: int, drop_last: bool) -> list[list[int]]:
    """The batches of one pass, made one by one."""
    batches = [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


def test_every_rank_of_torchs_distributed_sampler_is_reproduced() -> None:
    for row in golden("torch_distributed_sampler", rows=4154):
        size, world_size = int(row["dataset_size"]), int(row["world_size"])
        samples = distributed_samples_per_rank(size, dp_degree=world_size, drop_last=row["sampler_drop_last"] == "1")
        facts = LoaderFacts(
            reported_batches=int(row["len_dataloader"]),
            batch_size=int(row["batch_size"]),
            drop_last=row["loader_drop_last"] == "1",
            samples_per_rank=samples,
            dataset_size=size,
            sampling="distributed",
        )
        plan = BatchPlan.of(facts, dp_degree=world_size)
        assert samples == int(row["len_sampler"]), row
        assert plan.batches_per_epoch == int(row["batches"]), row
        assert plan.samples_per_epoch == int(row["samples"]) * world_size, row
        assert row["samples"] == row["distinct_samples"], row
        # The table counts the repeats of the samplers, before a loader drops any: as if no batch were ever short.
        sampled = BatchPlan.of(dataclasses.replace(facts, batch_size=1, reported_batches=None), dp_degree=world_size)
        assert sampled.samples_repeated == int(row["global_duplicates"]), row


def test_every_rank_of_a_strided_iterable_is_reproduced() -> None:
    """The samples of every rank are reproduced, with and without workers."""
    for row in golden("iterable_strided", rows=4915):
        world_size, workers = int(row["world_size"]), max(int(row["num_workers"]), 1)
        # Here the data is sharded among the workers first, then each worker's part among the ranks.
        streams = [strided_share(int(row["dataset_size"]), parts=workers, part=worker) for worker in range(workers)]
        shares = [strided_share(stream, parts=world_size, part=int(row["rank"])) for stream in streams]
        assert sum(shares) == int(row["samples"]), row


def lightning_samples(row: Row) -> tuple[int, int | None, Literal["distributed", "replicated", "unknown"]]:
    """Samples per rank, distinct samples, and how they are sharded, of a row of lightning_batches."""
    size, world_size = int(row["n"]), int(row["world"])
    if row["sampler"] == "off":
        return size, size, "replicated"
    if row["sampler"] == "weighted":
        return distributed_samples_per_rank(2 * size, dp_degree=world_size, drop_last=False), None, "unknown"
    drop_last = row["sampler"] == "user_dist_drop"
    return distributed_samples_per_rank(size, dp_degree=world_size, drop_last=drop_last), size, "distributed"


def lightning_facts(row: Row) -> LoaderFacts:
    samples, dataset_size, sampling = lightning_samples(row)
    batch_size, drop_last = int(row["batch_size"]), row["drop_last"] == "True"
    return LoaderFacts(
        reported_batches=batches_of_samples(samples, batch_size=batch_size, drop_last=drop_last),
        batch_size=batch_size,
        drop_last=drop_last,
        samples_per_rank=samples,
        dataset_size=dataset_size,
        sampling=sampling,
        gradient_accumulation_steps=int(row["accumulate_grad_batches"]),
        limit_batches=number(row["limit_train_batches"]),
        max_epochs=int(row["max_epochs"]),
        max_steps=int(row["max_steps"]),
    )


def test_every_map_style_run_of_lightning_is_reproduced() -> None:
    """Batches, steps and samples of every run of Lightning over a map-style dataset are reproduced."""
    ran = [row for row in golden("lightning_batches", rows=1602) if row["outcome"] == "ok"]
    assert len(ran) == 1421
    for row in ran:
        facts = lightning_facts(row)
        plan = BatchPlan.of(facts, dp_degree=int(row["world"]))
        assert plan.proven
        assert plan.wrong_length_factor is None
        assert plan.batches_per_epoch == plan.reported_batches_per_epoch == int(row["num_training_batches"]), row
        assert plan.total_steps == int(row["global_step_final"]), row
        assert plan.total_batches == int(row["micro_batches_per_rank"]), row
        # What rank 0 trained on: whole epochs, and the batches of one that max_steps ended.
        assert plan.samples_per_epoch is not None
        assert plan.total_batches is not None
        epochs, rest = divmod(plan.total_batches, plan.batches_per_epoch or 1)
        per_rank = plan.samples_per_epoch // plan.dp_degree
        assert epochs * per_rank + rest * int(row["batch_size"]) == int(row["samples_rank0"]), row


def test_every_fraction_that_lightning_refuses_is_refused() -> None:
    refused = [row for row in golden("lightning_batches", rows=1602) if row["outcome"] != "ok"]
    assert len(refused) == 181
    for row in refused:
        with pytest.raises(ValueError, match="limit_batches must leave at least 1 of"):
            BatchPlan.of(lightning_facts(row), dp_degree=int(row["world"]))


def iterable_facts(row: Row) -> LoaderFacts:
    return LoaderFacts(
        reported_batches=int(row["reported_len"]) if row["reported_len"] else None,
        batch_size=4,
        drop_last=False,
        samples_per_rank=None,
        gradient_accumulation_steps=int(row["accum"]),
        limit_batches=number(row["limit"]),
        max_epochs=int(row["max_epochs"]),
        max_steps=int(row["max_steps"]),
        known_batches=int(row["real_batches"]),
    )


def test_every_iterable_run_of_lightning_is_reproduced() -> None:
    """Runs of Lightning over iterables with a right, wrong or no length are reproduced."""
    ran = [row for row in golden("lightning_iterable", rows=283) if row["outcome"] == "ok"]
    assert len(ran) == 254
    for row in ran:
        plan = BatchPlan.of(iterable_facts(row), dp_degree=1)
        assert not plan.proven
        assert plan.reported_batches_per_epoch == (None if row["ntb"] == "inf" else int(row["ntb"])), row
        assert plan.total_steps == int(row["global_step"]), row
        assert plan.total_batches == int(row["micro"]), row


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    """As in Lightning, a limit that is a fraction is refused for a loader without a length."""
    refused = [row for row in golden("lightning_iterable", rows=283) if row["outcome"] != "ok"]
    assert len(refused) == 29
    for row in refused:
        with pytest.raises(ValueError, match=r"must be 1\.0 or an int for a loader without a length"):
            BatchPlan.of(iterable_facts(row), dp_degree=1)


sizes = st.integers(0, 60)
degrees = st.integers(1, 7)
batch_sizes = st.integers(1, 7)
steps_per_update = st.integers(1, 5)


@given(st.integers(1, 60), degrees, batch_sizes, st.booleans(), st.booleans(), st.none() | st.integers(0, 12))
def test_samples_match_real_index_lists(
    size: int, dp_degree: int, batch_size: int, sampler_drop: bool, loader_drop: bool, limit: int | None
) -> None:
    shares = distributed_indices(size, dp_degree=dp_degree, drop_last=sampler_drop)
    epochs = [cut(share, batch_size=batch_size, drop_last=loader_drop)[:limit] for share in shares]
    seen = [index for batches in epochs for batch in batches for index in batch]
    facts = LoaderFacts(
        reported_batches=None,
        batch_size=batch_size,
        drop_last=loader_drop,
        samples_per_rank=distributed_samples_per_rank(size, dp_degree=dp_degree, drop_last=sampler_drop),
        dataset_size=size,
        sampling="distributed",
        limit_batches=limit,
    )
    plan = BatchPlan.of(facts, dp_degree=dp_degree)
    assert {len(share) for share in shares} == {facts.samples_per_rank}
    assert {len(batches) for batches in epochs} == {plan.batches_per_epoch}
    assert plan.samples_per_epoch == len(seen)
    assert plan.samples_unique == len(set(seen))
    assert plan.samples_repeated == len(seen) - len(set(seen))
    assert plan.samples_dropped == len(set(range(size)) - set(seen))


@given(sizes, degrees, batch_sizes, st.booleans())
def test_samples_of_a_replicated_dataset_are_counted(
    size: int, dp_degree: int, batch_size: int, drop_last: bool
) -> None:
    """If every rank reads the whole dataset, different samples are counted only where they are certain."""
    batches = cut(list(range(size)), batch_size=batch_size, drop_last=drop_last)
    seen = [index for batch in batches for index in batch]
    facts = LoaderFacts(None, batch_size, drop_last, size, dataset_size=size, sampling="replicated")
    plan = BatchPlan.of(facts, dp_degree=dp_degree)
    assert plan.samples_per_epoch == len(seen) * dp_degree
    # Ranks may drop different samples, so their union is certain only if none drops any.
    certain = dp_degree == 1 or len(seen) == size
    assert plan.samples_unique == (len(set(seen)) if certain else None)


@given(st.integers(0, 30), steps_per_update, st.booleans(), st.integers(0, 4), st.none() | st.integers(0, 30))
def test_steps_and_batches_of_a_run_match_a_loop(
    batches: int, accumulate: int, partial_applied: bool, epochs: int, max_steps: int | None
) -> None:
    """Total steps and batches are those of a loop over epochs and batches."""
    trained, steps = 0, 0
    for _epoch, batch in itertools.product(range(epochs), range(1, batches + 1)):
        if steps == max_steps:
            break
        trained += 1
        steps += batch % accumulate == 0 or (batch == batches and partial_applied)
    facts = LoaderFacts(
        reported_batches=batches,
        batch_size=None,
        drop_last=False,
        samples_per_rank=None,
        known_batches=batches,
        gradient_accumulation_steps=accumulate,
        max_epochs=epochs,
        max_steps=max_steps,
        partial_step="applied" if partial_applied else "dropped",
    )
    plan = BatchPlan.of(facts, dp_degree=1)
    assert (plan.total_steps, plan.total_batches) == (steps, trained)


@given(st.integers(1, 30), steps_per_update, st.integers(0, 60))
def test_batches_until_a_step_match_a_loop(batches: int, accumulate: int, step: int) -> None:
    """The batches until a step are those of a loop without end."""
    trained, steps = 0, 0
    while steps < step:
        trained += 1
        place = (trained - 1) % batches + 1
        steps += place % accumulate == 0 or place == batches
    per_epoch = steps_in_epoch(batches, gradient_accumulation_steps=accumulate, partial_applied=True)
    assert trained == batches_until_step(
        step, batches_per_epoch=batches, steps_per_epoch=per_epoch, gradient_accumulation_steps=accumulate
    )


@given(st.integers(1, 400), st.integers(2, 9), batch_sizes, st.booleans(), st.booleans())
def test_the_length_of_the_whole_dataset_is_always_recognised(
    size: int, dp_degree: int, batch_size: int, sampler_drop: bool, loader_drop: bool
) -> None:
    all_batches = len(cut(list(range(size)), batch_size=batch_size, drop_last=loader_drop))
    share = distributed_indices(size, dp_degree=dp_degree, drop_last=sampler_drop)[0]
    mine = len(cut(share, batch_size=batch_size, drop_last=loader_drop))
    assert size_for_length(all_batches, true_batches=mine, dp_degree=dp_degree) == (all_batches > mine)


def facts(**changes: object) -> LoaderFacts:
    """Eight batches of four samples, reported as they are."""
    given: dict[str, object] = {"reported_batches": 8, "batch_size": 4, "drop_last": False, "samples_per_rank": 32}
    return LoaderFacts(**(given | changes))  # type: ignore[arg-type]


def test_a_length_of_all_ranks_is_found_with_its_factor() -> None:
    plan = BatchPlan.of(facts(reported_batches=128), dp_degree=16)
    assert (plan.wrong_length_factor, plan.size_taken_for_length) == (16.0, True)


def test_another_wrong_length_is_not_that_of_all_ranks() -> None:
    plan = BatchPlan.of(facts(reported_batches=20), dp_degree=16)
    assert (plan.wrong_length_factor, plan.size_taken_for_length) == (2.5, False)


def test_a_right_length_has_no_factor() -> None:
    plan = BatchPlan.of(facts(), dp_degree=16)
    assert (plan.wrong_length_factor, plan.size_taken_for_length) == (None, False)


def test_one_rank_cannot_report_the_length_of_all_ranks() -> None:
    assert not BatchPlan.of(facts(reported_batches=16), dp_degree=1).size_taken_for_length


def test_a_too_short_length_ends_the_epoch_only_as_a_cap() -> None:
    """A reported length that is too small ends the epoch only in a framework that stops at it."""
    capped = BatchPlan.of(facts(reported_batches=5), dp_degree=2)
    free = BatchPlan.of(facts(reported_batches=5, reported_is_cap=False), dp_degree=2)
    assert (capped.batches_per_epoch, free.batches_per_epoch) == (5, 8)
    assert capped.loader_batches == free.loader_batches == 8
    assert capped.samples_per_epoch == 40


def test_a_limit_holds_without_a_cap() -> None:
    """A limit holds also in a framework that does not stop at the reported length."""
    assert BatchPlan.of(facts(limit_batches=3, reported_is_cap=False), dp_degree=1).batches_per_epoch == 3
    assert BatchPlan.of(facts(limit_batches=0.5, reported_is_cap=False), dp_degree=1).batches_per_epoch == 4


def test_a_fraction_is_taken_of_the_reported_length() -> None:
    plan = BatchPlan.of(facts(reported_batches=16, limit_batches=0.5), dp_degree=2)
    assert (plan.batches_per_epoch, plan.reported_batches_per_epoch) == (8, 8)


@pytest.mark.parametrize(("partial_step", "steps"), [("applied", 3), ("at_reported_end", 2), ("dropped", 2)])
def test_a_too_long_length_loses_the_last_partial_step(partial_step: str, steps: int) -> None:
    """In Lightning, a reported length that is too large loses the last accumulation of an epoch."""
    changes = {"reported_batches": 16, "gradient_accumulation_steps": 3, "partial_step": partial_step}
    assert BatchPlan.of(facts(**changes), dp_degree=2).steps_per_epoch == steps


def test_an_iterable_has_no_true_length() -> None:
    """With an iterable dataset the plan has no batches, and gives the reason."""
    plan = BatchPlan.of(facts(samples_per_rank=None, max_epochs=2), dp_degree=2)
    assert (plan.batches_per_epoch, plan.steps_per_epoch, plan.total_steps, plan.total_batches) == (None,) * 4
    assert "samples per rank" in plan.unknown_because
    assert (plan.proven, plan.wrong_length_factor, plan.size_taken_for_length) == (False, None, False)


def test_a_custom_batch_sampler_has_no_true_length() -> None:
    """With a custom batch sampler the plan has no batches, and gives the reason."""
    plan = BatchPlan.of(facts(batch_size=None), dp_degree=2)
    assert (plan.batches_per_epoch, plan.global_batch_size, plan.proven) == (None, None, False)
    assert "batch size" in plan.unknown_because


def test_batches_of_a_past_epoch_are_used_but_no_proof() -> None:
    plan = BatchPlan.of(facts(samples_per_rank=None, known_batches=6), dp_degree=2)
    assert (plan.batches_per_epoch, plan.proven, plan.unknown_because) == (6, False, "")
    assert plan.samples_per_epoch is None


def test_the_arithmetic_wins_over_a_past_epoch() -> None:
    plan = BatchPlan.of(facts(known_batches=6), dp_degree=2)
    assert (plan.batches_per_epoch, plan.proven) == (8, True)


def test_samples_are_known_if_short_batches_are_dropped() -> None:
    """An iterable that drops short batches has a known number of samples."""
    plan = BatchPlan.of(facts(samples_per_rank=None, known_batches=6, drop_last=True), dp_degree=2)
    assert plan.samples_per_epoch == 48


def test_only_max_steps_ends_a_run_without_a_limit_on_epochs() -> None:
    unknown = {"samples_per_rank": None, "max_epochs": -1}
    assert BatchPlan.of(facts(**unknown, max_steps=7), dp_degree=1).total_steps == 7
    assert BatchPlan.of(facts(**unknown, max_steps=-1), dp_degree=1).total_steps is None
    assert BatchPlan.of(facts(max_epochs=None, max_steps=9), dp_degree=1).total_batches == 9
    assert BatchPlan.of(facts(max_epochs=None, max_steps=None), dp_degree=1).total_batches is None


def test_an_empty_loader_makes_no_steps() -> None:
    """An empty loader makes no steps, whatever max_steps is."""
    assert BatchPlan.of(facts(samples_per_rank=0, reported_batches=0, max_steps=5), dp_degree=1).total_steps == 0


def test_step_0_takes_no_batch() -> None:
    """No step takes no batch, also if the last batches of each epoch make no step."""
    counts = {"batches_per_epoch": 11, "steps_per_epoch": 2, "gradient_accumulation_steps": 4}
    assert [batches_until_step(step, **counts) for step in range(4)] == [0, 4, 8, 15]


def test_accumulation_multiplies_the_samples_of_a_step() -> None:
    assert BatchPlan.of(facts(gradient_accumulation_steps=3), dp_degree=2).global_batch_size == 24


def test_tokens_of_a_step_count_all_ranks() -> None:
    """Two sequences of 2,048 tokens on each of four ranks are 16,384 tokens per step."""
    plan = BatchPlan.of(facts(batch_size=2, sequence_length=2048), dp_degree=4)
    assert (plan.global_batch_size, plan.tokens_per_step) == (8, 16_384)


def test_draws_with_replacement_are_not_called_repeats() -> None:
    plan = BatchPlan.of(facts(dataset_size=16), dp_degree=2)
    assert plan.samples_per_epoch == 64
    assert (plan.samples_unique, plan.samples_repeated, plan.samples_dropped) == (None, None, None)


def test_metrics_have_public_names() -> None:
    """Metrics are the numbers of the plan under their public names."""
    changes = {"dataset_size": 63, "sampling": "distributed", "max_epochs": 3, "sequence_length": 10}
    assert BatchPlan.of(facts(**changes, reported_batches=16), dp_degree=2).metrics() == {
        "countoff/batches_per_epoch": 8,
        "countoff/reported_batches_per_epoch": 16,
        "countoff/steps_per_epoch": 8,
        "countoff/total_steps": 24,
        "countoff/global_batch_size": 8,
        "countoff/samples_per_epoch": 64,
        "countoff/samples_repeated": 1,
        "countoff/samples_dropped": 0,
        "countoff/tokens_per_step": 80,
        "countoff/total_tokens": 1920,
        "countoff/dp_degree": 2,
    }


def test_metrics_leave_out_what_is_unknown() -> None:
    plan = BatchPlan.of(facts(samples_per_rank=None, reported_batches=None), dp_degree=2)
    assert plan.metrics() == {"countoff/global_batch_size": 8, "countoff/dp_degree": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reported_batches", -1),
        ("reported_batches", math.inf),
        ("batch_size", 0),
        ("batch_size", True),
        ("samples_per_rank", -1),
        ("dataset_size", 1.0),
        ("gradient_accumulation_steps", 0),
        ("gradient_accumulation_steps", None),
        ("limit_batches", -1),
        ("limit_batches", 1.5),
        ("limit_batches", math.nan),
        ("limit_batches", True),
        ("max_epochs", -2),
        ("max_steps", -2),
        ("sequence_length", 0),
        ("known_batches", -1),
    ],
)
def test_a_fact_outside_its_domain_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*got {value!r}$"):
        facts(**{name: value})


@pytest.mark.parametrize("dp_degree", [0, -1, True, 2.0])
def test_a_dp_degree_outside_its_domain_is_refused(dp_degree: object) -> None:
    with pytest.raises(ValueError, match="dp_degree must be an integer of at least 1"):
        BatchPlan.of(facts(), dp_degree=dp_degree)  # type: ignore[arg-type]


def test_a_part_beyond_the_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="part must be below parts, got part 4 of 4"):
        strided_share(10, parts=4, part=4)


def test_a_loader_without_batches_stays_empty_under_every_limit() -> None:
    assert [limited_batches(0, limit) for limit in (None, 0, 3, 0.5, 1.0)] == [0] * 5
