"""The record that a rank keeps in a checkpoint of the framework, and how it is read back when a run resumes from it.

A checkpoint may come from another version of countoff, or from somebody else, so everything is checked here first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

from countoff.core import formats
from countoff.core.protocol.records import parse_count

__all__ = ["UNREADABLE", "Place", "ResumeRecord", "ScheduleState"]

UNREADABLE = KeyError, TypeError, ValueError, IndexError, AttributeError
"""What `ResumeRecord.from_json` raises of something that is no record."""


class ScheduleState(NamedTuple):
    """Learning rates and where their schedules stand.

    Attributes:
        rates: Learning rates in force, by parameter group.
        base_rates: The rates from which the schedules compute these; empty where that is not known.
        calls: How often each scheduler has been stepped; empty where schedulers are not known.
        calls_per_step: How often a scheduler is stepped at each optimizer step, at most.
    """

    rates: Sequence[float] = ()
    base_rates: Sequence[float] = ()
    calls: Sequence[int] = ()
    calls_per_step: int = 1


class Place(NamedTuple):
    """What a loader's sampler has issued around the place of a checkpoint in an epoch, as one rank tells it.

    Attributes:
        rows: Rows of the dataset; None if that is not known.
        batches: Batches of the epoch before the checkpoint.
        order: Digest of the indices of all of these, in their order; empty if some are not known.
        ahead: Digests of the indices of single batches: the last one of these, and the next ones that the loader has
            fetched ahead, by their numbers in the epoch, from 1.
        first: Digest of the indices of the epoch's first batch; empty if that is not known.
    """

    rows: int | None
    batches: int
    order: str
    ahead: Mapping[int, str]
    first: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Place:
        """Reads it out of a checkpoint; that may be anything.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If it is something else.
        """
        rows = None if record["rows"] is None else parse_count(record["rows"])
        ahead = {int(number): str(digest) for number, digest in record["ahead"].items()}
        return cls(rows, parse_count(record["batches"]), str(record["order"]), ahead, str(record["first"]))

    def to_json(self) -> dict[str, Any]:
        """The place as JSON types; `from_json` is its inverse."""
        return {**self._asdict(), "ahead": {str(number): digest for number, digest in self.ahead.items()}}


@dataclass(frozen=True, kw_only=True)
class ResumeRecord:
    """What a rank keeps in a checkpoint, of itself. Every value is one of JSON, so it loads without countoff.

    Attributes:
        epoch: Number of the open train epoch, or of the one that was left before its end; of the next one if there is
            neither; from 0.
        batches: Batches of that epoch that this rank has begun; None if that is not certain.
        stepped: Batches of that epoch that this rank had begun when it took its last optimizer step: those behind them
            may not have been trained on yet, as where a loop writes its checkpoint before it trains on a batch.
        left: Batches of the epoch that this rank has yet to begin; None if that is not known.
        steps: Optimizer steps applied in the whole run.
        dp_rank: This rank's dp_rank.
        dp_degree: The number of dp_ranks.
        batch_size: Samples per dp_rank and batch; None if that is not known.
        accumulation: Batches per dp_rank and optimizer step; None if that is not known.
        schedule: The learning rates and schedules when the record was written.
        start_rates: The learning rates of the run's first two optimizer steps.
        prints: Fingerprints of the first batches of the epoch; empty where they were not taken.
        informative: Whether these batches hold enough for their equality to be no coincidence.
        last: Fingerprint of the batch that was begun last; empty if that is not known.
        order: The epoch by which the sampler shuffled, the number of the train epoch for which it did, the samples that
            it shuffles, and its seed; None where the sampler does not show that.
        issued: What the sampler has issued around this place in the epoch; None if that is not known.
        since: Fingerprints of the first batches behind the resume in this epoch, from which this run came; empty where
            there was none.
        since_batches: Batches that this rank has begun since then.
    """

    epoch: int
    batches: int | None
    stepped: int
    left: int | None
    steps: int
    dp_rank: int
    dp_degree: int
    batch_size: int | None
    accumulation: int | None
    schedule: ScheduleState
    start_rates: tuple[tuple[float, ...], ...]
    prints: tuple[str, ...]
    informative: bool
    last: str
    order: tuple[int, int, int, int] | None
    issued: Place | None = None
    since: tuple[str, ...] = ()
    since_batches: int = 0

    @property
    def samples(self) -> int | None:
        """Samples of the epoch that all ranks have begun; None if that is not known."""
        if self.batches is None or self.batch_size is None:
            return None
        return self.batches * self.batch_size * self.dp_degree

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Samples per dp_rank and batch, and the number of dp_ranks."""
        return self.batch_size, self.dp_degree

    @property
    def trained(self) -> int:
        """Batches of the epoch that are sure to have been trained on."""
        return self.stepped if self.batches is None else min(self.stepped, self.batches)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON types; `from_json` is its inverse."""
        return {
            **asdict(self),
            "version": formats.RESUME_RECORD,
            "schedule": {
                "rates": list(self.schedule.rates),
                "base_rates": list(self.schedule.base_rates),
                "calls": list(self.schedule.calls),
            },
            "start_rates": [list(rates) for rates in self.start_rates],
            "prints": list(self.prints),
            "order": None if self.order is None else list(self.order),
            "issued": None if self.issued is None else self.issued.to_json(),
            "since": list(self.since),
        }

    @classmethod
    def from_json(cls, record: object) -> ResumeRecord:
        """Reads a record out of a checkpoint.

        Raises:
            KeyError, TypeError, ValueError, IndexError, AttributeError: If it is no such record, or one of another
                version of it; see `UNREADABLE`.
        """
        if not isinstance(record, Mapping):
            raise TypeError(f"expected a mapping, got a {type(record).__name__}")
        found = cast("Mapping[str, Any]", record)
        if found["version"] != formats.RESUME_RECORD:
            known = formats.RESUME_RECORD
            raise ValueError(f"its version is {found['version']!r}, and this countoff reads version {known}")
        schedule, order, issued = found["schedule"], found["order"], found.get("issued")  # older ones have none
        return cls(
            epoch=parse_count(found["epoch"]),
            batches=_optional(found["batches"]),
            stepped=parse_count(found["stepped"]),
            left=_optional(found["left"]),
            steps=parse_count(found["steps"]),
            dp_rank=parse_count(found["dp_rank"]),
            dp_degree=parse_count(found["dp_degree"]),
            batch_size=_optional(found["batch_size"]),
            accumulation=_optional(found["accumulation"]),
            schedule=ScheduleState(
                _rates(schedule["rates"]),
                _rates(schedule["base_rates"]),
                tuple(parse_count(calls) for calls in schedule["calls"]),
            ),
            start_rates=tuple(_rates(rates) for rates in found["start_rates"]),
            prints=tuple(str(digest) for digest in found["prints"]),
            informative=bool(found["informative"]),
            last=str(found["last"]),
            order=None if order is None else _order(*order),
            issued=_place_from(issued),
            since=tuple(str(digest) for digest in found.get("since", ())),
            since_batches=parse_count(found.get("since_batches", 0)),
        )


def _order(by: object, epoch: object, samples: object, seed: Any) -> tuple[int, int, int, int]:
    return parse_count(by), parse_count(epoch), parse_count(samples), int(seed)


def _place_from(issued: Any) -> Place | None:
    """What the sampler had issued; None if that cannot be read, which the rest of the record need not suffer."""
    with contextlib.suppress(*UNREADABLE):
        return None if issued is None else Place.from_json(issued)
    return None


def _optional(value: object) -> int | None:
    return None if value is None else parse_count(value)


def _rates(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
