"""An Accelerate loop on real digits, with ranks that are uneven because of a setting meant for the evaluation.

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
    ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py --fixed

`even_batches=False` stops Accelerate from repeating samples, so that an evaluation counts each digit once. But it also
applies to the train loader: of its 47 batches, one rank gets 24 and the other 23. Without countoff (COUNTOFF=0)
the ranks drift apart after the first epoch and the job hangs. With it every rank stops there, with the same verdict.
`--fixed` applies the setting only to the evaluation loader. Runs on the CPU, with gloo.

Needs: pip install 'countoff[accelerate]' scikit-learn
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from countoff.accelerate import Countoff

HELD_OUT, BATCH_SIZE, EPOCHS = 293, 32, 10  # 1504 digits to train on: 47 batches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="give every rank the same number of batches")
    fixed = parser.parse_args().fixed
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))

    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    train_set = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    eval_set = TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])

    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, optimizer, eval_loader = accelerator.prepare(
        network, torch.optim.Adam(network.parameters(), lr=0.01), DataLoader(eval_set, batch_size=BATCH_SIZE)
    )
    accelerator.even_batches = fixed
    train_loader = accelerator.prepare(DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True))

    countoff = Countoff(accelerator, epochs=EPOCHS)
    right = torch.zeros(1)
    for _ in range(EPOCHS):
        for images, labels in countoff.train(train_loader):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        right = sum((network(images).argmax(dim=1) == labels).sum() for images, labels in countoff.eval(eval_loader))

    accuracy = accelerator.reduce(right).item() / HELD_OUT
    countoff.close()
    batches = countoff.progress().get("countoff/batches_per_epoch", "uncounted")
    accelerator.print(
        f"trained {EPOCHS} epochs of {batches} batches on each rank; accuracy on held-out digits {accuracy:.3f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
