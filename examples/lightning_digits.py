"""Lightning on real digits, with ranks that are uneven on purpose.

    torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py
    torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py --fixed

The digits are in 47 files of one batch each, and each rank reads whole files. Of two ranks, the last one gets 23 files
and the other 24; of four ranks, the last one gets 11 and the others 12. Without the callback (COUNTOFF=0) the ranks
drift apart after the first epoch. With it every rank stops there, with the same verdict. `--fixed` distributes single
digits, so that all ranks get the same number, and trains to the end. Runs on the CPU, with gloo.

Needs: pip install 'countoff[lightning]' scikit-learn
"""

import argparse
import os

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from countoff.lightning import Countoff

HELD_OUT, FILE_SIZE, BATCH_SIZE, EPOCHS = 293, 32, 32, 10  # 1504 digits to train on: 47 files


class Files(IterableDataset):
    """Distributes whole files over the ranks, as many datasets do: some ranks get one more than others."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def indices(self, rank, world_size):
        files = range(0, len(self.images), FILE_SIZE)[rank::world_size]
        return [index for start in files for index in range(start, start + FILE_SIZE)]

    def __iter__(self):
        for index in self.indices(dist.get_rank(), dist.get_world_size()):
            yield self.images[index], self.labels[index]


class Rounds(Files):
    """Distributes single digits in rounds of one per rank: all ranks get the same number, and the rest is dropped."""

    def indices(self, rank, world_size):
        return list(range(rank, len(self.images) - len(self.images) % world_size, world_size))


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        right = self.network(images).argmax(dim=1) == labels
        self.log("accuracy", right.double().mean(), on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class PrintAccuracy(Callback):
    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            print(f"trained {trainer.current_epoch} epochs; accuracy on held-out digits", end=" ")
            print(f"{trainer.callback_metrics['accuracy']:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="give every rank the same number of digits")
    fixed = parser.parse_args().fixed

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    train_set = (Rounds if fixed else Files)(images[HELD_OUT:], labels[HELD_OUT:])
    eval_set = TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=EPOCHS,
        callbacks=[Countoff(), PrintAccuracy()],  # the only change
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train_set, batch_size=BATCH_SIZE), DataLoader(eval_set, batch_size=BATCH_SIZE))


if __name__ == "__main__":
    main()
