"""Records what DDP really averages: each rank's epoch and batch travel in the same message as its gradients.

No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with its own types.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback


class AllReduceRecorder(Callback):
    """Records, for each all-reduce of gradients, from which epoch and batch each rank's gradients came.

    It replaces DDP's all-reduce by an all-reduce of a longer message: the gradients, then two numbers for each rank:
    its epoch, from 0, and its batch, from 1. Each rank fills in its own. So the result shows which gradients were
    really averaged together. An all-reduce on GPUs that was cut off returns, too. A batch of its result is then 0, and
    it is no record.

    Args:
        directory: Where ``rank<n>.all_reduces`` is written, one line of JSON for each all-reduce.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._position = (0, 0)
        self._file: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Registers the communication hook."""
        path = self._directory / f"rank{trainer.global_rank}.all_reduces"
        self._file = path.open("w", buffering=1, encoding="utf-8")
        trainer.strategy.model.register_comm_hook(self, average_with_positions)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keeps this rank's epoch and batch, numbered as verdicts do."""
        self._position = (trainer.current_epoch, batch_idx + 1)

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        """Returns one (epoch, batch) for each rank, flat; all are zero but this rank's own."""
        positions = like.new_zeros(dist.get_world_size(), 2)
        positions[dist.get_rank()] = like.new_tensor(self._position)
        return positions.flatten()

    def record(self, positions: torch.Tensor) -> None:
        """Writes down this rank's position and the positions that came back, if the all-reduce was completed."""
        averaged = positions.view(-1, 2).int().tolist()  # on a GPU, this waits for the all-reduce
        if all(batch for _, batch in averaged):
            self._file.write(json.dumps({"own": self._position, "averaged": averaged}) + "\n")


def average_with_positions(
    state: AllReduceRecorder,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]  # public in torch's documentation
) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients over the ranks, as DDP does, with the recorder's positions appended."""
    gradients = bucket.buffer()
    message = torch.cat([gradients / dist.get_world_size(), state.positions(gradients)])
    future = dist.all_reduce(message, async_op=True).get_future()  # pyright: ignore[reportOptionalMemberAccess]

    def unpack(completed: Any) -> torch.Tensor:
        result = completed.value()[0]
        state.record(result[gradients.numel() :])
        return result[: gradients.numel()]

    return future.then(unpack)
