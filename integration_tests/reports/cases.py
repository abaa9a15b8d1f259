"""The reports, and what countoff says of each program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One kind of fault, as users have reported it.

    Attributes:
        program: The module of this package that trains so.
        names: The reports.
        framework: What it trains with.
        stages: Launches of it; the last one is where it goes wrong.
        kind: What countoff says of the wrong one; empty if it says nothing.
    """

    program: str
    names: str
    framework: str
    stages: int
    kind: str


REPORTS = (
    Report("accelerate_4233", "accelerate #4233", "Accelerate", 2, "ResumeMismatch"),
    Report("accelerate_4233_later", "accelerate #4233, the next epoch", "Accelerate", 2, "SameOrder"),
    Report("accelerate_4071", "accelerate #4071", "Accelerate", 2, "ResumeMismatch"),
    Report("accelerate_1451", "accelerate #1451, open-instruct #681", "Accelerate", 2, "NotReadOnce"),
    Report("transgenic_59", "transgenic #59", "Accelerate", 2, "ResumeMismatch"),
    Report("transformers_40690", "transformers #40690", "Trainer", 2, "ResumeMismatch"),
    Report("torchtitan_3907", "torchtitan #3907, datasets #8308", "datasets, torchdata", 3, "ResumeMismatch"),
    Report("lightning_20550", "Lightning #20550, #21765", "Lightning, torchdata", 2, "ResumeMismatch"),
    Report("lightning_21938", "Lightning #21938", "Lightning", 2, ""),
    Report("lightning_15734", "Lightning #15734", "Lightning", 1, "DuplicateData"),
    Report("megatron_bridge_4565", "Megatron-Bridge #4565", "torch", 2, "NotReadOnce"),
    Report("verl_7401", "verl #7401", "torch, torchdata", 2, "ShortRun"),
    Report("astropt_64", "astroPT #64", "torch, datasets", 1, "DuplicateData"),
    Report("opentau_498", "OpenTau #498", "Accelerate", 1, "StreamsDiffer"),
    Report("funasr_3472", "FunASR #3472", "torch", 1, "WeightsDiffer"),
    Report("nemo_3854", "NeMo #3854", "Lightning", 1, "WrongLength"),
)
