"""The handle that every `attach` returns: what a program may call while its loop is observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from countoff._adapter.counted_source import counted_source
from countoff._adapter.observed_loop import ObservedLoop
from countoff.core import Guard

__all__ = ["Attached"]


class Attached:
    """What `attach` returns.

    Args:
        loop: The loop that is observed.

    Attributes:
        loop: The loop, for adapters.
    """

    def __init__(self, loop: ObservedLoop) -> None:
        self.loop = loop

    @property
    def guard(self) -> Guard:
        """The guard of the fit."""
        return self.loop.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now, and this rank's progress, under the names of the logged metrics.

        After an evaluation, it also has the samples that all ranks have read there, where they are proven.
        """
        return self.loop.progress()

    def counted(self, source: Any) -> Any:
        """Returns a source of train batches that counts them as it hands them out, for a loop without a loader.

        Args:
            source: An iterable, each pass over which is a train epoch; an iterator, which is one train epoch; or a
                function without arguments that returns the next batch, all calls of which are one train epoch.

        Returns:
            An iterable, an iterator or a function, as the source is; the source itself where countoff is off.

        Raises:
            TypeError: If the source is none of these.
        """
        if not (isinstance(source, Iterable) or callable(source)):
            raise TypeError(
                f"counted() takes an iterable or a function that returns the next batch, got a {type(source).__name__}"
            )
        return counted_source(self.loop, source) if self.loop.fit.settings.enabled else source

    def micro_batch(self) -> None:
        """Counts a micro-batch, unless passes are not compared now."""
        self.loop.micro_batch()

    def uncounted(self) -> AbstractContextManager[None]:
        """A context in which passes are not compared, for what may be uneven on purpose, such as `Join`."""
        return self.loop.uncounted()

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this rank has come, for a checkpoint: plain types, which load without countoff.

        It takes no part in what the run computes. `load_state_dict` compares it with where the resumed run goes on.
        """
        return self.loop.record() if self.loop.fit.settings.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins the fit again where a checkpoint was written. Collective: every rank must call it, before its loop.

        It restores nothing of the run: the epoch and the batch at which the loop goes on are up to the loop. From its
        first batches and steps, countoff warns if it repeats or skips data, or if its learning rate jumps.

        Args:
            state: What `state_dict` has returned, on any rank; an empty mapping where the checkpoint was written
                without countoff. With that, nothing is compared.
        """
        self.loop.resume_where_begun(state)

    def detach(self) -> None:
        """Ends the fit and gives the loaders back as they were. Does nothing when called again.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        self.loop.end()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        else:
            self.loop.leave_by(error)
