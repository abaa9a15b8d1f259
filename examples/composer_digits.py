"""Composer on real digits in MDS shards, with a dataset that returns the wrong length.

    composer -n 2 examples/composer_digits.py
    composer -n 2 examples/composer_digits.py --fix
    torchrun --standalone --nproc-per-node 2 examples/composer_digits.py

Rank 0 writes the digits as an MDS dataset into a temporary directory. `len(dataset)` returns the number of samples of
all ranks together, but Composer needs the number of one rank. So on two ranks the console counts to 94 while an epoch
has 47 batches, and the warm-up of one epoch takes two epochs. countoff reports this before the first batch. With
`--fix` it sets the length, and the console and the learning rate are right. Runs on the CPU, with gloo.

Needs: pip install 'countoff[composer]' scikit-learn
"""

import argparse
import contextlib
import tempfile

import numpy as np
import torch
from composer import Trainer
from composer.core import Callback
from composer.models import ComposerClassifier
from composer.optim import LinearWithWarmupScheduler
from composer.utils import dist, get_device
from sklearn.datasets import load_digits
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from countoff.composer import Countoff

BATCH_SIZE, EPOCHS = 16, 4


class Digits(StreamingDataset):
    def __getitem__(self, at):
        sample = super().__getitem__(at)
        return torch.from_numpy(sample["image"].copy()), sample["label"]

    def __len__(self):
        return self.size  # the mistake: `size` is that of all ranks together, `length` that of one rank


class PrintLearningRate(Callback):
    """Prints the learning rate at every quarter of an epoch."""

    def batch_end(self, state, logger):
        batch = int(state.timestamp.batch_in_epoch)
        if dist.get_global_rank() == 0 and batch % 16 == 0:
            epoch, rate = int(state.timestamp.epoch) + 1, state.schedulers[0].get_last_lr()[0]
            print(f"epoch {epoch} of {EPOCHS}, batch {batch} of {int(state.dataloader_len)}: learning rate {rate:.4f}")


def write_digits(directory):
    pixels, targets = load_digits(return_X_y=True)
    with MDSWriter(out=directory, columns={"image": "ndarray:float32:64", "label": "int"}, size_limit="32kb") as writer:
        for image, label in zip(pixels[:1504], targets[:1504], strict=True):
            writer.write({"image": (image / 16).astype(np.float32), "label": int(label)})


def train(directory, totals):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    trainer = Trainer(
        model=ComposerClassifier(model, num_classes=10),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        schedulers=LinearWithWarmupScheduler(t_warmup="1ep"),
        train_dataloader=StreamingDataLoader(Digits(local=directory, batch_size=BATCH_SIZE), batch_size=BATCH_SIZE),
        max_duration=f"{EPOCHS}ep",
        device="cpu",
        progress_bar=False,
        callbacks=[Countoff(totals=totals), PrintLearningRate()],  # the only change
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        print(f"trained {int(trainer.state.timestamp.batch)} batches on each rank")
    trainer.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true", help="let countoff set the true length")
    totals = "fix" if parser.parse_args().fix else "show"

    dist.initialize_dist(get_device("cpu"))
    with contextlib.ExitStack() as stack:
        shared = [None]
        if dist.get_global_rank() == 0:
            shared = [stack.enter_context(tempfile.TemporaryDirectory())]
            write_digits(shared[0] + "/digits")
        dist.broadcast_object_list(shared)
        train(shared[0] + "/digits", totals)
        dist.barrier()  # before rank 0 removes the directory


if __name__ == "__main__":
    main()
