"""The judgement: which ranks a verdict names, what it reports of each, and the cause and the remedy that it gives."""

import dataclasses
from typing import Any, Literal

import pytest

from countoff.core.checks import judge
from countoff.core.checks.lost import lost_rank
from countoff.core.checks.uneven import EVALUATION, WHO_EVALUATES
from countoff.core.protocol.records import SyncPoint, verdict_from_json, verdict_to_json
from countoff.core.protocol.rows import outlier_ranks, ranks_behind
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Remedies, Verdict, remedy_for

EPOCH = "train epoch 0"


REMEDIES: dict[str, str] = {"UnevenBatches": "Give every rank the same number of batches: drop_last=True."}


LOADERS = (
    "The ranks' train loaders differ in length. From the next batch on, the job would average gradients of different "
    "batches, and then hang or fail."
)
DECISIONS = (
    "One rank left the loop where the others went on: a break, a limit, an exit or a condition of that rank alone."
)


def closing(reason: Literal["exhausted", "stopped"], at: int = 4, **counts: Any) -> SyncPoint:
    return SyncPoint("train_end", EPOCH, at=at, reason=reason, rank=1, **counts)


def uneven(logged: SyncPoint, count: int, own: SyncPoint | None = None, *, evaluation: bool = False) -> Verdict:
    """The verdict of rank 0, which cannot follow rank 1's sync point."""
    return judge(Divergence("UnevenBatches", logged, count, own, evaluation=evaluation), 0)


def test_a_loader_that_ran_out_against_a_fetched_batch() -> None:
    found = uneven(closing("exhausted"), 5)
    assert found.sentence == "rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5."
    assert (found.ranks, found.why) == ((1, 0), LOADERS)


def test_a_stop_against_a_batch_begun() -> None:
    found = uneven(closing("stopped"), 5)
    assert found.sentence == "rank 1 stopped after 4 batches of train epoch 0; rank 0 has begun batch 5."
    assert found.why == DECISIONS


def test_an_evaluation_begun_early_against_a_batch_begun() -> None:
    found = uneven(SyncPoint("eval_start", "validation", at=1, rank=1), 2)
    assert found.sentence == "rank 1 began validation after 1 train batch; rank 0 has begun batch 2."
    assert (found.subject, found.standing) == (WHO_EVALUATES, "differ")
    assert found.why.startswith("Not all ranks evaluate there.")


def test_an_evaluation_after_the_last_batch_is_about_the_loaders() -> None:
    """A rank that evaluates because its train loader holds no more has a short loader."""
    found = uneven(SyncPoint("eval_start", "validation", at=4, rank=1, reason="exhausted"), 5)
    assert found.sentence == "rank 1 began validation after 4 train batches; rank 0 has batch 5."
    assert (found.subject, found.standing, found.why) == ("", "ran out first", LOADERS)


def test_the_loader_that_ended_first_comes_first() -> None:
    """Of two ranks whose loaders have ended, the shorter one is named first, whichever wrote its sync point first."""
    logged = SyncPoint("eval_end", "validation", at=3, reason="exhausted", rank=1)
    found = uneven(logged, 2, SyncPoint("eval_end", "validation", at=2, reason="exhausted"), evaluation=True)
    sides = (
        "rank 0 ran out of data after 2 batches of validation; rank 1 ran out of data after 3 batches of validation."
    )
    assert (found.sentence, found.ranks, found.standing) == (sides, (0, 1), "ran out first")


def test_two_sync_points_of_one_index_tell_what_each_rank_did() -> None:
    found = uneven(closing("exhausted", at=1), 2, SyncPoint("eval_start", "validation", at=2))
    did = "rank 1 ran out of data after 1 batch of train epoch 0; rank 0 began validation after 2 train batches."
    assert found.sentence == did


def test_evaluations_tell_the_batches_of_each_loader() -> None:
    """The verdict on evaluations of several loaders names the batches of each loader."""
    theirs = SyncPoint("eval_end", "validation", at=5, reason="exhausted", counts=(3, 2), rank=1)
    mine = SyncPoint("eval_end", "validation", at=5, reason="exhausted", counts=(2, 3))
    found = uneven(theirs, 5, mine, evaluation=True)
    sides = ("rank 1 ran out of data after 5 batches (3 + 2)", "rank 0 ran out of data after 5 batches (2 + 3)")
    assert found.sentence == f"{sides[0]} of validation; {sides[1]} of validation."
    why = "The ranks' evaluation loaders differ in length. A metric that synchronises every batch hangs there."
    assert (found.why, found.subject, found.standing) == (why, EVALUATION, "differ")


@pytest.mark.parametrize(
    ("kind", "did"),
    [("fit_start", "began the fit"), ("fit_end", "ended the fit"), ("train_start", "began train epoch 0")],
)
def test_a_sync_point_without_counts_tells_what_the_rank_did(kind: Any, did: str) -> None:
    found = uneven(SyncPoint(kind, EPOCH, rank=1), 4, closing("exhausted"))
    assert found.sentence == f"rank 1 {did}; rank 0 ran out of data after 4 batches of train epoch 0."


def test_other_numbers_of_steps() -> None:
    found = judge(Divergence("StepMismatch", closing("exhausted", steps=1), 2), 0)
    counts = "rank 1 had applied 1 optimizer step and rank 0 2 optimizer steps"
    assert found.headline == f"StepMismatch: after 4 batches of train epoch 0, {counts}."


def test_as_many_steps_after_other_batches() -> None:
    found = judge(Divergence("StepMismatch", closing("exhausted", steps=2), 2), 0)
    counts = "rank 1 had applied 2 optimizer steps and rank 0 2 optimizer steps, but after other batches"
    assert found.headline == f"StepMismatch: after 4 batches of train epoch 0, {counts}."


def test_another_position_names_both_and_the_checkpoint() -> None:
    """A rank that resumes at another batch is told before its first batch, not where the loaders end."""
    first, own = (SyncPoint("train_start", EPOCH, at=at, rank=rank) for rank, at in enumerate((5, 6)))
    found = judge(Divergence("PlanMismatch", first, 6, own, sync_index=2), 1)
    assert found.headline == "PlanMismatch: rank 0 began train epoch 0 after 5 batches of it, rank 1 after 6 batches."
    assert remedy_for(found, {}).startswith("resume every rank from the same checkpoint")
    assert (found.ranks, found.subject, found.sync_index) == ((0, 1), "position", 2)


def test_a_rank_that_exits_is_lost() -> None:
    """A rank that exits is named, and not those that continue, whichever of them proves it."""
    left, ended = SyncPoint("train_end", EPOCH, at=3, reason="exited", rank=1), closing("exhausted")
    other = dataclasses.replace(ended, rank=2)
    for divergence, rank in (
        (Divergence("UnevenBatches", left, 4), 2),
        (Divergence("UnevenBatches", other, 3, left), 1),
    ):
        verdict = judge(divergence, rank)
        assert (verdict.kind, verdict.ranks) == ("LostRank", (1,))
        assert verdict.sentence == "rank 1 left the job (sys.exit) in batch 3 of train epoch 0, where rank 2 goes on."


def test_a_lost_rank_is_named_with_the_cause() -> None:
    """The whole message about a rank that has died."""
    assert lost_rank(3, "is gone (pid 7)", "It was killed, or it crashed.").render().splitlines() == [
        "countoff: LostRank: rank 3 is gone (pid 7).",
        "  why: It was killed, or it crashed.",
        "  more: countoff explain LostRank",
    ]


def test_after_a_break_of_one_rank_the_remedy_is_about_it() -> None:
    """For a decision of one rank the remedy is about that alone, also on a rank that received the verdict."""
    stopped = verdict_from_json(verdict_to_json(uneven(closing("stopped"), 5)))
    assert remedy_for(stopped, REMEDIES).startswith("look for a break")


def test_a_verdicts_own_remedy_comes_first() -> None:
    """Then the adapter's and the general one for its subject, then the adapter's and the general one for its kind."""
    own = Verdict("RankMapError", "they collide.", remedy="give it the mesh.")
    assert remedy_for(own, {"RankMapError": "read as we do."}) == "give it the mesh."
    assert remedy_for(dataclasses.replace(own, remedy=""), {"RankMapError": "read as we do."}) == "read as we do."
    assert remedy_for(dataclasses.replace(own, remedy=""), {}).startswith("compute dp_rank with the sizes")
    special: Remedies = {"UnevenBatches": {"": "a.", EVALUATION: "b."}}
    subjects = {subject: remedy_for(Verdict("UnevenBatches", "", subject=subject), special) for subject in ("", "x")}
    assert subjects == {"": "a.", "x": "a."}
    assert remedy_for(Verdict("UnevenBatches", "", subject=EVALUATION), special) == "b."
    assert remedy_for(Verdict("UnevenBatches", "", subject=EVALUATION), REMEDIES) == REMEDIES["UnevenBatches"]
    assert remedy_for(Verdict("Truncated", ""), {}) == ""


def test_a_remedy_travels_as_a_whole_or_not_at_all() -> None:
    """A remedy that fits into the record is read back; of one that does not, nothing is, and the adapter's holds."""
    own = Verdict("WrongHorizon", "it ends early.", remedy="make it for 60 calls.")
    assert verdict_from_json(verdict_to_json(own)) == own
    assert verdict_from_json(verdict_to_json(dataclasses.replace(own, remedy="x" * 800))).remedy == ""


@pytest.mark.parametrize(
    ("sides", "outliers"),
    [
        ([False, True, False], (1,)),
        ([True, False, True, True, False, True, None], (1, 4)),
        ([True, False, True, True, False, None], ()),
        ([True, False], ()),
        ([True, True, False, False], ()),
        ([True, False, False, None, None, None], ()),
        ([False, False, False], ()),
        ([None, None], ()),
    ],
)
def test_outliers_are_the_side_that_stays_smaller(sides: list[bool | None], outliers: tuple[int, ...]) -> None:
    """The outliers are the side that stays the smaller whatever the undecided do; else there are none."""
    assert outlier_ranks([{"rank": rank, "side": side} for rank, side in enumerate(sides)]) == outliers


def test_ranks_behind_are_in_the_same_span_at_no_later_batch() -> None:
    """A rank that has begun more, is elsewhere, or has decided is not behind."""
    lines: list[tuple[str, int, str, bool | None]] = [
        ("train epoch 0", 4, "in batch 4", True),
        ("train epoch 0", 3, "in batch 3", None),
        ("train epoch 0", 4, "in batch 4", None),
        ("train epoch 0", 5, "in batch 5", None),
        ("train epoch 0", 4, "stopped", None),
        ("validation", 3, "in batch 3", None),
        ("train epoch 0", 3, "in batch 3", False),
    ]
    rows = {
        rank: {"where": where, "batches": batches, "state": state, "side": side}
        for rank, (where, batches, state, side) in enumerate(lines)
    }
    assert ranks_behind(rows, 0) == (1, 2)
    assert ranks_behind(rows, 9) == ()
