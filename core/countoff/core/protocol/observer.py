"""Who else is told what happens to a guard, besides the user and the other ranks: the trace of its rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from countoff.core.verdict import Verdict


class Observer(Protocol):
    """What the threads of the runtime tell; each call returns at once."""

    def warned(self, warning: Verdict) -> None:
        """This rank has printed a warning."""
        ...

    def rolled(self, span: str, closed: Mapping[int, float]) -> None:
        """Rank 0 knows when each rank has closed a span.

        Args:
            span: The span's name.
            closed: When each rank did, by rank, in seconds since the epoch.
        """
        ...

    def stood_still(self) -> None:
        """This rank takes part in a stall."""
        ...

    def concluded(self, verdict: Verdict) -> None:
        """This rank is about to print the verdict."""
        ...
