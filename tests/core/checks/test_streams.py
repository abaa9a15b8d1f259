"""Streams that a framework deals out: what the ranks' facts prove together, and how the first elements are seen."""

import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from countoff._adapter.dealt_streams import stream_facts
from countoff._adapter.messages import data_remedies
from countoff.core import constants
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
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.settings import Settings
from countoff.core.verdict import remedy_for
from tests.other_ranks import KeptRecords


def digests(*numbers: int) -> str:
    return "".join(f"{number:08x}" for number in numbers)


def begins(*firsts: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prints": digests(*range(first, first + ELEMENTS)), **more} for first in firsts]


def judge(facts: list[dict[str, Any]], ways: int = 2) -> str:
    found = judge_streams("train epoch 0", {rank: StreamFacts("It", ways, **each) for rank, each in enumerate(facts)})
    return "" if found is None else found.kind


PROVED = {
    "all streams are different": (begins(0, 100), ""),
    "streams overlap": (begins(0, 4), "StreamsDiffer"),
    "one rank of four has another order": (begins(0, 0, 0, 4), "StreamsDiffer"),
    "one rank of four has another stream": (begins(0, 0, 0, 100), "StreamsDiffer"),
    "pairs of ranks share a stream": (begins(0, 0, 100, 100), ""),
    "they are equal": (begins(0, 0), ""),
    "equal as far as the shorter one was seen": ([begins(0)[0], {"prints": digests(0, 1)}], ""),
    "one element": ([{"prints": digests(1)}, {"prints": digests(2)}], ""),
    "nothing was seen": ([{}, {}], ""),
    "streams overlap, and a part is equal": (begins(0, 4, parts=digests(7, 8)), ""),
    "streams overlap, and a part that says nothing is equal": (begins(0, 4, parts="-" * 8), "StreamsDiffer"),
    "a sampler shuffles": (begins(0, 100, sampler=True, shuffled=True), "StreamsDiffer"),
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


@pytest.mark.parametrize("name", PROVED)
def test_what_the_facts_of_all_ranks_prove(name: str) -> None:
    facts, kind = PROVED[name]
    assert judge(facts) == kind


def test_datasets_of_other_lengths_are_not_said_to_be_shuffled_by_other_seeds() -> None:
    """One seed gives another order where a dataset has fewer rows."""
    shuffled = [{**each, "length": 9 - n} for n, each in enumerate(begins(0, 100, sampler=True, shuffled=True))]
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
    contents=digests(*range(4)),
    seed=digests(1),
    length=10**12,
    whole=10**12,
    shuffled=True,
    sampler=True,
)


def test_facts_survive_a_record() -> None:
    assert parse_stream(WORST.to_json()) == WORST


def test_the_longest_record_fits_into_the_store() -> None:
    """With all fingerprints, and facts that are as long as they can be."""
    others = KeptRecords()
    data = DataIdentity(State(0, 2, Settings(), {}))
    data.fit_started(FitStart(FitPlan(dp_rank=99_999, dp_degree=100_000), {}), others)
    data.span_opened(SpanCounters("train epoch 0", evaluation=False, opened=0, compared=True), 0)
    for number in range(constants.FINGERPRINT_BATCHES):
        data.read(torch.arange(64) * number, stream=lambda: WORST)
    (record,) = others.reported
    assert len(record["prints"]) == constants.FINGERPRINT_BATCHES
    assert record["stream"] == WORST.to_json()
    assert parse_stream(record["stream"]) == WORST
    assert len(encode(record)) <= RECORD_BYTES


def test_the_longest_sentence_fits_into_the_store() -> None:
    facts = {rank: WORST._replace(shares=0, contents="", seed=digests(rank)) for rank in range(4096)}
    found = judge_streams("train epoch 1000000", facts)
    assert found is not None
    assert len(encode(verdict_to_json(found))) <= RECORD_BYTES
    declared = judge_streams("train epoch 1000000", {0: WORST})
    assert declared is not None
    assert len(encode(verdict_to_json(declared))) <= RECORD_BYTES


@pytest.mark.parametrize("place", range(len(StreamFacts._fields)))
@pytest.mark.parametrize("value", [None, -1, "x" * 200, [], {}, 1.5, True, float("nan")])
def test_a_broken_record_is_none(place: int, value: Any) -> None:
    """What another program has written is either facts or nothing, and judging it does not raise."""
    record = WORST.to_json()
    record[place] = value
    found = parse_stream(record)
    if found is not None:
        judge_streams("train epoch 0", {0: found, 1: WORST})
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


def test_parts_are_those_that_differ() -> None:
    parts = seen_of([{"a": number, "b": 0} for number in range(3)]).parts
    assert parts[8:] == "-" * 8
    assert parts[:8] != "-" * 8


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
        StreamFacts("Accelerate", 2, prints=prints * 8, shuffled=True, sampler=True, length=length)
        for prints, length in (("00000001", 96), ("00000002", 88))
    ]
    records = {rank: {**record(), "stream": stream.to_json()} for rank, stream in enumerate(streams)}
    found = [each.kind for each in judge(records) if each is not None]
    assert found == ([] if known else ["StreamsDiffer"])
    assert set(after) == {"splits"}
