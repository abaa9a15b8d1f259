"""A plain PyTorch loop on uneven data that trains to the end: every rank takes as many batches as the shortest one.

    torchrun --standalone --nproc-per-node 2 examples/uneven_digits.py
    torchrun --standalone --nproc-per-node 2 examples/uneven_digits.py --uneven-train raise

The digits are in 47 files of one batch each, and each rank reads whole files: of two ranks, the last one has 23 batches
and the other 24. With `stop`, every epoch has 23 batches on both. With `raise`, the default of countoff, the job stops
where the last rank has no batch. Runs on the CPU, with gloo.

Needs: pip install 'countoff[torch]' scikit-learn
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from countoff.torch import Countoff

HELD_OUT, BATCH_SIZE, EPOCHS = 293, 32, 10


class Files(IterableDataset):
    """Reads every world_size-th file; here, a file is one batch of digits in memory."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for images, labels in self.files[dist.get_rank() :: dist.get_world_size()]:
            yield from zip(images, labels, strict=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--uneven-train", choices=["raise", "stop"], default="stop")
    uneven_train = parser.parse_args().uneven_train
    dist.init_process_group("gloo")

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    files = list(zip(images[HELD_OUT:].split(BATCH_SIZE), labels[HELD_OUT:].split(BATCH_SIZE), strict=True))
    loader = DataLoader(Files(files), batch_size=BATCH_SIZE)

    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    batches = [0] * EPOCHS
    with Countoff(model=model, optimizer=optimizer, uneven_train=uneven_train) as countoff:
        for epoch in range(EPOCHS):
            for batch_images, batch_labels in countoff.train(loader):
                cross_entropy(model(batch_images), batch_labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                batches[epoch] += 1

    accuracy = (network(images[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]).double().mean().item()
    print(f"rank {dist.get_rank()}: batches per epoch {batches}, accuracy on held-out digits {accuracy:.3f}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
