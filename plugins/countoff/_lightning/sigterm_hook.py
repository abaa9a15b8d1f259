"""Where Lightning's ranks meet before a batch, and what that says of a rank that waits there."""

from __future__ import annotations

from typing import Any

from countoff.core import Guard

__all__ = ["SigtermHook"]


class SigtermHook:
    """Tells the guard when this rank goes on to another batch: Lightning broadcasts before it fetches one.

    Without it a rank that waits in that broadcast looks like one that has stopped, while another has begun to evaluate.

    Args:
        guard: Told before the broadcast, which another version of Lightning may not have, or not have by this name.
        epoch_loop: The Trainer's loop over the batches of an epoch.
    """

    _NAME = "_broadcast_sigterm_tensor"

    def __init__(self, guard: Guard, epoch_loop: Any) -> None:
        self._loop = epoch_loop
        broadcast = getattr(epoch_loop, self._NAME, None)
        if broadcast is None:
            return

        def ask_and_broadcast() -> None:
            guard.batch_requested()
            broadcast()

        setattr(epoch_loop, self._NAME, ask_and_broadcast)

    def remove(self) -> None:
        """Gives the loop its own broadcast back."""
        vars(self._loop).pop(self._NAME, None)
