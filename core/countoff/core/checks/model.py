"""Do ranks that must hold the same model hold the same parameters? `ModelMismatch`.

Compared once, when the fit has begun: the name, shape and type of each parameter, and whether it needs a gradient. A
record has room for digests of a few ranges of parameters, and for some runs of parameters that do or do not need a
gradient. So every difference is found, and in a large model its place is known as well as these tell it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.protocol.records import Records, parse_count
from countoff.core.verdict import Cause, Standing, Verdict, VerdictKind
from countoff.core.words import clip, count_of, names_of, ranks_by

__all__ = ["MODEL_MISMATCH", "ModelCheck", "Parameter", "SharedModel", "judge_models"]

GRADIENTS = "gradients"
"""Subject of a `ModelMismatch` of equal parameters, of which some need a gradient on some ranks only."""
MODEL_MISMATCH = VerdictKind(
    "ModelMismatch",
    "ranks that must hold the same model have different parameters, or different ones need a gradient",
    causes={
        "": Cause(
            "These ranks average the gradients of their parameters one by one. Where the parameters are not the same, "
            "gradients of different parameters are averaged, or a collective waits for ever.",
            "build the same model on every rank: look for a layer, a tied weight or a dtype that depends on the rank, "
            "on its data, or on what a checkpoint held there. Where they are to differ: levels={'ModelMismatch': "
            "'off'}.",
        ),
        GRADIENTS: Cause(
            "A rank on which a parameter needs no gradient has none to average, so the others wait for it, or it keeps "
            "the old weights.",
            "set requires_grad alike on every rank, and before the model is wrapped. Where it is to differ: "
            "levels={'ModelMismatch': 'off'}.",
        ),
    },
)
_RANGES = 24
_DIGITS = 4
_MOST_RUNS = 40
_MOST_GROUPS = 2
"""What of a record of 1 KiB one rank uses at most: some 900 bytes."""


class Parameter(NamedTuple):
    """One parameter of a model.

    Attributes:
        name: Its name in the model.
        form: Its shape and type, as text.
        needs_gradient: Whether it does.
    """

    name: str
    form: str
    needs_gradient: bool


class SharedModel(NamedTuple):
    """Parameters that several ranks must hold alike, as one of them holds them.

    Attributes:
        ranks: These ranks, ascending.
        parameters: The parameters, in an order that does not depend on the rank.
        models: Models that they are of. Ranks that hold more of them than others are not compared with those.
    """

    ranks: tuple[int, ...]
    parameters: Sequence[Parameter]
    models: int = 1

    def to_json(self) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        count = len(self.parameters)
        runs = [(needed, len(list(run))) for needed, run in itertools.groupby(each[2] for each in self.parameters)]
        return {
            "of": _digest(repr((self.ranks, self.models)), 16),
            "count": count,
            "prints": [
                _digest(repr([each[:2] for each in self.parameters[first:last]]), _DIGITS)
                for first, last in _ranges(count)
            ],
            "needs": {
                "all": _digest("".join("01"[each.needs_gradient] for each in self.parameters), 8),
                "first": bool(runs) and runs[0][0],
                "runs": [length for _, length in runs[:_MOST_RUNS]],
            },
        }


class ModelCheck(Check):
    """Compares the ranks' models once the roll call is over."""

    def __init__(self) -> None:
        self._others: Others | None = None
        self._models: Sequence[SharedModel] = ()

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others, self._models = others, start.models[:_MOST_GROUPS]

    def counted_off(self) -> None:  # noqa: D102
        models, self._models = self._models, ()
        if self._others is None:
            return
        record = {"models": [each.to_json() for each in models]}
        known = {each["of"]: model for each, model in zip(record["models"], models, strict=True)}
        self._others.report("model", record, lambda records: judge_models(records, known))


def judge_models(records: Records, known: Mapping[str, SharedModel]) -> Iterator[Verdict]:
    """Yields a `ModelMismatch` for each set of ranks of which not all hold the same model.

    Args:
        records: What each rank has told, by rank.
        known: What the judging rank holds itself, by the same keys as in the records.

    Raises:
        KeyError, TypeError, ValueError: If a record is none.

    Example:
        >>> def told(*flags):
        ...     held = SharedModel((0, 1, 2), [Parameter(f"layer.{n}", "4", flag) for n, flag in enumerate(flags)])
        ...     return {"models": [held.to_json()]}
        >>> [found] = judge_models({0: told(True, True), 1: told(True, False), 2: told(True, True)}, {})
        >>> found.sentence
        'before the first batch, parameter 2 of 2 needs no gradient on rank 1, and needs one on ranks 0, 2.'
    """
    by_group: dict[str, dict[int, _Told]] = {}
    for rank, record in records.items():
        for model in record["models"][:_MOST_GROUPS]:
            by_group.setdefault(str(model["of"]), {})[rank] = _Told.from_json(model)
    for of, models in sorted(by_group.items()):
        found = _forms_differ(models, known.get(of)) or _needs_differ(models, known.get(of))
        if found is not None:
            yield found


class _Told(NamedTuple):
    """What one rank has told of its parameters.

    Attributes:
        length: How many there are.
        prints: Digests of ranges of them.
        flags: A digest of which of them need a gradient.
        changes: The first of them, and each one from which on the need is another; as far as the record tells.
        first: Whether the first one needs a gradient.
    """

    length: int
    prints: tuple[str, ...]
    flags: str
    changes: tuple[int, ...]
    first: bool

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> _Told:
        needs = record["needs"]
        runs = [parse_count(run) for run in needs["runs"][:_MOST_RUNS]]
        return cls(
            length=parse_count(record["count"]),
            prints=tuple(str(each) for each in record["prints"][:_RANGES]),
            flags=str(needs["all"]),
            changes=tuple(itertools.accumulate(runs, initial=0)),
            first=bool(needs["first"]),
        )

    def needs(self, number: int) -> bool:
        """Whether a parameter that the record tells of needs a gradient."""
        return self.first == (bisect.bisect_right(self.changes, number) % 2 == 1)


def _forms_differ(models: Mapping[int, _Told], known: SharedModel | None) -> Verdict | None:
    counts = ranks_by({rank: model.length for rank, model in models.items()})
    sides = ranks_by({rank: (model.length, model.prints) for rank, model in models.items()})
    if len(sides) == 1:
        return None
    ((_, prints), few), ((count, others), most) = sides[0], sides[-1]
    if len(counts) > 1:
        has = ", ".join(f"{count_of(each, 'parameter')} on {names_of(ranks)}" for each, ranks in counts[:4])
        sentence = f"the model has {has}"
    else:
        sentence = f"the model of {names_of(few)} differs from that of {names_of(most)}"
        places = [span for span, *pair in zip(_ranges(count), prints, others, strict=False) if pair[0] != pair[1]]
        if places:
            sentence += f", first in {_named(places[0], count, known)}"
    return _mismatch(sentence, few, models, "")


def _needs_differ(models: Mapping[int, _Told], known: SharedModel | None) -> Verdict | None:
    sides = ranks_by({rank: model.flags for rank, model in models.items()})
    if len(sides) == 1:
        return None
    few, most = sides[0][1], sides[-1][1]
    one, other = models[few[0]], models[most[0]]
    told = min(one.changes[-1], other.changes[-1])
    place = next(
        (each for each in sorted({*one.changes, *other.changes}) if one.needs(each) != other.needs(each)), told
    )
    if place >= told:
        after = f"after {_named((told - 1, told), one.length, known)}, " if told else ""
        sentence = f"{after}other parameters need a gradient on {names_of(few)} than on {names_of(most)}"
    else:
        name = _named((place, place + 1), one.length, known)
        needing, without = (few, most) if one.needs(place) else (most, few)
        if len(needing) < len(without):
            sentence = f"{name} needs a gradient on {names_of(needing)}, and needs none on {names_of(without)}"
        else:
            sentence = f"{name} needs no gradient on {names_of(without)}, and needs one on {names_of(needing)}"
    return _mismatch(sentence, few, models, GRADIENTS)


def _mismatch(sentence: str, few: Sequence[int], models: Mapping[int, object], subject: str) -> Verdict:
    minority = 2 * len(few) < len(models)
    standing: Standing = "out of step" if minority else "differ"
    named = few if minority else sorted(models)
    return MODEL_MISMATCH.found(f"before the first batch, {sentence}.", named, subject=subject, standing=standing)


def _ranges(count: int) -> list[tuple[int, int]]:
    parts = min(_RANGES, count)
    edges = [count * number // parts for number in range(parts + 1)] if parts else [0]
    return list(itertools.pairwise(edges))


def _named(span: tuple[int, int], count: int, known: SharedModel | None) -> str:
    first, last = span[0], span[1] - 1
    if known is None or len(known.parameters) != count:
        numbers = f"{first + 1}" if first == last else f"{first + 1} to {last + 1}"
        return f"parameter{'' if first == last else 's'} {numbers} of {count}"
    names = [clip(known.parameters[each].name, 80) for each in (first, last)]
    return names[0] if first == last else f"one of {names[0]} to {names[1]}"


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=digits // 2).hexdigest()
