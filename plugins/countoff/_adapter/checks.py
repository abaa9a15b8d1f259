"""Which verdicts each adapter can give: the one place that says so. The table in the documentation is made of it."""

from __future__ import annotations

from collections.abc import Mapping

from countoff.core.verdict import Kind

__all__ = ["CHECKS"]

_ALWAYS = "yes"
_EVERYWHERE: Mapping[Kind, str] = {
    "PlanMismatch": _ALWAYS,
    "UnevenBatches": _ALWAYS,
    "StepMismatch": _ALWAYS,
    "LostRank": _ALWAYS,
    "Stalled": _ALWAYS,
    "VersionMismatch": _ALWAYS,
    "SettingsMismatch": _ALWAYS,
    "LateRank": _ALWAYS,
}

_EVEN: Mapping[Kind, str] = {"Truncated": "with `uneven_train`", "Repeated": "with `uneven_train`"}

CHECKS: Mapping[str, Mapping[Kind, str]] = {
    "torch": {
        **_EVERYWHERE,
        **_EVEN,
        "LearningRateMismatch": "with `optimizer=`",
        "RankMapError": "with `mesh=`",
        "WrongLength": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "DoubleSharded": "behind a DistributedSampler",
        "StreamsDiffer": "behind a DistributedSampler",
        "PeersDiffer": "with `mesh=`",
        "SameOrder": _ALWAYS,
        "ResumeMismatch": "with `handle.state_dict()`",
        "WeightsDiffer": "with `weights_every=` and `model=`",
        "UnseenLoader": _ALWAYS,
        "WrongHorizon": "with `scheduler=` and `epochs=` or `max_steps=`",
    },
    "accelerate": {
        **_EVERYWHERE,
        **_EVEN,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": _ALWAYS,
        "WrongLength": _ALWAYS,
        "DuplicateData": "loaders that are not sharded",
        "DoubleSharded": _ALWAYS,
        "StreamsDiffer": _ALWAYS,
        "PeersDiffer": _ALWAYS,
        "SameOrder": _ALWAYS,
        "ResumeMismatch": _ALWAYS,
        "WeightsDiffer": "with `weights_every=`",
        "UnseenLoader": _ALWAYS,
        "WrongHorizon": "prepared schedulers",
        "NotDistributed": _ALWAYS,
    },
    "transformers": {
        **_EVERYWHERE,
        **_EVEN,
        "LearningRateMismatch": _ALWAYS,
        "WrongLength": _ALWAYS,
        "DuplicateData": "loaders that are not sharded",
        "DoubleSharded": _ALWAYS,
        "StreamsDiffer": _ALWAYS,
        "SameOrder": _ALWAYS,
        "ResumeMismatch": _ALWAYS,
        "WeightsDiffer": "with `weights_every=`",
        "WrongHorizon": _ALWAYS,
        "WrongTotal": _ALWAYS,
        "NotDistributed": _ALWAYS,
    },
    "lightning": {
        **_EVERYWHERE,
        **_EVEN,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": _ALWAYS,
        "WrongLength": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "DoubleSharded": "map-style datasets",
        "StreamsDiffer": "map-style datasets",
        "PeersDiffer": _ALWAYS,
        "SameOrder": _ALWAYS,
        "ResumeMismatch": _ALWAYS,
        "WeightsDiffer": "with `weights_every=`",
        "WrongHorizon": "automatic optimization",
    },
    "fabric": {
        **_EVERYWHERE,
        **_EVEN,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": "with a mesh",
        "WrongLength": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "DoubleSharded": "map-style datasets",
        "StreamsDiffer": "map-style datasets",
        "PeersDiffer": "with a mesh",
        "SameOrder": _ALWAYS,
        "ResumeMismatch": "with `state_dict()` in the checkpoint",
        "WeightsDiffer": "with `weights_every=`",
        "UnseenLoader": _ALWAYS,
        "WrongHorizon": "with `watch_schedule()`",
    },
    "composer": {
        **_EVERYWHERE,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": _ALWAYS,
        "WrongLength": _ALWAYS,
        "Truncated": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "DoubleSharded": "behind a DistributedSampler",
        "StreamsDiffer": "behind a DistributedSampler",
        "PeersDiffer": _ALWAYS,
        "SameOrder": _ALWAYS,
        "ResumeMismatch": _ALWAYS,
        "WeightsDiffer": "with `weights_every=`",
        "WrongHorizon": "durations in epochs or batches",
    },
    "torchtitan": {
        **_EVERYWHERE,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "PeersDiffer": _ALWAYS,
        "WeightsDiffer": "with `weights_every=`",
        "WrongHorizon": "the configuration's",
    },
    "lingua": {
        **_EVERYWHERE,
        "LearningRateMismatch": _ALWAYS,
        "RankMapError": _ALWAYS,
        "DuplicateData": _ALWAYS,
        "PeersDiffer": _ALWAYS,
        "WeightsDiffer": "with `weights_every=` and `model=`",
    },
}
"""By adapter (its public module's name), the kinds that it can report, and under which condition."""
