"""An iterable dataset that each worker reads as a whole: with two workers, an epoch has twice the steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from countoff.lightning import Countoff
from integration_tests.once_jobs import forked
from integration_tests.reports.parts import loss_of, net, rows, sgd


class Records(IterableDataset[Any]):
    def __init__(self, rank: int, ranks: int, wrong: bool) -> None:
        self._rank, self._ranks, self._wrong = rank, ranks, wrong

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = self._rank, self._ranks
        if worker is not None and not self._wrong:
            first, every = first + worker.id * every, every * worker.num_workers
        data = rows()
        for index in range(first, len(data), every):
            yield data[index]


class Net(lightning.LightningModule):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = net()
        self._wrong = wrong

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.layer, batch)

    def train_dataloader(self) -> Any:
        return DataLoader(Records(self.global_rank, self.trainer.world_size, self._wrong), 4, **forked(2))

    def configure_optimizers(self) -> Any:
        return sgd(self)


def train(wrong: bool, stage: int, folder: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Countoff()],
    )
    trainer.fit(Net(wrong))
