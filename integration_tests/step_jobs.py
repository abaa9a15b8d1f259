"""Loops with Accelerate that accumulate the gradients of several batches, and step as often as that, or more often."""

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, TensorDataset

from countoff.accelerate import Countoff
from integration_tests import devices
from integration_tests.digits import digits
from integration_tests.weight_jobs import build

BATCHES = 24


@dataclass(frozen=True)
class Loop:
    """A loop of two epochs.

    Attributes:
        every: Batches after which it steps; 0 where `accumulate()` decides that.
        parts: Into how many parts each batch is cut.
        chained: How many passes over the loader are one epoch.
        warms_up: Whether an optimizer of the last layer alone steps, and the other one does not.
        accumulation: The gradient accumulation that is said.
        sync_with_dataloader: Whether Accelerate steps at the end of the loader.
        stops: Whether the loop leaves each epoch after half of its batches.
    """

    every: int = 0
    parts: int = 1
    chained: int = 1
    warms_up: bool = False
    accumulation: int = 4
    sync_with_dataloader: bool = True
    stops: bool = False


class _Made:
    """The objects of a loop, as its framework prepares them."""

    def __init__(self, loop: Loop) -> None:
        images, labels = digits()
        samples = BATCHES * 8 * dist.get_world_size()
        dataset = TensorDataset(images.repeat(3, 1)[:samples], labels.repeat(3)[:samples])
        self.model: Any = build()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.applied = [0, 0]
        head = torch.optim.SGD(self.model[-1].parameters(), lr=0.01)
        self.epoch = 0
        for each in (self.optimizer, head):
            each.register_step_post_hook(self._count)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        plugin = GradientAccumulationPlugin(loop.accumulation, sync_with_dataloader=loop.sync_with_dataloader)
        self.accelerator: Any = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        loader = DataLoader(dataset, 8)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.model, self.optimizer, loader)
        if loop.warms_up:
            self.optimizer = self.accelerator.prepare(head)
        self.countoff = Countoff(self.accelerator)

    def _count(self, *_: Any) -> None:
        self.applied[self.epoch] += 1

    def train_on(self, part: Any, *, accumulates: bool) -> None:
        with self.accelerator.accumulate(self.model) if accumulates else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(self.model(part[0]), part[1])
            self.accelerator.backward(loss)
            if accumulates:
                self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(loop: Loop) -> dict[str, Any]:
    """Trains; returns what was warned of, and the optimizer steps that torch has applied in an epoch, at most."""
    if not dist.is_initialized():
        devices.join()
    made = _Made(loop)
    for made.epoch in range(2):
        loader = itertools.chain(*[made.loader] * loop.chained) if loop.chained > 1 else made.loader
        for number, batch in enumerate(made.countoff.train(loader), 1):
            for part in zip(*(values.chunk(loop.parts) for values in devices.moved(batch)), strict=True):
                made.train_on(part, accumulates=not loop.every)
            if loop.every and number % loop.every == 0:
                made.step()
            if loop.stops and number == BATCHES // 2:
                break
    made.countoff.close()
    warned = {notice.kind: notice.sentence for notice in made.countoff.guard.notices}
    return {"warned": warned, "steps": max(made.applied)}


def train_each(loops: list[Loop]) -> list[dict[str, Any]]:
    """Trains one after the other on the same ranks."""
    return [train(loop) for loop in loops]
