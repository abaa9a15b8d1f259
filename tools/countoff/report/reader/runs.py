"""Which fits of the ranks are one run of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from countoff.report.model import Fit, Run, Value

_STARTING_SECONDS = 300.0
"""So long after the first rank another one may begin, where ranks do not name their fit."""


def runs_of(fits: Sequence[Fit]) -> list[Run]:
    """Finds out which fits of the ranks are one run, and leaves out those that were begun again before they trained."""
    return _trained(_gathered(fits))


def _gathered(fits: Sequence[Fit]) -> list[Run]:
    """Fits that belong together.

    A fit joins a run that was still going on, has as many ranks, was launched as it was, has its number, and has
    nothing of its rank yet: one of its own directory rather than another, and the one that began nearest to it in time.
    """
    found: list[_Gathered] = []
    homes: list[tuple[Fit, _Gathered]] = []
    for fit in sorted(fits, key=lambda fit: (fit.begin, fit.rank)):
        going_on = [at for at, each in enumerate(found) if each.takes(fit)]
        at = max(going_on, key=lambda at: (fit.directory in found[at].places, at), default=-1)
        if at < 0:
            found.append(_Gathered(fit))
        else:
            found[at].add(fit)
            homes.append((fit, found[at]))
    for fit, home in homes:  # the first rank of a restart has found only the run before
        later = [
            each
            for each in found
            if fit.begin <= each.begin < 2 * fit.begin - home.begin
            and (fit.directory in each.places or fit.directory not in home.places)
            and each.takes(fit)
        ]
        if later:
            del home.run.fits[fit.rank]
            later[0].add(fit)
    for each in found:
        each.run.fits = dict(sorted(each.run.fits.items()))
    return [each.run for each in found]


class _Gathered:
    """A run, and what tells which fits may belong to it.

    Attributes:
        run: The run.
        begin: When its first rank began.
        places: The directories of its fits.
    """

    def __init__(self, fit: Fit) -> None:
        self.run, self.begin, self.places = Run(), fit.begin, set[str]()
        self._end = fit.begin + _STARTING_SECONDS
        self._number = fit.number
        self._world_size, self._part = 0, fit.part
        self._launches: dict[str, Mapping[str, Value]] = {}
        self.add(fit)

    def add(self, fit: Fit) -> None:
        """Takes a fit."""
        self.run.fits[fit.rank] = fit
        self.begin, self._end = min(self.begin, fit.begin), max(self._end, fit.last)
        self._world_size = self._world_size or fit.world_size
        self.places.add(fit.directory)
        if fit.run:
            self._launches.setdefault(fit.host, fit.run)

    def takes(self, fit: Fit) -> bool:
        """Whether a fit may belong to the run.

        On one host, all ranks of a run have been launched with the same numbers. Those of two hosts may differ: an
        agent of torchrun counts only the failures of its own host.
        """
        return (
            fit.begin <= self._end
            and fit.rank not in self.run.fits
            and fit.number == self._number
            and fit.part == self._part
            and (not fit.world_size or not self._world_size or fit.world_size == self._world_size)
            and (not fit.run or self._launches.get(fit.host, fit.run) == fit.run)
        )


def _trained(runs: Sequence[Run]) -> list[Run]:
    """The runs without those that ended before their first span, because their processes began the fit again.

    Loading a checkpoint does that. The warnings of such a run are those of the next one.
    """
    found: list[Run] = []
    for run, later in zip(runs, [*runs, Run()][1:], strict=True):
        if not all(_is_begun_again(fit, later.fits.get(rank)) for rank, fit in run.fits.items()):
            found.append(run)
            continue
        for rank, fit in run.fits.items():
            warnings = later.fits[rank].warnings
            warnings[:0] = [warning for warning in fit.warnings if warning not in warnings]
    return found


def _is_begun_again(fit: Fit, later: Fit | None) -> bool:
    """Whether the process of a fit ended it before its first span, and then began another one."""
    same = later is not None and (later.pid, later.host, later.directory) == (fit.pid, fit.host, fit.directory)
    done = fit.ending is not None and fit.ending.how in ("finished", "closed")
    return same and done and not fit.spans and fit.verdict is None
