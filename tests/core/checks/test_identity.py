"""Data identity: what the fingerprints of all ranks prove together."""

from typing import Any

import pytest
import torch

from countoff.core.checks.check import FitStart
from countoff.core.checks.data import DataIdentity, Sampling, judge_data
from countoff.core.data.fingerprint import fingerprint
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import FitPlan, verdict_to_json
from countoff.core.session.state import State
from countoff.core.settings import Settings
from tests.fake_gpu import tensors_on_a_gpu
from tests.other_ranks import KeptRecords


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


class Epoch:
    """One train epoch of a rank whose batches are on a GPU; `reported` has what it reported."""

    def __init__(self) -> None:
        others = KeptRecords()
        self.reported = others.reported
        self.span = SpanCounters("train epoch 0")
        self.data = DataIdentity(State(0, 2, Settings(), {}))
        self.data.fit_started(FitStart(FitPlan(), {}), others)
        self.data.span_opened(self.span, 0)
        self.batches = [torch.rand(4, 64) for _ in range(5)]
        self.expected = [found.digest for found in map(fingerprint, self.batches[:2]) if found is not None]

    def give(self, number: int) -> None:
        """Gives a batch, as an adapter does."""
        if self.data.fingerprints_due:
            self.data.read(self.batches[number])


@pytest.mark.parametrize("last_to_arrive", [0, 1])
def test_fingerprints_of_a_gpu_are_complete_at_a_later_batch(last_to_arrive):
    """They are reported once, in the order of the batches, whatever the order in which they arrive."""
    epoch = Epoch()
    with tensors_on_a_gpu() as copies:
        for number in range(3):
            epoch.give(number)
            assert epoch.data.fingerprints_due
        copies[1 - last_to_arrive].arrived = True
        epoch.give(3)
        assert epoch.reported == []
        copies[last_to_arrive].arrived = True
        epoch.give(4)
        assert not epoch.data.fingerprints_due
        epoch.data.span_closing(epoch.span, "exhausted", orderly=True)
    (record,) = epoch.reported
    assert record["prints"] == epoch.expected
    assert record["informative"]
    assert len(copies) == 2


def test_fingerprints_of_a_gpu_are_complete_at_the_end_of_the_epoch():
    epoch = Epoch()
    with tensors_on_a_gpu() as copies:
        for number in range(2):
            epoch.give(number)
        for copy in copies:
            copy.arrived = True
        epoch.data.span_closing(epoch.span, "exhausted", orderly=True)
    assert [record["prints"] for record in epoch.reported] == [epoch.expected]
    assert not epoch.data.fingerprints_due


class Passes:
    """Train epochs of one rank, all in the same order as its sampler tells."""

    def __init__(self) -> None:
        self.state = State(0, 2, Settings(), {})
        self.data = DataIdentity(self.state)
        self.data.fit_started(FitStart(FitPlan(), {}), KeptRecords())
        self.batches = [torch.rand(4, 64) for _ in range(3)]
        self.epoch = 0

    def run(
        self,
        *,
        exhausted: bool = True,
        whole: bool = False,
        short: bool = False,
        steps: int = 3,
        batches: Any = None,
        epoch: int | None = None,
        skipped: int = 0,
        begun_as: Any = None,
        by: int = 0,
    ) -> bool | None:
        """Runs one pass, shuffled by this epoch; returns whether it has repeated the order of the epoch before it."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        span = SpanCounters(f"train epoch {self.epoch}", started=skipped)
        self.data.span_opened(span, self.epoch)
        self.data.begun_as = begun_as
        for batch in (self.batches if batches is None else batches)[: 2 if short else None]:
            span.started += 1
            if self.data.fingerprints_due:
                self.data.read(batch, Sampling(shuffled=(by, 12, 7)))
        self.state.steps += steps
        self.data.is_whole = whole
        self.data.span_closing(span, "exhausted" if exhausted else "stopped", orderly=True)
        return self.data.repeats_order


def test_the_same_data_in_the_same_order_is_warned_of():
    passes = Passes()
    assert not passes.run()
    assert not passes.run(steps=0)  # a look at the data
    assert passes.run()


def test_the_same_order_of_other_data_is_no_finding():
    """A buffer behind the loader was filled again; an object that cannot be read tells nothing."""
    passes = Passes()
    passes.run()
    assert not passes.run(batches=[torch.rand(4, 64) for _ in range(3)])
    assert not passes.run()
    assert not any(passes.run(batches=[object()] * 3) for _ in range(2))


def test_the_order_of_an_epoch_that_another_run_has_begun_is_known_from_the_checkpoint():
    begun = Passes()
    begun.run(short=True)
    order, prints = begun.data.order, begun.data.prints
    assert order is not None
    for left, again in (((order, prints), True), (((5, *order[1:]), prints), None), (None, None)):
        passes = Passes()
        passes.batches = begun.batches
        rest = [torch.rand(4, 64) for _ in range(2)]
        assert not passes.run(batches=rest, skipped=1, begun_as=left)
        assert passes.run() is again


def test_a_second_pass_over_one_epoch_is_meant():
    """Whoever says that a pass is of the same epoch reads the same data again on purpose."""
    passes = Passes()
    passes.run(epoch=3)
    assert not passes.run(epoch=3)
    assert passes.run(epoch=4)


def test_a_loader_that_counts_itself_on_may_be_passed_over_twice_in_each_epoch():
    """As one that Accelerate has prepared, though set_epoch is called before each epoch."""
    passes, orders = Passes(), [[torch.rand(4, 64) for _ in range(3)] for _ in range(3)]
    assert not any(passes.run(epoch=epoch, by=by, batches=orders[by]) for epoch in (0, 1) for by in (epoch, epoch + 1))


def test_a_short_pass_is_no_epoch():
    """A pass that was left early may have been a search for a learning rate, before or between whole epochs."""
    passes = Passes()
    for _ in range(2):
        passes.run(exhausted=False, short=True)
    assert not passes.run()
    passes.run(exhausted=False, short=True)
    assert not passes.run()
    assert passes.run()


def test_an_epoch_that_is_left_at_its_last_batch_is_whole():
    """Composer ends an epoch without asking for another batch, and its adapter says that the epoch is whole."""
    passes = Passes()
    passes.run(exhausted=False, whole=True)
    assert passes.run(exhausted=False, whole=True)


def test_a_fingerprint_that_is_not_complete_in_time_is_left_out():
    """Nothing is compared then, and the epoch's end waits for nothing; the next epoch begins anew."""
    epoch = Epoch()
    with tensors_on_a_gpu() as copies:
        for number in range(2):
            epoch.give(number)
        copies[0].arrived = True
        epoch.data.span_closing(epoch.span, "exhausted", orderly=True)
        assert [(record["prints"], record["informative"]) for record in epoch.reported] == [([], False)]
        assert not epoch.data.fingerprints_due
        epoch.data.span_opened(epoch.span, 0)
        for number in range(2):
            epoch.give(number)
        for copy in copies:
            copy.arrived = True
        epoch.give(2)
    assert [record["prints"] for record in epoch.reported] == [[], epoch.expected]


def test_first_batches_of_other_epochs_are_not_compared():
    """Where one rank alone evaluates, another epoch may have the same place among its spans."""
    judges = list[Any]()

    class Keeping(KeptRecords):
        def report(self, name: str, record: Any, judge: Any, **_: Any) -> None:
            judges.append((record(), judge))

    data, span = DataIdentity(State(0, 2, Settings(), {})), SpanCounters("train epoch 0")
    data.fit_started(FitStart(FitPlan(dp_rank=0, dp_degree=1), {}), Keeping())
    data.span_opened(span, 0)
    for _ in range(2):
        data.read(torch.rand(4, 64))
    ((own, judge),) = judges
    peer = {**own, "prints": ["a", "b"]}
    assert [found.kind for found in judge({0: own, 1: peer}) if found is not None] == ["PeersDiffer"]
    assert list(judge({0: own, 1: {**peer, "epoch": "train epoch 1"}})) == []
