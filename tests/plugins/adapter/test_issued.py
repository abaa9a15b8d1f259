"""The indices that loaders issue, as real loaders of torch issue them."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter import issued
from countoff._adapter.issued import AnyLoader, Issue, Tally, Watch, of_iterator, sum_of_rows
from countoff.core.checks.once import Marks, step_between

ROWS = 100
NEXT_INDEX = vars(_BaseDataLoaderIter)["_next_index"]


@pytest.fixture(autouse=True)
def _torchs_method_is_given_back():
    yield
    assert vars(_BaseDataLoaderIter)["_next_index"] is NEXT_INDEX


def dataset(rows: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(rows))


def read(loader: DataLoader[Any], soon: Any = lambda job: None, batches: int | None = None) -> tuple[list[int], Issue]:
    """Reads a loader below a watch; returns the rows that the loop got, and what was issued."""
    watch, rows = Watch(loader, soon), list[int]()
    for number, (batch,) in enumerate(loader, 1):
        rows += batch.tolist() if batch.ndim else [batch.item()]
        if number == batches:
            break
    issue = watch.latest
    watch.release()
    assert issue is not None
    return rows, issue


def tally_of(issue: Issue, rows: int | None = ROWS) -> Tally:
    if rows is not None:
        issue.are_of(rows)
    found = issue.sum_up(issue.issued)
    assert found is not None
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [{"batch_size": 8}, {"batch_size": None}, {"batch_size": 7, "drop_last": True}])
def test_what_is_issued_is_what_is_read(workers, how):
    torch.manual_seed(3)
    rows, issue = read(DataLoader(dataset(), shuffle=True, num_workers=workers, **how))
    again = Tally(ROWS)
    again.add([rows])
    found = tally_of(issue)
    assert issue.ended
    assert (found.samples, found.total, found.marks, found.order) == (len(rows), again.total, again.marks, again.order)
    assert found.marks == Marks(sum(1 << row for row in rows), 0)


@pytest.mark.parametrize("counted", [1 << 21, 50_000])
def test_what_is_read_is_marked(monkeypatch, counted):
    """Of each sample that is looked at, whether it was read, and whether more than once, in one batch or in several."""
    monkeypatch.setattr(issued, "COUNTED", counted)
    rows, tally = 100_003, Tally(100_003)
    read = [[3, 5, 3], [9999, 5], [7], [7]]
    for batch in read:
        tally.add([batch])
    places = {number * step_between(rows) % rows: number for number in range(min(rows, counted))}
    seen = sum(1 << places[row] for row in {3, 5, 7, 9999} if row in places)
    twice = sum(1 << places[row] for row in {3, 5, 7} if row in places)
    assert tally.marks == Marks(seen, twice)
    assert 0 < twice < seen


def test_the_shares_of_all_ranks_add_up_to_the_whole():
    total = 0
    for rank in range(4):
        share = DistributedSampler(dataset(), 4, rank)
        total += tally_of(read(DataLoader(dataset(), batch_size=8, sampler=share))[1]).total
    assert total % (1 << 64) == sum_of_rows(0, ROWS)
    assert sum(sum_of_rows(first, first + 25) for first in range(0, ROWS, 25)) % (1 << 64) == sum_of_rows(0, ROWS)


def test_persistent_workers_begin_each_pass_anew():
    loader = DataLoader(dataset(), batch_size=8, num_workers=2, persistent_workers=True)
    watch = Watch(loader, lambda job: False)
    for _ in range(3):
        assert len(list(loader)) == 13
        assert watch.latest is not None
        assert (watch.latest.issued, watch.latest.ended) == (13, True)
    watch.release()
    assert len(list(loader)) == 13


def test_workers_are_issued_more_than_a_loop_has_taken():
    _, issue = read(DataLoader(dataset(), batch_size=8, num_workers=2), batches=3)
    assert 3 < issue.issued < 13
    assert not issue.ended
    assert issue.digest_of(3)
    first = issue.sum_up(3)
    assert first is not None
    assert first.samples == 24
    assert (issue.digest_of(3), bool(issue.digest_of(4)), issue.sum_up(2)) == ("", True, None)


def test_another_loader_and_a_look_at_a_batch_are_passes_of_their_own():
    loader, other = DataLoader(dataset(), batch_size=8), DataLoader(dataset(), batch_size=8)
    watch = Watch(loader, lambda job: False)
    first = iter(loader)
    next(first)
    next(iter(loader))
    assert len(list(other)) == 13
    assert len(list(first)) == 12
    issue = of_iterator(first)
    assert issue is not None
    assert (issue.issued, issue is watch.latest) == (13, False)
    assert of_iterator(iter(range(3))) is None
    watch.release()
    assert of_iterator(first) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_has_begun_is_taken_over_by_the_watch_of_its_loader(workers):
    loader, other = (DataLoader(dataset(), batch_size=8, num_workers=workers) for _ in range(2))
    with AnyLoader():
        passes = [iter(other), iter(loader), iter(other)]
        firsts = [next(each) for each in passes]
        watch = Watch(loader, lambda job: False)
    rest = [len(list(each)) for each in passes]
    assert (len(firsts), rest) == (3, [12, 12, 12])
    issue = watch.latest
    assert issue is not None
    assert issue is of_iterator(passes[1])
    assert (issue.issued, issue.begun, tally_of(issue).samples) == (13, 0, ROWS)
    watch.release()


def test_few_batches_are_kept_of_a_pass_that_no_watch_takes_over():
    with AnyLoader():
        batches: Any = iter(DataLoader(dataset(2000), batch_size=1))
        next(batches)
        issue = of_iterator(batches)
        assert issue is not None
        assert issue.issued == 1
        assert sum(1 for _ in batches) == 1999
        assert issue.batches is None


def test_a_list_that_a_sampler_fills_again_is_copied():
    class Again(Sampler[Any]):
        def __iter__(self) -> Any:
            batch = [0] * 4
            for first in range(0, ROWS, 4):
                batch[:] = range(first, first + 4)
                yield batch

    rows, issue = read(DataLoader(dataset(), batch_sampler=Again()))
    assert rows == list(range(ROWS))
    assert tally_of(issue).total == sum_of_rows(0, ROWS)


def test_a_list_that_a_dataset_changes_is_copied():
    class Changes(TensorDataset):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [self[rows.pop(0)] for _ in list(rows)]

    rows, issue = read(DataLoader(Changes(torch.arange(ROWS)), batch_size=8))
    assert rows == list(range(ROWS))
    assert tally_of(issue).total == sum_of_rows(0, ROWS)


@pytest.mark.parametrize(("workers", "is_copied"), [(0, True), (2, False)])
def test_a_list_that_nobody_can_change_is_kept_as_it_is(workers, is_copied):
    class OfItsOwn(TensorDataset):
        __getitems__ = None

    issued: list[Any] = []
    for data, copied in ((dataset(), False), (OfItsOwn(torch.arange(ROWS)), is_copied)):
        loader = DataLoader(data, batch_size=8, num_workers=workers)
        watch, batches = Watch(loader, lambda job: False), iter(loader)
        issued.append(batches._next_index())
        assert watch.latest is not None
        assert watch.latest.batches is not None
        assert (watch.latest.batches[-1] is not issued[-1]) is copied
        watch.release()


def test_what_is_no_row_number_is_not_summed_up():
    class Keys(Sampler[Any]):
        def __iter__(self) -> Any:
            yield from ("a", "b")

    class Named:
        def __getitem__(self, key: str) -> tuple[torch.Tensor]:
            return (torch.tensor(ord(key)),)

    _, issue = read(DataLoader(Named(), batch_size=2, sampler=Keys()))  # pyright: ignore[reportArgumentType]
    assert issue.sum_up(issue.issued) is None
    beyond = Tally(ROWS)
    beyond.add([[-1]])
    assert not beyond.valid


def test_an_iterable_dataset_has_none():
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ((torch.tensor(number),) for number in range(6))

    _, issue = read(DataLoader(Stream(), batch_size=2))
    assert issue.sum_up(issue.issued) is None


def test_a_long_epoch_keeps_few_batches():
    def now(job: Any) -> None:
        job(None)

    _, issue = read(DataLoader(dataset(5000), batch_size=1), now)
    assert issue.batches is not None
    assert len(issue.batches) <= 1024
    whole = issue.sum_up(5000)
    assert whole is not None
    assert whole.samples == 5000


def test_a_pass_leaves_nothing_behind():
    """The sampler's iterator ends with its pass, as it does without a watch, and a loader can be pickled below one."""
    loader = DataLoader(dataset(), batch_size=8)
    watch = Watch(loader, lambda job: False)
    batches: Any = iter(loader)
    next(batches)
    source = weakref.ref(batches._sampler_iter)
    del batches
    assert source() is None
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 13
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    watch.release()
    watch.release()
