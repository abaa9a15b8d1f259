"""An Accelerate loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

from countoff.accelerate import Countoff
from integration_tests import devices
from integration_tests.accelerate_jobs import model_and_optimizer
from integration_tests.faults.rank_behavior import RankBehavior, world_size
from integration_tests.resume_jobs import Prepared, PreparedJob


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    if behavior.resumes:
        resume_wrongly(behavior)
        return
    accelerator = Accelerator(
        cpu=devices.framework_uses_cpu(),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False, use_seedable_sampler=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=behavior.accumulation, sync_with_dataloader=False
        ),
    )
    model, optimizer = model_and_optimizer()
    loaders = [behavior.train_loader(sharded_over=world_size()), behavior.eval_loader(sharded_over=world_size())]
    model, optimizer, loader, *evals = accelerator.prepare(
        model, optimizer, *(loader for loader in loaders if loader is not None)
    )
    evaluation = evals[0] if evals else None
    behavior.before_fit(model)
    epochs = behavior.epochs if behavior.fault == "F31" else None
    with Countoff(accelerator, epochs=epochs, **behavior.options) as countoff:
        if behavior.fault == "F11":
            resume_elsewhere(countoff, accelerator, behavior, loader, model, optimizer)
        for epoch in range(behavior.epochs):
            for number, batch in enumerate(countoff.train(loader)):
                if behavior.runs_extra(number):
                    with accelerator.no_sync(model):
                        back(accelerator, model, batch)
                back(accelerator, model, batch)
                if behavior.steps_after(number):
                    optimizer.step()
                    optimizer.zero_grad()
                if behavior.fault == "F8" and number == behavior.evaluates_at:
                    evaluate(countoff, accelerator, model, evaluation, alone=True)
                behavior.after_batch(epoch, number, model)
                if behavior.breaks_after(number):
                    break
            if behavior.fault != "F8":
                evaluate(countoff, accelerator, model, evaluation)
            behavior.after_epoch(epoch)
            accelerator.wait_for_everyone()


def back(accelerator: Any, model: Any, batch: Any) -> None:
    """One batch, forwards and backwards."""
    images, labels = batch
    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))


def resume_elsewhere(
    countoff: Countoff, accelerator: Any, behavior: RankBehavior, loader: Any, model: Any, optimizer: Any
) -> None:
    """Trains an epoch, writes two checkpoints in it, and loads another one on the culprit than on its peers."""
    for number, batch in enumerate(countoff.train(loader)):
        back(accelerator, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        if number in (1, 3):
            accelerator.save_state(f"after-{number}")
            accelerator.wait_for_everyone()
    accelerator.load_state("after-1" if behavior.mine else "after-3")


def resume_wrongly(behavior: RankBehavior) -> None:
    """Writes a checkpoint in the middle of an epoch, and goes on elsewhere."""
    how: dict[str, Any] = {"F21": {"skips": 0}, "F22": {"skips": 4}, "F23": {"prepared": False}}[behavior.fault]
    run = Prepared(behavior.fault, ranks=world_size(), **how)
    first = PreparedJob(run, Path("saved"))
    first.train((0, 0), run.saved_at)
    first.countoff.close()
    second = PreparedJob(run, Path("saved"))
    second.accelerator.load_state("saved")
    second.train((run.saved_at[0], run.saved_at[1] if run.skips is None else run.skips), None)
    second.countoff.close()


def evaluate(countoff: Countoff, accelerator: Any, model: Any, evals: Any, *, alone: bool = False) -> None:
    """Gathers a loss from all ranks, batch by batch, unless each rank evaluates alone."""
    for images, labels in () if evals is None else countoff.eval(evals):
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(accelerator.unwrap_model(model)(images), labels)
        if not alone:
            accelerator.gather(loss)
