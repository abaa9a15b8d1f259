"""In which train epochs all ranks have read each sample once, as rank 0 has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from countoff.core.messages import count_of
from countoff.report.facts.spans import is_evaluation, spans_of
from countoff.report.model import Run

_NAMED = 8
"""Epochs that a sentence names."""


class Measured(NamedTuple):
    """Train epochs of a run in which the same number of samples were read, each once.

    Attributes:
        samples: Samples of the dataset.
        repeated: Those that were read once more in each of these epochs, as planned.
        dropped: Those that were left out, as planned.
        epochs: The names of these epochs.
        of: All train epochs that all ranks have closed.
    """

    samples: int
    repeated: int
    dropped: int
    epochs: tuple[str, ...]
    of: int

    @property
    def totals(self) -> Mapping[str, float]:
        """The totals that this has measured, by the names of the metrics; none if it is not so in every epoch."""
        read = {"samples_per_epoch": self.samples + self.repeated - self.dropped}
        return {**read, "samples_repeated": self.repeated, "samples_dropped": self.dropped} if self.is_whole else {}

    @property
    def is_whole(self) -> bool:
        """Whether it is so in every epoch."""
        return len(self.epochs) == self.of

    @property
    def in_words(self) -> str:
        """What was measured, as a sentence without its end.

        >>> Measured(60_000, 0, 0, ("train epoch 0", "train epoch 2"), 3).in_words
        'each of 60,000 samples was read once in 2 of 3 epochs (measured): train epoch 0, train epoch 2'
        >>> Measured(61, 1, 0, ("train epoch 0",), 1).in_words
        'each of 61 samples was read once and 1 once more, as planned, in 1 of 1 epoch (measured)'
        >>> Measured(63, 0, 3, ("train epoch 0",), 1).in_words
        'each of 60 samples was read once and 3 were left out, as planned, in 1 of 1 epoch (measured)'
        """
        planned = [f"{self.repeated:,} once more"] if self.repeated else []
        if self.dropped:
            planned.append(f"{self.dropped:,} {'was' if self.dropped == 1 else 'were'} left out")
        said = " and ".join([f"each of {self.samples - self.dropped:,} samples was read once", *planned])
        named = ", ".join(self.epochs[:_NAMED]) + (", …" if len(self.epochs) > _NAMED else "")
        where = f"in {len(self.epochs)} of {count_of(self.of, 'epoch')} (measured)"
        return f"{said}{', as planned,' if planned else ''} {where}{'' if self.is_whole else f': {named}'}"


def measured_of(run: Run) -> list[Measured]:
    """The train epochs of a run in which each sample was read once, by the number of samples."""
    spans = {key.name: spans for key, spans in spans_of(run).items() if not is_evaluation(spans)}
    closed = {name for name, each in spans.items() if all(span.end is not None for span in each.values())}
    found: dict[tuple[int, int, int], list[str]] = {}
    for fit in run.fits.values():
        for each in fit.read_once:
            if each.span in closed:
                found.setdefault((each.rows, each.repeated, each.dropped), []).append(each.span)
    return [Measured(*read, tuple(dict.fromkeys(names)), len(closed)) for read, names in found.items()]
