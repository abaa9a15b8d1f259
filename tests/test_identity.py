"""Data identity: what the fingerprints of all ranks prove together."""

from typing import Any

from countoff.core.data.identity import judge_data
from countoff.core.protocol.records import verdict_to_json


def record(dp_rank: int, *prints: str, informative: bool = True, is_sharded: bool = False) -> dict[str, Any]:
    place = {"dp_rank": dp_rank, "first": 1}
    return {**place, "prints": list(prints), "informative": informative, "is_sharded": is_sharded}


def kinds(*records: dict[str, Any]) -> list[str]:
    return [verdict.kind for verdict in judge_data("train epoch 0", dict(enumerate(records)))]


def test_ranks_that_read_different_data_are_healthy():
    assert kinds(record(0, "a", "b"), record(1, "c", "d"), record(2, "e", "f")) == []


def test_all_batches_must_be_equal():
    """Data counts as the same only if all batches are equal."""
    assert kinds(record(0, "a", "b"), record(1, "a", "c")) == []


def test_uninformative_batches_are_not_compared():
    """Batches that hold too few bytes are compared with none."""
    poor = record(0, "a", "b", informative=False), record(1, "a", "b", informative=False)
    assert kinds(*poor) == []
    assert kinds(record(0, "a", "b"), poor[1]) == []


def test_sharded_data_is_compared_with_unsharded_only():
    """Ranks whose samplers shard the data are compared only with ranks whose data is not sharded."""
    is_sharded = [record(rank, "a", "b", is_sharded=True) for rank in range(3)]
    assert kinds(*is_sharded) == []
    assert kinds(*is_sharded, record(3, "a", "b")) == ["DuplicateData"]


def test_batches_without_fingerprint_are_not_compared():
    assert kinds(record(0, informative=False), record(1, informative=False), record(1, "a", "b")) == []


def test_every_group_that_read_the_same_is_named():
    prints = [("a", "b"), ("c", "d"), ("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]
    (verdict,) = judge_data("train epoch 3", {rank: record(rank, *each) for rank, each in enumerate(prints)})
    assert verdict.sentence == (
        "ranks 0, 2 read identical data in train epoch 3, and so do ranks 1, 3: their batches 1 to 2 are equal."
    )
    assert verdict.ranks == (0, 2, 1, 3)
    assert "computed alike" in verdict.why


def test_ranks_of_one_dp_rank_must_read_the_same():
    """Ranks that share a dp_rank may and must read the same data; the first batch that differs is named."""
    shared = [record(0, "a", "b"), record(0, "a", "b"), record(1, "c", "d"), record(1, "c", "d")]
    assert kinds(*shared) == []
    (verdict,) = judge_data("train epoch 0", dict(enumerate([*shared[:3], record(1, "c", "x")])))
    assert verdict.kind == "PeersDiffer"
    assert verdict.sentence == (
        "ranks 2 and 3 share dp_rank 1 and must read the same data; in train epoch 0 their batch 2 is not the same."
    )


def test_dp_ranks_are_named_if_they_differ_from_ranks():
    same = [record(rank // 2, "a", "b") for rank in range(4)]
    (verdict,) = judge_data("train epoch 0", dict(enumerate(same)))
    assert verdict.sentence.startswith("dp_ranks 0, 1 (ranks 0–3) read identical data in train epoch 0: ")


def test_the_longest_sentence_fits_into_a_record():
    many = {rank: record(rank, str(rank % 64), "x") for rank in range(4096)}
    (verdict,) = judge_data("train epoch 100000", many)
    assert verdict_to_json(verdict)["sentence"] == verdict.sentence
