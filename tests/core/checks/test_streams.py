"""Streams that a framework deals out: what the ranks' facts prove together, and how the first elements are seen."""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from countoff._adapter.dealt_streams import stream_facts
from countoff._adapter.words import data_remedies
from countoff.core.checks.check import FitStart
from countoff.core.checks.data import DataIdentity
from countoff.core.checks.streams import (
    ELEMENTS,
    FirstElements,
    StreamFacts,
    column_digest,
    judge_streams,
    parse_stream,
)
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, verdict_to_json
from countoff.core.settings import Settings
from countoff.core.state import State
from countoff.core.store.channel import encode
from countoff.core.verdict import remedy_for
from tests.other_ranks import KeptRecords


def digests(*numbers: int) -> str:
    return "".join(f"{number:08x}" for number in numbers)


def begins(*firsts: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prints": digests(*range(first, first + ELEMENTS)), **more} for first in firsts]


def judge(facts: list[dict[str, Any]], ways: int = 2) -> str:
    found = judge_streams("train epoch 0", {rank: StreamFacts("It", ways, **each) for rank, each in enumerate(facts)})
    return "" if found is None else found.kind


def named(rank: str, ranks: str) -> dict[str, Any]:
    """The facts of a stream that rank 0 reads for all, by code that reads these numbers."""
    return {"first_only": True, "rank_names": rank, "ranks_names": ranks}


PROVED = {
    "all streams are different": (begins(0, 100), "DoubleSharded"),
    "streams overlap": (begins(0, 4), "StreamsDiffer"),
    "one rank of four has another order": (begins(0, 0, 0, 4), "StreamsDiffer"),
    "one rank of four has another stream": (begins(0, 0, 0, 100), "StreamsDiffer"),
    "pairs of ranks share a stream": (begins(0, 0, 100, 100), "DoubleSharded"),
    "they are equal": (begins(0, 0), ""),
    "equal as far as the shorter one was seen": ([begins(0)[0], {"prints": digests(0, 1)}], ""),
    "one element": ([{"prints": digests(1)}, {"prints": digests(2)}], ""),
    "nothing was seen": ([{}, {}], ""),
    "a part is equal": (begins(0, 100, parts=digests(7, 8)), ""),
    "a part is equal, and says nothing": (begins(0, 100, parts="-" * 8), "DoubleSharded"),
    "each rank drew at random": ([{**each, "drawn": digests(n)} for n, each in enumerate(begins(0, 100))], ""),
    "all drew alike": (begins(0, 100, drawn=digests(1)), "DoubleSharded"),
    "each rank drew, and they overlap": (
        [{**each, "drawn": digests(n)} for n, each in enumerate(begins(0, 4))],
        "StreamsDiffer",
    ),
    "a generator of their own": (begins(0, 100, order="drawn"), ""),
    "a sampler shuffles": (begins(0, 100, sampler=True, order="shuffled"), "StreamsDiffer"),
    "a sampler has a share": (begins(0, 100, sampler=True, length=48, whole=96), "DoubleSharded"),
    "a sampler has all data": (begins(0, 100, sampler=True, length=96, whole=96), ""),
    "a sampler of unknown length": (begins(0, 100, sampler=True), ""),
    "samplers overlap": (begins(0, 4, sampler=True, length=48, whole=96), ""),
    "repeated elements": ([{"prints": digests(1, 1, 2)}, {"prints": digests(1, 2, 2)}], ""),
    "other seeds": ([{"seed": digests(1)}, {"seed": digests(2)}], "StreamsDiffer"),
    "a seed on one rank alone": ([{"seed": digests(1)}, {}], ""),
    "a share": ([{"shares": 2, "said_by": "x"}] * 2, "DoubleSharded"),
    "a share on one rank alone": ([{"shares": 2, "said_by": "x"}, {}], ""),
    "the only share": ([{"shares": 1, "said_by": "x"}] * 2, ""),
    "rank 0 reads for all": ([{"first_only": True, **each} for each in begins(0, 100)], ""),
    "rank 0 reads its share for all": ([{"first_only": True, "shares": 2}, {"first_only": True}], "DoubleSharded"),
    "rank 0 reads for all, by code with both numbers": (
        [named("self.rank", "self.world")] * 2,
        "DoubleSharded",
    ),
    "of several numbers, some are equal by chance": (
        [named("self.epoch self.rank", "self.world"), named("self.rank", "self.size self.world")],
        "DoubleSharded",
    ),
    "another number on each rank is the rank": ([named("self.epoch", "world"), named("self.seed", "world")], ""),
    "code with the rank alone, as for a seed": ([named("self.rank", "")] * 2, ""),
    "code with the number of ranks alone": ([named("", "world")] * 2, ""),
    "code with both, read on every rank": ([{**named("rank", "world"), "first_only": False}] * 2, ""),
    "half of the samples are equal at the same place": (
        [{"prints": digests(*range(1, 13))}, {"prints": digests(*(n if n % 2 else 50 + n for n in range(1, 13)))}],
        "",
    ),
    "an equal sample at the same place, and one at another": (
        [{"prints": digests(1, 2, 3)}, {"prints": digests(1, 3, 4)}],
        "",
    ),
    "other rows": ([{"contents": digests(n), "length": 9, "whole": 18} for n in (1, 2)], "DoubleSharded"),
    "other rows of data of unknown length": ([{"contents": digests(n), "length": 9} for n in (1, 2)], ""),
    "other rows in all but one column": ([{"contents": digests(n, 7), "length": 9} for n in (1, 2)], ""),
    "datasets of other lengths": ([{"contents": digests(n), "length": 8 + n} for n in (1, 2)], ""),
    "rows that say nothing": ([{"contents": "-" * 8, "length": 9}] * 2, ""),
    "rows in another order": ([{"contents": digests(n), "length": 9, "whole": 9} for n in (1, 2)], "StreamsDiffer"),
}


def test_code_that_may_take_a_share_is_told_with_what_it_reads() -> None:
    facts = StreamFacts("Accelerate", 2, **named("self.rank", "self.world_size"))
    found = judge_streams("train epoch 0", {0: facts, 1: facts})
    assert found is not None
    assert found.sentence == (
        "the train data's __iter__ reads each rank's own number (self.rank) and the number of ranks (self.world_size), "
        "and Accelerate reads rank 0's stream for all ranks: if that is rank 0's share, about 1/2 of the data is read."
    )
    assert found.subject == "own number"
    assert judge_streams("train epoch 0", {0: facts}) is None  # nobody knows what the number is on the other rank


@pytest.mark.parametrize("name", PROVED)
def test_what_the_facts_of_all_ranks_prove(name: str) -> None:
    facts, kind = PROVED[name]
    assert judge(facts) == kind


def test_datasets_of_other_lengths_are_not_said_to_be_shuffled_by_other_seeds() -> None:
    """One seed gives another order where a dataset has fewer rows."""
    shuffled = [{**each, "length": 9 - n} for n, each in enumerate(begins(0, 100, sampler=True, order="shuffled"))]
    found = judge_streams("train epoch 0", {rank: StreamFacts("It", 2, **each) for rank, each in enumerate(shuffled)})
    assert found is not None
    assert found.sentence.endswith(" differ in train epoch 0: they have from 8 to 9 samples.")
    remedies = data_remedies(shares="shard.", order="seed.", option="off", dealer="It", undo="leave it")
    assert "seed" not in remedy_for(found, remedies)


def test_ranks_that_name_another_dealer_are_not_compared() -> None:
    assert (
        judge_streams("e", {0: StreamFacts("A", 2, **begins(0)[0]), 1: StreamFacts("B", 2, **begins(100)[0])}) is None
    )
    assert judge_streams("e", {}) is None


def test_the_ranks_of_the_smaller_group_are_named() -> None:
    facts = {rank: StreamFacts("It", 4, **each) for rank, each in enumerate(begins(0, 0, 4, 0))}
    found = judge_streams("train epoch 0", facts)
    assert found is not None
    assert found.ranks == (2,)
    assert "those of rank 2 and of the other ranks differ in train epoch 0" in found.sentence


WORST = StreamFacts(
    "Lightning's DistributedSamplerWrapper",
    100_000,
    first_only=False,
    shares=100_000,
    said_by="webdataset's split_by_node",
    prints=digests(*range(ELEMENTS)),
    parts=digests(*range(4)),
    drawn=digests(1),
    contents=digests(*range(4)),
    seed=digests(1),
    length=10**12,
    whole=10**12,
    order="shuffled",
    sampler=True,
)


def test_facts_survive_a_record() -> None:
    assert parse_stream(WORST.to_json()) == WORST


NAMED = StreamFacts("d" * 40, 10**5, True, rank_names=" ".join(["n" * 30] * 3), ranks_names=" ".join(["n" * 30] * 3))
"""What is told of the code of a dataset that only rank 0 reads."""


@pytest.mark.parametrize("longest", [WORST, NAMED])
def test_the_longest_record_fits_into_the_store(longest: StreamFacts) -> None:
    """With as many fingerprints as can be asked for, and facts that are as long as they can be."""
    others = KeptRecords()
    data = DataIdentity(State(0, 2, Settings(fingerprint_batches=32), {}))
    data.fit_started(FitStart(FitPlan(dp_rank=99_999, dp_degree=100_000), {}), others)
    data.span_opened(SpanCounters("train epoch 0", evaluation=False, opened=0, compared=True), 0)
    for number in range(32):
        data.read(torch.arange(64) * number, stream=lambda: longest)
    (record,) = others.reported
    assert len(record["prints"]) == 32
    assert record["stream"] == longest.to_json()
    assert parse_stream(record["stream"]) == longest
    assert len(encode(record)) <= RECORD_BYTES


def test_the_longest_sentence_fits_into_the_store() -> None:
    facts = {rank: WORST._replace(shares=0, contents="", seed=digests(rank)) for rank in range(4096)}
    found = judge_streams("train epoch 1000000", facts)
    assert found is not None
    assert len(encode(verdict_to_json(found))) <= RECORD_BYTES
    declared = judge_streams("train epoch 1000000", {0: WORST})
    assert declared is not None
    assert len(encode(verdict_to_json(declared))) <= RECORD_BYTES


@pytest.mark.parametrize("longest", [WORST, NAMED])
@pytest.mark.parametrize("place", range(len(StreamFacts._fields)))
@pytest.mark.parametrize("value", [None, -1, "x" * 200, [], {}, 1.5, True, float("nan")])
def test_a_broken_record_is_none(place: int, value: Any, longest: StreamFacts) -> None:
    """What another program has written is either facts or nothing, and judging it does not raise."""
    record = longest.to_json()
    record[min(place, len(record) - 1)] = value
    found = parse_stream(record)
    if found is not None:
        judge_streams("train epoch 0", {0: found, 1: longest})
    assert parse_stream(None) is None
    assert parse_stream(record[1:]) is None


def seen_of(stream: Any, *, indices: bool = False) -> FirstElements:
    first = FirstElements()
    followed = first.follow(iter(stream), list if indices else None)
    assert list(followed) == list(stream)
    return first


def test_the_first_elements_are_seen_and_none_is_lost() -> None:
    assert len(seen_of(range(100)).prints) == ELEMENTS * 8
    assert len(seen_of(range(5)).prints) == 5 * 8
    batches = [[4 * number + place for place in range(4)] for number in range(10)]
    assert len(seen_of(batches, indices=True).prints) == ELEMENTS * 8


def test_nothing_is_taken_that_the_reader_does_not_ask_for() -> None:
    source = iter(range(100))
    followed = FirstElements().follow(source)
    assert [next(followed) for _ in range(3)] == [0, 1, 2]
    assert next(source) == 3


def test_samples_that_cannot_be_read_have_no_digests() -> None:
    assert seen_of([object(), object()]).prints == ""
    assert seen_of([1, object(), 3]).prints == ""
    assert seen_of([(1, 2), (1, 2, 3)]).prints == ""


class Lazy(Mapping[str, int]):
    """A sample whose fields are computed when they are read."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2


class Unnamed:
    def __str__(self) -> str:
        raise RuntimeError


def test_no_code_of_a_sample_is_called() -> None:
    lazy = Lazy()
    for samples in ([lazy] * 3, [{"a": lazy}] * 3, [(1, lazy)] * 3, [{Unnamed(): 1}] * 3):
        first = FirstElements()
        assert list(first.follow(iter(samples))) == samples
        assert first.prints == ""


SHARED = numpy.random.default_rng(3)


def noisy(value: float) -> float:
    return value + SHARED.normal()


def made_for_each(value: int) -> float:
    return value + numpy.random.default_rng(value).normal()


def local() -> Iterator[Any]:
    rng = numpy.random.RandomState(1)
    for number in range(20):
        yield number + rng.normal()


def drawn_by_a_method() -> Iterator[Any]:
    draw = random.Random(1).random
    for _ in range(20):
        yield draw()


def delegating() -> Iterator[Any]:
    yield from local()


def looping() -> Iterator[Any]:
    for each in local():
        yield each + 1


def of_a_cell() -> Iterator[Any]:
    generator = torch.Generator()
    return (float(torch.rand((), generator=generator)) for _ in range(20))


OWN = {
    "a local variable": local,
    "a method of one": drawn_by_a_method,
    "behind yield from": delegating,
    "in the iterator of a loop": looping,
    "a closure": of_a_cell,
    "a global": lambda: (number + SHARED.normal() for number in range(20)),
    "a global of a function": lambda: (noisy(number) for number in range(20)),
    "made for each sample": lambda: (made_for_each(number) for number in range(20)),
    "behind map": lambda: map(noisy, range(20)),
    "in a partial": lambda: map(functools.partial(lambda rng, each: each + rng.random(), random.Random(1)), range(20)),
}


@pytest.mark.parametrize("name", OWN)
def test_a_generator_of_the_iterators_own_is_noticed(name: str) -> None:
    first = FirstElements()
    assert len(list(first.follow(iter(OWN[name]())))) == 20
    assert first.own_generator
    assert first.drawn == ""


def test_generators_that_all_code_shares_are_not_the_iterators_own() -> None:
    def plain() -> Iterator[Any]:
        draw, shuffle = random.random, numpy.random.shuffle
        for number in range(20):
            yield number, draw() if shuffle is None else 0, torch.default_generator is None

    assert not seen_of(range(20)).own_generator
    first = FirstElements()
    assert len(list(first.follow(plain()))) == 20
    assert not first.own_generator


def test_parts_are_those_that_differ() -> None:
    parts = seen_of([{"a": number, "b": 0} for number in range(3)]).parts
    assert parts[8:] == "-" * 8
    assert parts[:8] != "-" * 8


def test_draws_from_global_generators_are_noticed() -> None:
    assert seen_of(range(20)).drawn == ""

    def drawing(draw: Any) -> Any:
        first = FirstElements()
        list(first.follow(draw() for _ in range(20)))
        return first.drawn

    assert drawing(random.random)
    assert drawing(lambda: float(torch.rand(())))


def test_a_digest_of_a_column_needs_values_that_differ() -> None:
    assert column_digest([1, 2]) == column_digest([1, 2]) != column_digest([2, 1])
    assert column_digest([1, object()]) == column_digest([3, 3]) == "-" * 8


def test_facts_are_none_where_nothing_is_dealt_out() -> None:
    data = DataIdentity(State(0, 2, Settings(), {}))
    loader = torch.utils.data.DataLoader(list(itertools.repeat(1, 4)))  # pyright: ignore[reportArgumentType]
    assert stream_facts(loader, data) is None
    data.elements = FirstElements()
    assert stream_facts(loader, data) is None
    assert stream_facts([1], data) is None


@pytest.mark.parametrize("known", [False, True])
def test_what_follows_from_other_datasets_is_not_said_again(known: bool) -> None:
    """A shuffle with one seed gives datasets of other lengths other orders: the datasets have been named before."""
    judges: list[Any] = []
    identity = DataIdentity(State(0, 2, Settings(), {}), datasets_differ=lambda: known)
    others: Any = SimpleNamespace(report=lambda name, record, judge, after: judges.append((record, judge, after)))
    identity.fit_started(FitStart(FitPlan(dp_rank=0, dp_degree=2), {}), others)
    span = SpanCounters("train epoch 0", started=4)
    identity.span_opened(span, 0)
    identity.read([1, 2])
    identity.span_closing(span, "exhausted", orderly=True)
    ((record, judge, after),) = judges
    streams = [
        StreamFacts("Accelerate", 2, prints=prints * 8, order="shuffled", sampler=True, length=length)
        for prints, length in (("00000001", 96), ("00000002", 88))
    ]
    records = {rank: {**record(), "stream": stream.to_json()} for rank, stream in enumerate(streams)}
    found = [each.kind for each in judge(records) if each is not None]
    assert found == ([] if known else ["StreamsDiffer"])
    assert set(after) == {"splits"}
