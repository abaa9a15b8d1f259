"""Credits: how ranks with different numbers of batches start the same number, with no collective per batch.

Each rank fetches a few batches ahead of the one that it trains on. It starts a batch only once all ranks are known to
have one of that number, so no collective ever lacks a rank.

- Batches come in blocks. A rank whose loader has delivered a block adds 1 to the block's counter, which is its credit.
  The rank that completes the counter appends a grant to the log, and every rank may start the batches of the block. The
  first two blocks have one batch, and so have all where a rank fetches nothing ahead: its first credits say so. Two
  counters are enough, in turns: no rank gives credit for a block before the second one before it is granted.
- Blocks double until the training of one takes long enough: 20 times as long as the store's host is busy with it, which
  follows from the number of the clients of the store, and 4 times as long as the store takes to answer.
- A rank whose loader ends announces its number of batches. Every rank that has as many adds 1 to a counter of that
  number, and the rank that completes it appends the common end. A rank whose loader ends earlier announces its own
  number instead.
- Where the lengths of all loaders are proven, there are no credits: every rank ends after the smallest length.

A rank fetches at most `lookahead` batches more than it has started, and gives credit for at most two blocks that are
not granted yet. A rank that ends has fewer batches than any other rank can fetch while it waits, so each of those finds
its own end or one batch more, and nobody waits for ever.

Nothing here does I/O or starts a thread. What a rank fetches and what the log holds comes in as method calls, and each
returns the actions to be carried out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from countoff.core.protocol.actions import Action, AddOne, WriteEntry
from countoff.core.protocol.records import parse_count

__all__ = ["Credits"]

_GROWTH = 8
"""Blocks grow up to this many times their first size: a rank holds two of them in memory."""
_HOST_SHARE = 1 / 20
"""The store's host may be busy with a block for this share of the time that the block is trained on."""
_ANSWER_SHARE = 1 / 4
"""The store may take this share of that time to answer."""
_HOST_SECONDS = 3 * 10e-6
"""What each client of the store costs its host per block: an ``add``, a ``wait`` and a ``get``.

docs/costs.md ("Even epochs") has what one of these was measured to take.
"""
_BLOCK_LIMIT = 1 << 20
_COUNTERS = 2
"""Blocks take turns with so many counters: a rank gives credit for a block only once the second one before is granted.
"""


class Credits:
    """The credits of one rank in one span.

    Args:
        opened: Index of the sync point that opened the span; equal on all ranks.
        lookahead: Batches that a rank may fetch ahead of the one that it trains on, at least 1; equal on all ranks.
        ahead: Whether this rank may fetch ahead; False, or a look-ahead of 1: it fetches each batch where its loop asks
            for it.
        size: Batches of a block from the third one on, as far as this rank decides on it, if that is more than half of
            the look-ahead.
        ranks: How many ranks add to a counter, and wait for its grant.

    Attributes:
        opened: Index of the sync point that opened the span.
        ready: Batches that this rank's loader has delivered.
        granted: Batches that every rank may start.
        total: Batches that every rank takes in all; None while that is not known.
        own_end: Batches after which this rank's loader ended for the first time; None if it has not.
        lookahead: Batches that the rank holds before it starts them; it grows with the blocks.
        size: Batches of each block whose border is not known yet.
        host_seconds: How long a block keeps the store's host busy, computed.
    """

    def __init__(self, opened: int, lookahead: int, *, ahead: bool = True, size: int = 0, ranks: int = 1) -> None:
        self.opened = opened
        self.ready = 0
        self.granted = 0
        self.total: int | None = None
        self.own_end: int | None = None
        self.lookahead = lookahead if ahead else 1
        self._ahead = ahead and lookahead > 1
        self._first_block = max(1, lookahead // 2)
        self.size = max(self._first_block, size)
        self.host_seconds = ranks * _HOST_SECONDS
        self._borders = [1, 2]  # the block at index 0 is the first one that is not granted
        self._block = 0  # its number
        self._credited = 0  # blocks for which this rank has given credit
        self._answer_seconds = 0.0
        self._batch_seconds = math.inf  # not measured yet
        self._measured = 0  # batches that this rank had trained on at the last measurement
        self._measured_at = 0.0
        self._ends: set[int] = set()  # in the log
        self._lowest: int | None = None  # the smallest end known here
        self._offered: int | None = None

    @classmethod
    def known(cls, opened: int, total: int) -> Credits:
        """Returns the credits of a span for which the lengths of all loaders are proven: nothing is fetched ahead.

        Args:
            opened: Index of the sync point that opened the span.
            total: Batches of the shortest loader.
        """
        credits = cls(opened, 1, ahead=False)
        credits._borders = []
        credits.lookahead = 0
        credits.granted = credits.total = total
        return credits

    # Events of the training thread.

    def fetched(self, now: float) -> list[Action]:
        """This rank's loader has delivered another batch.

        Args:
            now: The time, in seconds of any clock.
        """
        self.ready += 1
        self._measure(now)
        return self._due()

    def ended(self) -> list[Action]:
        """This rank's loader has ended, for the first time in this span."""
        self.own_end = end = self.ready
        if self.total is not None:
            return []
        if self._lowest is not None and self._lowest <= end:
            return self._due()
        self._lowest = end
        return [WriteEntry({"type": "ends", "opened": self.opened, "at": end}), *self._due()]

    # Events from other ranks.

    def receive(self, entry: Mapping[str, Any]) -> list[Action]:
        """Receives an entry of the log about this span.

        Args:
            entry: The entry.

        Raises:
            KeyError, TypeError, ValueError: If it is not an entry that countoff writes.
        """
        if entry["type"] == "grant":
            block, size = parse_count(entry["block"]), parse_count(entry["size"], _BLOCK_LIMIT)
            if self._block == block < self._credited and size:
                self._receive_grant(size)
        elif entry["type"] == "ends":
            at = parse_count(entry["at"])
            self._ends.add(at)
            self._lowest = at if self._lowest is None else min(at, self._lowest)
        else:
            at = parse_count(entry["at"])
            if self.total is None:
                self.total = self.granted = at
        return self._due()

    def added(self, seconds: float) -> None:
        """This rank has added 1 to a counter.

        Args:
            seconds: How long the store took to answer.
        """
        self._answer_seconds = seconds

    def can_come(self, batch: int) -> bool:
        """Whether a batch may still be granted if this rank fetches no more.

        It may not if it is in a block that this rank has not delivered whole, unless an end is known that it can reach.

        Args:
            batch: Its number in this span, from 1.
        """
        whole = self._credited - self._block
        delivered = self._borders[whole - 1] if whole > 0 else self.granted
        return batch <= delivered or (batch <= self.ready and min(self._ends, default=self.ready + 1) <= self.ready)

    def has_end(self, end: int) -> bool:
        """Whether the log is known to hold that some loader ends after as many batches or fewer, or the common end."""
        return self.total is not None or any(heard <= end for heard in self._ends)

    def left_keys(self) -> list[str]:
        """The keys of this span that may be left in the store once it is over on all ranks."""
        names = [str(counter) for counter in range(_COUNTERS if self._borders else 0)]
        names += [f"end/{end}" for end in sorted(self._ends)]
        return [self._key(name) for name in names]

    def _receive_grant(self, size: int) -> None:
        self.granted = self._borders.pop(0)
        self._block += 1
        self.size = size
        self._borders.append(self._borders[-1] + size)
        if size > self._first_block and self._ahead:
            self.lookahead = max(self.lookahead, 2 * size)

    def _due(self) -> list[Action]:
        """The counters to which this rank has to add 1, now that it has fetched, heard or been told something."""
        actions: list[Action] = []
        if self.total is not None:
            return actions
        held = self.ready if self.own_end is None else self.own_end
        while (place := self._credited - self._block) < len(self._borders):
            border = self._borders[place]
            if border > held or (self._lowest is not None and border > self._lowest):
                break
            actions.append(self._credit())
        end = min(self._ends, default=None)  # those in the log, so that every rank knows of each counter that begins
        if end is not None and self.ready >= end and self._offered != end:
            self._offered = end
            entry = {"type": "stop", "opened": self.opened, "at": end}
            actions.append(AddOne(self.opened, self._key(f"end/{end}"), entry))
        return actions

    def _credit(self) -> AddOne:
        number, self._credited = self._credited, self._credited + 1
        size = self.size
        if size * self._batch_seconds < max(self.host_seconds / _HOST_SHARE, self._answer_seconds / _ANSWER_SHARE):
            size = min(2 * size, _GROWTH * self._first_block)
        entry = {"type": "grant", "opened": self.opened, "block": number, "size": size}
        single = not self._ahead and number < _COUNTERS
        return AddOne(self.opened, self._key(str(number % _COUNTERS)), entry, single=single)

    def _measure(self, now: float) -> None:
        """Measures how long a batch takes, whenever this rank has trained on as many as a block has.

        A rank whose look-ahead is full fetches a batch whenever it has trained on one. While it fills its look-ahead,
        at the start or because that has grown, it has trained on more than is computed here.
        """
        trained = self.ready - self.lookahead
        if trained - self._measured < self.size:
            return
        if self._measured:  # the first block is left out: it has the wait for the first grant
            self._batch_seconds = (now - self._measured_at) / (trained - self._measured)
        self._measured, self._measured_at = trained, now

    def _key(self, name: str) -> str:
        return f"even/{self.opened}/{name}"
