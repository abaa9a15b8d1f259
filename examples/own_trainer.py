"""An adapter for your own trainer; of countoff it needs only `FitPlan`, `Guard` and `Settings`.

    torchrun --standalone --nproc-per-node 2 examples/own_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/own_trainer.py --fixed

`Rowboat` is a made-up trainer that knows nothing of countoff; `Countoff` translates its hooks. The last rank's loader
has one batch less than the others', except with `--fixed`. docs/write-an-adapter.md explains each call. Runs on the
CPU, with gloo.

Needs: pip install 'countoff[torch]'
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from countoff.core import FitPlan, Guard, Settings


class Rowboat:
    """A made-up trainer: for each hook, it calls the method of that name of each listener that has one."""

    def __init__(self, listeners=()):
        self.listeners = list(listeners)

    def call(self, hook, *arguments):
        for listener in self.listeners:
            getattr(listener, hook, lambda *_: None)(*arguments)

    def fit(self, model, optimizer, train_loader, eval_loader, epochs):
        self.optimizer, self.train_loader = optimizer, train_loader
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        try:
            self.call("fit_begins", self)
            for epoch in range(epochs):
                self.call("epoch_begins", epoch)
                for inputs, targets in train_loader:
                    self.call("batch_begins")
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    self.call("stepped")
                    optimizer.zero_grad()
                self.call("epoch_ends")
                self.call("evaluation_begins")
                for inputs, targets in eval_loader:
                    self.call("batch_begins")
                    torch.nn.functional.mse_loss(model.module(inputs), targets)
                self.call("evaluation_ends")
            self.call("fit_ends")
        except BaseException as error:
            self.call("fit_fails", error)
            raise


# The adapter: all of it.
class Countoff:
    """Asserts that all ranks of a Rowboat count the same: `Rowboat(listeners=[Countoff()])`."""

    def __init__(self, **options):
        self.settings = Settings.resolve(**options)
        self.guard = None

    def fit_begins(self, trainer):
        if not self.settings.enabled:
            return
        self.guard = Guard(
            self.settings,
            rank=trainer.rank,
            world_size=trainer.world_size,
            remedies={
                "UnevenBatches": "give every rank the same number of batches: Rowboat goes on until the loader ends."
            },
            learning_rates=lambda: [group["lr"] for group in trainer.optimizer.param_groups],
            framework="Rowboat",
        )
        plan = FitPlan(batch_size=trainer.train_loader.batch_size)
        self.guard.fit_start(plan, {"torch": torch.__version__})

    def epoch_begins(self, epoch):
        if self.guard:
            self.guard.train_start(epoch)

    def batch_begins(self):
        if self.guard:
            self.guard.batch()

    def stepped(self):
        if self.guard:
            self.guard.step()

    def epoch_ends(self):
        if self.guard:
            self.guard.train_end("exhausted")

    def evaluation_begins(self):
        if self.guard:
            self.guard.eval_start("validation")

    def evaluation_ends(self):
        if self.guard:
            self.guard.eval_end("exhausted")

    def fit_ends(self):
        if self.guard:
            self.guard.fit_end()
            self.guard.close()

    def fit_fails(self, error):
        if self.guard:
            self.guard.failed(error)  # and no close(): the guard stays armed on the way out


# The end of the adapter.


def numbers(batches):
    inputs = torch.arange(8.0 * batches).reshape(-1, 1) / (8 * batches)
    return DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="give every rank the same number of batches")
    fixed = parser.parse_args().fixed
    dist.init_process_group("gloo")

    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    short = not fixed and dist.get_rank() == dist.get_world_size() - 1
    trainer = Rowboat(listeners=[Countoff()])
    trainer.fit(model, optimizer, numbers(4 if short else 5), numbers(2), epochs=30)

    if dist.get_rank() == 0:
        print(f"trained; the line is {model.module.weight.item():.2f} x + {model.module.bias.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
