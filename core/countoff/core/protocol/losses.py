"""When a rank is lost, and so may end the others: as soon as another rank needs it, and not before.

A rank may be away in several ways. Its process is gone or stopped, it has left the job, or an exception has left its
loop, which its program may still catch. All of that is no harm where every rank does the same, one of them seconds
before the others. It is harm once another rank waits for the one that is away.

An exception that nothing catches is no question of need: that rank reports it as the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.protocol.judgement import DIED, STOPPED, lost_rank
from countoff.core.protocol.records import Absence
from countoff.core.settings import Settings
from countoff.core.verdict import EXITED, Verdict

GONE_SECONDS = 0.15
"""For so long a rank must have waited, where the one that is away cannot come back: no healthy collective ends then."""
SPARE_BATCHES = 1
"""Ranks that leave alike are at most so many batches apart, where a signal makes them leave."""


@dataclass(frozen=True)
class Need:
    """How much this rank needs the other ranks at one moment.

    Attributes:
        begun: Train batches that it has begun in the fit.
        known: Seconds since it has known that the other rank is away.
        waited: Seconds that its main thread has waited for others since then.
        failed: Whether one of its collectives has failed, as happens when another rank is lost.
        counts_off: Whether it does not know yet that all ranks have begun the fit.
    """

    begun: int = 0
    known: float = 0.0
    waited: float = 0.0
    failed: bool = False
    counts_off: bool = False


def is_lost(absence: Absence, need: Need, settings: Settings) -> bool:
    """Whether a rank that is away is lost, because this rank needs it.

    Args:
        absence: What is known of that rank.
        need: How this rank needs others.
        settings: The user's choices.

    >>> raised = Absence(1, "raised ValueError", begun=4)
    >>> [is_lost(raised, Need(begun, known=15.0), Settings()) for begun in (4, 5, 6)]
    [False, False, True]
    """
    if need.failed or (need.counts_off and absence.certain):
        return True
    # A rank that goes on after its exception says so, but later than a loop may take for some batches.
    apart = absence.begun is not None and need.begun > absence.begun + SPARE_BATCHES
    return max(need.waited, need.known if apart else 0.0) >= patience(absence, settings)


def patience(absence: Absence, settings: Settings) -> float:
    """The seconds for which this rank must have waited for a rank that is away before that one is lost.

    A stopped rank may go on at any time. A rank may catch its exception and come back to a collective, some seconds
    later where it asks a slow storage again. If nothing catches the exception, the rank says so.

    Args:
        absence: What is known of that rank.
        settings: The user's choices.
    """
    if absence.certain:
        return GONE_SECONDS
    return settings.lost_seconds


def loss_of(absence: Absence) -> Verdict:
    """Returns the verdict that a rank is lost."""
    gone = absence.certain or absence.subject in (DIED, STOPPED, EXITED)
    return lost_rank(absence.rank, absence.event, absence.why, gone=gone, subject=absence.subject)
