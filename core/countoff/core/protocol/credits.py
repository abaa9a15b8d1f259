"""Credits: how ranks with different numbers of batches start the same number, with no collective per batch.

Each rank fetches a few batches ahead of the one that it trains on. It starts a batch only once all ranks are known to
have one of that number, so no collective ever lacks a rank.

- Batches come in blocks. A rank whose loader has delivered a block adds 1 to the block's counter, which is its credit.
  The rank that completes the counter appends a grant to the log, and every rank may start the batches of the block.
- ``stop``: a rank whose loader ends announces its number of batches. Every rank that has as many adds 1 to a counter of
  that number, and the rank that completes it appends the common end. A rank whose loader ends earlier announces its own
  number instead.
- ``repeat``: a rank whose loader ends for the first time writes its number and adds 1 to a counter. It then gives no
  credit beyond that number until it knows that it was not the last rank; it goes on with its loader's batches from the
  first one. The rank that completes the counter appends the largest number as the common end. A rank without any batch
  announces that, because it has nothing to repeat.

A rank fetches at most `lookahead` batches more than it has started, and gives credit for at most two blocks that are
not granted yet. A rank that ends has no more batches than any other rank can fetch while it waits, so nobody waits for
ever.

Nothing here does I/O or starts a thread. What a rank fetches and what the log holds comes in as method calls, and each
returns the actions to be carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from countoff.core.protocol.actions import Action, AddOne, WriteEntry
from countoff.core.protocol.records import parse_count

__all__ = ["Credits"]

_GROWTH = 8
"""A slow store lets blocks grow up to this many times their first size."""
_SLOW_SHARE = 0.25
"""A store is slow if its answer takes longer than this share of the time that a block is trained on."""
_PACED = 3
"""From this block on, the rank fetches at the pace of its training; the blocks before fill its look-ahead."""
_BLOCK_LIMIT = 1 << 20


class Credits:
    """The credits of one rank in one span.

    Args:
        opened: Index of the mark that opened the span; equal on all ranks.
        policy: Whether the span ends with the shortest rank (``stop``) or with the longest (``repeat``).
        lookahead: Batches that the rank fetches ahead of the one that it trains on, at least 1; equal on all ranks.
        rank: This rank.

    Attributes:
        opened: Index of the mark that opened the span.
        policy: Whether the span ends with the shortest rank or with the longest.
        ready: Batches that this rank's loader has delivered, repeated ones included.
        granted: Batches that every rank may start.
        total: Batches that every rank takes in all; None while that is not known.
        own_end: Batches after which this rank's loader ended for the first time; None if it has not.
        may_repeat: Whether this rank's loader has ended, and is known not to be the last one to end.
        lookahead: Batches that the rank fetches ahead; it grows where the store is slow.
    """

    def __init__(self, opened: int, policy: Literal["stop", "repeat"], lookahead: int, rank: int) -> None:
        block = max(1, lookahead // 2)
        self.opened = opened
        self.policy = policy
        self.ready = 0
        self.granted = 0
        self.total: int | None = None
        self.own_end: int | None = None
        self.may_repeat = False
        self.lookahead = lookahead
        self._rank = rank
        self._empty: int | None = None  # a rank that has no batch to repeat
        self._first_block = block
        self._size = block  # of the blocks whose border is not known yet
        self._borders = [block, 2 * block]  # the block at index 0 is the first one that is not granted
        self._block = 0  # its number
        self._credited = 0  # blocks for which this rank has given credit
        self._credited_at = 0.0
        self._answer_seconds = 0.0
        self._grants: list[int] = []  # indices in the log of the last two
        self._others: list[int] = []  # indices in the log of the announced ends, and of the common one
        self._ends: set[int] = set()  # in the log
        self._lowest: int | None = None  # the smallest end known here
        self._offered: int | None = None

    @classmethod
    def known(cls, opened: int, policy: Literal["stop", "repeat"], total: int, rank: int) -> Credits:
        """Returns the credits of a span whose common end is known before it begins: nothing is fetched ahead.

        Args:
            opened: Index of the mark that opened the span.
            policy: Whether the span ends with the shortest rank or with the longest.
            total: Batches that every rank takes.
            rank: This rank.
        """
        credits = cls(opened, policy, 1, rank)
        credits.lookahead = 0
        credits.granted = credits.total = total
        credits.may_repeat = policy == "repeat"
        return credits

    # Events of the training thread.

    def fetched(self, now: float) -> list[Action]:
        """This rank's loader has delivered another batch.

        Args:
            now: The time, in seconds of any clock.
        """
        self.ready += 1
        return self._due(now)

    def ended(self, now: float) -> list[Action]:
        """This rank's loader has ended, for the first time in this span.

        Args:
            now: The time, in seconds of any clock.
        """
        self.own_end = end = self.ready
        if self.total is not None:
            return []
        if self.policy == "repeat":
            entry = {"type": "stop", "opened": self.opened}
            ended = AddOne(self.opened, self._key("ended"), entry, batches=end)
            return [ended] if end else [self._ends_entry(end), ended]
        if self._lowest is not None and self._lowest <= end:
            return self._due(now)
        self._lowest = end
        return [self._ends_entry(end), *self._due(now)]

    # Events from other ranks.

    def receive(self, entry: Mapping[str, Any], index: int, now: float) -> list[Action]:
        """Receives an entry of the log about this span.

        Args:
            entry: The entry.
            index: Its index in the log.
            now: The time, in seconds of any clock.

        Raises:
            KeyError, TypeError, ValueError: If it is not an entry that countoff writes.
        """
        if entry["type"] == "grant":
            block, size = parse_count(entry["block"]), parse_count(entry["size"], _BLOCK_LIMIT)
            if self._block == block < self._credited and size:
                self._receive_grant(index, size)
        else:
            at = parse_count(entry["at"])
            self._others.append(index)
            if entry["type"] == "ends":
                self._ends.add(at)
                if self.policy == "repeat":
                    self._empty = parse_count(entry["rank"])
                else:
                    self._lowest = at if self._lowest is None else min(at, self._lowest)
            elif self.total is None:
                self.total = self.granted = at
        return self._due(now)

    def added(self, action: AddOne, *, last: bool, seconds: float, now: float) -> list[Action]:
        """This rank has added 1 to a counter.

        Args:
            action: The action that asked for it.
            last: Whether it has completed the counter.
            seconds: How long the store took to answer.
            now: The time, in seconds of any clock.
        """
        self._answer_seconds = seconds
        if action.batches is None or last:
            return []
        self.may_repeat = action.batches > 0
        return self._due(now)

    @property
    def empty(self) -> int | None:
        """A rank that has no batch to repeat, where this rank has batches; None if none is known."""
        return self._empty if self.ready else None

    def can_come(self, batch: int) -> bool:
        """Whether a batch may still be granted if this rank fetches no more.

        It may not if it is in a block that this rank has not delivered whole, unless an end is known that it can reach.

        Args:
            batch: Its number in this span, from 1.
        """
        whole = self._credited - self._block
        delivered = self._borders[whole - 1] if whole > 0 else self.granted
        return batch <= delivered or (batch <= self.ready and min(self._ends, default=self.ready + 1) <= self.ready)

    def is_written(self, end: int) -> bool:
        """Whether the log is known to hold an end that is as small as this one."""
        return self.total is not None or any(heard <= end for heard in self._ends)

    def left_keys(self, world_size: int) -> list[str]:
        """The keys of this span that may be left in the store once it is over on all ranks.

        Args:
            world_size: Ranks in the job.
        """
        # Another rank may have heard of two grants more, and have given credit for two blocks beyond those.
        names = [str(self._block + ahead) for ahead in range(2 * len(self._borders))]
        names += [f"end/{end}" for end in sorted(self._ends)]
        if self.policy == "repeat" and self.total is None:
            names += ["ended", *(f"ended/{rank}" for rank in range(world_size))]
        return [self._key(name) for name in names]

    def left_entries(self) -> list[int]:
        """Indices of the entries about this span that are left in the log once it is over on all ranks."""
        return [*self._grants, *self._others]

    def _receive_grant(self, index: int, size: int) -> None:
        self.granted = self._borders.pop(0)
        self._block += 1
        self._size = size
        self._borders.append(self._borders[-1] + size)
        self._grants = [*self._grants[-1:], index]
        if size > self._first_block:
            self.lookahead = max(self.lookahead, 2 * size)

    def _due(self, now: float) -> list[Action]:
        """The counters to which this rank has to add 1, now that it has fetched, heard or been told something."""
        actions: list[Action] = []
        if self.total is not None:
            return actions
        held = self.ready if self.own_end is None or self.may_repeat else self.own_end
        while (place := self._credited - self._block) < len(self._borders):
            border = self._borders[place]
            if border > held or (self._lowest is not None and border > self._lowest):
                break
            actions.append(self._credit(now))
        end = min(self._ends, default=None)  # those in the log, so that every rank knows of each counter that begins
        if self.policy == "stop" and end is not None and self.ready >= end and self._offered != end:
            self._offered = end
            entry = {"type": "stop", "opened": self.opened, "at": end}
            actions.append(AddOne(self.opened, self._key(f"end/{end}"), entry))
        return actions

    def _credit(self, now: float) -> AddOne:
        number, self._credited = self._credited, self._credited + 1
        size, took, self._credited_at = self._size, now - self._credited_at, now
        if number >= _PACED and self._answer_seconds > _SLOW_SHARE * took:
            size = min(2 * size, _GROWTH * self._first_block)
        # Who gives credit for block n has the grant of block n - 2: no border beyond two blocks is known before.
        forget = self._grants[number - 2 - self._block] if number - 2 >= self._block - len(self._grants) else None
        entry = {"type": "grant", "opened": self.opened, "block": number, "size": size}
        return AddOne(self.opened, self._key(str(number)), entry, forget=forget)

    def _ends_entry(self, end: int) -> WriteEntry:
        return WriteEntry({"type": "ends", "opened": self.opened, "at": end, "rank": self._rank})

    def _key(self, name: str) -> str:
        return f"even/{self.opened}/{name}"
