"""Hooks into the broadcast before each batch in which Lightning's ranks wait for each other."""

from __future__ import annotations

from typing import Any

from countoff.core import Guard

__all__ = ["SigtermHook"]


class SigtermHook:
    """Tells the guard when this rank requests another batch: Lightning broadcasts before it fetches one.

    Without this hook, a rank that waits in the broadcast looks as if it had stopped where another rank has begun to
    evaluate.

    Args:
        guard: Told before the broadcast; some versions of Lightning do not have it, or not by this name.
        epoch_loop: The Trainer's loop over the batches of an epoch.
    """

    _NAME = "_broadcast_sigterm_tensor"

    def __init__(self, guard: Guard, epoch_loop: Any) -> None:
        self._loop = epoch_loop
        broadcast = getattr(epoch_loop, self._NAME, None)
        if broadcast is None:
            return

        def request_and_broadcast() -> None:
            guard.batch_requested()
            broadcast()

        setattr(epoch_loop, self._NAME, request_and_broadcast)

    def remove(self) -> None:
        """Gives the loop its own broadcast back."""
        vars(self._loop).pop(self._NAME, None)
