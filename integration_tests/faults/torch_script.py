"""A plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.faults.rank_behavior import RankBehavior, world_size
from integration_tests.loops import model_and_optimizer
from integration_tests.resume_jobs import Job, Run


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    if behavior.resumes:
        resume_wrongly(behavior)
        return
    model, optimizer = model_and_optimizer()
    loader, evals = behavior.train_loader(), behavior.eval_loader()
    behavior.before_fit(model)
    start = 1 if behavior.has("F11") else 0
    with Countoff(
        optimizer=optimizer,
        model=model,
        gradient_accumulation_steps=behavior.accumulation,
        epochs=behavior.epochs if behavior.fault == "F31" else None,
        **behavior.options,
    ) as countoff:
        for epoch in range(start, behavior.epochs):
            if isinstance(loader.sampler, DistributedSampler) and behavior.fault != "F15":
                loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(countoff.train(loader, epoch=epoch)):
                images, labels = devices.moved(batch)
                if behavior.runs_extra(number):
                    with model.no_sync():
                        torch.nn.functional.cross_entropy(model(images), labels).backward()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                if behavior.steps_after(number):
                    optimizer.step()
                    optimizer.zero_grad()
                if behavior.fault == "F8" and number == behavior.evaluates_at:
                    evaluate(countoff, model, evals, alone=True)
                behavior.after_batch(epoch, number, model)
                if behavior.breaks_after(number):
                    break
            if behavior.fault != "F8":
                evaluate(countoff, model, evals)
            behavior.after_epoch(epoch)
            dist.barrier()


def resume_wrongly(behavior: RankBehavior) -> None:
    """Writes a checkpoint in the middle of an epoch, and goes on elsewhere."""
    how: dict[str, Any] = {
        "F21": {"resumes_at": (1, 0)},
        "F22": {"resumes_at": (2, 0), "start_epoch": 2},
        "F23": {"restored": "moc"},
    }[behavior.fault]
    run = Run(behavior.fault, ranks=world_size(), **how)
    first = Job(run, Path("saved.pt"))
    first.train((0, 0), run.saved_at)
    first.countoff.close()
    second = Job(run, Path("saved.pt"), start_epoch=run.start_epoch)
    second.load()
    second.train(run.place, None)
    second.countoff.close()


def evaluate(countoff: Countoff, model: Any, evals: Any, *, alone: bool = False) -> None:
    """Averages a loss over all ranks, batch by batch, unless each rank evaluates alone."""
    for batch in () if evals is None else countoff.eval(evals):
        images, labels = devices.moved(batch)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model.module(images), labels)
        if not alone:
            dist.all_reduce(loss)
