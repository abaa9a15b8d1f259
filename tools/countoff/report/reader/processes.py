"""The processes of ranks, and whose clock their times are by: all are moved to that of rank 0's host."""

from __future__ import annotations

from collections import defaultdict

from countoff.report.model import Fit

_CLOCK_PRECISION = 1e-4


class Process:
    """One process of a rank: its fits, and how far its clock is ahead.

    Attributes:
        fits: Its fits, by the number of the guard.
        ahead: Seconds that its clock is ahead of rank 0's.
        applied: Those that have been taken off its times.
        error: By how many seconds that may be wrong.
        compared: Whether its own lines tell that; else it is what another rank of its host has found.
    """

    def __init__(self) -> None:
        self.fits: dict[int, Fit] = {}
        self.ahead = self.applied = 0.0
        self.error: float | None = None
        self.compared = False

    @property
    def host(self) -> str:
        """The host's name; empty if that is not known."""
        return next((fit.host for fit in self.fits.values()), "")

    @property
    def is_rank_0(self) -> bool:
        """Whether it is rank 0."""
        return any(fit.rank == 0 for fit in self.fits.values())

    def overlaps(self, other: Process) -> bool:
        """Whether both ran at the same time, if they are on the same host."""
        (begin, end), (other_begin, other_end) = self._times(), other._times()
        return begin <= other_end and other_begin <= end

    def _times(self) -> tuple[float, float]:
        """Its first and last time, by its host's clock."""
        begin = min(fit.begin for fit in self.fits.values())
        return begin + self.applied, max(fit.last for fit in self.fits.values()) + self.applied

    def settle(self) -> None:
        """Moves all times to rank 0's clock, as far as the last estimate of it is another one than before."""
        if abs(self.ahead - self.applied) > _CLOCK_PRECISION:
            for fit in self.fits.values():
                fit.shift(self.applied - self.ahead)
            self.applied = self.ahead
        for fit in self.fits.values():
            fit.clock_error = self.error


def share_clocks(processes: list[Process]) -> None:
    """Moves the times of ranks that have not compared clocks: one rank of each host does so for all of them."""
    hosts: defaultdict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.host:
            hosts[process.host].append(process)
    for ranks in hosts.values():
        compared = [process for process in ranks if process.compared]
        first = [process for process in ranks if process.is_rank_0]  # with its clock, the others are compared
        for process in ranks if compared else ():
            if process.compared or any(process.overlaps(each) for each in first):
                continue
            found = next((each for each in compared if process.overlaps(each)), None)
            if found is not None:
                process.ahead, process.error = found.ahead, found.error
                process.settle()
