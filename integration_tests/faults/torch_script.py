"""A plain PyTorch loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import attach
from integration_tests.faults.conduct import Conduct
from integration_tests.loops import model_and_optimizer


def train(conduct: Conduct) -> None:
    """Trains one rank."""
    model, optimizer = model_and_optimizer()
    loader, evals = conduct.train_loader(), conduct.eval_loader()
    start = 1 if conduct.has("F11") else 0
    with attach(
        train=loader,
        eval=evals,
        optimizer=optimizer,
        gradient_accumulation_steps=conduct.accumulation,
        start_epoch=start,
        **conduct.options,
    ):
        for epoch in range(start, conduct.epochs):
            if isinstance(loader.sampler, DistributedSampler) and conduct.fault != "F15":
                loader.sampler.set_epoch(epoch)
            for number, (images, labels) in enumerate(loader):
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                if conduct.steps_after(number):
                    optimizer.step()
                    optimizer.zero_grad()
                if conduct.fault == "F8" and number == conduct.evaluates_at:
                    evaluate(model, evals)
                conduct.after_batch(epoch, number)
                if conduct.breaks_after(number):
                    break
            if conduct.fault != "F8":
                evaluate(model, evals)
            conduct.after_epoch(epoch)
            dist.barrier()


def evaluate(model: Any, evals: Any) -> None:
    """Averages a loss over all ranks, batch by batch."""
    for images, labels in () if evals is None else evals:
        with torch.no_grad():
            dist.all_reduce(torch.nn.functional.cross_entropy(model.module(images), labels))
