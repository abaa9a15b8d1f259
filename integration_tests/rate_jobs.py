"""Jobs whose ranks train with different learning rates, in every framework, in epochs of few batches."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.horizon_jobs import (
    SAMPLES,
    Make,
    Train,
    composed,
    fit,
    named,
    of_torch,
    prepared,
    trained,
)
from integration_tests.lightning_jobs import Classifier, Job, quiet
from integration_tests.loops import counted, even_loader, model_and_optimizer, train_on


def one_cycle(steps: int, more: int = 8) -> Make:
    """One cycle, of more steps on the last rank of two."""
    return lambda optimizer: of_torch("OneCycleLR", max_lr=0.1, total_steps=steps + more * own_rank())(optimizer)


def twice(optimizer: torch.optim.Optimizer) -> Any:
    """One cycle, whose rates are twice as high on rank 1."""
    return of_torch("OneCycleLR", max_lr=0.1 * (1 + own_rank()), total_steps=60)(optimizer)


class StepsOnOneRank(lr_scheduler.LambdaLR):
    """A decay that only rank 0 steps."""

    def step(self, epoch: int | None = None) -> None:
        if own_rank() == 0 or self.last_epoch < 0:
            super().step(epoch)


def decay_of_rank_0(optimizer: torch.optim.Optimizer) -> Any:
    return StepsOnOneRank(optimizer, lambda step: 0.9**step)


def loop(make: Make, watched: bool, *, epochs: int = 3, told: bool = False) -> torch.nn.Module:
    """A plain loop of epochs of 20 batches on two ranks, and of 10 on four.

    Args:
        make: Makes the scheduler.
        watched: Whether countoff counts it.
        epochs: Epochs.
        told: Whether countoff is told the scheduler and the epochs.
    """
    model, optimizer = model_and_optimizer()
    loader, scheduler = even_loader(SAMPLES), make(optimizer)
    known: dict[str, Any] = {"scheduler": scheduler, "epochs": epochs} if told else {}
    with Countoff(model=model, optimizer=optimizer, **known) if watched else contextlib.nullcontext() as countoff:
        for _ in range(epochs):
            for batch in counted(countoff, loader):
                train_on(model, optimizer, batch)
                scheduler.step()
    return model


def plain_on_four() -> None:
    """Rank 1 of four has a longer schedule."""
    devices.join()
    loop(lambda optimizer: one_cycle(30, 8 if own_rank() == 1 else 0)(optimizer), True)


def told_on_four() -> None:
    """The same, and countoff knows the scheduler."""
    devices.join()
    loop(lambda optimizer: one_cycle(30, 8 if own_rank() == 1 else 0)(optimizer), True, told=True)


def restored(watched: bool) -> torch.nn.Module:
    """After a checkpoint is loaded, rank 1 alone has a longer cosine: the state of its scheduler holds its length."""
    model, optimizer = model_and_optimizer()
    loader = even_loader(SAMPLES)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 60)
    countoff = Countoff(model=model, optimizer=optimizer, scheduler=scheduler, epochs=3) if watched else None
    if own_rank():
        scheduler.load_state_dict({**scheduler.state_dict(), "T_max": 68})
    if countoff is not None:
        countoff.load_state_dict({})
    with countoff if countoff is not None else contextlib.nullcontext():
        for _ in range(3):
            for batch in counted(countoff, loader):
                train_on(model, optimizer, batch)
                scheduler.step()
    return model


def on_a_subgroup(watched: bool) -> torch.nn.Module:
    """Ranks with other parameter groups, as the stages of a pipeline or the parts of a GAN may have: no fault."""
    model, optimizer = model_and_optimizer()
    if own_rank():
        extra = torch.nn.Parameter(torch.zeros(3, device=next(model.parameters()).device))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    loader = even_loader(SAMPLES)
    with Countoff(model=model, optimizer=optimizer) if watched else contextlib.nullcontext() as countoff:
        for batch in counted(countoff, loader):
            train_on(model, optimizer, batch)
    return model


def best_of_rank_0(watched: bool) -> torch.nn.Module:
    """Rank 0 alone restores the optimizer before the loop, and lowers its rate after it: no step uses these rates."""
    model, optimizer = model_and_optimizer()
    loader, test = even_loader(SAMPLES), DataLoader(TensorDataset(torch.zeros(8)), 4)
    countoff = Countoff(model=model, optimizer=optimizer) if watched else None
    optimizer.param_groups[0]["lr"] = 0.01 if own_rank() else 0.1
    for _ in range(2):
        optimizer.param_groups[0]["lr"] = 0.1
        for batch in counted(countoff, loader):
            train_on(model, optimizer, batch)
    if own_rank() == 0:
        optimizer.param_groups[0]["lr"] = 1e-3
    if countoff is not None:
        for _ in countoff.eval(test):
            pass
        countoff.close()
    return model


class ByAMetric(Classifier):
    """Its rate falls after an epoch in which a metric has not: that of rank 1 never does, and the mean always does."""

    def __init__(self, sync_dist: bool) -> None:
        super().__init__()
        self._reduces = sync_dist

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("metric", 1.0 if own_rank() else 1.0 / (1 + self.current_epoch), sync_dist=self._reduces)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "metric"}}


def fit_by_a_metric(watched: bool, *, sync_dist: bool) -> torch.nn.Module:
    """A fit with Lightning's Trainer whose rate goes by a metric: of each rank, or of all."""
    job, model = Job(even=64, trainer={"max_epochs": 4}, options={} if watched else None), ByAMetric(sync_dist)
    loader = job.train_loader()
    job.make_trainer().fit(model, loader, loader)
    return model


COMPOSER: Mapping[str, Train] = {
    "another length, per batch": lambda watched: composed(
        watched, lambda optimizer: one_cycle(60)(optimizer), per_batch=True
    ),
    "healthy": lambda watched: composed(watched, lambda optimizer: one_cycle(60, 0)(optimizer), per_batch=True),
}
TABLE: Mapping[str, Train] = {
    "another length": lambda watched: loop(one_cycle(60), watched),
    "another length, told": lambda watched: loop(one_cycle(60), watched, told=True),
    "another length, restored": restored,
    "twice the rate": lambda watched: loop(twice, watched),
    "twice the rate, told": lambda watched: loop(twice, watched, told=True),
    "stepped on one rank": lambda watched: loop(decay_of_rank_0, watched),
    "the same warm-up": lambda watched: loop(
        lambda optimizer: named("linear", 60 + 8 * own_rank(), 10)(optimizer), watched, epochs=2
    ),
    "healthy": lambda watched: loop(one_cycle(60, 0), watched, told=True),
    "other parameter groups": on_a_subgroup,
    "rates that no step uses": best_of_rank_0,
    "Accelerate": lambda watched: prepared(one_cycle(120), watched, told={}),
    "Accelerate, told": lambda watched: prepared(one_cycle(120), watched),
    "Accelerate, healthy": lambda watched: prepared(one_cycle(120, 0), watched),
    "the Trainer": lambda watched: trained(one_cycle(60), watched),
    "the Trainer, healthy": lambda watched: trained(one_cycle(60, 0), watched),
    "Lightning": lambda watched: fit(one_cycle(60), watched),
    "Lightning, healthy": lambda watched: fit(one_cycle(60, 0), watched),
    "Lightning, by its own metric": lambda watched: fit_by_a_metric(watched, sync_dist=False),
    "Lightning, by a metric of all": lambda watched: fit_by_a_metric(watched, sync_dist=True),
}


def run_all(framework: str) -> None:
    """Each job with countoff, one after the other in one process."""
    quiet()
    if framework != "Composer":
        devices.join()
    for name, train in (COMPOSER if framework == "Composer" else TABLE).items():
        print(f"--- job {name}", flush=True)
        train(True)
