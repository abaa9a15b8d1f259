"""The messages of the adapter for lingua."""

from __future__ import annotations

from countoff._adapter.messages import READS_BY_DP_RANK, Messages, data_remedies

__all__ = ["MESSAGES"]

_OPTION = "Countoff(..., {})"
_NO_END = "lingua's loader has no end and no length"

MESSAGES = Messages(
    framework="lingua",
    length_of="lingua",
    option=_OPTION,
    remedies={
        "UnevenBatches": "look for a break or an exception of one rank alone: lingua's loader has no end.",
        "PlanMismatch": "start every rank with the same configuration.",
        "StepMismatch": "look at train_state.acc_step: it must be equal on all ranks, so that they step together.",
        "LearningRateMismatch": "give optim and steps the same values on every rank.",
        "RankMapError": (
            'in train.py: dp_rank = dp_rank * world_mesh["dp_shard"].size() + '
            'world_mesh["dp_shard"].get_local_rank(), not dp_rank * dp_degree, which is the number of replicas there.'
        ),
        **data_remedies(
            shares="give build_dataloader_from_args the dp_rank and dp_degree of the mesh, one dp_rank for each share.",
            option=_OPTION,
        ),
    },
    cannot={
        "WrongLength": _NO_END,
        "Truncated": _NO_END,
        "DoubleSharded": READS_BY_DP_RANK,
        "StreamsDiffer": READS_BY_DP_RANK,
        "SplitLeak": READS_BY_DP_RANK,
        "NotReadOnce": READS_BY_DP_RANK,
        "SameOrder": READS_BY_DP_RANK,
        "ResumeMismatch": "lingua's checkpoint has no record of countoff's",
        "ShortRun": _NO_END,
        "WrongHorizon": "lingua makes the schedule of the run's steps; `countoff check` reads it in the configuration",
        "WrongTotal": "lingua tells no total",
        "NotDistributed": "lingua sets torch.distributed up by itself",
    },
)
