"""The indices that the samplers of torch's loaders issue: which samples a loop has read.

A loader's iterator asks its sampler for the indices of each batch by one method, in the main process, with workers and
without. While a fit watches a loader, a function of countoff's stands in the place of that method, in torch's class.
Nothing is put on a loader, a sampler or an iterator, and the sampler is asked for nothing more than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.hooks import PlacedValue
from countoff._adapter.torch_facts import of_library
from countoff.core.checks.once import COUNTED, Marks, step_between
from countoff.core.data.plain import ABSENT, attribute_of, attributes_of, in_class
from countoff.core.data.unobserved import unobserved

__all__ = ["AnyLoader", "Issue", "Tally", "Watch", "of_iterator", "sum_of_rows"]

_KEPT = 512
"""Batches whose indices are kept until they are summed up, at least: more than loaders fetch ahead, as a rule."""
_CHUNK = 1 << 20
_OF_NUMBERS = (DistributedSampler, RandomSampler, SequentialSampler)
"""Samplers that give numbers, and nothing else."""
_BITS = (1 << 64) - 1


class Tally:
    """Sums up the indices of one epoch, as one rank has read them.

    Args:
        rows: Rows of the dataset; None where only the order is looked at.

    Attributes:
        samples: Indices so far.
        total: The sum of their hashes, modulo 2**64.
        valid: Whether all were rows of the dataset.
    """

    def __init__(self, rows: int | None) -> None:
        self.samples = self.total = 0
        self.valid = True
        self._rows = rows
        self._bits: tuple[torch.Tensor, torch.Tensor] | None = None
        self._order = hashlib.blake2b(digest_size=8)
        if rows:
            self._inverse = pow(step_between(rows), -1, rows) if rows > 1 else 1

    @property
    def order(self) -> str:
        """The digest of the indices in their order, in 16 hexadecimal digits."""
        return self._order.hexdigest()

    @property
    def marks(self) -> Marks:
        """Which samples they are."""
        seen, twice = (int.from_bytes(bytes(each.tolist()), "little") for each in self._bits or (torch.empty(0),) * 2)
        return Marks(seen, twice)

    def add(self, batches: list[Any]) -> None:
        """Adds the indices of batches: lists of numbers, or single numbers. It raises nothing."""
        try:
            with unobserved():  # a mode of the user's would see the operations
                self._add(batches)
        except Exception:  # as of a number beyond 64 bits
            self.valid = False

    def _add(self, batches: list[Any]) -> None:
        flat = list(itertools.chain.from_iterable(each if type(each) is list else (each,) for each in batches))
        if not self.valid or not flat:
            return
        if set(map(type, flat)) != {int}:
            self.valid = False
            return
        values = array("q", flat)
        self._order.update(values.tobytes())
        self.samples += len(values)
        rows = self._rows
        if rows is None:
            return
        indices = torch.frombuffer(values, dtype=torch.int64)
        if int(indices.min()) < 0 or int(indices.max()) >= rows:
            self.valid = False  # an index from the end, or of another dataset
            return
        self.total = (self.total + _sum_of(indices)) & _BITS
        places = indices * self._inverse % rows if self._inverse != 1 else indices
        self._mark(places[places < COUNTED] if rows > COUNTED else places, min(rows, COUNTED))

    def _mark(self, places: torch.Tensor, of: int) -> None:
        """Sets a bit for each sample that was read, and another one for each that was read before."""
        if self._bits is None:
            self._bits = _no_bits(of), _no_bits(of)
        seen, twice = self._bits
        places, counts = torch.unique(places, return_counts=True)
        again = _bits_of(seen, places) | (counts > 1)
        _set_bits(seen, places)
        _set_bits(twice, places[again])


def _no_bits(of: int) -> torch.Tensor:
    return torch.zeros(-(-of // 8), dtype=torch.uint8, device="cpu")


def _bits_of(bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Whether the bits at some places are set."""
    return (bits[places >> 3] >> (places & 7)) & 1 == 1


def _set_bits(bits: torch.Tensor, places: torch.Tensor) -> None:
    """Sets the bits at some places, of which no two are equal."""
    new = places[~_bits_of(bits, places)]
    bits.index_add_(0, new >> 3, (1 << (new & 7)).to(torch.uint8))


def sum_of_rows(begin: int, end: int) -> int:
    """Returns the sum of the hashes of some rows, modulo 2**64.

    Args:
        begin: The first row.
        end: The row behind the last one.
    """
    total = 0
    for first in range(begin, end, _CHUNK):
        total += _sum_of(torch.arange(first, min(first + _CHUNK, end), dtype=torch.int64, device="cpu"))
    return total & _BITS


def _sum_of(indices: torch.Tensor) -> int:
    """The sum of the hashes of row numbers: each is mixed as by the finalizer of splitmix64, modulo 2**64.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), with Stafford's constants.
    """
    mixed = indices + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ ((mixed >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ ((mixed >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return int((mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).sum())


def _signed(value: int) -> int:
    return value - (1 << 64)  # of the constants above, all have their highest bit


class Issue:
    """The indices that one pass over a loader has been issued.

    Args:
        iterator: The loader's iterator.
        kept: Whether the indices are recorded.

    Attributes:
        soon: As for `Watch`; None as long as no watch of the loader has claimed the pass. Then few batches are kept.
        source: The `id` of the sampler's iterator, from which they come. A loader may use its own for another pass.
        batches: The batches that are not summed up yet, the oldest first; None where they are not kept.
        ended: Whether the sampler has none left.
        begun: Batches that the pass had been issued before this recorded any.
        restored: Batches of the epoch before the first one, where the iterator of a loader that was restored tells.
        tally: The sums of the batches before these.
    """

    def __init__(self, iterator: Any, *, kept: bool) -> None:
        self.soon: Callable[[Any], bool] | None = None
        self.source = id(iterator._sampler_iter)
        self.batches: deque[Any] | None = deque() if kept else None
        self.ended = False
        self.restored: int = getattr(iterator, "_sampler_iter_yielded", 0)  # of torchdata's loaders
        # Lightning makes the iterator, whose workers fetch ahead at once, before a callback hears of the fit.
        self.begun: int = 0 if self.restored else getattr(iterator, "_send_idx", 0) or iterator._num_yielded
        self.tally = Tally(None)
        self._summed = 0
        self._asked = False
        self._lists_are_new = _lists_are_new(iterator)
        self._lock = threading.Lock()

    @property
    def issued(self) -> int:
        """Batches that were issued and recorded."""
        return self._summed + len(self.batches or ())

    def add(self, index: Any) -> None:
        """Takes the indices of another batch; what is no row number ends the recording, and no object is kept."""
        batches = self.batches
        if batches is None:
            return
        if self._lists_are_new or type(index) is int:
            batches.append(index)
        elif type(index) is list and index and type(index[0]) is int:
            batches.append(index[:])  # it may be one that the sampler fills again for the next batch
        else:
            self.batches, self.tally.valid = None, False
            return
        if len(batches) > 2 * _KEPT and not self._asked:
            if self.soon is None:
                self.batches = None
                return
            self._asked = True
            if not self.soon(self._sum_up_most):
                self._sum_up_most(None)

    def _sum_up_most(self, _: Any) -> None:
        self.sum_up(self.issued - _KEPT)
        self._asked = False

    def sum_up(self, batches: int) -> Tally | None:
        """Sums up the first batches; returns the sums, or None if they are not known of exactly so many.

        Args:
            batches: How many.
        """
        with self._lock:
            kept = self.batches
            if kept is None or not self._summed <= batches <= self.issued:
                return None
            more = [kept.popleft() for _ in range(batches - self._summed)]
            self._summed = batches
            self.tally.add(more)
            return self.tally if self.tally.valid else None

    def are_of(self, rows: int) -> None:
        """Says how many rows the dataset has; to be called before anything is summed up, or it means nothing."""
        with self._lock:
            if not self._summed:
                self.tally = Tally(rows)

    def digest_of(self, number: int) -> str:
        """Returns the digest of the indices of one batch, in 16 hexadecimal digits; empty if they are not kept.

        Args:
            number: Its number in the pass, from 1.
        """
        with self._lock:
            place = number - self._summed - 1
            if self.batches is None or not 0 <= place < len(self.batches):
                return ""
            tally = Tally(None)
            tally.add([self.batches[place]])
            return tally.order if tally.valid else ""


def _lists_are_new(iterator: Any) -> bool:
    """Whether a sampler gives a new list of numbers for each batch, which nothing changes after it is issued.

    torch's loader hands the list to the dataset's `__getitems__`, if it has one; workers get a copy.
    """
    sampler, dataset = iterator._index_sampler, iterator._dataset
    if type(sampler) is not BatchSampler or type(attribute_of(sampler, "sampler")) not in _OF_NUMBERS:
        return False
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        return True
    of_class, computes = (in_class(type(dataset), name) for name in ("__getitems__", "__getattr__"))
    is_known = of_class is ABSENT or (type(of_class) is types.FunctionType and of_library(of_class))
    return is_known and computes is ABSENT and "__getitems__" not in attributes_of(dataset)


class Watch:
    """Records what the sampler of one loader issues, from here on until it is released.

    Args:
        loader: A DataLoader of torch's, or one of a class made from it.
        soon: Has a function called on another thread, with an argument that means nothing; returns whether it will be.

    Attributes:
        latest: The latest pass that has begun.
    """

    def __init__(self, loader: DataLoader[Any], soon: Callable[[Any], bool]) -> None:
        self._loader = weakref.ref(loader)
        self._soon = soon
        self.latest: Issue | None = None
        _hook.add(self)

    def knows(self, iterator: Any) -> bool:
        """Whether an iterator is one over this loader, which asks the loader's own sampler."""
        loader = self._loader()
        if loader is None:
            return False
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return iterator._index_sampler is sampler and iterator._dataset is loader.dataset

    def claim(self, issue: Issue) -> None:
        """Takes over the record of a pass over this loader."""
        issue.soon = self._soon
        self.latest = issue

    def release(self) -> None:
        """Ends that. Does nothing when called again."""
        self.latest = None
        _hook.remove(self)


class AnyLoader(contextlib.ExitStack):
    """Records what the samplers of all loaders issue until it is closed: which one trains is not known yet.

    A `Watch` of a loader takes over the record of a pass that has begun before it.
    """

    def __init__(self) -> None:
        super().__init__()
        _hook.add(self)
        self.callback(_hook.remove, self)

    def knows(self, _: Any) -> bool:
        """Whether the pass of an iterator is recorded: each one is."""
        return True

    def claim(self, issue: Issue) -> None:
        """Leaves the record of a pass to the watch of its loader."""


class _Hook:
    """The function in the place of torch's own method, while there is a watch."""

    def __init__(self) -> None:
        self.issues: dict[int, Issue] = {}
        self._iterators: dict[int, weakref.ref[Any]] = {}
        self._watches: list[Watch | AnyLoader] = []
        self._placed: PlacedValue | None = None
        self._is_over: list[bool] = []
        self.renew_lock()

    def renew_lock(self) -> None:
        """Makes a lock that no thread holds: another one may have held it when this process was forked."""
        self._lock = threading.RLock()

    def add(self, watch: Watch | AnyLoader) -> None:
        with self._lock:
            self._watches.append(watch)
            if self._placed is None:
                self._is_over = is_over = list[bool]()
                self._placed = PlacedValue(_BaseDataLoaderIter, "_next_index", self._function(is_over))
            self._claim_begun(watch)

    def remove(self, watch: Watch | AnyLoader) -> None:
        with self._lock:
            self._watches = [each for each in self._watches if each is not watch]
            if not self._watches and self._placed is not None:
                self._is_over.append(True)  # other code may have wrapped the function, and keep it
                self._placed.remove()
                self._placed = None
                self.issues.clear()
                self._iterators.clear()

    def _claim_begun(self, watch: Watch | AnyLoader) -> None:
        """Gives a watch the passes that have begun before it."""
        for key, issue in list(self.issues.items()):  # the oldest first; iterators may end meanwhile
            known = self._iterators.get(key)
            iterator = None if known is None else known()
            is_free = issue.soon is None and issue.batches is not None
            if iterator is not None and is_free and watch.knows(iterator):
                watch.claim(issue)

    def _function(self, is_over: list[bool]) -> Callable[[Any], Any]:
        own, issues, begin = _BaseDataLoaderIter._next_index, self.issues, self._begin

        def next_index(iterator: Any) -> Any:
            if is_over:
                return own(iterator)
            issue = issues.get(id(iterator))
            try:
                if issue is None or issue.source != id(iterator._sampler_iter):
                    issue = begin(iterator)
            except Exception:  # an iterator of the user's own, without what those of torch have
                return own(iterator)
            try:
                index = own(iterator)
            except StopIteration:
                issue.ended = True
                raise
            if issue.batches is not None:
                issue.add(index)
            return index

        return next_index

    def _begin(self, iterator: Any) -> Issue:
        with self._lock:
            watch = next((each for each in reversed(self._watches) if each.knows(iterator)), None)
            issue = Issue(iterator, kept=watch is not None)
            if watch is not None:
                watch.claim(issue)
            if self._placed is not None:
                self._keep(iterator, issue)
            return issue

    def _keep(self, iterator: Any, issue: Issue) -> None:
        key, issues, iterators = id(iterator), self.issues, self._iterators

        def forget(_: object) -> None:  # before anything else has the same id
            issues.pop(key, None)
            iterators.pop(key, None)

        issues.pop(key, None)
        issues[key] = issue
        if key not in iterators:
            iterators[key] = weakref.ref(iterator, forget)


_hook = _Hook()
os.register_at_fork(after_in_child=_hook.renew_lock)


def of_iterator(iterator: Any) -> Issue | None:
    """Returns what an iterator of torch's has been issued in its pass; None for any other iterator."""
    return _hook.issues.get(id(iterator)) if issubclass(type(iterator), _BaseDataLoaderIter) else None
