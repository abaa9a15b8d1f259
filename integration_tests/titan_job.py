"""TorchTitan's debug model on CPU ranks, one fit after the other: run by torchrun, `titan_job.py DIRECTORY`.

TorchTitan is made for accelerators. What stands in for one here: the device's name and memory, attention that can be
differentiated on a CPU, plain sums in gloo, no barrier that names a device, and a tokenizer and text of our own. The
trainer, its loop, loader, optimizers, learning rates, mesh and FSDP are the real ones, over gloo.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # pyright: ignore  # else it is taken for CUDA
for name, value in {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
}.items():
    setattr(torch.cpu, name, value)

from torchtitan.components.metrics import BaseLogger  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchtitan.distributed import utils  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3 import config_registry  # noqa: E402  # pyright: ignore[reportMissingImports]

from countoff import torchtitan  # noqa: E402
from countoff.torchtitan import Countoff  # noqa: E402

utils.set_pg_timeouts = lambda **_: None  # its barrier names a device


class Kept(BaseLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.metrics |= metrics

    def close(self) -> None:
        """Nothing to close."""


def config(directory: Path, text: str) -> Any:
    """The debug model's config, made small."""
    made = config_registry.llama3_debugmodel()
    made.model_spec.model.layers = made.model_spec.model.layers[:1]
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.training.local_batch_size = 2
    made.training.global_batch_size = 8
    made.training.seq_len = 32
    made.training.steps = 4
    made.training.disable_cuda_graphs = True
    made.training.mixed_precision_param = "float32"
    made.parallelism.spmd_backend = "partial_dtensor"
    made.lr_scheduler.warmup_steps = 1
    made.hf_assets_path = str(directory / "tokenizer")
    made.dataloader.dataset_path = str(directory / text)
    made.validator.enable = made.checkpoint.enable = made.debug.enable_structured_logging = False
    made.dump_folder = str(directory / "outputs")
    return made


def sum_plainly(trainer: Any) -> None:
    """Reduces gradients by plain sums: gloo has none with a factor."""
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def fit(made: Any) -> dict[str, Any]:
    """One fit; its steps, what was logged and warned."""
    trainer = made.build()
    sum_plainly(trainer)
    kept = trainer.metrics_processor.logger = Kept()
    countoff = Countoff(trainer)
    trainer.train()
    trainer.close()
    return {
        "step": trainer.step,
        "counted": [countoff.guard.batches, countoff.guard.steps],
        "logged": {name: value for name, value in kept.metrics.items() if name.startswith("countoff/")},
        "warned": [notice.headline for notice in countoff.guard.notices],
    }


def uneven() -> Any:
    """The config function for TorchTitan's own program: a text of which rank 1 has fewer words, read once."""
    made = config(Path(sys.path[0]), "uneven")
    made.dataloader.infinite = False
    made.training.steps = 100
    return made


def run_program(directory: Path) -> None:
    """TorchTitan's own program, counted as by ``-m countoff.torchtitan``, on the uneven text."""

    def plainly(trainer: Any, **options: Any) -> Countoff:
        sum_plainly(trainer)
        return Countoff(trainer, **options)

    torchtitan.Countoff = plainly
    sys.path.insert(0, str(directory))
    sys.modules["titan_program"] = sys.modules[__name__]
    sys.argv = ["train", "--module", "titan_program", "--config", "uneven"]
    torchtitan.main()


def main() -> None:
    """Runs the fits, writes what this rank found, and ends as the program does."""
    directory = Path(sys.argv[1])
    fits = {"healthy": config(directory, "text"), "short horizon": config(directory, "text")}
    fits["short horizon"].lr_scheduler.total_steps = 2
    fits["short horizon"].lr_scheduler.decay_ratio = None
    found = {name: fit(made) for name, made in fits.items()}
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    run_program(directory)


if __name__ == "__main__":
    main()
