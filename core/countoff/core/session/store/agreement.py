"""Agreement: how a rank learns that all ranks have come as far as it has, so that none will object any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from countoff.core.session.state import State

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel


class Agreement:
    """Counts the ranks that agree with one entry of the log, under a key of its own.

    The last rank deletes the key: that it is gone means that all ranks agree, and nothing stays in the store.

    Args:
        state: This rank's state.
        key: The key, the same on all ranks.
        agrees: Whether this rank agrees, once the log holds the entry. A rank that has proved a divergence does not.

    Attributes:
        reached: Whether all ranks are known to agree.
    """

    def __init__(self, state: State, key: str, agrees: Callable[[], bool] = lambda: True) -> None:
        self._state = state
        self._key = key
        self._agrees = agrees
        self.reached = False

    def count(self, channel: Channel) -> None:
        """Counts this rank, if it agrees. Runs on the writer thread, once for each rank."""
        state = self._state
        if state.proposed is not None or state.end is not None or not self._agrees():
            return
        if channel.add(self._key, 1) == state.world_size:
            channel.delete(self._key)
            self.reached = True

    def look(self, channel: Channel) -> None:
        """Looks whether all ranks agree; this rank must have been counted before. Runs on the writer thread."""
        self.reached = self.reached or (self._state.proposed is None and not channel.has(self._key))
