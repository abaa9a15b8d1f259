"""Which samples the train loader of one fit reads: what its sampler issues, in each epoch."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.held_datasets import dealt, dealt_rows, rows_of
from countoff._adapter.issued import Issue, Watch, of_iterator, sum_of_rows
from countoff._adapter.sampling import accelerate_classes, asks_for_length, samplers_of, torchdata_classes
from countoff._adapter.torch_facts import is_data_loader, iterates_as_torch, reported_length
from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.checks.once import MOST_ROWS, Marks, Reading
from countoff.core.data.plain import attribute_of
from countoff.core.protocol.resume_record import Place

if TYPE_CHECKING:
    from countoff.core import Guard

__all__ = ["Reads"]

_WIDEST = 1 << 24
"""Rows that one rank hashes for its part of the dataset, at most: for a few seconds, once, nothing else is sent."""
_AHEAD = 2
"""Batches behind a checkpoint whose indices are told, if the loader has fetched them by then."""


class Reads:
    """Records what the train loader's sampler issues, so that the guard can compare what is read.

    Args:
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.

    Attributes:
        soon: Has a function called on another thread, with an argument that means nothing; returns whether it will be.
    """

    def __init__(self, dp_rank: int, dp_degree: int) -> None:
        self.soon: Callable[[Any], bool] = _nobody_takes
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._watch: Watch | None = None
        self._watched: Callable[[], Any] = _nobody
        self._numbers: tuple[Any, ...] | None = None

    def expect(self, loader: Any) -> None:
        """Records a train loader's passes from here on; to be called before it is iterated. It raises nothing.

        Args:
            loader: The loader.
        """
        if self._watch is not None and self._watched() is loader:
            return
        self.release()
        with contextlib.suppress(Exception):  # objects of the user's may be made of anything
            if is_data_loader(loader) and not isinstance(loader.dataset, IterableDataset):
                self._watched = weakref.ref(loader)
                self._numbers = _numbers_of(loader) if self._dp_degree > 1 else None
                self._watch = Watch(loader, lambda job: self.soon(job))

    def begin(self, guard: Guard, plan: BatchPlan | None, iterator: Any = None, *, spun: bool = False) -> None:
        """Lets a guard compare what the train epoch reads whose first batch has come.

        Args:
            guard: The guard.
            plan: The plan of an epoch; None if it is not known.
            iterator: The loader's own iterator; None where only the framework has it.
            spun: Whether the framework has taken the batches from the loader that it skips after a resume.
        """
        watch, loader = self._watch, self._watched()
        issue = None if watch is None else of_iterator(iterator) or watch.latest
        if watch is None or loader is None or issue is None or issue.batches is None:
            return
        watch.latest = None  # a later pass that nobody has seen begin is not this one
        own = self._dp_rank, self._dp_degree
        unseen = issue.begun + (0 if spun else guard.once.position)
        known = None if plan is None else plan.facts.dataset_size
        with contextlib.suppress(Exception):  # as above
            stored = rows_of(loader.dataset)
            rows, dealt = known if stored is None else stored, self._rows_dealt_once(loader, known)
            if dealt is not None:
                issue.are_of(dealt)
            how = {"in_order": attribute_of(loader, "in_order") is not False, "spun": spun and not issue.begun}
            planned = None if dealt is None else _plan_of(loader, plan, dealt)
            guard.once.reads = _EpochReads(issue, unseen, own, rows, dealt, planned, **how)
            if iterates_as_torch(loader):
                guard.resumes.look_at_order()

    def release(self) -> None:
        """Ends the recording. Does nothing when called again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.release()

    def _rows_dealt_once(self, loader: DataLoader[Any], known: int | None) -> int | None:
        """The rows of a dataset that is dealt out to all ranks, each to be read once; None where that is not certain.

        Args:
            loader: The loader.
            known: What `len` of its dataset has given; None if that is not known.
        """
        if self._dp_degree == 1 or dealt(loader, self._dp_rank, self._dp_degree) is not loader.dataset:
            return None
        if self._numbers is None or self._numbers != _numbers_of(loader):
            return None  # the plan is that of the loader as it was
        _, *samplers = samplers_of(loader)
        rows = dealt_rows(loader, dp_rank=self._dp_rank, dp_degree=self._dp_degree, known=known)
        if not rows or rows // self._dp_degree >= _WIDEST or rows >= MOST_ROWS:
            return None
        return rows if all(map(_issues_once, samplers)) else None


class _Planned(NamedTuple):
    """What all ranks are planned to read in an epoch.

    Attributes:
        repeated: Samples that are read once more.
        dropped: Samples that are not read.
        batches: Batches of a whole epoch on this rank; None if that is not known.
        uneven: Whether other ranks may have another number of them.
    """

    repeated: int
    dropped: int
    batches: int | None = None
    uneven: bool = False

    def ends(self, batches: int, *, ended: bool) -> bool:
        """Whether an epoch is at its end after so many batches.

        Args:
            batches: The batches.
            ended: Whether the sampler has none left.
        """
        return batches == self.batches or (self.uneven and ended)


def _plan_of(loader: DataLoader[Any], plan: BatchPlan | None, rows: int) -> _Planned | None:
    """What is planned to be read of so many rows; None where that is not known.

    A loader that saves its state may begin anywhere in an epoch, so it has no plan. Its sampler tells how many samples
    are repeated at most.
    """
    if plan is not None and plan.samples_repeated is not None and plan.samples_dropped is not None:
        uneven = plan.uneven_batches is not None
        known = plan.facts.dataset_size == rows
        return _Planned(plan.samples_repeated, plan.samples_dropped, plan.batches_per_epoch, uneven) if known else None
    sampler = next((each for each in samplers_of(loader) if type(each) is DistributedSampler), None)
    return None if sampler is None else _Planned(max(0, sampler.total_size - rows), 0)


class _EpochReads:
    """What a train epoch reads.

    Args:
        issue: What the sampler has been asked for in its pass.
        unseen: Batches that the fit counts in the epoch, before the first one that was issued.
        own: The dp_rank of this rank, and the number of dp_ranks.
        rows: Rows of the dataset; None if that is not known.
        dealt: The same where they are dealt out to all ranks, each to be read once; else None.
        planned: What is planned to be read in an epoch; None where that is not known.
        in_order: Whether the loop gets the batches in the order in which they are issued.
        spun: Whether the framework has taken the batches from the loader that it skips after a resume.

    Attributes:
        skipped: Batches of the epoch before that one, with those that the fit does not count.
        first: Digest of the indices of the first batch that was recorded; empty if it is not known.
    """

    def __init__(
        self,
        issue: Issue,
        unseen: int,
        own: tuple[int, int],
        rows: int | None,
        dealt: int | None,
        planned: _Planned | None,
        *,
        in_order: bool,
        spun: bool,
    ) -> None:
        self._issue = issue
        self._unseen = unseen
        self.skipped = issue.restored or unseen
        self._own = own
        self._rows, self._dealt = rows, dealt
        self._planned = planned
        self._in_order = in_order
        self._spun = spun
        self.first = issue.digest_of(1)

    def reading(self, batches: int) -> Callable[[], tuple[Reading, Marks] | None] | None:
        """Returns what tells of the epoch; see `countoff.core.checks.once.EpochReads`, also below."""
        issue, rows, planned = self._issue, self._dealt, self._planned
        taken, (rank, degree) = batches - self._unseen, self._own
        if rows is None or planned is None or taken < 1:
            return None
        whole = not self.skipped and issue.issued == batches and planned.ends(batches, ended=issue.ended)
        if not (whole or issue.issued == taken or self._in_order):
            return None

        def make() -> tuple[Reading, Marks] | None:
            tally = issue.sum_up(taken)
            if tally is None:
                return None
            told = Reading(rows, tally.samples, 0, planned.repeated, planned.dropped, rank, part=not whole)
            if told.is_exact:  # else the sums tell nothing, and that of many rows takes seconds
                difference = tally.total - _part(rows * rank // degree, rows * (rank + 1) // degree)
                told = told._replace(difference=difference % (1 << 64))
            return told, tally.marks

        return make

    def place(self, batches: int) -> Place | None:
        """Returns what has been issued around a place in the epoch."""
        issue, first = self._issue, batches - self.skipped
        numbers = range(max(1, first), min(issue.issued, first + _AHEAD) + 1)
        ahead = {number + self.skipped: digest for number in numbers if (digest := issue.digest_of(number))}
        tally = None if self.skipped else issue.sum_up(batches)
        return Place(
            self._rows, batches, "" if tally is None else tally.order, ahead, "" if self.skipped else self.first
        )

    def goes_on(self, place: Place, position: int, *, again: bool = False) -> bool | None:
        """Returns whether a resumed epoch goes on in the order that it had before a checkpoint."""
        issue = self._issue
        now = issue.digest_of(1)
        if self._rows is None or place.rows != self._rows or not now:
            return None
        if self._spun or (again and not self.skipped and not issue.begun):  # those before it have been issued again
            tally = issue.sum_up(place.batches) if place.order and position == place.batches else None
            return None if tally is None else tally.order == place.order
        before = place.ahead.get(position + 1)
        if self.skipped != position or not before or now == place.first:  # it begins the epoch again: its data tells
            return None
        # A loader of one's own may take and drop batches by itself.
        return any(issue.digest_of(number) == before for number in range(1, issue.issued + 1))


_part = functools.lru_cache(maxsize=4)(sum_of_rows)


def _issues_once(sampler: Any) -> bool:
    """Whether a sampler is one of a library's that issues each row, or each batch of another sampler, once."""
    kind = type(sampler)
    if kind is RandomSampler or kind in accelerate_classes("SeedableRandomSampler"):
        return attribute_of(sampler, "replacement") is False and attribute_of(sampler, "_num_samples") is None
    exact = (BatchSampler, DistributedSampler, SequentialSampler, *torchdata_classes("BatchSampler"))
    return kind in (*exact, *accelerate_classes("BatchSamplerShard", "SkipBatchSampler"))


def _numbers_of(loader: DataLoader[Any]) -> tuple[Any, ...] | None:
    """What the samplers of a loader and its dataset have in numbers now; None where a pass would not ask for them."""
    if not asks_for_length(loader):
        return None
    numbers: list[Any] = [rows_of(loader.dataset), id(loader.dataset)]
    for sampler in list(samplers_of(loader))[1:]:
        numbers += [id(sampler), reported_length(sampler)]
        numbers += [attribute_of(sampler, name) for name in ("batch_size", "drop_last", "num_samples", "total_size")]
        if isinstance(sampler, DistributedSampler):
            numbers += [reported_length(sampler.dataset), id(sampler.dataset)]
    return tuple(numbers)


def _nobody_takes(_: Any) -> bool:
    """Where there is no thread that sums anything up."""
    return False


def _nobody() -> None:
    """The loader that is recorded, where none is."""
