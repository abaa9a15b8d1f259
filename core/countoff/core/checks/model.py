"""Do ranks that must hold the same model hold the same parameters? A `PlanMismatch` that warns.

What must be the same is one more value of the plan: how many parameters there are, their numbers, shapes and types in
order, and which of them need a gradient. Their names are not compared: gradients are averaged by the order of the
parameters, and a rank may rightly wrap its modules in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff.core.checks.check import Check, FitStart
from countoff.core.checks.plan import GRADIENTS, MODEL, each_on, mismatch_of, outvoted
from countoff.core.messages import count_of, names_of, ranks_by
from countoff.core.protocol.fit_records import SharedModel
from countoff.core.protocol.records import Records
from countoff.core.verdict import Verdict

__all__ = ["ModelCheck", "judge_models"]

_MOST_GROUPS = 2


class ModelCheck(Check):
    """Compares the ranks' models at the roll call."""

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        return {"models": start.models[:_MOST_GROUPS]} if start.models else {}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict]:  # noqa: D102
        by_group: dict[str, dict[int, SharedModel]] = {}
        for rank, report in reports.items():
            for model in map(SharedModel.from_json, report.get("models", ())[:_MOST_GROUPS]):
                by_group.setdefault(model.of, {})[rank] = model
        yield from filter(None, map(judge_models, by_group.values()))


def judge_models(models: Mapping[int, SharedModel]) -> Verdict | None:
    """Returns a `PlanMismatch` that warns if ranks that must hold the same model do not.

    Args:
        models: What each of these ranks has told, by rank.

    Example:
        >>> whole, odd = ([(64, "(8, 8) float32", True), (size, "…", True)] for size in (8, 72))
        >>> models = {rank: SharedModel.of_ranks((0, 1, 2), odd if rank == 2 else whole) for rank in range(3)}
        >>> judge_models(models).sentence
        'before the first batch, the model has 2 parameters with 136 numbers on rank 2, 2 parameters with 72 numbers \
on ranks 0, 1.'
    """
    forms = ranks_by({rank: model[1:4] for rank, model in models.items()})
    if len(forms) > 1:
        told = [f"{count_of(count, 'parameter')} with {count_of(size, 'number')}" for (count, size, _), _ in forms]
        if len(set(told)) == len(told):
            has = each_on([(words, ranks) for words, (_, ranks) in zip(told, forms, strict=True)])
            sentence = f"the model has {has}"
        else:
            sentence = (
                f"the model has {told[0]} on {names_of(forms[0][1])}, of other shapes or types than on "
                f"{names_of(forms[-1][1])}"
            )
        return _warning(MODEL, sentence, [ranks for _, ranks in forms])
    needs = ranks_by({rank: model[4:] for rank, model in models.items()})
    if len(needs) == 1:
        return None
    if len({trained for (trained, _), _ in needs}) == len(needs):
        told = [(count_of(trained, "parameter"), ranks) for (trained, _), ranks in needs]
        first = f"{told[0][0]} {'needs' if needs[0][0][0] == 1 else 'need'} a gradient"
        sentence = each_on([(first, told[0][1]), *told[1:]])
    else:
        sentence = f"other parameters need a gradient on {names_of(needs[0][1])} than on {names_of(needs[-1][1])}"
    return _warning(GRADIENTS, sentence, [ranks for _, ranks in needs])


def _warning(subject: str, sentence: str, groups: Sequence[Sequence[int]]) -> Verdict:
    ranks, standing = outvoted(groups)
    return replace(mismatch_of(subject, sentence, ranks, standing), harmful=False)
