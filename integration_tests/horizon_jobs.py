"""Learning-rate schedules as people get them wrong, and as they are right, in every framework: a small real job each.

A job is a function that trains with countoff or without, and returns the model. `run_all` runs a table of them.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

from countoff import accelerate, fabric, lightning, transformers
from countoff import torch as plain_torch
from countoff.core import Guard
from integration_tests import composer_jobs, devices
from integration_tests.accelerate_jobs import model_and_optimizer as linear
from integration_tests.digits import BATCH_SIZE, digits, weights
from integration_tests.lightning_jobs import quiet
from integration_tests.loops import counted, even_loader, model_and_optimizer
from integration_tests.trainer_jobs import Digits, Linear, collate

SAMPLES = 160
"""20 batches for each of two ranks."""
Make = Callable[[torch.optim.Optimizer], Any]
Train = Callable[[bool], torch.nn.Module]


@dataclass(frozen=True)
class Outcome:
    """What a job did.

    Attributes:
        weights: The model's, as a hash of their bits.
        rates: The learning rate with which each optimizer step was made.
        warned_at: The optimizer steps after which this rank found something to warn of.
        error: The exception that ended it, if one did.
    """

    weights: str
    rates: list[float]
    warned_at: list[int]
    error: str


def run_all(framework: str) -> dict[str, tuple[Outcome, Outcome]]:
    """Each job of a framework, without countoff and with it, one after the other in one process."""
    quiet()
    if framework != "Composer":  # which makes the process group by itself
        devices.join()
    found: dict[str, tuple[Outcome, Outcome]] = {}
    for name, train in TABLES[framework]().items():
        without = recorded(partial(train, False))
        print(f"--- job {name}", flush=True)
        found[name] = without, recorded(partial(train, True))
    return found


def recorded(train: Callable[[], torch.nn.Module]) -> Outcome:
    """Runs a job, and notes the rate of each optimizer step and when countoff warns."""
    rates, warned_at = list[float](), list[int]()
    warn, error = Guard.warn, ""

    def noted(guard: Guard, verdict: Any) -> None:
        warned_at.append(len(rates))
        warn(guard, verdict)

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    model = torch.nn.Linear(1, 1)
    with patch.object(Guard, "warn", noted):
        try:
            model = train()
        except ValueError as raised:  # as OneCycleLR raises it
            error = str(raised)
    hook.remove()
    return Outcome(weights(model) if not error else "", list(map(float, rates)), warned_at, error)


# Schedules.


def named(name: str, steps: int, warmup: int = 0, **more: Any) -> Make:
    """A schedule of transformers, by its name."""
    return partial(_named, name, steps, warmup, more)


def _named(name: str, steps: int, warmup: int, more: dict[str, Any], optimizer: Any) -> Any:
    return get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=more or None)


def of_torch(name: str, **arguments: Any) -> Make:
    """A scheduler of torch, by its name."""
    return lambda optimizer: getattr(lr_scheduler, name)(optimizer, **arguments)


def map_loader(samples: int, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    images, labels = digits()
    return DataLoader(TensorDataset(images[:samples], labels[:samples]), batch_size)


# Plain PyTorch.


def loop(
    make: Make,
    watched: bool,
    *,
    epochs: int = 3,
    samples: int = SAMPLES,
    accumulation: int = 1,
    per: str = "step",
    told: Mapping[str, Any] | None = None,
    scaler: bool = False,
    metric: bool = False,
) -> torch.nn.Module:
    """A plain loop.

    Args:
        make: Makes the scheduler.
        watched: Whether countoff watches it.
        epochs: Epochs.
        samples: Samples of all ranks.
        accumulation: Batches per optimizer step.
        per: When the scheduler is stepped: after each optimizer step, batch or epoch.
        told: What countoff is told of the run's length; None: its epochs.
        scaler: Scale the gradients, and leave out some optimizer steps as they overflow.
        metric: Give the scheduler a loss.
    """
    model, optimizer = model_and_optimizer()
    loader, scheduler = even_loader(samples), make(optimizer)
    scale = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=8.0)  # pyright: ignore[reportPrivateImportUsage]
    fit: Any = contextlib.nullcontext()
    if watched:
        length = {"epochs": epochs} if told is None else told
        fit = plain_torch.Countoff(
            optimizer=optimizer, scheduler=scheduler, gradient_accumulation_steps=accumulation, **length
        )
    with fit as countoff:
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            for number, batch in enumerate(counted(countoff, loader), 1):
                images, labels = devices.moved(batch)
                loss = torch.nn.functional.cross_entropy(model(images), labels) / accumulation
                overflows = scaler and number in (1, 2, 4, 9)
                scale.scale(loss * math.inf if overflows else loss).backward()
                if number % accumulation == 0:
                    scale.step(optimizer)
                    scale.update()
                    optimizer.zero_grad()
                if per == "batch" or (per == "step" and number % accumulation == 0):
                    scheduler.step()
            if per == "epoch":
                scheduler.step(*[1.0] if metric else [])
    return model


def resumed_loop(make: Make, watched: bool, *, doubled: bool = False, silently: bool = False) -> torch.nn.Module:
    """One epoch of three, a checkpoint, and the other two in new objects.

    Args:
        make: Makes the scheduler.
        watched: Whether countoff watches it.
        doubled: Step the scheduler once more for each step before the checkpoint.
        silently: Do not tell countoff that the run resumes.
    """
    before: dict[str, Any] = {}
    model: Any = None
    for first, last in ((0, 1), (1, 3)):
        model, optimizer = model_and_optimizer()
        loader, scheduler = even_loader(SAMPLES), make(optimizer)
        fit: Any = contextlib.nullcontext()
        if watched:
            steps = 0 if silently else 20 * first
            fit = plain_torch.Countoff(optimizer=optimizer, scheduler=scheduler, epochs=3, start_step=steps)
        with fit as countoff:
            if before:
                model.load_state_dict(before["model"])
                optimizer.load_state_dict(before["optimizer"])
                scheduler.load_state_dict(before["scheduler"])
                if doubled:
                    for _ in range(20):
                        scheduler.step()
                if watched and not silently:
                    countoff.load_state_dict(before["countoff"])
            for epoch in range(first, last):
                loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
                told: dict[str, Any] = {} if silently else {"epoch": epoch}
                for batch in countoff.train(loader, **told) if watched else loader:
                    images, labels = devices.moved(batch)
                    torch.nn.functional.cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            before = {name: each.state_dict() for name, each in parts.items()}
            before["countoff"] = countoff.state_dict() if watched else {}
    return model


def plain() -> dict[str, Train]:
    def job(make: Make, **how: Any) -> Train:
        return lambda watched: loop(make, watched, **how)

    milestones = of_torch("MultiStepLR", milestones=[6, 9])
    return {
        "one epoch of three": job(named("linear", 20, 2)),
        "all epochs": job(named("linear", 60, 2)),
        "one epoch of three, the run's length unknown": job(named("linear", 20, 2), told={}),
        "one cycle of one epoch": job(of_torch("OneCycleLR", max_lr=0.1, total_steps=20)),
        "one cycle of all epochs": job(of_torch("OneCycleLR", max_lr=0.1, total_steps=60)),
        "per batch, made for optimizer steps": job(named("cosine", 15, 2), accumulation=4, per="batch"),
        "per batch, made for batches": job(named("cosine", 60, 8), accumulation=4, per="batch"),
        "per step, made for batches": job(named("cosine", 60, 2), accumulation=4),
        "per step, made for optimizer steps": job(named("cosine", 15, 2), accumulation=4),
        "divided by the accumulation twice": job(named("linear", 15, 2), epochs=12, accumulation=4),
        "steps of one process alone": job(named("linear", 120)),
        "steps divided by the processes": job(named("linear", 30)),
        "per epoch, made for steps": job(of_torch("CosineAnnealingLR", T_max=60), epochs=12, samples=40, per="epoch"),
        "per epoch, made for epochs": job(of_torch("CosineAnnealingLR", T_max=12), epochs=12, samples=40, per="epoch"),
        "per step, made for epochs": job(milestones, epochs=12),
        "per epoch, milestones of epochs": job(milestones, epochs=12, samples=40, per="epoch"),
        "warm-up subtracted twice": job(named("linear", 108, 12), epochs=6),
        "warm-up subtracted once": job(named("linear", 120, 12), epochs=6),
        "a warm-up longer than the run": job(named("constant_with_warmup", 0, 600)),
        "a warm-up": job(named("constant_with_warmup", 0, 10)),
        "a cosine that rises again": job(of_torch("CosineAnnealingLR", T_max=20)),
        "a rate that vanishes": job(of_torch("ExponentialLR", gamma=0.5)),
        "exponential": job(of_torch("ExponentialLR", gamma=0.98)),
        "a lowest rate above 0": job(named("cosine_with_min_lr", 30, min_lr_rate=0.1)),
        "restarts": job(of_torch("CosineAnnealingWarmRestarts", T_0=10, T_mult=2)),
        "plateau": job(of_torch("ReduceLROnPlateau", patience=0), per="epoch", metric=True),
        "a function of the user's": job(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: max(0.0, 1 - step / 20))),
        "skipped optimizer steps": job(named("linear", 60), scaler=True),
        "a limit of steps": job(named("linear", 1000), told={"epochs": 3, "max_steps": 60}),
        "resumed": partial(resumed_loop, named("linear", 60)),
        "resumed, which nobody says": partial(resumed_loop, named("linear", 60), silently=True),
        "resumed, a chain": partial(resumed_loop, _chain),
        "resumed at twice the position": partial(resumed_loop, named("linear", 60), doubled=True),
    }


def _chain(optimizer: Any) -> Any:
    """A warm-up and a decay, one after the other."""
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, 55),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


# DeepSpeed's schedulers, which need no engine and no GPU.


def with_deepspeed() -> dict[str, Train]:
    lr_schedules = import_module("deepspeed.runtime.lr_schedules")  # not in every environment

    def job(name: str, steps: int, *, accumulation: int = 1, **arguments: Any) -> Train:
        total = {} if name == "WarmupLR" else {"total_num_steps": steps}
        warmup = {"warmup_num_steps": steps if name == "WarmupLR" else 6}
        kind = getattr(lr_schedules, name)
        return lambda watched: loop(
            lambda optimizer: kind(optimizer, **total, **warmup, **arguments), watched, accumulation=accumulation
        )

    return {
        "one epoch of three": job("WarmupDecayLR", 20, warmup_max_lr=0.1),
        "the steps of one process alone": job("WarmupDecayLR", 120, warmup_max_lr=0.1),
        "made for batches": job("WarmupDecayLR", 60, warmup_max_lr=0.1, accumulation=4),
        "made for steps": job("WarmupDecayLR", 15, warmup_max_lr=0.1, accumulation=4),
        "all epochs": job("WarmupDecayLR", 60, warmup_max_lr=0.1, warmup_type="linear"),
        "a cosine of twice the run": job("WarmupCosineLR", 120),
        "a cosine of the run": job("WarmupCosineLR", 60),
        "a warm-up longer than the run": job("WarmupLR", 600),
        "a warm-up": job("WarmupLR", 6),
    }


# Accelerate.


def prepared(
    make: Make,
    watched: bool,
    *,
    accumulation: int = 1,
    per: str = "step",
    told: Mapping[str, Any] | None = None,
    stop: int = 0,
    resumes: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """A loop with Accelerate, which prepares the scheduler.

    Args:
        make: Makes the scheduler.
        watched: Whether countoff watches it.
        accumulation: Batches per optimizer step.
        per: When the loop calls the scheduler: after each batch, as Accelerate wants it, or after each epoch.
        told: What countoff is told of the run's length; None: its epochs.
        stop: Optimizer steps after which it ends; 0: with its epochs.
        resumes: Write a checkpoint after the first epoch, and go on in new objects.
        options: More arguments of the Accelerator.
    """
    model: Any = None
    for first, last in ((0, 1), (1, 3)) if resumes else ((0, 3),):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
        model, raw = linear()
        split = accelerator.split_batches
        loader = map_loader(SAMPLES, batch_size=BATCH_SIZE * (accelerator.num_processes if split else 1))
        model, optimizer, train, scheduler = accelerator.prepare(model, raw, loader, make(raw))
        fit: Any = contextlib.nullcontext()
        if watched:
            length = {"epochs": 3} if told is None else told
            fit = accelerate.Countoff(accelerator, **length)
        with fit as countoff:
            if first:
                accelerator.load_state("saved")
            for epoch in range(first, last):
                train.set_epoch(epoch)
                for images, labels in counted(countoff, train):
                    with accelerator.accumulate(model):
                        accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                        optimizer.step()
                        if per == "step":
                            scheduler.step()
                        optimizer.zero_grad()
                    if raw.applied == stop > 0:
                        return model
                if per == "epoch":
                    scheduler.step()
            if resumes:
                accelerator.save_state("saved")
    return model


def with_accelerate() -> dict[str, Train]:
    def job(make: Make, **how: Any) -> Train:
        return lambda watched: prepared(make, watched, **how)

    split = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    alone = {"step_scheduler_with_optimizer": False}
    return {
        "made for the steps": job(named("linear", 60, 6)),
        "times the processes": job(named("linear", 120, 12)),
        "made for the steps, accumulation": job(named("linear", 30), accumulation=2),
        "times the processes, accumulation": job(named("linear", 60), accumulation=2),
        "times the accumulation, as in diffusers": job(named("linear", 60), accumulation=4),
        "times the processes, as in diffusers": job(named("linear", 30), accumulation=4),
        "split batches, times the processes": job(named("linear", 120), **split),
        "split batches": job(named("linear", 60), **split),
        "stepped by the loop, times the processes": job(named("linear", 120), **alone),
        "stepped by the loop": job(named("linear", 60), **alone),
        "per epoch, made for epochs": job(of_torch("CosineAnnealingLR", T_max=3), per="epoch"),
        "per epoch, made for epochs × processes": job(of_torch("CosineAnnealingLR", T_max=6), per="epoch"),
        "a limit of steps": job(named("cosine", 10_000, 500), told={"max_steps": 10_000}, stop=30),
        "a limit of steps, times the processes": job(
            named("cosine", 20_000, 1000), told={"max_steps": 10_000}, stop=30
        ),
        "resumed": job(named("linear", 120), resumes=True),
    }


def on_more_processes() -> dict[str, Train]:
    """A schedule of 10,000 steps, on four processes."""
    told = {"max_steps": 10_000}
    return {"10,000 steps": lambda watched: prepared(named("cosine", 10_000), watched, told=told, stop=30)}


# Lightning.


class Scheduled(pl.LightningModule):
    """A linear classifier with a scheduler."""

    def __init__(self, make: Make, manual: bool, config: Mapping[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)
        self.automatic_optimization = not manual
        self._make, self._config = make, config

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._make(optimizer), **self._config}}


def fit(
    make: Make,
    watched: bool,
    *,
    manual: bool = False,
    config: Mapping[str, Any] | None = None,
    resumes: bool = False,
    **arguments: Any,
) -> torch.nn.Module:
    """A fit with Lightning's Trainer.

    Args:
        make: Makes the scheduler.
        watched: Whether countoff watches it.
        manual: Whether the module steps the optimizer and the scheduler.
        config: How Lightning is to step the scheduler; None: after every optimizer step.
        resumes: Write a checkpoint after the first epoch, and go on in new objects.
        arguments: More arguments of the Trainer.
    """
    model: Any = None
    for path in (None, "first.ckpt") if resumes else (None,):
        model = Scheduled(make, manual, {"interval": "step"} if config is None else config)
        stops = resumes and path is None
        given: dict[str, Any] = {
            **devices.lightning(),
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
            "strategy": "ddp",
            "max_epochs": 3,
            "callbacks": [*([lightning.Countoff()] if watched else []), *([_StopsFit()] if stops else [])],
            **arguments,
        }
        trainer = pl.Trainer(**given)
        trainer.fit(model, map_loader(SAMPLES), ckpt_path=path)
        if stops:
            trainer.save_checkpoint("first.ckpt")
    return model


class _StopsFit(pl.Callback):
    """Ends a fit after its first epoch, as a job that is killed."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


def with_lightning() -> dict[str, Train]:
    def job(make: Make, **how: Any) -> Train:
        return lambda watched: fit(make, watched, **how)

    def one_cycle(steps: int) -> Make:
        return of_torch("OneCycleLR", max_lr=0.1, total_steps=steps)

    by_epoch: Mapping[str, Any] = {"interval": "epoch"}
    return {
        "one cycle of batches, accumulation": job(one_cycle(60), accumulate_grad_batches=4),
        "one cycle of steps, accumulation": job(one_cycle(15), accumulate_grad_batches=4),
        "one cycle of all ranks' batches": job(one_cycle(120)),
        "one cycle of one epoch": job(one_cycle(20)),
        "one cycle": job(one_cycle(60)),
        "the interval left at epoch": job(one_cycle(60), config={}),
        "the interval left at epoch, made for epochs": job(one_cycle(3), config={}),
        "every second step": job(one_cycle(60), config={"interval": "step", "frequency": 2}),
        "every second step, made for it": job(one_cycle(31), config={"interval": "step", "frequency": 2}),
        "a cosine of epochs, per step": job(of_torch("CosineAnnealingLR", T_max=3)),
        "a cosine of epochs, in a run of one": job(
            of_torch("CosineAnnealingLR", T_max=3), config=by_epoch, max_epochs=1
        ),
        "a cosine of epochs": job(of_torch("CosineAnnealingLR", T_max=3), config=by_epoch),
        "plateau": job(of_torch("ReduceLROnPlateau", patience=0), config={**by_epoch, "monitor": "loss"}),
        "manual optimization": job(named("linear", 20), manual=True),
        "a fast run": job(named("linear", 60), fast_dev_run=3),
        "limited batches": job(named("linear", 60), limit_train_batches=5),
        "a limit of steps": job(named("linear", 1000), max_steps=30),
        "resumed": job(named("linear", 60), resumes=True),
        "resumed, a chain": job(_chain, resumes=True),
        "resumed, per epoch": job(of_torch("CosineAnnealingLR", T_max=3), config=by_epoch, resumes=True),
    }


# Fabric.


def with_fabric_loop(make: Make, watched: bool, *, accumulation: int = 1, **told: Any) -> torch.nn.Module:
    """A loop of three epochs with Fabric, which is told of its scheduler."""
    one = Fabric(**devices.lightning(), strategy="ddp")
    one.launch()
    raw, optimizer = linear()
    scheduler = make(optimizer)
    model, applied = one.setup(raw, optimizer)
    loader: Any = one.setup_dataloaders(map_loader(SAMPLES))
    fit: Any = contextlib.nullcontext()
    if watched:
        told = {"gradient_accumulation_steps": accumulation, **(told or {"epochs": 3})}
        fit = fabric.Countoff(one, optimizer=applied, scheduler=scheduler, **told)
    with fit as countoff:
        for _ in range(3):
            for number, (images, labels) in enumerate(counted(countoff, loader), 1):
                one.backward(torch.nn.functional.cross_entropy(model(images), labels) / accumulation)
                if number % accumulation == 0:
                    applied.step()
                    applied.zero_grad()
                    scheduler.step()
    return raw


def with_fabric() -> dict[str, Train]:
    def job(make: Make, **how: Any) -> Train:
        return lambda watched: with_fabric_loop(make, watched, **how)

    return {
        "one epoch of three": job(named("linear", 20)),
        "all epochs": job(named("linear", 60)),
        "made for batches": job(named("linear", 60), accumulation=4),
        "made for steps": job(named("linear", 15), accumulation=4),
        "made for another number of steps": job(named("linear", 40), max_steps=60),
        "made for the number of steps": job(named("linear", 60), max_steps=60),
    }


# The Trainer of transformers.

DEFAULT = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")
"""The Trainer's own schedules that need no further argument."""


def trained(
    make: Make | None, watched: bool, *, resumes: bool = False, told: Mapping[str, Any] | None = None
) -> torch.nn.Module:
    """A run of the Trainer with a scheduler of the user's, or with the Trainer's own.

    Args:
        make: Makes the scheduler; None: the Trainer does.
        watched: Whether countoff watches it.
        resumes: Write a checkpoint after 20 steps, and go on in new objects.
        told: More of TrainingArguments.
    """
    model: Any = None
    for last in (20, -1) if resumes else (-1,):
        arguments: dict[str, Any] = {
            "output_dir": "out",
            "use_cpu": devices.framework_uses_cpu(),
            "report_to": "none",
            "per_device_train_batch_size": BATCH_SIZE,
            "num_train_epochs": 3,
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "dataloader_pin_memory": False,
            "remove_unused_columns": False,
            "label_names": ["labels"],
            "learning_rate": 0.1,
            **(told or {}),
        }
        if last > 0:
            arguments |= {"save_strategy": "steps", "save_steps": 20}
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments),
            train_dataset=Digits(SAMPLES),
            eval_dataset=Digits(8),
            data_collator=collate,
            optimizers=(optimizer, make(optimizer) if make else None),
            callbacks=[*([transformers.Countoff()] if watched else []), *([_StopsAt(last)] if last > 0 else [])],
        )
        trainer.train(resume_from_checkpoint="out/checkpoint-20" if resumes and last < 0 else None)
    return model


class _StopsAt(TrainerCallback):
    """Ends the run before its last step, as a job that is killed."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self._steps


def with_trainer() -> dict[str, Train]:
    def job(make: Make | None, **how: Any) -> Train:
        return lambda watched: trained(make, watched, **how)

    def default(name: str, **more: Any) -> Train:
        return job(None, told={"lr_scheduler_type": name, "warmup_steps": 6, **more})

    return {
        "one epoch of three": job(named("cosine", 20, 2)),
        "all epochs": job(named("cosine", 60, 6)),
        "made for batches": job(named("cosine", 60), told={"gradient_accumulation_steps": 4}),
        "made for steps": job(named("cosine", 15), told={"gradient_accumulation_steps": 4}),
        "times the processes": job(named("cosine", 120)),
        **{f"the Trainer's {name}": default(name) for name in DEFAULT},
        "the Trainer's linear, half an epoch more": default("linear", num_train_epochs=2.5),
        "the Trainer's linear, a limit of steps": default("linear", max_steps=30),
        "the Trainer's linear, accumulation": default("linear", gradient_accumulation_steps=3),
        "the Trainer's plateau": default("reduce_lr_on_plateau", eval_strategy="epoch"),
        "the Trainer's linear, resumed": job(None, resumes=True),
        "resumed": job(named("cosine", 60, 6), resumes=True),
    }


# Composer, which the newest torch does not have.


def composed(watched: bool, schedulers: Any, *, per_batch: bool | None = None, **more: Any) -> torch.nn.Module:
    """A fit with Composer's Trainer.

    Args:
        watched: Whether countoff watches it.
        schedulers: Makes the scheduler: torch's of an optimizer, or Composer's own, which takes none.
        per_batch: Whether Composer steps torch's scheduler after every batch; None: as it does by itself.
        more: More of the job: `mistaken`, `resumes`, and arguments of the Trainer.
    """
    from torch.optim import SGD

    from integration_tests.composer_parts import Classifier, StopsAfterAnEpoch

    mistaken, resumes = more.pop("mistaken", False), more.pop("resumes", False)
    model: Any = None
    for path in (None, "saved/latest-rank0.pt") if resumes else (None,):
        model = Classifier()
        optimizer = SGD(model.parameters(), lr=0.1)
        arguments: dict[str, Any] = {
            "model": model,
            "optimizers": optimizer,
            "schedulers": schedulers(optimizer),
            "step_schedulers_every_batch": per_batch,
            "max_duration": "3ep",
            "load_path": path,
            **more,
        }
        if resumes:
            arguments |= {"save_folder": "saved", "save_overwrite": True}
        if resumes and path is None:
            arguments["callbacks"] = [StopsAfterAnEpoch()]
        job = composer_jobs.Job(even=SAMPLES, mistaken=mistaken, options={} if watched else None)
        trainer = job.make_trainer(**arguments)
        trainer.fit()
        trainer.close()
    return model


def with_composer() -> dict[str, Train]:
    from composer import optim

    def job(schedulers: Make, **how: Any) -> Train:
        return lambda watched: composed(watched, schedulers, **how)

    def own(name: str, *arguments: Any, **how: Any) -> Train:
        return job(lambda _: getattr(optim, name)(*arguments), **how)

    cosine = "CosineAnnealingScheduler"
    return {
        "a cosine of half the run": own(cosine, "30ba"),
        "a cosine of twice the run": own(cosine, "6ep"),
        "a cosine of the run": own(cosine, "1dur"),
        "a cosine of the run in batches": own(cosine, "60ba"),
        "a lowest rate above 0": own(cosine, "30ba", 0.1),
        "linear, one epoch of three": own("LinearScheduler", 1.0, 0.0, "1ep"),
        "linear": own("LinearScheduler", 1.0, 0.0, "3ep"),
        "a warm-up of one epoch": own("LinearWithWarmupScheduler", "1ep"),
        "a warm-up of one epoch, and a cosine": own("CosineAnnealingWithWarmupScheduler", "1ep"),
        "a warm-up longer than the run": own("ConstantWithWarmupScheduler", "7ep"),
        "a warm-up of one epoch of all ranks": own("ConstantWithWarmupScheduler", "1ep", mistaken=True),
        "a cosine of all ranks' batches": own(cosine, "1dur", mistaken=True),
        "milestones": own("MultiStepScheduler", ["1ep", "2ep"]),
        "torch's, made for batches, per epoch": job(of_torch("CosineAnnealingLR", T_max=60)),
        "torch's, made for epochs, per epoch": job(of_torch("CosineAnnealingLR", T_max=3)),
        "torch's, one epoch of three, per batch": job(named("linear", 20), per_batch=True),
        "torch's, made for epochs, per batch": job(of_torch("CosineAnnealingLR", T_max=3), per_batch=True),
        "torch's, made for batches, per batch": job(of_torch("CosineAnnealingLR", T_max=60), per_batch=True),
        "resumed": own(cosine, "60ba", resumes=True),
        "torch's, resumed": job(of_torch("CosineAnnealingLR", T_max=60), per_batch=True, resumes=True),
    }


TABLES: dict[str, Callable[[], dict[str, Train]]] = {
    "PyTorch": plain,
    "DeepSpeed": with_deepspeed,
    "Accelerate": with_accelerate,
    "Accelerate on more processes": on_more_processes,
    "Lightning": with_lightning,
    "Fabric": with_fabric,
    "transformers": with_trainer,
    "Composer": with_composer,
}
