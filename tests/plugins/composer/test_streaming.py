"""The arithmetic of StreamingDataset, against every row of the golden tables and orders partitioned as lists."""

import dataclasses
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff._composer.streaming_facts import StreamFacts, StreamingFacts
from countoff._composer.streaming_pass import streaming_pass
from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts, LoaderPass
from countoff.core.arithmetic.totals import Totals
from tests.golden_tables import Row, golden

# The reasons why there is no partition, with the rows of the table of streams that have them; numbers replaced by N.
REASONS = {
    "streaming refuses N canonical nodes on N nodes: one must divide the other": 141,
    "streaming refuses device_per_stream batching: N canonical nodes do not divide among N nodes": 106,
    "streaming refuses device_per_stream batching: stream N fills no batch of one rank's": 27,
    "streaming refuses per_stream batching: stream N fills no batch of every rank's": 118,
    "streaming refuses stratified batching: stream N has no sample in a global batch of N": 39,
    "streaming refuses to resume at sample N of an epoch of N": 30,
    "streaming refuses to shuffle N samples among N canonical nodes": 267,
    "streaming fails to share N samples of N canonical nodes among N nodes": 7,
}

# The table of variants has only the size of both streams together. For 50, 97, 129 and 300, only this pair of sizes
# gives every row; for 194 and 347 this is one pair of many.
TWO_STREAMS = {50: (30, 20), 97: (64, 33), 129: (65, 64), 194: (129, 65), 300: (200, 100), 347: (246, 101)}


def of_random(row: Row) -> StreamingFacts:
    batch_size = int(row["batch_size"])
    return StreamingFacts(
        epoch_size=int(row["dataset_size"]),
        nodes=1,
        ranks_per_node=int(row["world_size"]),
        dataset_batch_size=batch_size,
        batch_size=batch_size,
        drop_last=row["drop_last"] == "1",
        num_workers=int(row["num_workers"]),
    )


def of_variant(row: Row, **changes: object) -> StreamingFacts:
    given: dict[str, object] = {
        "epoch_size": int(row["size"]),
        "nodes": int(row["nodes"]),
        "ranks_per_node": int(row["ranks_per_node"]),
        "dataset_batch_size": int(row["ds_batch_size"]),
        "batch_size": int(row["dl_batch_size"]),
        "drop_last": row["drop_last"] == "1",
        "num_workers": int(row["num_workers"]),
        "num_canonical_nodes": int(row["ncn"]),
        "replication": int(row["replication"]),
        "drop_first": int(row["drop_first"]),
        "batching_method": row["variant"].partition("/")[2] or "random",
    }
    return StreamingFacts(**(given | changes))  # type: ignore[arg-type]


def of_streams(row: Row) -> StreamingFacts:
    columns = (row[name].split("|") for name in ("stream_samples", "stream_choose", "stream_proportion"))
    numbers = ("epoch_size", "nodes", "ranks_per_node", "dataset_batch_size", "batch_size", "num_workers")
    return StreamingFacts(
        **{name: int(row[name]) for name in (*numbers, "num_canonical_nodes", "drop_first")},  # type: ignore[arg-type]
        drop_last=row["drop_last"] == "1",
        batching_method=row["batching_method"],
        shuffle=row["shuffle"] == "1",
        streams=tuple(
            StreamFacts(int(samples), int(choose), float(proportion))
            for samples, choose, proportion in zip(*columns, strict=True)
        ),
    )


def reproduces(facts: StreamingFacts, row: Row) -> bool:
    """Whether lengths, batches and samples of this rank's row of the table of variants are reproduced."""
    found = streaming_pass(facts, rank=int(row["rank"]))
    batches = (found.batches, found.fewest_batches, found.most_batches)
    assigned = streaming_pass(dataclasses.replace(facts, drop_last=False), rank=int(row["rank"])).samples
    return (
        batches == tuple(int(row[name]) for name in ("batches_yielded", "min_batches", "max_batches"))
        and facts.dataset_length == int(row["len_dataset"])
        and facts.reported_batches == int(row["len_dataloader"])
        and (found.uneven or assigned == int(row["samples_assigned"]) * facts.dp_degree)
    )


def test_every_rank_of_random_batching_is_reproduced() -> None:
    for row in golden("streaming_random", rows=7554):
        facts = of_random(row)
        found = streaming_pass(facts, rank=int(row["rank"]))
        assert facts.dataset_length == int(row["len_dataset"]), row
        assert facts.reported_batches == int(row["len_dataloader"]), row
        assert (found.batches, found.uneven) == (int(row["batches"]), False), row
        assert found.samples == int(row["samples"]) * facts.dp_degree, row


def test_every_variant_of_one_stream_is_reproduced() -> None:
    rows = [row for row in golden("streaming_variants", rows=6327) if "/" not in row["variant"]]
    known = [row for row in rows if row["variant"] != "epoch_size"]
    assert (len(rows), len(known)) == (6154, 5582)
    assert [row for row in known if not reproduces(of_variant(row), row)] == []


def test_every_epoch_size_is_reproduced() -> None:
    rows = [row for row in golden("streaming_variants", rows=6327) if row["variant"] == "epoch_size"]
    assert len(rows) == 572
    for row in rows:
        # The table has the dataset's length instead of its epoch_size: every epoch_size that rounds to it must match.
        ranks, length = int(row["nodes"]) * int(row["ranks_per_node"]), int(row["len_dataset"])
        for epoch_size in range(ranks * (length - 1) + 1, ranks * length + 1):
            assert reproduces(of_variant(row, epoch_size=epoch_size), row), row


def test_unknown_stream_sizes_are_refused() -> None:
    """Variants of two streams of unknown sizes are refused, unless the batching method does not need them."""
    rows = [row for row in golden("streaming_variants", rows=6327) if "/" in row["variant"]]
    refused = Counter[str]()
    for row in rows:
        found = streaming_pass(of_variant(row), rank=int(row["rank"]))
        if found.batches is None:
            refused[found.unknown_because] += 1
        else:
            assert reproduces(of_variant(row), row), row
    why = "the sizes of the streams are not known, on which {} batching depends; it cannot be known before the first "
    assert len(rows) - refused.total() == 45
    assert refused == {
        f"{why.format('device_per_stream')}epoch is over": 49,
        f"{why.format('per_stream')}epoch is over": 40,
        f"{why.format('stratified')}epoch is over": 39,
    }


def test_every_variant_of_two_streams_is_reproduced() -> None:
    """With known sizes, every variant of two streams is reproduced."""
    rows = [row for row in golden("streaming_variants", rows=6327) if "/" in row["variant"]]
    assert len(rows) == 173
    for row in rows:
        streams = tuple(StreamFacts(samples, samples) for samples in TWO_STREAMS[int(row["size"])])
        assert reproduces(of_variant(row, streams=streams), row), row


def test_every_partition_of_streams_is_reproduced_on_every_rank() -> None:
    rows = [row for row in golden("streaming_streams", rows=2400) if row["outcome"] == "ok"]
    unique = Counter[str]()
    for row in rows:
        facts = of_streams(row)
        passes = [streaming_pass(facts, rank=rank) for rank in range(facts.dp_degree)]
        batches = [int(number) for number in row["batches_per_rank"].split("|")]
        assert [each.batches for each in passes] == batches, row
        assert (passes[0].fewest_batches, passes[0].most_batches) == (min(batches), max(batches)), row
        assert {each.samples for each in passes} == {int(row["samples"])}, row
        assert {each.unique for each in passes} <= {int(row["unique"]), None}, row
        resumed = "resumed" if facts.drop_first else "whole"
        unique[f"{resumed}, {'unknown' if passes[0].unique is None else 'known'}"] += 1
    assert len(rows) == 1665
    assert unique == {"whole, known": 846, "whole, unknown": 425, "resumed, unknown": 394}


def test_every_refused_partition_is_refused() -> None:
    """A partition that streaming refuses is refused with the reason."""
    refused = [row for row in golden("streaming_streams", rows=2400) if row["outcome"] != "ok"]
    reasons = Counter[str]()
    for row in refused:
        found = streaming_pass(of_streams(row), rank=0)
        assert (found.batches, found.samples, found.unique) == (None, None, None), row
        reasons[re.sub(r"\d+", "N", found.unknown_because)] += 1
    assert reasons == REASONS


def partitioned(samples: int, *, canonical: int, nodes: int, ranks: int, drop_first: int = 0) -> list[list[int]]:
    """The samples of every rank, as lists: blocks of the canonical nodes, interleaved, then taken in turns."""
    ratio, block = max(nodes // canonical, 1), -(-samples // canonical)
    padding = -block % ratio
    if samples < canonical or (samples == canonical < nodes):
        wide = block + padding
        blocks = [[(row * wide + column) % samples for column in range(wide)] for row in range(canonical)]
    else:
        blocks = [list(range(row * samples // canonical, (row + 1) * samples // canonical)) for row in range(canonical)]
        for row in blocks:
            row += row[-1:] * (block - len(row))
            repeated = row[max(block - padding - ratio + 1, 0) : max(block - ratio + 1, 0)]
            row += repeated * padding if len(repeated) == 1 else repeated
    order = [row[column] for column in range(block + padding) for row in blocks][drop_first - drop_first % nodes :]
    shares: list[list[int]] = []
    for node in range(nodes):
        mine = order[node::nodes]
        missing, end = -len(mine) % ranks, len(mine) - ranks + 1
        mine += mine[end - missing : end] if missing <= end else (mine * missing)[:missing]
        shares += [mine[rank::ranks] for rank in range(ranks)]
    return shares


def loaded(share: list[int], *, workers: int, chunk: int, batch_size: int, drop_last: bool) -> list[list[int]]:
    """The batches of one rank, in the order in which its loader takes them from its workers."""
    chunks = [share[start : start + chunk] for start in range(0, len(share), chunk)]
    queues: list[list[list[int]]] = []
    for worker in range(max(workers, 1)):
        stream = [sample for each in chunks[worker :: max(workers, 1)] for sample in each]
        batches = [stream[start : start + batch_size] for start in range(0, len(stream), batch_size)]
        queues.append([batch for batch in batches if len(batch) == batch_size or not drop_last])
    return [queue[turn] for turn in range(len(share) + 1) for queue in queues if turn < len(queue)]


few = st.integers(1, 4)
jobs = st.builds(
    StreamingFacts,
    epoch_size=st.integers(1, 70),
    nodes=few,
    ranks_per_node=few,
    dataset_batch_size=few,
    batch_size=few,
    drop_last=st.booleans(),
    num_workers=st.integers(0, 3),
    num_canonical_nodes=st.integers(1, 9),
    drop_first=st.sampled_from([0, 0, 0, 3, 8]),
)


@settings(max_examples=300)
@given(jobs)
def test_random_batching_matches_lists_of_samples(facts: StreamingFacts) -> None:
    """Random batching gives the batches and samples of lists that are partitioned sample by sample."""
    found = streaming_pass(facts, rank=facts.dp_degree - 1)
    canonical = facts.canonical_nodes
    if found.batches is None:
        assert "refuses" in found.unknown_because or "fails" in found.unknown_because
        return
    shares = partitioned(
        facts.epoch_size,
        canonical=canonical,
        nodes=facts.nodes,
        ranks=facts.ranks_per_node,
        drop_first=facts.drop_first,
    )
    assert facts.dataset_batch_size is not None
    assert facts.batch_size is not None
    ranks = [
        loaded(
            share,
            workers=facts.num_workers,
            chunk=facts.dataset_batch_size,
            batch_size=facts.batch_size,
            drop_last=facts.drop_last,
        )
        for share in shares
    ]
    seen = [sample for batches in ranks for batch in batches for sample in batch]
    assert {len(batches) for batches in ranks} == {found.batches} == {found.fewest_batches} == {found.most_batches}
    assert found.samples == len(seen)
    assert found.unique == (None if facts.drop_first else len(set(seen)))
    assert all(len(batch) == facts.batch_size for batches in ranks for batch in batches[: found.full_batches])


def job(**changes: object) -> StreamingFacts:
    """One hundred samples on two hosts of two ranks, in batches of four."""
    given: dict[str, object] = {
        "epoch_size": 100,
        "nodes": 2,
        "ranks_per_node": 2,
        "dataset_batch_size": 4,
        "batch_size": 4,
        "drop_last": True,
        "num_workers": 0,
    }
    return StreamingFacts(**(given | changes))  # type: ignore[arg-type]


def plan_of(facts: StreamingFacts, *, rank: int = 0, **changes: object) -> BatchPlan:
    """The plan that an adapter gets for a loader of this job."""
    given: dict[str, object] = {
        "reported_batches": facts.reported_batches,
        "batch_size": facts.batch_size,
        "drop_last": facts.drop_last,
        "samples_per_rank": None,
        "dataset_size": facts.epoch_size,
        "one_pass": streaming_pass(facts, rank=rank),
    }
    return BatchPlan.of(LoaderFacts(**(given | changes)), dp_degree=facts.dp_degree)  # type: ignore[arg-type]


def test_a_streaming_loader_is_proven() -> None:
    """The batches of a streaming loader are proven, and its different samples are counted."""
    plan = plan_of(job(epoch_size=101, drop_last=False))
    assert (plan.batches_per_epoch, plan.proven, plan.uneven_batches) == (7, True, None)
    assert (plan.samples_per_epoch, plan.samples_unique, plan.samples_repeated, plan.samples_dropped) == (
        104,
        101,
        3,
        0,
    )


def test_samples_that_no_rank_gets_are_counted_as_dropped() -> None:
    plan = plan_of(job(epoch_size=101))
    assert (plan.batches_per_epoch, plan.samples_per_epoch) == (6, 96)
    assert (plan.samples_unique, plan.samples_repeated, plan.samples_dropped) == (96, 0, 5)


def test_canonical_nodes_can_make_the_length_too_short() -> None:
    """Canonical nodes that round up make the reported length too short."""
    facts = job(epoch_size=130, num_canonical_nodes=128, shuffle_algo="py1s")
    plan = plan_of(facts, reported_is_cap=False)
    assert (plan.reported_batches, plan.loader_batches, plan.wrong_length_factor) == (8, 16, 0.5)


def test_unset_canonical_nodes_have_their_default() -> None:
    """Canonical nodes that are not set have the value that the library sets at the first iteration."""
    assert job().canonical_nodes == 2
    assert job(shuffle_algo="py1s").canonical_nodes == 128
    assert job(num_canonical_nodes=3, shuffle_algo="py1s").canonical_nodes == 3


@pytest.mark.parametrize(("replication", "nodes", "dp_degree"), [(None, 2, 4), (1, 2, 4), (2, 1, 2), (4, 1, 1)])
def test_replicated_ranks_count_as_one(replication: int | None, nodes: int, dp_degree: int) -> None:
    facts = job(replication=replication)
    assert (facts.parallel_nodes, facts.dp_degree) == (nodes, dp_degree)
    assert streaming_pass(facts, rank=3).samples == streaming_pass(facts, rank=0).samples


def test_the_rest_of_an_epoch_after_a_resume_is_counted() -> None:
    assert streaming_pass(job(drop_first=64), rank=0) == LoaderPass(
        batches=2, fewest_batches=2, most_batches=2, full_batches=2, samples=32, unique=None
    )


def test_device_per_stream_batches_are_uneven() -> None:
    """Batches of a device_per_stream loader are uneven and no proof."""
    streams = (StreamFacts(30, 30), StreamFacts(20, 20))
    facts = job(epoch_size=50, nodes=1, ranks_per_node=4, batching_method="device_per_stream", streams=streams)
    passes = [streaming_pass(facts, rank=rank) for rank in range(4)]
    assert [each.batches for each in passes] == [4, 3, 3, 3]
    assert all(each.uneven and each.uneven_batches == (3, 4) for each in passes)
    plan = plan_of(facts, rank=2)
    assert (plan.loader_batches, plan.uneven_batches, plan.proven) == (3, (3, 4), False)


def test_a_limit_keeps_full_batches() -> None:
    """A limit keeps the full batches at the start of an epoch; samples are known as long as those are all."""
    plan = plan_of(job(), limit_batches=2)
    assert (plan.batches_per_epoch, plan.samples_per_epoch, plan.samples_unique) == (2, 32, 32)
    repeating = plan_of(job(epoch_size=101, drop_last=False), limit_batches=2)
    assert (repeating.samples_per_epoch, repeating.samples_unique) == (32, None)
    beyond = plan_of(job(epoch_size=101, drop_last=False, dataset_batch_size=1, num_workers=4), limit_batches=5)
    assert (beyond.loader_batches, beyond.batches_per_epoch, beyond.samples_per_epoch) == (8, 5, None)


def test_an_unknown_epoch_is_learned_from_the_last_one() -> None:
    """An epoch that cannot be counted has the batches of the last one, which are no proof."""
    facts = job(batching_method="stratified")
    assert "sizes of the streams" in plan_of(facts).unknown_because
    seen = plan_of(facts, known_batches=5)
    assert (seen.batches_per_epoch, seen.proven, seen.unknown_because) == (5, False, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataset_batch_size": None}, "was given no batch_size"),
        ({"batch_size": None}, "makes no batches of its own"),
        ({"batching_method": "by_colour"}, "'by_colour' is not one that countoff knows"),
        ({"num_canonical_nodes": 3}, "streaming refuses 3 canonical nodes on 2 nodes"),
        ({"num_canonical_nodes": 3, "initial_nodes": 3}, "this epoch began on 3 nodes"),
        ({"num_canonical_nodes": 3, "initial_nodes": 3, "partition_algo": "orig"}, "streaming refuses 3 canonical"),
        ({"batching_method": "per_stream", "streams": (StreamFacts(1, 0),)}, "stream 0 gives no sample"),
    ],
)
def test_an_unknown_pass_has_a_reason(changes: dict[str, object], why: str) -> None:
    assert why in streaming_pass(job(**changes), rank=0).unknown_because


def test_stratified_batches_are_known_unless_a_tie_matters() -> None:
    """Stratified batches are unknown only if it matters which of two equal rests numpy rounds up."""
    facts = job(nodes=1, ranks_per_node=1, dataset_batch_size=3, batch_size=3, batching_method="stratified")
    equal = dataclasses.replace(facts, streams=(StreamFacts(40, 40), StreamFacts(40, 40)))
    assert streaming_pass(equal, rank=0).batches == 20
    # Two streams have the same rest for the third sample, and one of them has twice as many samples.
    unlike = (StreamFacts(40, 40, 0.5), StreamFacts(80, 80, 0.5))
    assert "equal claim" in streaming_pass(dataclasses.replace(facts, streams=unlike), rank=0).unknown_because


@pytest.mark.parametrize(
    ("name", "value"),
    [("epoch_size", 0), ("nodes", 0), ("num_workers", -1), ("drop_first", -1), ("batch_size", 0), ("replication", 3)],
)
def test_a_bad_streaming_fact_is_refused_by_name(name: str, value: int) -> None:
    """A fact outside its domain is refused, and the error names the fact."""
    with pytest.raises(ValueError, match=rf"^{name} .*got {value}$"):
        job(**{name: value})


@pytest.mark.parametrize(("rank", "message"), [(4, "rank must be below 4, got 4"), (-1, "rank must be an integer")])
def test_a_rank_outside_the_job_is_refused(rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streaming_pass(job(), rank=rank)


def test_a_pass_without_batches_needs_a_reason() -> None:
    """A pass without batches needs a reason, and one with batches must have none."""
    with pytest.raises(ValueError, match="unknown_because must say why"):
        LoaderPass(batches=None)
    with pytest.raises(ValueError, match="unknown_because must say why"):
        LoaderPass(batches=1, unknown_because="no reason")
    with pytest.raises(ValueError, match="most_batches must be an integer of at least 0, got -1"):
        LoaderPass(batches=1, most_batches=-1)


def test_a_length_of_all_ranks_is_no_proof_if_uneven() -> None:
    """A reported length of all ranks proves nothing if ranks are known to be uneven."""
    uneven = LoaderPass(batches=3, fewest_batches=3, most_batches=4)
    facts = LoaderFacts(reported_batches=12, batch_size=4, drop_last=False, samples_per_rank=None, one_pass=uneven)
    totals = Totals(facts, dp_degree=4)
    assert totals.plan.size_taken_for_length
    assert (totals.proven_batches, totals.shorter_than_reported) == (None, None)
