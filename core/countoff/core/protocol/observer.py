"""Who else is told what happens to a guard, besides the user and the other ranks: the trace of its rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from countoff.core.protocol.records import Records
from countoff.core.verdict import Verdict


class Observer(Protocol):
    """What the threads of the runtime tell; each call but the last returns at once."""

    def met(self, writer: Any) -> None:
        """There are other ranks.

        Args:
            writer: The guard's writer.
        """
        ...

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

    def read_once(self, span: str, rows: int, repeated: int, dropped: int) -> None:
        """Rank 0 knows that all ranks have read each sample once in a train epoch, but for what the plan has.

        Args:
            span: The epoch's name.
            rows: Samples of the dataset.
            repeated: Those that were read once more, as planned.
            dropped: Those that were left out, as planned.
        """
        ...

    def stood_still(self) -> None:
        """This rank takes part in a stall."""
        ...

    def posted(self, channel: Any) -> None:
        """This rank has posted its row of the table. Never raises.

        Args:
            channel: The guard's channel.
        """
        ...

    def gathered(self, channel: Any, rows: Records) -> None:
        """The rows of the table were gathered. Never raises; takes about 0.4 s at most.

        Args:
            channel: The guard's channel.
            rows: What each rank had counted, by rank; empty on any rank but the first.
        """
        ...

    def concluded(self, verdict: Verdict, *, whole: bool) -> None:
        """This rank is about to print the verdict.

        Args:
            verdict: The verdict, with its table.
            whole: Whether it prints it whole, for its host.
        """
        ...

    def ended_by(self, signal: str) -> None:
        """This process is about to end by a signal. Waits until that is written, a fraction of a second at most.

        Args:
            signal: The signal's name.
        """
        ...
