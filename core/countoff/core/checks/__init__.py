"""The questions that countoff answers, one file each: what may be wrong, how it is found, and what to do about it.

A file has the kinds of verdict that it finds (`VerdictKind`, with their causes and general remedies), what ranks
compare, the comparison, and the sentence. The string below a kind is its text in docs/verdicts.md, which
``COUNTOFF_WRITE_GOLDEN=1 python -m pytest tests/test_messages.py`` writes. `check.Check` says what a guard tells it.
To add a question: write its file, and add its kinds and its check to the two lists here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from countoff.core.checks import (
    data,
    even,
    framework,
    horizon,
    late,
    learning_rates,
    lost,
    micro_batches,
    model,
    once,
    plan,
    rank_map,
    resume,
    short,
    splits,
    stalled,
    steps,
    streams,
    uneven,
    versions,
    weights,
)
from countoff.core.checks.check import RankState
from countoff.core.protocol.resume_record import ScheduleState
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import KINDS, Verdict

__all__ = ["KINDS", "Checks", "judge", "shows_other_counts"]

KINDS |= {
    kind.name: kind
    for kind in (
        plan.PLAN_MISMATCH,
        uneven.UNEVEN_BATCHES,
        steps.STEP_MISMATCH,
        learning_rates.LEARNING_RATE_MISMATCH,
        rank_map.RANK_MAP_ERROR,
        lost.LOST_RANK,
        stalled.STALLED,
        framework.WRONG_LENGTH,
        even.TRUNCATED,
        data.DUPLICATE_DATA,
        streams.DOUBLE_SHARDED,
        streams.STREAMS_DIFFER,
        data.PEERS_DIFFER,
        data.SAME_ORDER,
        once.NOT_READ_ONCE,
        resume.RESUME_MISMATCH,
        short.SHORT_RUN,
        weights.WEIGHTS_DIFFER,
        splits.SPLIT_LEAK,
        horizon.WRONG_HORIZON,
        framework.WRONG_TOTAL,
        framework.NOT_DISTRIBUTED,
        versions.VERSION_MISMATCH,
        late.LATE_RANK,
    )
}
"""All kinds by name, the most severe first."""


class Checks(NamedTuple):
    """The checks of one guard, in the order in which they are told of each event: an earlier one finds first."""

    plan: plan.PlanCheck
    uneven: uneven.UnevenCheck
    steps: steps.StepCheck
    rank_map: rank_map.RankMapCheck
    learning_rates: learning_rates.LearningRateCheck
    micro_batches: micro_batches.MicroBatchCheck
    even: even.EvenCheck
    versions: versions.VersionCheck
    model: model.ModelCheck
    splits: splits.SplitCheck
    weights: weights.Weights
    data: data.DataIdentity
    once: once.Once
    resumes: resume.Resumes

    @classmethod
    def of(
        cls,
        state: RankState,
        *,
        learning_rates_in_force: Callable[[], Sequence[float]] | None,
        schedule: Callable[[], ScheduleState],
        hash_weights: Callable[[], weights.PendingHashes] | None,
    ) -> Checks:
        """Returns the checks of a guard.

        Args:
            state: This rank's state.
            learning_rates_in_force: Returns the learning rates in force; None where they are not known.
            schedule: Returns them with where their schedules stand.
            hash_weights: Begins to compute the hashes of the weights; None where these are not compared.
        """
        plans, split = plan.PlanCheck(state.settings.weights_every), splits.SplitCheck()
        identity = data.DataIdentity(state, datasets_differ=lambda: plans.datasets_differ or split.found)
        reads = once.Once(
            state,
            explained=lambda: plans.datasets_differ or split.found or identity.found,
            repeats_order=lambda: identity.repeats_order,
            goes_on=lambda: resumes.goes_on,
        )
        resumes = resume.Resumes(state, identity, reads, schedule)
        return cls(
            plan=plans,
            uneven=uneven.UnevenCheck(state.settings),
            steps=steps.StepCheck(state),
            rank_map=rank_map.RankMapCheck(),
            learning_rates=learning_rates.LearningRateCheck(
                state, learning_rates_in_force, lambda: schedule().base_rates
            ),
            micro_batches=micro_batches.MicroBatchCheck(state),
            even=even.EvenCheck(state),
            versions=versions.VersionCheck(off=state.settings.levels.get(versions.VERSION_MISMATCH.name) == "off"),
            model=model.ModelCheck(),
            splits=split,
            weights=weights.Weights(state, hash_weights),
            data=identity,
            once=reads,
            resumes=resumes,
        )


def judge(divergence: Divergence, rank: int) -> Verdict:
    """Turns a divergence that this rank has proved into a verdict that names both ranks and both counts.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    found = lost.judge_exit(divergence, rank)
    if found is None and divergence.kind == "StepMismatch":
        found = micro_batches.judge_micro_batches(divergence, rank) or steps.judge_steps(divergence, rank)
    elif found is None and divergence.kind == "PlanMismatch":
        found = plan.judge_position(divergence, rank)
    elif found is None and divergence.kind == "LearningRateMismatch":
        found = learning_rates.judge_rates(divergence, rank)
    return found or uneven.judge_batches(divergence, rank)


def shows_other_counts(verdict: Verdict) -> bool:
    """Whether ranks have other counts of batches or steps from the place of a verdict on, as their sync points show.

    >>> shows_other_counts(Verdict("StepMismatch", "they step after other batches.", sync_index=3))
    True
    >>> shows_other_counts(Verdict("UnevenBatches", "they differ.", subject="evaluation", sync_index=3))
    False
    """
    kinds = (plan.PLAN_MISMATCH.name, uneven.UNEVEN_BATCHES.name, steps.STEP_MISMATCH.name)
    apart = (uneven.EVALUATION, steps.MICRO_BATCHES, steps.FORWARD_PASSES)  # each is compared by itself
    return verdict.sync_index >= 0 and verdict.kind in kinds and verdict.subject not in apart
