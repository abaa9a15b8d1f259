"""What one rank tells at the begin of a fit, beside its plan: of its schedules, its model and its split of the data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from countoff.core.arithmetic.schedules import Ending
from countoff.core.messages import clip
from countoff.core.protocol.records import parse_count

__all__ = ["SAMPLED", "SchedulePlan", "SharedModel", "SplitSample"]

SAMPLED = 2048
"""Rows of a dataset whose split is compared, at most: two bits for each in a record of 1 KiB."""
_COUNTS = ("made_for", "warmup", "falls_after", "begins", "reaches")
_DIGITS = 16


@dataclass(frozen=True)
class SchedulePlan:
    """One schedule of one rank, and how far the run goes through it.

    Attributes:
        name: The scheduler's class.
        made_for: Calls of its `step` for which it was made, at least 1.
        warmup: Those of its warm-up.
        peak: Its highest learning rate.
        falls_after: The last call that has this rate for sure.
        begins: The call at which the run begins, or goes on.
        reaches: The last call with whose learning rate the run is sure to train.
    """

    name: str
    made_for: int
    warmup: int
    peak: float
    falls_after: int
    begins: int
    reaches: int

    @classmethod
    def of(cls, name: str, ending: Ending, *, begin: int, calls: int) -> SchedulePlan:
        """Returns the plan of a schedule.

        Args:
            name: The scheduler's class.
            ending: Where it ends.
            begin: Calls until now.
            calls: Calls from now on with whose learning rates the run is sure to train, at least 1.
        """
        return cls(
            name=clip(name, 40),
            made_for=ending.at,
            warmup=ending.warmup,
            peak=ending.peak,
            falls_after=ending.falls_after,
            begins=begin,
            reaches=begin + calls - 1,
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SchedulePlan:
        """Reads what another rank has reported.

        Raises:
            KeyError, TypeError, ValueError: If the record is no such plan.
        """
        counts = {name: parse_count(record[name]) for name in _COUNTS}
        return cls(name=clip(str(record["name"]), 40), peak=float(record["peak"]), **counts)


class SharedModel(NamedTuple):
    """Parameters that several ranks must hold alike, as one of them holds them.

    Attributes:
        of: A digest of these ranks, and of the number of models. Only ranks with the same one are compared.
        parameters: How many parameters there are.
        numbers: How many numbers these have.
        forms: A digest of their shapes and types.
        trained: How many of them need a gradient.
        needs: A digest of which of them do.
    """

    of: str
    parameters: int
    numbers: int
    forms: str
    trained: int
    needs: str

    @classmethod
    def of_ranks(
        cls, ranks: Sequence[int], parameters: Sequence[tuple[int, str, bool]], models: int = 1
    ) -> SharedModel:
        """Returns what is told of parameters.

        Args:
            ranks: The ranks that must hold them alike, ascending.
            parameters: How many numbers each has, its shape and type as text, and whether it needs a gradient; in an
                order that does not depend on the rank.
            models: Models that they are of. Ranks that hold more of them than others are not compared with those.
        """
        numbers, forms, needs = zip(*parameters, strict=True) if parameters else ((), (), ())
        return cls(
            _digest((tuple(ranks), models)),
            len(parameters),
            sum(numbers),
            _digest(forms),
            sum(needs),
            _digest(needs),
        )

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> SharedModel:
        """Reads what another rank has told; that may be anything.

        Raises:
            TypeError, ValueError: If it is something else.
        """
        of, parameters, numbers, forms, trained, needs = record
        texts = [str(each)[:_DIGITS] for each in (of, forms, needs)]
        return cls(texts[0], parse_count(parameters), parse_count(numbers), texts[1], parse_count(trained), texts[2])


class SplitSample(NamedTuple):
    """How one rank has split a dataset, as far as the sampled rows tell it.

    Attributes:
        of: A digest of what is known of that dataset.
        step: Every so many-th row is sampled.
        train: The sampled rows on which this rank trains: bit `n` stands for row `n * step`.
        evaluated: Those with which it evaluates, likewise.
    """

    of: str
    step: int
    train: int
    evaluated: int

    @classmethod
    def of_places(cls, of: str, step: int, train: Iterable[int], evaluated: Iterable[int]) -> SplitSample:
        """Returns the sample with these bits, each below `SAMPLED`."""
        return cls(of, step, sum(1 << place for place in set(train)), sum(1 << place for place in set(evaluated)))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SplitSample:
        """Reads what another rank has told; that may be anything.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        of = clip(str(record["of"]), _DIGITS + 2)
        return cls(of, parse_count(record["step"]), _parse_bits(record["train"]), _parse_bits(record["evaluated"]))

    def to_json(self) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        bits = [base64.b64encode(each.to_bytes(SAMPLED // 8, "little")).decode() for each in self[2:]]
        return {"of": self.of[:_DIGITS], "step": self.step, "train": bits[0], "evaluated": bits[1]}


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=_DIGITS // 2).hexdigest()


def _parse_bits(value: object) -> int:
    if not isinstance(value, str) or len(value) > SAMPLED // 4:
        raise ValueError(f"expected the bits of {SAMPLED} rows, got {value!r:.40}")
    return int.from_bytes(base64.b64decode(value, validate=True)[: SAMPLED // 8], "little")
