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
from countoff.core.arithmetic.curves import UnknownRate

__all__ = ["schedules"]


def schedules(state: Any, *, length_is_right: bool) -> Iterator[Schedule | None]:
    """Yields the schedules of a run; None stands for one that has no end.

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
        yield _by_time(state, state.schedulers[0], length_is_right)


def _by_time(state: Any, compiled: Any, length_is_right: bool) -> Schedule | None:
    """Returns the schedule of one of Composer's own schedulers, as a function of batches; None if it cannot be one."""
    with_it = made_with(compiled.lr_lambdas[0])
    units = {"".join(filter(str.isalpha, time)) for time in times_of(with_it["scheduler"])}
    units |= {state.max_duration.unit.value} if "dur" in units else set()
    known = length_is_right and bool(state.dataloader_len)
    if not units <= {"ep", "ba", "dur"} or (units & {"ep", "dur"} and not known):
        return None  # the batches of a token, a sample or a second are not known
    try:
        scheduler = copied(with_it["scheduler"], {})
    except NotCopied:
        return None
    factor, length = _Factor(scheduler, with_it.get("ssr", 1.0), state), max(map(float, compiled.base_lrs))
    return Schedule(
        getattr(scheduler, "__name__", type(scheduler).__name__),
        lambda batch: length * factor(batch),
        lambda: int(state.timestamp.batch),
        Fraction(1),
    )


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
