"""Do ranks begin with the same plan: lengths, batch sizes, accumulation, limits and positions? `PlanMismatch`.

It ends the job where training on would do harm. Of datasets and models (`model`) that differ it warns: a plan does not
prove what follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from countoff.core.checks.check import Check, FitStart
from countoff.core.messages import count_of, names_of, ranks_by
from countoff.core.protocol.records import FitPlan, Records, parse_count, record_text
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Level, Standing, Verdict, VerdictKind

__all__ = [
    "DATASET",
    "GRADIENTS",
    "MODEL",
    "PLAN_MISMATCH",
    "PROOF_FIELDS",
    "PlanCheck",
    "agreed_fields",
    "behind_its_warning",
    "datasets_differ",
    "each_on",
    "joined",
    "judge_plans",
    "judge_position",
    "mismatch_of",
    "outvoted",
]

PROOF_FIELDS = (
    "dp_degree",
    "batch_size",
    "evaluation_intervals",
    "gradient_accumulation_steps",
    "max_epochs",
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batches_between_evaluations",
    "max_steps",
    "position",
)
"""Fields of a `FitPlan` in which ranks must not differ; each is the subject of its `PlanMismatch`."""
LIMITS = ("max_epochs", "max_steps")
"""Those of them in which None is a value: there is no such limit. In the others it is unknown, and proves nothing."""
OWN_LENGTH = "own_batches_per_epoch"
LENGTHS = ("batches_per_epoch", "proven_batches_per_epoch")
DATASET, MODEL, GRADIENTS = "dataset_rows", "model", "gradients"
"""Subjects of a `PlanMismatch` that warns."""
_MAY_BE_MEANT = (DATASET, "sampler")
"""Those of them that a plan has."""
_ORDER = (DATASET, "dp_degree", "sampler", "batch_size", "limits", *PROOF_FIELDS[2:])
"""Fields that are compared, each behind those from which it may follow."""
_OF_LENGTHS = (*LENGTHS, "batches_between_evaluations", "max_steps")
_EFFECTS = {
    **dict.fromkeys((DATASET, "dp_degree", "sampler", "batch_size", "limits", *LENGTHS), _OF_LENGTHS),
    "evaluation_intervals": ("batches_between_evaluations",),
    **dict.fromkeys(("gradient_accumulation_steps", "max_epochs"), ("max_steps",)),
}
"""By field: the fields that may differ because it does."""
_OF_SCHEDULES = (*_EFFECTS, *_OF_LENGTHS)
"""Fields from which other learning-rate schedules may follow."""
_MAY_FOLLOW = ("UnevenBatches", "StepMismatch", "LearningRateMismatch")
"""Kinds of verdict that may follow from plans that differ."""
_BEFORE = "before the first batch, "
_NAMED = {
    "sampler": "the sampler's {} is",
    **dict.fromkeys(("limits", "evaluation_intervals"), "{} is"),
}
"""Fields that have values by name, with the words for one of these."""

_UNEQUAL = (
    "The ranks' loaders differ in length, so the ranks would end their epochs, and reach every limit and schedule that "
    "depends on the length, at different batches."
)
_ENDS = "The rank that ends first would leave the others waiting in a collective."
_OTHER_INTERVALS = (
    "The ranks would evaluate after different train batches. A collective of the evaluation would meet one of the "
    "training."
)
_OTHER_SETTINGS = Cause(
    why=(
        "With these settings, ranks tell one another which batches they have. A rank with another setting does not do "
        "that in the same way, and the others would wait for it."
    ),
    remedy=("give every rank the same uneven_train and uneven_eval, in the code or in the environment of all hosts."),
)
_SAME_DATASET = (
    "give every rank the same dataset: look for a file, a download, a cache or a filter that is not the same on every "
    "host.\n"
    "if each rank's dataset is a share already, use no sampler that shards it again."
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
        "batches_between_evaluations": Cause(_OTHER_INTERVALS),
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
        "limits": Cause(_ENDS, "give every rank the same limit."),
        "evaluation_intervals": Cause(_OTHER_INTERVALS, "give every rank the same interval."),
        "sampler": Cause(
            "A sampler gives each rank its share of one common order. With different orders, some samples are read by "
            "several ranks and others by none.",
            "make the sampler with the same arguments on every rank, but for the rank itself.\n"
            "if they are to differ: compare_data=False.",
        ),
        DATASET: Cause(
            "A sampler gives each rank its share of one dataset, and takes every rank to hold the same one. Otherwise "
            "some rows are read several times and others never, and ranks may have different numbers of batches.",
            f"{_SAME_DATASET}\nif they are to differ: compare_data=False.",
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
"""**Cause.** The message names each field that differs. `batches_per_epoch` is the length of the train loader,
`proven_batches_per_epoch` what its sampler proves; a loop of your own may leave its loaders earlier, so neither is
compared there. `position` is where a resumed run continues. Two differences are warnings, as they may be meant: the
rows of a train dataset that a sampler divides, with that sampler's `shuffle` and seed; and the parameters of ranks that
must hold the same model (their number, shapes and types, and which of them need a gradient).

**Fix.** Read the value from one configuration, or let rank 0 choose the checkpoint and broadcast its path.

Rows are not read, and models that no wrapper synchronises are not compared.
"""


class PlanCheck(Check):
    """Compares the plans of all ranks at the roll call.

    Args:
        weights_every: Optimizer steps of this rank between two comparisons of weights; 0: none.

    Attributes:
        datasets_differ: Whether the ranks' train datasets are known to differ. Known on the first rank alone.
    """

    takes_the_rest = True

    def __init__(self, weights_every: int) -> None:
        self._weights_every = weights_every
        self.datasets_differ = False

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        known = {name: value for name, value in start.plan.to_json().items() if value is not None}
        told: dict[str, Any] = {"plan": {name: value for name, value in known.items() if name not in _NAMED}}
        if self._weights_every:
            told["weights_every"] = self._weights_every
        for name in [each for each in _NAMED if each in known]:
            longer = {**told, "plan": {**told["plan"], name: known[name]}}
            if len(record_text(longer)) <= room:
                told = longer
        return told

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        plans = {rank: report["plan"] for rank, report in reports.items()}
        self.datasets_differ = datasets_differ(plans)
        yield judge_settings(reports) or judge_plans(plans)


class _Difference(NamedTuple):
    """One value in which the ranks' plans differ.

    Attributes:
        subject: What the value is one of: the subject of its `PlanMismatch`.
        words: What it is on which ranks.
        ranks: The ranks that it names.
        standing: What is proved of them.
    """

    subject: str
    words: str
    ranks: tuple[int, ...]
    standing: Standing


def judge_plans(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` of all in which the ranks' plans differ, as far as they are known.

    It is about the first difference, from which others may follow. It warns if all of them may be meant.

    >>> plans = {rank: {"batch_size": size, "batches_per_epoch": 64 // size} for rank, size in enumerate([8, 4])}
    >>> found = judge_plans(plans)
    >>> found.sentence
    'before the first batch, batch_size is 8 on rank 0, 4 on rank 1.'
    >>> found.why.partition(". ")[0]
    'From this follows: batches_per_epoch is 8 on rank 0, 16 on rank 1'
    >>> judge_plans({rank: {"dataset_rows": 96 - 8 * (rank == 2)} for rank in range(4)}).sentence
    'before the first batch, the train dataset has 88 rows on rank 2, 96 rows on ranks 0, 1, 3.'
    >>> judge_plans({0: {"position": [0, 3, 0]}, 1: {"position": None}}) is None
    True
    >>> judge_plans({rank: {"batches_per_epoch": 8 - rank, "runs_to_end": False} for rank in (0, 1)}) is None
    True
    """
    differences = list(_differences(plans))
    if not any(each.subject in _OF_LENGTHS for each in differences):  # limits may come to the same length
        differences = [each for each in differences if each.subject != "limits"]
    if not differences:
        return _judge_limit(plans)
    subjects = [each.subject for each in differences]
    first, *others = differences
    if LENGTHS[0] in subjects:  # the same length, as the arithmetic knows it
        others = [each for each in others if each.subject != LENGTHS[1]]
    follow = [each for each in others if any(each.subject in _EFFECTS.get(cause, ()) for cause in subjects)]
    apart = [each for each in others if each not in follow]
    told = [f"From this follows: {'; '.join(each.words for each in follow)}."] if follow else []
    if apart:
        told.append(f"Besides, {'; '.join(each.words for each in apart)}: that must be the same on every rank, too.")
    cause = (_why_equal(plans) if first.subject in LENGTHS else "") or PLAN_MISMATCH.causes[first.subject].why
    found = mismatch_of(first.subject, first.words, first.ranks, first.standing, why=" ".join((*told, cause)))
    if not set(subjects) - set(_MAY_BE_MEANT):
        return replace(found, harmful=False)
    return replace(found, remedy=_SAME_DATASET) if first.subject == DATASET else found


def joined(found: Sequence[Verdict], levels: Mapping[str, Level]) -> list[Verdict]:
    """Returns what was found at the start of a fit, with learning-rate schedules that differ behind their cause.

    Args:
        found: What the checks have found.
        levels: The user's levels, by kind of verdict.
    """
    plan = next((each for each in found if each.kind == PLAN_MISMATCH.name and each.subject in _ORDER), None)
    rates = next((each for each in found if each.kind == "LearningRateMismatch"), None)
    if plan is None or rates is None or levels.get(plan.kind, "raise") != "raise":
        return list(found)
    rest, level = [each for each in found if each is not rates], levels.get(rates.kind, "raise")
    if level == "off":
        return rest
    follows = "From this follows: " if plan.subject in _OF_SCHEDULES else "Besides, "
    why = f"{follows}{rates.sentence.removeprefix(_BEFORE)} {plan.why}"
    both = replace(plan, why=why, harmful=plan.harmful if level == "warn" else None)
    return [both if each is plan else each for each in rest]


def _differences(plans: Mapping[int, Mapping[str, Any]]) -> Iterator[_Difference]:
    """Yields the values in which plans differ, each behind those from which it may follow."""
    unused = () if all(plan.get("runs_to_end", True) for plan in plans.values()) else LENGTHS
    for subject in [each for each in _ORDER if each not in unused]:
        for words, values in _values(plans, subject):
            groups = ranks_by(values)
            if len(groups) > 1:
                ranks, standing = outvoted([ranks for _, ranks in groups])
                shown = each_on([(_shown(subject, value), ranks) for value, ranks in groups])
                yield _Difference(subject, f"{words} {shown}", tuple(ranks), standing)


def _values(plans: Mapping[int, Mapping[str, Any]], subject: str) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yields what the plans have of a field, by rank, with the words before it."""
    known: dict[int, Any] = {rank: plan.get(subject) for rank, plan in plans.items()}
    if subject not in LIMITS:
        known = {rank: value for rank, value in known.items() if value is not None}
    if subject in _NAMED:
        for name in sorted({name for values in known.values() for name in values}):
            yield _NAMED[subject].format(name), {rank: each[name] for rank, each in known.items() if name in each}
    else:
        yield "the train dataset has" if subject == DATASET else f"{subject} is", known


def _judge_limit(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if a limit of the run ends an epoch of the shortest loaders alone."""
    lengths = own_lengths(plans)
    limits = {plan.get("max_steps") for plan in plans.values()}
    if len(lengths) > 1 and (limit := next(iter(limits))):
        fewest, short = min(lengths)
        if limit % fewest == 0:
            sentence = f"the run ends after {count_of(limit, 'batch')}, where the loaders of {names_of(short)} end"
            why = "Only those ranks would end that epoch too, with its evaluation and its checkpoint."
            return mismatch_of("batches_per_epoch", f"{sentence}, and the others' do not", tuple(short), why=why)
    return None


def datasets_differ(plans: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the ranks' train datasets are known to differ."""
    return len({plan[DATASET] for plan in plans.values() if plan.get(DATASET) is not None}) > 1


def behind_its_warning(verdict: Verdict, notices: Sequence[Verdict]) -> Verdict:
    """Returns a verdict that says first what the ranks were warned of before the first batch, if it may be the cause.

    Args:
        verdict: What has been found later.
        notices: The warnings of all ranks.
    """
    warned = next((each for each in notices if each.kind == PLAN_MISMATCH.name and each.subject in _ORDER), None)
    if warned is None or verdict.kind not in _MAY_FOLLOW:
        return verdict
    return replace(verdict, why=f"There was a warning: {warned.sentence} {verdict.why}".strip())


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
    logged = divergence.logged
    theirs, mine = count_of(logged.at, "batch"), count_of(divergence.count, "batch")
    return PLAN_MISMATCH.found(
        f"rank {logged.rank} began {logged.span} after {theirs} of it, rank {rank} after {mine}.",
        (logged.rank, rank),
        subject="position",
        why="They have resumed at different places, or skip different numbers of batches.",
        remedy=f"{_RESUMED}, and skip as many batches on each: compare what each rank loads.",
        time=logged.time,
        sync_index=divergence.sync_index,
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
    return PLAN_MISMATCH.found(f"{_BEFORE}{sentence}.", ranks, subject=field, **more)


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
    """Names of the fields that have the same value in all plans; None where a plan does not have one."""
    names = sorted({*FitPlan.__annotations__, *(name for plan in plans.values() for name in plan)})
    return [name for name in names if len(ranks_by({rank: plan.get(name) for rank, plan in plans.items()})) == 1]


def _shown(subject: str, value: Any) -> str:
    if subject == DATASET:
        return count_of(parse_count(value), "row")
    return "unknown" if value is None else str(value)


def _why_equal(plans: Mapping[int, Mapping[str, Any]]) -> str:
    return next((str(plan["why_equal_lengths"]) for plan in plans.values() if plan.get("why_equal_lengths")), "")
