"""A plain PyTorch loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import attach
from integration_tests import devices
from integration_tests.faults.rank_behavior import RankBehavior
from integration_tests.loops import model_and_optimizer


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    model, optimizer = model_and_optimizer()
    loader, evals = behavior.train_loader(), behavior.eval_loader()
    start = 1 if behavior.has("F11") else 0
    with attach(
        train=loader,
        eval=evals,
        optimizer=optimizer,
        gradient_accumulation_steps=behavior.accumulation,
        start_epoch=start,
        **behavior.options,
    ):
        for epoch in range(start, behavior.epochs):
            if isinstance(loader.sampler, DistributedSampler) and behavior.fault != "F15":
                loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                images, labels = devices.moved(batch)
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                if behavior.steps_after(number):
                    optimizer.step()
                    optimizer.zero_grad()
                if behavior.fault == "F8" and number == behavior.evaluates_at:
                    evaluate(model, evals)
                behavior.after_batch(epoch, number)
                if behavior.breaks_after(number):
                    break
            if behavior.fault != "F8":
                evaluate(model, evals)
            behavior.after_epoch(epoch)
            dist.barrier()


def evaluate(model: Any, evals: Any) -> None:
    """Averages a loss over all ranks, batch by batch."""
    for batch in () if evals is None else evals:
        images, labels = devices.moved(batch)
        with torch.no_grad():
            dist.all_reduce(torch.nn.functional.cross_entropy(model.module(images), labels))
