"""The messages of the adapter for TorchTitan."""

from __future__ import annotations

from countoff._adapter.messages import READS_BY_DP_RANK, Messages, data_remedies

__all__ = ["MESSAGES"]

_OPTION = "Countoff(trainer, {})"
_NO_LENGTH = "TorchTitan asks no loader for its length"
_NO_COMMON_END = "TorchTitan's ranks cannot be made even"

MESSAGES = Messages(
    framework="TorchTitan",
    length_of="TorchTitan",
    option=_OPTION,
    remedies={
        "UnevenBatches": {
            "": (
                "let the loader start over at its end (infinite=True, the default). TorchTitan cancels the step in "
                "which data runs out, on that rank alone.\n"
                "set training.steps to what every data rank has."
            ),
        },
        "PlanMismatch": "start every rank with the same config.",
        "StepMismatch": (
            "let all ranks step after the same batches: no condition of one rank around optimizers.step()."
        ),
        "LearningRateMismatch": "give lr_scheduler the same steps on every rank.",
        "RankMapError": "read with the dp_rank and dp_world_size that TorchTitan gives to dataloader.build().",
        **data_remedies(
            shares="read with the dp_rank and dp_world_size that TorchTitan gives to dataloader.build().",
            option=_OPTION,
        ),
    },
    cannot={
        "WrongLength": _NO_LENGTH,
        "Truncated": _NO_COMMON_END,
        "DoubleSharded": READS_BY_DP_RANK,
        "StreamsDiffer": READS_BY_DP_RANK,
        "SplitLeak": READS_BY_DP_RANK,
        "NotReadOnce": READS_BY_DP_RANK,
        "SameOrder": READS_BY_DP_RANK,
        "ResumeMismatch": "TorchTitan's checkpoint has no record of countoff's",
        "ShortRun": "TorchTitan raises an error where its loader ends before the last step",
        "WrongTotal": "TorchTitan tells no total",
        "NotDistributed": "TorchTitan sets torch.distributed up by itself",
    },
    names={"total_steps": "steps"},
)
