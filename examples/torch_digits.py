"""A plain PyTorch loop on real digits, with ranks that are uneven on purpose.

    torchrun --standalone --nproc-per-node 2 examples/torch_digits.py
    torchrun --standalone --nproc-per-node 2 examples/torch_digits.py --fixed

The digits are in 47 files of one batch each, and each rank reads whole files. Of two ranks, the last one gets 23 files
and the other 24; of four ranks, the last one gets 11 and the others 12. Without countoff (COUNTOFF=0) the ranks drift
apart after the first epoch. With it every rank stops there, with the same verdict. `--fixed` distributes single digits,
so that all ranks get the same number, and trains to the end. Runs on the CPU, with gloo.

Needs: pip install 'countoff[torch]' scikit-learn
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from countoff.torch import Countoff

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="give every rank the same number of digits")
    fixed = parser.parse_args().fixed
    dist.init_process_group("gloo")

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    train_set = (Rounds if fixed else Files)(images[HELD_OUT:], labels[HELD_OUT:])
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE)
    eval_loader = DataLoader(TensorDataset(images[:HELD_OUT], labels[:HELD_OUT]), batch_size=BATCH_SIZE)

    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    countoff = Countoff(model=model, optimizer=optimizer)
    accuracy = 0.0
    for _ in range(EPOCHS):
        for images, labels in countoff.train(train_loader):
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        right = [network(images).argmax(dim=1) == labels for images, labels in countoff.eval(eval_loader)]
        accuracy = torch.cat(right).double().mean().item()

    countoff.close()
    if dist.get_rank() == 0:
        batches = countoff.progress().get("countoff/batches_per_epoch", "uncounted")
        print(f"trained {EPOCHS} epochs of {batches} batches on each rank; accuracy on held-out digits {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
