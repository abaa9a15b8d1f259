"""Do ranks begin with the same plan: lengths, batch sizes, accumulation, limits and positions? `PlanMismatch`.

It ends the job where training on would do harm. Of datasets and models (`model`) that differ it warns: a plan does not
prove what follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff.core.checks.check import Check, FitStart
from countoff.core.protocol.records import Records, parse_count
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Standing, Verdict, VerdictKind
from countoff.core.words import count_of, names_of, ranks_by

__all__ = [
    "DATASET",
    "GRADIENTS",
    "MODEL",
    "PLAN_MISMATCH",
    "PROOF_FIELDS",
    "PlanCheck",
    "agreed_fields",
    "each_on",
    "judge_plans",
    "judge_position",
    "judge_rows",
    "mismatch_of",
    "outvoted",
]

PROOF_FIELDS = (
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batches_between_evaluations",
    "batch_size",
    "gradient_accumulation_steps",
    "max_epochs",
    "max_steps",
    "position",
    "dp_degree",
)
"""Fields of a `FitPlan` in which ranks must not differ; each is the subject of its `PlanMismatch`."""
LIMITS = ("max_epochs", "max_steps")
"""Those of them in which None is a value: there is no such limit. In the others it is unknown, and proves nothing."""
OWN_LENGTH = "own_batches_per_epoch"
LENGTHS = ("batches_per_epoch", "proven_batches_per_epoch")
DATASET, MODEL, GRADIENTS = "dataset_rows", "model", "gradients"
"""Subjects of a `PlanMismatch` that warns."""

_UNEQUAL = (
    "The ranks' loaders differ in length, so the ranks would end their epochs, and reach every limit and schedule that "
    "depends on the length, at different batches."
)
_ENDS = "The rank that ends first would leave the others waiting in a collective."
_OTHER_SETTINGS = Cause(
    why=(
        "With these settings, ranks tell one another which batches they have. A rank with another setting does not do "
        "that in the same way, and the others would wait for it."
    ),
    remedy=("give every rank the same uneven_train and uneven_eval, in the code or in the environment of all hosts."),
)
_SAME_DATASET = (
    "give every rank the same dataset: look for a file, a download, a cache or a filter that is not the same on every "
    "host. If each rank's dataset is a share already, use no sampler that shards it again."
)
_RESUMED = "resume every rank from the same checkpoint"
PLAN_MISMATCH = VerdictKind(
    "PlanMismatch",
    "ranks start with different lengths, batch sizes, accumulation, limits, positions, datasets or models",
    default="raises, before the first batch; warns of datasets and models",
    level="raise",
    restart="useless",
    causes={
        "batches_per_epoch": Cause(_UNEQUAL),
        "proven_batches_per_epoch": Cause(_UNEQUAL),
        "batches_between_evaluations": Cause(
            "The ranks would evaluate after different train batches. A collective of the evaluation would meet one of "
            "the training."
        ),
        "batch_size": Cause(
            "The averaged gradient would give the samples of some ranks more weight than those of others.",
            "use the same batch_size on every rank.",
        ),
        "gradient_accumulation_steps": Cause(
            "The ranks would take their optimizer steps after different batches.",
            "give every rank the same number of batches per optimizer step.",
        ),
        "max_epochs": Cause(_ENDS, "give every rank the same number of epochs."),
        "max_steps": Cause(_ENDS, "give every rank the same number of steps."),
        "position": Cause(
            "The ranks have resumed from different checkpoints, or only some of them have resumed. The numbers of a "
            "position are the epoch, the batches of it that are done, and the steps, as far as the framework knows "
            "them.",
            f"{_RESUMED}: look at the path that each rank loads.",
        ),
        "dp_degree": Cause(
            "The ranks would divide the data into different numbers of shares.", "build the same mesh on every rank."
        ),
        DATASET: Cause(
            "A sampler gives each rank its share of one dataset, and takes every rank to hold the same one. Otherwise "
            "some rows are read several times and others never, and ranks may have different numbers of batches.",
            f"{_SAME_DATASET} If they are to differ: compare_data=False.",
        ),
        MODEL: Cause(
            "These ranks average the gradients of their parameters one by one. Where the parameters are not the same, "
            "gradients of different parameters are averaged, or a collective waits for ever.",
            "build the same model on every rank: look for a layer, a tied weight or a dtype that depends on the rank, "
            "on its data, or on what a checkpoint held there. To find the parameter, print the name, shape and dtype "
            "of each on these ranks.",
        ),
        GRADIENTS: Cause(
            "A rank on which a parameter needs no gradient has none to average, so the others wait for it, or it keeps "
            "the old weights.",
            "set requires_grad alike on every rank, and before the model is wrapped.",
        ),
        "uneven_train": _OTHER_SETTINGS,
        "uneven_eval": _OTHER_SETTINGS,
        "weights_every": Cause(
            "The ranks would compare their weights after different optimizer steps.",
            "give every rank the same weights_every.",
        ),
    },
)


class PlanCheck(Check):
    """Compares the plans of all ranks at the roll call.

    Args:
        weights_every: Optimizer steps of this rank between two comparisons of weights; 0: none.

    Attributes:
        datasets_differ: Whether the ranks' train datasets are known to differ. Known on the first rank alone.
    """

    def __init__(self, weights_every: int) -> None:
        self._weights_every = weights_every
        self.datasets_differ = False

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        weights = {"weights_every": self._weights_every} if self._weights_every else {}
        return {"plan": start.plan.to_json(), **weights}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        plans = {rank: report["plan"] for rank, report in reports.items()}
        rows = judge_rows(plans)
        self.datasets_differ = rows is not None
        yield judge_settings(reports) or _by_rows(judge_plans(plans), plans) or rows


def judge_plans(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if the ranks' plans differ in one of `PROOF_FIELDS`, as far as they are known.

    >>> judge_plans({0: {"position": [0, 3, 0]}, 1: {"position": None}}) is None
    True
    >>> judge_plans({rank: {"batches_per_epoch": 8 - rank, "runs_to_end": False} for rank in (0, 1)}) is None
    True
    """
    unused = () if all(plan.get("runs_to_end", True) for plan in plans.values()) else LENGTHS
    for name in [each for each in PROOF_FIELDS if each not in unused]:
        known = {rank: plan for rank, plan in plans.items() if name in LIMITS or plan.get(name) is not None}
        difference = first_difference(known, [name])
        if difference is not None:
            sentence, ranks = difference
            standing = "differ" if len(ranks) == len(known) else "out of step"
            return mismatch_of(name, sentence, ranks, standing, why=_why_equal(plans) if name in LENGTHS else "")
    lengths = own_lengths(plans)
    limits = {plan.get("max_steps") for plan in plans.values()}
    if len(lengths) > 1 and (limit := next(iter(limits))):
        fewest, short = min(lengths)
        if limit % fewest == 0:
            sentence = f"the run ends after {count_of(limit, 'batch')}, where the loaders of {names_of(short)} end"
            why = "Only those ranks would end that epoch too, with its evaluation and its checkpoint."
            return mismatch_of("batches_per_epoch", f"{sentence}, and the others' do not", tuple(short), why=why)
    return None


def judge_rows(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` that warns if the train datasets that a sampler deals out have different rows.

    >>> judge_rows({rank: {"dataset_rows": 96 - 8 * (rank == 2)} for rank in range(4)}).sentence
    'before the first batch, the train dataset has 88 rows on rank 2, 96 rows on ranks 0, 1, 3.'
    """
    groups = _rows(plans)
    if len(groups) < 2:
        return None
    ranks, standing = outvoted([ranks for _, ranks in groups])
    found = mismatch_of(DATASET, f"the train dataset has {_rows_in_words(groups)}", ranks, standing)
    return replace(found, harmful=False)


def judge_settings(records: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if ranks differ in a setting by which they act together.

    A rank on which nothing makes ranks even reports nothing of that, and one that compares no weights nothing of these.

    >>> on = {"uneven_train": "stop", "uneven_eval": "warn"}
    >>> judge_settings({0: on, 1: {}}).sentence
    "before the first batch, uneven_train is 'stop' on rank 0, 'raise' on rank 1."
    """
    reported = {rank: record for rank, record in records.items() if "uneven_train" in record}
    train = {rank: {"uneven_train": repr(record.get("uneven_train", "raise"))} for rank, record in records.items()}
    evaluation = {rank: {"uneven_eval": repr(each["uneven_eval"])} for rank, each in reported.items()}
    if reported:
        evaluation |= {rank: {"uneven_eval": "not 'stop'"} for rank in records if rank not in reported}
    weights = {rank: {"weights_every": record.get("weights_every", 0)} for rank, record in records.items()}
    for name, compared in (("uneven_train", train), ("uneven_eval", evaluation), ("weights_every", weights)):
        difference = first_difference(compared, [name])
        if difference is not None:
            return mismatch_of(name, *difference)
    return None


def judge_position(divergence: Divergence, rank: int) -> Verdict:
    """Returns a `PlanMismatch`: two ranks began a train epoch after different batches of it.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    standing = divergence.standing
    theirs, mine = count_of(standing.at, "batch"), count_of(divergence.count, "batch")
    return PLAN_MISMATCH.found(
        f"rank {standing.rank} began {standing.span} after {theirs} of it, rank {rank} after {mine}.",
        (standing.rank, rank),
        subject="position",
        why="They have resumed at different places, or skip different numbers of batches.",
        remedy=f"{_RESUMED}, and skip as many batches on each: compare what each rank loads.",
        time=standing.time,
        mark_index=divergence.mark_index,
        standing="differ",
    )


def mismatch_of(
    field: str, sentence: str, ranks: Sequence[int], standing: Standing = "differ", *, why: str = ""
) -> Verdict:
    """Returns a `PlanMismatch` of one field.

    Args:
        field: The field, which is the verdict's subject.
        sentence: In what ranks differ, without its end.
        ranks: These ranks.
        standing: What is proved of them.
        why: The cause; empty: that of the field.
    """
    more = {"standing": standing, **({"why": why} if why else {})}
    return PLAN_MISMATCH.found(f"before the first batch, {sentence}.", ranks, subject=field, **more)


def first_difference(
    records: Mapping[int, Mapping[str, Any]], fields: Sequence[str]
) -> tuple[str, tuple[int, ...]] | None:
    """The first of `fields` in which ranks differ, in words, with the ranks of the smallest group.

    >>> plan = {"batches_per_epoch": 5}
    >>> first_difference({0: plan, 1: {"batches_per_epoch": 4}, 2: plan}, ["batches_per_epoch"])
    ('batches_per_epoch is 4 on rank 1, 5 on ranks 0, 2', (1,))
    """
    for name in fields:
        found = ranks_by({rank: record.get(name) for rank, record in records.items()})
        if len(found) > 1:
            words = each_on([("unknown" if value is None else str(value), ranks) for value, ranks in found])
            smallest, largest = found[0][1], found[-1][1]
            return f"{name} is {words}", tuple(smallest if len(smallest) < len(largest) else sorted(records))
    return None


def each_on(found: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The first four of values and their ranks, in words. A comma may stand between the ranks of a list too.

    >>> each_on([("4", [1]), ("5", [0, 2])]), each_on([("4", [1, 3]), ("5", [0, 2])])
    ('4 on rank 1, 5 on ranks 0, 2', '4 on ranks 1, 3; 5 on ranks 0, 2')
    """
    several = any(len(ranks) > 1 for _, ranks in found[:3][: len(found) - 1])
    return ("; " if several else ", ").join(f"{value} on {names_of(ranks)}" for value, ranks in found[:4])


def outvoted(groups: Sequence[Sequence[int]]) -> tuple[list[int], Standing]:
    """Returns the ranks that a difference names, and what is proved of them.

    Args:
        groups: The ranks that have the same, the smallest group first.

    >>> outvoted([[3], [0, 1, 2]]), outvoted([[0], [1]])
    (([3], 'out of step'), ([0, 1], 'differ'))
    """
    *few, most = groups
    others = sorted(rank for ranks in few for rank in ranks)
    return (others, "out of step") if len(others) < len(most) else (sorted([*others, *most]), "differ")


def own_lengths(plans: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, list[int]]]:
    """The lengths of the ranks' own loaders with their ranks, where the framework ends epochs by the shortest one."""
    return ranks_by({rank: int(plan[OWN_LENGTH]) for rank, plan in plans.items() if plan.get(OWN_LENGTH)})


def agreed_fields(plans: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of the fields that have the same value in all plans."""
    names = sorted({name for plan in plans.values() for name in plan})
    return [name for name in names if len(ranks_by({rank: plan.get(name) for rank, plan in plans.items()})) == 1]


def _by_rows(found: Verdict | None, plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Gives lengths that differ the cause that is known: the ranks' datasets differ."""
    groups = _rows(plans)
    if found is None or found.subject not in LENGTHS or len(groups) < 2:
        return found
    why = (
        f"The train dataset has {_rows_in_words(groups)}. A sampler gives each rank its share of it, and takes all to "
        "hold the same."
    )
    return replace(found, why=why, remedy=_SAME_DATASET)


def _rows(plans: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, list[int]]]:
    """The rows of the train datasets with their ranks, as far as they are known."""
    known = {rank: rows for rank, plan in plans.items() if (rows := plan.get(DATASET)) is not None}
    return ranks_by({rank: parse_count(rows) for rank, rows in known.items()})


def _rows_in_words(groups: Sequence[tuple[int, Sequence[int]]]) -> str:
    return each_on([(count_of(rows, "row"), ranks) for rows, ranks in groups])


def _why_equal(plans: Mapping[int, Mapping[str, Any]]) -> str:
    return next((str(plan["why_equal_lengths"]) for plan in plans.values() if plan.get("why_equal_lengths")), "")
