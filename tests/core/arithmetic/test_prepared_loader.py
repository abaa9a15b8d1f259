"""The arithmetic of loaders that Accelerate has prepared, against every row of the golden tables and index lists."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts
from countoff.core.arithmetic.prepared_loader import PreparedFacts, prepared_pass
from tests.golden_tables import Row, golden


def each(text: str) -> list[int]:
    """One number per process; ``-`` where it has no last batch."""
    return [0 if number == "-" else int(number) for number in text.split("|")]


def facts_of(row: Row) -> PreparedFacts:
    return PreparedFacts(
        row["kind"],  # type: ignore[arg-type]
        samples=int(row["dataset_size"]),
        batch_size=int(row["batch_size"]),
        num_processes=int(row["world_size"]),
        drop_last=row["drop_last"] == "1",
        split_batches=row["split_batches"] == "1",
        even_batches=row["even_batches"] != "0",  # empty for the kinds that do not use it
        iterable=row["kind"] == "IterableDatasetShard",
    )


def plan_of(facts: PreparedFacts, process_index: int, **changes: object) -> BatchPlan:
    """The plan that an adapter gets for a loader of these facts."""
    given: dict[str, object] = {
        "reported_batches": facts.reported_batches(process_index),
        "batch_size": facts.batch_size_per_rank,
        "drop_last": facts.drop_last,
        "samples_per_rank": None,
        "dataset_size": facts.samples,
        "one_pass": prepared_pass(facts, process_index=process_index),
        "reported_is_cap": False,
        "partial_step": "applied",
    }
    return BatchPlan.of(LoaderFacts(**(given | changes)), dp_degree=facts.num_processes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "rows", "kinds"),
    [
        ("accelerate_shards", 1808, {"BatchSamplerShard": 1368, "IterableDatasetShard": 440}),
        ("accelerate_dispatcher_w2", 110, {"DataLoaderDispatcher": 110}),
        ("accelerate_dispatcher_w3", 83, {"DataLoaderDispatcher": 83}),
    ],
)
def test_every_prepared_loader_is_reproduced_on_every_process(table: str, rows: int, kinds: dict[str, int]) -> None:
    reproduced = Counter[str]()
    for row in golden(table, rows=rows):
        facts = facts_of(row)
        plans = [plan_of(facts, process) for process in range(facts.num_processes)]
        assert [plan.batches_per_epoch for plan in plans] == each(row["batches_per_rank"]), row
        assert [plan.reported_batches for plan in plans] == each(row["len_reported"]), row
        uneven = row["uneven"] == "1"
        assert [(plan.proven, plan.uneven_batches is not None) for plan in plans] == [(not uneven, uneven)] * len(plans)
        for plan in plans:
            samples = (plan.samples_per_epoch, plan.samples_unique, plan.samples_repeated, plan.samples_dropped)
            columns = ("samples_total", "samples_unique", "samples_repeated", "samples_dropped")
            assert samples == tuple(int(row[column]) for column in columns), row
        reproduced[facts.kind] += 1
    assert reproduced == kinds


def cut(samples: list[int], size: int) -> list[list[int]]:
    """The batches of a list, made one by one; the last one may be short."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def filled(samples: list[int], unit: int, beginning: list[int]) -> list[int]:
    """The samples, filled up to a multiple of a unit with the given ones, repeatedly."""
    source = itertools.cycle(beginning)
    return samples + [next(source) for _ in range(-len(samples) % unit)]


def divided(facts: PreparedFacts, process: int) -> list[list[int]]:
    """The batches of one process, as lists of indices."""
    assert facts.samples is not None
    assert facts.batch_size is not None
    processes, size = facts.num_processes, facts.batch_size
    unit = size if facts.split_batches else size * processes
    share = unit // processes
    samples = list(range(facts.samples))
    if facts.drop_last:
        samples = samples[: len(samples) - len(samples) % unit]
    elif facts.kind == "IterableDatasetShard" or (facts.kind == "BatchSamplerShard" and facts.even_batches):
        samples = filled(samples, unit, samples[:unit])
    rounds = cut(samples, unit)
    if facts.kind == "DataLoaderDispatcher":
        rounds = [each_round + (rounds[0][:processes] if len(each_round) % processes else []) for each_round in rounds]
        pieces = [-(-len(each_round) // processes) for each_round in cut(samples, unit)]
        return [each_round[piece * process :][:piece] for each_round, piece in zip(rounds, pieces, strict=True)]
    mine = [each_round[share * process : share * (process + 1)] for each_round in rounds]
    return [batch for batch in mine if batch]


@st.composite
def prepared(draw: st.DrawFn) -> PreparedFacts:
    kind = draw(st.sampled_from(["BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"]))
    processes, split = draw(st.integers(1, 5)), draw(st.booleans())
    return PreparedFacts(
        kind,  # type: ignore[arg-type]
        samples=draw(st.integers(0, 70)),
        batch_size=draw(st.integers(1, 5)) * (processes if split else 1),
        num_processes=processes,
        drop_last=draw(st.booleans()),
        split_batches=split,
        even_batches=draw(st.booleans()),
    )


@settings(max_examples=300)
@given(prepared())
def test_batches_and_samples_match_real_index_lists(facts: PreparedFacts) -> None:
    """The counted batches and samples are those of index lists that are cut and sharded as Accelerate does."""
    found = [prepared_pass(facts, process_index=process) for process in range(facts.num_processes)]
    lists = [divided(facts, process) for process in range(facts.num_processes)]
    if facts.kind == "DataLoaderDispatcher" and not lists[0]:
        assert {one.unknown_because for one in found} == {"DataLoaderDispatcher has no batch to hand out, and fails"}
        return
    seen = [index for batches in lists for batch in batches for index in batch]
    assert [one.batches for one in found] == [len(batches) for batches in lists]
    for one in found:
        assert (one.fewest_batches, one.most_batches) == (min(map(len, lists)), max(map(len, lists)))
        assert (one.samples, one.unique) == (len(seen), len(set(seen)))
        begun = [batch for batches in lists for batch in batches[: one.full_batches]]
        assert all(len(batch) == facts.batch_size_per_rank for batch in begun)


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 4), st.none() | st.integers(0, 12))
def test_a_run_that_carries_accumulation_matches_a_loop(
    batches: int, accumulate: int, epochs: int, max_steps: int | None
) -> None:
    """Steps and batches of a run that carries accumulation into the next epoch are those of a loop."""
    trained, steps = 0, 0
    for _ in range(epochs * batches):
        if steps == max_steps:
            break
        trained += 1
        steps += trained % accumulate == 0
    facts = PreparedFacts("BatchSamplerShard", samples=batches * 2, batch_size=1, num_processes=2, drop_last=False)
    limits = {"max_epochs": epochs, "max_steps": max_steps, "gradient_accumulation_steps": accumulate}
    plan = plan_of(facts, 0, partial_step="carried", **limits)
    assert plan.batches_per_epoch == batches
    assert (plan.total_steps, plan.total_batches) == (steps, trained)
    assert plan.steps_per_epoch == (None if batches % accumulate else batches // accumulate)


def test_uneven_shards_are_known_but_no_proof() -> None:
    """Every process knows that shards are uneven, and no number of batches is proven."""
    facts = PreparedFacts(
        "BatchSamplerShard", samples=13, batch_size=2, num_processes=2, drop_last=False, even_batches=False
    )
    plans = [plan_of(facts, process) for process in range(2)]
    assert [plan.loader_batches for plan in plans] == [4, 3]
    assert [(plan.uneven_batches, plan.proven) for plan in plans] == [((3, 4), False)] * 2


def test_samples_that_may_repeat_are_not_counted_as_unique() -> None:
    """Without proof that all samples differ, repeats are unknown."""
    facts = PreparedFacts(
        "BatchSamplerShard", samples=12, batch_size=2, num_processes=2, drop_last=False, all_different=False
    )
    plan = plan_of(facts, 0)
    assert (plan.samples_per_epoch, plan.samples_unique, plan.samples_repeated) == (12, None, None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": None}, "the samples are not known"),
        ({"batch_size": None}, "the batch size is not known"),
        ({"split_batches": True, "batch_size": 3}, "batches of 3 cannot be split evenly among 2 processes"),
        ({"kind": "IterableDatasetShard", "num_workers": 2}, "what each of the 2 workers reads"),
        ({"kind": "DataLoaderDispatcher", "iterable": True, "num_workers": 2}, "what each of the 2 workers reads"),
        ({"kind": "DataLoaderDispatcher", "samples": 0}, "has no batch to hand out"),
    ],
)
def test_an_unknown_pass_has_a_reason(changes: dict[str, object], why: str) -> None:
    """A pass that cannot be counted has no numbers, and the plan gives the reason."""
    given: dict[str, object] = {
        "kind": "BatchSamplerShard",
        "samples": 10,
        "batch_size": 4,
        "num_processes": 2,
        "drop_last": False,
    }
    facts = PreparedFacts(**(given | changes))  # type: ignore[arg-type]
    plan = plan_of(facts, 0)
    assert why in plan.unknown_because
    assert (plan.batches_per_epoch, plan.samples_per_epoch, plan.proven) == (None, None, False)


def test_dispatcher_workers_share_the_batches() -> None:
    """With a map-style dataset, the workers of a dispatcher do not change the number of batches."""
    facts = PreparedFacts(
        "DataLoaderDispatcher", samples=10, batch_size=2, num_processes=2, drop_last=False, num_workers=2
    )
    assert prepared_pass(facts, process_index=0).batches == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", -1), ("batch_size", 0), ("num_processes", 0), ("num_workers", -1), ("kind", "DataLoader")],
)
def test_a_bad_prepared_fact_is_refused_by_name(name: str, value: object) -> None:
    """A fact of a prepared loader outside its domain is refused, and the error names the fact."""
    given: dict[str, object] = {
        "kind": "BatchSamplerShard",
        "samples": 10,
        "batch_size": 4,
        "num_processes": 2,
        "drop_last": False,
    }
    with pytest.raises(ValueError, match=rf"^{name} must be .*got {value!r}$"):
        PreparedFacts(**(given | {name: value}))  # type: ignore[arg-type]
