"""The comparison of plans and settings that ranks reported at the roll call."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from countoff.core.checks.check import FitStart
from countoff.core.checks.even import EvenCheck, judge_lengths
from countoff.core.checks.plan import (
    PROOF_FIELDS,
    PlanCheck,
    agreed_fields,
    behind_its_warning,
    first_difference,
    joined,
    judge_plans,
    judge_settings,
)
from countoff.core.levels import effect
from countoff.core.messages import ranks_by
from countoff.core.protocol.records import FitPlan
from countoff.core.session.state import State
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict, remedy_for


def test_the_smallest_group_comes_first() -> None:
    assert ranks_by({0: 1, 1: 2, 2: 1, 3: None}) == [(2, [1]), (None, [3]), (1, [0, 2])]


def test_plans_that_agree_are_no_mismatch() -> None:
    """Plans that agree are no mismatch; fields that are not compared may differ, and missing ones are equal."""
    records = {0: {"batch_size": 8, "note": "a"}, 1: {"batch_size": 8, "note": "b"}}
    assert judge_plans(records) is None


def test_the_first_field_in_which_plans_differ_is_named() -> None:
    records = {0: {"batch_size": 8, "max_steps": 5}, 1: {"batch_size": 8, "max_steps": 6}, 2: {"batch_size": 8}}
    sentence, ranks = first_difference(records, ["batch_size", "max_steps"]) or ("", ())
    assert sentence == "max_steps is 5 on rank 0, 6 on rank 1, unknown on rank 2"
    assert ranks == (0, 1, 2)


def test_with_two_groups_of_one_size_all_ranks_are_named() -> None:
    found = judge_plans({rank: {"batch_size": 8 + rank % 2} for rank in range(4)})
    assert found is not None
    assert found.ranks == (0, 1, 2, 3)


def test_a_plan_mismatch_names_the_one_rank_that_differs() -> None:
    """The whole message of a plan that one of three ranks has differently."""
    found = judge_plans({0: {"batch_size": 8}, 1: {"batch_size": 4}, 2: {"batch_size": 8}})
    assert found is not None
    assert replace(found, remedy=remedy_for(found, {})).render().splitlines() == [
        "countoff: PlanMismatch: before the first batch, batch_size is 4 on rank 1, 8 on ranks 0, 2.",
        "  why: The averaged gradient would give the samples of some ranks more weight than those of others.",
        "  do:  use the same batch_size on every rank.",
        "  more: countoff explain PlanMismatch",
    ]
    assert (found.ranks, found.standing) == ((1,), "out of step")


@pytest.mark.parametrize("field", PROOF_FIELDS)
def test_a_plan_mismatch_is_about_its_field(field: str) -> None:
    """Each field has a cause, and a remedy that speaks of it; that for what follows from lengths is the adapter's."""
    values: list[Any] = [8, 4]
    if field == "evaluation_intervals":
        values = [{"limit": each} for each in values]
    found = judge_plans({rank: {field: value} for rank, value in enumerate(values)})
    assert found is not None
    assert (found.subject, found.standing) == (field, "differ")
    assert found.why.endswith(".")
    remedy = remedy_for(found, {})
    assert bool(remedy) != (field.endswith("batches_per_epoch") or field == "batches_between_evaluations")
    assert "loader" not in remedy or field == "batch_size"


def test_different_checkpoints_are_the_cause_of_different_positions() -> None:
    found = judge_plans({0: {"position": [1, 4, 7]}, 1: {"position": [0, 9, 5]}})
    assert found is not None
    assert remedy_for(found, {}).startswith("resume every rank from the same checkpoint")


def compared(*plans: FitPlan) -> tuple[PlanCheck, list[Any]]:
    """The check of the first rank, and what it has found."""
    check = PlanCheck(weights_every=0)
    reports = {rank: dict(check.report(FitStart(plan, {}), 500)) for rank, plan in enumerate(plans)}
    return check, [*filter(None, check.compare_reports(reports, complete=True, refused=False))]


def test_datasets_of_other_rows_are_a_warning() -> None:
    whole, odd = FitPlan(dataset_rows=96), FitPlan(dataset_rows=88)
    check, [found] = compared(whole, whole, odd, whole)
    said = "before the first batch, the train dataset has 88 rows on rank 2, 96 rows on ranks 0, 1, 3."
    assert (found.sentence, found.ranks, found.standing) == (said, (2,), "out of step")
    assert effect(found, {"PlanMismatch": "raise"}) == "warn"
    assert check.datasets_differ
    check, [found] = compared(whole, odd)
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_rows_that_are_not_known_are_not_compared() -> None:
    check, found = compared(FitPlan(dataset_rows=96), FitPlan(), FitPlan(dataset_rows=96))
    assert (check.datasets_differ, found) == (False, [])
    with pytest.raises(ValueError, match="expected a whole number"):
        judge_plans({0: {"dataset_rows": 96}, 1: {"dataset_rows": "all"}})


def found_in(**differ: tuple[Any, Any]) -> Any:
    """What is found in the plans of two ranks that differ in some fields."""
    [verdict] = compared(*(FitPlan(**{field: each[rank] for field, each in differ.items()}) for rank in range(2)))[1]
    return verdict


def test_lengths_that_differ_have_the_datasets_as_their_cause() -> None:
    """A difference of datasets is a warning, and what follows from it ends the job."""
    found = found_in(batches_per_epoch=(12, 11), dataset_rows=(96, 88))
    assert found.sentence == "before the first batch, the train dataset has 96 rows on rank 0, 88 rows on rank 1."
    assert found.why.startswith("From this follows: batches_per_epoch is 12 on rank 0, 11 on rank 1. A sampler gives ")
    assert found.remedy.startswith("give every rank the same dataset")
    assert "compare_data" not in found.remedy
    assert effect(found, {}) == "raise"


def test_all_differences_are_named_at_once_and_the_cause_comes_first() -> None:
    found = found_in(
        sampler=({"seed": 0, "shuffle": True}, {"seed": 1, "shuffle": True}),
        batch_size=(8, 4),
        batches_per_epoch=(8, 16),
        max_steps=(24, 48),
        gradient_accumulation_steps=(1, 2),
        evaluation_intervals=({"val_check_interval": 2}, {"val_check_interval": 3}),
    )
    assert found.sentence == "before the first batch, the sampler's seed is 0 on rank 0, 1 on rank 1."
    assert found.why.startswith(
        "From this follows: batches_per_epoch is 8 on rank 0, 16 on rank 1; max_steps is 24 on rank 0, 48 on rank 1. "
        "Besides, batch_size is 8 on rank 0, 4 on rank 1; val_check_interval is 2 on rank 0, 3 on rank 1; "
        "gradient_accumulation_steps is 1 on rank 0, 2 on rank 1: that must be the same on every rank, too. "
    )
    assert effect(found, {}) == "raise"


@pytest.mark.parametrize(
    ("field", "values", "said"),
    [("dataset_rows", (96, 88), "From this follows: "), ("position", ([0, 1, 2], [0, 2, 2]), "Besides, ")],
)
def test_schedules_that_differ_are_named_behind_the_cause(field: str, values: tuple[Any, Any], said: str) -> None:
    """They end the job, which different datasets alone do not."""
    plan = found_in(**{field: values})
    rates = Verdict("LearningRateMismatch", "before the first batch, LinearLR is made for 8 steps on rank 0.")
    [found] = joined([plan, rates], {})
    assert found.sentence == plan.sentence
    assert found.why == f"{said}LinearLR is made for 8 steps on rank 0. {plan.why}"
    assert effect(found, {}) == "raise"
    assert joined([plan, rates], {"LearningRateMismatch": "off"}) == [plan]
    [warned] = joined([plan, rates], {"LearningRateMismatch": "warn"})
    assert warned.harmful == plan.harmful
    assert joined([rates], {}) == [rates]
    assert joined([plan, rates], {"PlanMismatch": "warn"}) == [plan, rates]


def test_another_sampler_is_a_warning() -> None:
    found = found_in(sampler=({"seed": 1}, {"seed": 2, "shuffle": True}))
    assert effect(found, {"PlanMismatch": "raise"}) == "warn"
    assert (found.subject, remedy_for(found, {}) != "") == ("sampler", True)


def test_limits_are_told_only_where_lengths_differ() -> None:
    """They may come to the same length, and where ranks are made even, no length is compared."""
    limits = {"limit_train_batches": 0.5}, {"limit_train_batches": 1.0}
    assert compared(*(FitPlan(limits=each, batches_per_epoch=20) for each in limits))[1] == []
    assert found_in(limits=limits, batches_per_epoch=(20, 40)).subject == "limits"


def test_ranks_that_compare_weights_after_different_steps_do_not_begin() -> None:
    """A rank that compares none reports nothing."""
    reports = [PlanCheck(every).report(FitStart(FitPlan(), {}), 500) for every in (5, 0, 5)]
    found = judge_settings(dict(enumerate(reports)))
    assert found is not None
    assert (found.kind, found.ranks) == ("PlanMismatch", (1,))
    assert found.sentence == "before the first batch, weights_every is 0 on rank 1, 5 on ranks 0, 2."
    assert remedy_for(found, {}) == "give every rank the same weights_every."
    assert judge_settings({0: reports[0], 1: reports[2]}) is None


def test_agreed_fields_are_those_with_one_value_on_all_ranks() -> None:
    """A field that one rank lacks, or has with another value, is not agreed."""
    plans = {0: {"batch_size": 8, "max_steps": 5, "seed": 1}, 1: {"batch_size": 8, "max_steps": 6}}
    assert {"batch_size", "max_epochs"} <= set(agreed_fields(plans)) < {*FitPlan().to_json(), "seed"}
    assert not {"max_steps", "seed"} & set(agreed_fields(plans))


def test_what_has_no_room_in_the_record_is_not_told() -> None:
    """Ranks may have different room: what one does not tell is compared with nothing."""
    plan = FitPlan(batch_size=8, sampler={"seed": 1}, evaluation_intervals={"val_check_interval": 2})
    told = [PlanCheck(0).report(FitStart(plan, {}), room)["plan"] for room in (10, 90, 900)]
    assert [list(each) for each in told] == [
        ["batch_size", "runs_to_end"],
        ["batch_size", "runs_to_end", "sampler"],
        ["batch_size", "runs_to_end", "sampler", "evaluation_intervals"],
    ]


@pytest.mark.parametrize("field", ["position", "batches_per_epoch", "proven_batches_per_epoch", "batch_size"])
def test_what_a_rank_does_not_know_is_compared_with_nothing(field: str) -> None:
    """Ranks that know a value are compared with each other, whatever another rank does not know."""
    assert judge_plans({0: {field: 3}, 1: {field: None}, 2: {}}) is None
    found = judge_plans({0: {field: 3}, 1: {field: None}, 2: {field: 4}})
    assert found is not None
    assert found.sentence == f"before the first batch, {field} is 3 on rank 0, 4 on rank 2."


@pytest.mark.parametrize("field", ["max_epochs", "max_steps"])
def test_a_limit_of_one_rank_alone_is_a_mismatch(field: str) -> None:
    """A run without a limit, beside one that has it, does not end with it."""
    assert judge_plans({0: {field: 3}, 1: {field: None}}) is not None


def test_the_plan_may_know_why_lengths_must_be_equal() -> None:
    """The cause that an adapter gives is that of different lengths, and of nothing else."""
    plans = {rank: {"batches_per_epoch": 7 + rank, "why_equal_lengths": "A schedule counts."} for rank in range(2)}
    found = judge_plans(plans)
    assert found is not None
    assert found.why == "A schedule counts."
    other = judge_plans({rank: {**plan, "batches_per_epoch": 7, "batch_size": rank} for rank, plan in plans.items()})
    assert other is not None
    assert other.why.startswith("The averaged gradient")


def test_lengths_that_may_differ_are_warned_of() -> None:
    """Where the framework ends an epoch on all ranks with the shortest loader, the warning says what that cuts."""
    plans = {rank: {"own_batches_per_epoch": 7 if rank == 1 else 8, "max_steps": 20} for rank in range(3)}
    assert judge_plans(plans) is None
    found = judge_lengths(plans)
    assert found is not None
    assert (found.kind, found.ranks) == ("Truncated", (1,))
    assert found.sentence == (
        "a train epoch has 7 batches on rank 1, 8 batches on ranks 0, 2: it ends after 7 on all ranks, and what the "
        "others have beyond is not trained on."
    )
    assert judge_lengths({0: {"own_batches_per_epoch": 7}, 1: {"own_batches_per_epoch": None}}) is None


def test_a_run_that_ends_with_the_shortest_loader_is_a_mismatch() -> None:
    """Only the ranks whose loader ends there would end the epoch too."""
    found = judge_plans({rank: {"own_batches_per_epoch": 7 + rank, "max_steps": 14} for rank in range(2)})
    assert found is not None
    assert found.sentence == (
        "before the first batch, the run ends after 14 batches, where the loaders of rank 0 end, and the others' "
        "do not."
    )
    assert found.ranks == (0,)


EVEN = Settings(uneven_train="stop")


def reported(settings: Settings, own_batches: int | None) -> Mapping[str, Any]:
    """What a rank with these settings reports of how it is kept even."""
    return EvenCheck(State(0, 3, settings, {})).report(FitStart(FitPlan(), {}, own_batches=own_batches), 0)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (EVEN, Settings(), "uneven_train is 'stop' on rank 0, 'raise' on ranks 1, 2"),
        (Settings(uneven_eval="stop"), Settings(), "uneven_eval is 'stop' on rank 0, not 'stop' on ranks 1, 2"),
        (Settings(uneven_eval="stop"), EVEN, "uneven_train is 'raise' on rank 0, 'stop' on ranks 1, 2"),
    ],
)
def test_ranks_that_take_the_same_number_have_the_same_settings(one: Settings, other: Settings, words: str) -> None:
    """The message has the value of a rank that reports none of these settings, because nothing makes it even."""
    verdict = judge_settings({rank: reported(other if rank else one, None) for rank in range(3)})
    assert verdict is not None
    assert verdict.sentence == f"before the first batch, {words}."
    assert remedy_for(verdict, {})


@pytest.mark.parametrize("settings", [EVEN, Settings()])
def test_equal_settings_are_no_mismatch(settings: Settings) -> None:
    assert judge_settings({rank: reported(settings, 4 + rank) for rank in range(3)}) is None


def test_a_later_verdict_says_first_what_the_ranks_were_warned_of() -> None:
    """What ends the job may follow from it: the cause comes first."""
    warned = found_in(dataset_rows=(96, 88))
    state = State(0, 2, Settings(), {})
    state.notices.append(warned)
    state.propose(Verdict("UnevenBatches", "rank 1 ran out of data.", why="The loaders differ."))
    assert state.proposed is not None
    assert state.proposed.why == f"There was a warning: {warned.sentence} The loaders differ."
    other = Verdict("LostRank", "rank 1 is gone.")
    assert behind_its_warning(other, [warned]) == other
    assert behind_its_warning(Verdict("UnevenBatches", "…"), []).why == ""
