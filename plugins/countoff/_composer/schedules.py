"""The learning-rate schedules of a Composer run: torch's, and Composer's own, which follow the State's time."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from composer.core import Timestamp

from countoff._adapter.object_copies import NotCopied, copied
from countoff._adapter.schedule_watch import Schedule
from countoff._composer.state import made_with, own_schedulers, times_of
from countoff.core.counts.curves import Curve, UnknownRate

__all__ = ["schedules"]


def schedules(state: Any, *, length_is_right: bool) -> Iterator[Schedule]:
    """Yields the schedules of a run, as far as they can be followed.

    Composer steps torch's schedulers after every epoch or after every batch, which its State does not show: their
    first steps do.

    Args:
        state: Composer's State.
        length_is_right: Whether an epoch has as many batches as Composer counts on. Otherwise another warning tells
            what becomes of a schedule that is made in epochs.
    """
    own = own_schedulers(state)
    for scheduler in own:
        yield Schedule.of(scheduler)
    if not own and len(state.schedulers) == 1:  # several multiply their factors
        yield from _by_time(state, state.schedulers[0], length_is_right)


def _by_time(state: Any, compiled: Any, length_is_right: bool) -> Iterator[Schedule]:
    """Yields the schedule of one of Composer's own schedulers, as a function of batches, if it can be one."""
    with_it = made_with(compiled.lr_lambdas[0])
    units = {"".join(filter(str.isalpha, time)) for time in times_of(with_it["scheduler"])}
    known = length_is_right and bool(state.dataloader_len)
    if not units <= {"ep", "ba"} or ("ep" in units and not known):
        return  # a part of the duration is what the user says, and the batches of a token or a second are not known
    scheduler = with_it["scheduler"]

    def curve() -> Curve | None:
        try:
            factor, rate = (
                _Factor(copied(scheduler, {}), with_it.get("ssr", 1.0), state),
                max(map(float, compiled.base_lrs)),
            )
        except NotCopied:
            return None
        return lambda batch: rate * factor(batch)

    name = getattr(scheduler, "__name__", type(scheduler).__name__)
    yield Schedule(name, curve, lambda: int(state.timestamp.batch), Fraction(1))


class _Factor:
    """The factor of one of Composer's schedulers after a number of batches."""

    def __init__(self, scheduler: Any, ratio: float, state: Any) -> None:
        self._scheduler, self._ratio = scheduler, ratio
        self._length = None if state.dataloader_len is None else int(state.dataloader_len)
        self._known = {"max_duration": state.max_duration, "dataloader_len": state.dataloader_len}

    def __call__(self, batch: int) -> float:
        epoch, inside = divmod(batch, self._length) if self._length else (0, batch)
        at = SimpleNamespace(timestamp=Timestamp(epoch=epoch, batch=batch, batch_in_epoch=inside), **self._known)
        try:
            return float(self._scheduler(at) if self._ratio == 1.0 else self._scheduler(at, self._ratio))
        except Exception as error:  # a function that reads what only a State has
            raise UnknownRate from error
