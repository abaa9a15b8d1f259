"""A witness of what DDP really averages: every rank's epoch and batch travel in the very message of its gradients.

No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with its own types.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback


class Witness(Callback):
    """Writes down whose epoch and batch each all-reduce of gradients has brought together.

    It replaces DDP's all-reduce by the same all-reduce of a longer message: the gradients, then for every rank two
    numbers, of which each rank fills in its own. What comes out of it is therefore what the gradients met.

    Args:
        directory: Where ``rank<n>.met`` is written, one line for each all-reduce.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._place = (0, 0)
        self._met: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes the place of DDP's own all-reduce."""
        path = self._directory / f"rank{trainer.global_rank}.met"
        self._met = path.open("w", buffering=1, encoding="utf-8")
        trainer.strategy.model.register_comm_hook(self, average_with_place)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Knows where this rank is."""
        self._place = (trainer.current_epoch, batch_idx)

    def places(self, like: torch.Tensor) -> torch.Tensor:
        """Every rank's place, of which this rank knows its own: [rank × (epoch, batch)], flat."""
        places = torch.zeros(dist.get_world_size(), 2, dtype=like.dtype)
        places[dist.get_rank()] = torch.tensor(self._place, dtype=like.dtype)
        return places.flatten()

    def saw(self, places: torch.Tensor) -> None:
        """Writes down what came back, after the place of this rank."""
        met = places.view(-1, 2).int().tolist()
        self._met.write(json.dumps({"own": self._place, "met": met}) + "\n")


def average_with_place(
    state: Witness,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]  # public in torch's documentation
) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients over the ranks, as DDP does, with the witness's numbers behind them."""
    gradients = bucket.buffer()
    message = torch.cat([gradients / dist.get_world_size(), state.places(gradients)])
    future = dist.all_reduce(message, async_op=True).get_future()  # pyright: ignore[reportOptionalMemberAccess]

    def unpack(arrived: Any) -> torch.Tensor:
        whole = arrived.value()[0]
        state.saw(whole[gradients.numel() :])
        return whole[: gradients.numel()]

    return future.then(unpack)
