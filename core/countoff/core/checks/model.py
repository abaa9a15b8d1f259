"""Do ranks that must hold the same model hold the same parameters? `ModelMismatch`.

Compared once, when the fit has begun: the name, shape and type of each parameter, and whether it needs a gradient. A
record has room for digests of a few ranges of parameters, so a difference in a large model is found, and its place is
known as well as these tell it. Which parameters need a gradient is told exactly, as runs.
"""

from __future__ import annotations

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
"""Subject of a `ModelMismatch` whose parameters are equal, and do not all need a gradient on the same ranks."""
MODEL_MISMATCH = VerdictKind(
    "ModelMismatch",
    "ranks that must hold the same model have other parameters, or other ones that need a gradient",
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
_MOST_PARAMETERS = 1 << 20
"""Parameters beyond these are not compared one by one, whatever another rank writes."""


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
        parameters: The parameters, in the model's order.
    """

    ranks: tuple[int, ...]
    parameters: Sequence[Parameter]

    def to_json(self) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        count = len(self.parameters)
        return {
            "of": _digest(repr(self.ranks), 16),
            "count": count,
            "prints": [
                _digest(repr([(each.name, each.form) for each in self.parameters[first:last]]), _DIGITS)
                for first, last in _ranges(count)
            ],
            "needs": [len(list(run)) for _, run in _runs(self.parameters)][:_MOST_RUNS],
            "first": bool(self.parameters) and self.parameters[0].needs_gradient,
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

    Example:
        >>> def told(*flags):
        ...     return {"models": [SharedModel((0, 1, 2), [Parameter(f"layer.{n}", "4", flag)
        ...                                                for n, flag in enumerate(flags)]).to_json()]}
        >>> [found] = judge_models({0: told(True, True), 1: told(True, False), 2: told(True, True)}, {})
        >>> found.sentence
        'before the first batch, parameter 2 of 2 needs no gradient on rank 1, and needs one on ranks 0, 2.'
    """
    by_group: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for model in record["models"][:_MOST_GROUPS]:
            by_group.setdefault(str(model["of"]), {})[rank] = model
    for of, models in sorted(by_group.items()):
        found = _forms_differ(models, known.get(of)) or _needs_differ(models, known.get(of))
        if found is not None:
            yield found


def _forms_differ(models: Mapping[int, Mapping[str, Any]], known: SharedModel | None) -> Verdict | None:
    counts = ranks_by({rank: parse_count(model["count"]) for rank, model in models.items()})
    sides = ranks_by({rank: (model["count"], tuple(model["prints"])) for rank, model in models.items()})
    if len(sides) == 1:
        return None
    if len(counts) > 1:
        has = ", ".join(f"{count_of(count, 'parameter')} on {names_of(ranks)}" for count, ranks in counts[:4])
        sentence = f"before the first batch, the model has {has}"
    else:
        fewest, most = sides[0][1], sides[-1][1]
        sentence = f"before the first batch, the model of {names_of(fewest)} differs from that of {names_of(most)}"
        place = next(
            number
            for number, prints in enumerate(zip(*(each for (_, each), _ in sides), strict=True))
            if len(set(prints)) > 1
        )
        sentence += f" in {_named_range(_ranges(counts[0][0])[place], counts[0][0], known)}"
    return _mismatch(f"{sentence}.", sides[0][1], models, "")


def _needs_differ(models: Mapping[int, Mapping[str, Any]], known: SharedModel | None) -> Verdict | None:
    flags = {rank: _flags(model) for rank, model in models.items()}
    for number, column in enumerate(zip(*flags.values(), strict=False)):
        if len(set(column)) == 1:
            continue
        without = [rank for rank, needed in zip(flags, column, strict=True) if not needed]
        needing = [rank for rank in flags if rank not in without]
        total = next(iter(models.values()))["count"]
        name = _named_range((number, number + 1), total, known)
        if len(without) <= len(needing):
            how, few = f"needs no gradient on {names_of(without)}, and needs one on {names_of(needing)}", without
        else:
            how, few = f"needs a gradient on {names_of(needing)}, and needs none on {names_of(without)}", needing
        return _mismatch(f"before the first batch, {name} {how}.", few, models, GRADIENTS)
    return None


def _mismatch(sentence: str, few: Sequence[int], models: Mapping[int, object], subject: str) -> Verdict:
    minority = 2 * len(few) < len(models)
    standing: Standing = "out of step" if minority else "differ"
    return MODEL_MISMATCH.found(sentence, few if minority else sorted(models), subject=subject, standing=standing)


def _flags(model: Mapping[str, Any]) -> list[bool]:
    needed, flags, count = bool(model["first"]), list[bool](), min(parse_count(model["count"]), _MOST_PARAMETERS)
    for run in model["needs"]:
        flags += [needed] * min(parse_count(run), count - len(flags))
        needed = not needed
    return flags


def _runs(parameters: Sequence[Parameter]) -> Iterator[tuple[bool, Iterator[Parameter]]]:
    return itertools.groupby(parameters, key=lambda each: each.needs_gradient)


def _ranges(count: int) -> list[tuple[int, int]]:
    parts = min(_RANGES, count)
    edges = [count * number // parts for number in range(parts + 1)] if parts else [0]
    return list(itertools.pairwise(edges))


def _named_range(span: tuple[int, int], count: int, known: SharedModel | None) -> str:
    first, last = span[0], span[1] - 1
    if known is None or len(known.parameters) != count:
        numbers = f"{first + 1}" if first == last else f"{first + 1} to {last + 1}"
        return f"parameter {numbers} of {count}"
    names = [clip(known.parameters[each].name, 80) for each in (first, last)]
    return names[0] if first == last else f"a parameter from {names[0]} to {names[1]}"


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=digits // 2).hexdigest()
