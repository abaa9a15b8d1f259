"""Reads Lightning's own objects, and sets one of them. Names outside its public API are read with a fallback."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from countoff._adapter import fit
from countoff._adapter.evaluation_totals import evaluation_facts
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.hooks import MethodHook
from countoff._adapter.sampling import fingerprint_batch
from countoff._adapter.schedule_watch import Schedule
from countoff._adapter.torch_facts import has_library_methods, loader_facts, of_library
from countoff._lightning.fetchers import module_fetches
from countoff.core import BatchPlan, FitPlan, Guard, LoaderFacts
from countoff.core.arithmetic.totals import evaluation_metrics
from countoff.core.checks.horizon import RunLength

_PACKAGES = "lightning", "pytorch_lightning", "lightning_fabric"
_ADD_HYPERPARAMETERS = {"CSVLogger", "WandbLogger"}
_OF_STEPS = ("countoff/steps_per_epoch", "countoff/estimated_stepping_batches", "countoff/global_batch_size")


def _finite(number: int | float) -> int | None:
    """Returns a number of batches; None for Lightning's infinity, which stands for no length."""
    return None if math.isinf(number) else int(number)


def plan_of(trainer: Any, facts: LoaderFacts, proven: int | None, own: OwnRank) -> FitPlan:
    """Returns what all ranks must agree on before the first batch.

    Args:
        trainer: Lightning's Trainer.
        facts: The facts of the train loader.
        proven: Batches per epoch as the arithmetic knows them; None if it does not.
        own: This rank.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return fit.plan_of(
        facts,
        own,
        batches_per_epoch=_finite(trainer.num_training_batches),
        proven_batches_per_epoch=proven,
        batches_between_evaluations=None if proven is not None else _fraction_of_length(trainer),
        position=[trainer.current_epoch, batches, trainer.global_step],
        limits={"limit_train_batches": trainer.limit_train_batches},
        evaluation_intervals=_intervals(trainer),
    )


def _intervals(trainer: Any) -> dict[str, int]:
    """Returns the batches and the epochs between two evaluations, where they are given so and the fit gets there."""
    batch = trainer.val_check_batch  # None where it evaluates by the clock
    if not trainer.enable_validation or batch is None or not _gets_to(trainer, batch):
        return {}
    given = {each: getattr(trainer, each) for each in ("val_check_interval", "check_val_every_n_epoch")}
    return {name: value for name, value in given.items() if type(value) is int}


def _gets_to(trainer: Any, batch: float) -> bool:
    """Returns whether a fit has so many batches before its limits of steps and epochs."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    batches = math.inf if trainer.max_steps == -1 else trainer.max_steps * trainer.accumulate_grad_batches
    return batches >= batch and not (every and epochs not in (None, -1) and epochs < every)


def _fraction_of_length(trainer: Any) -> int | None:
    """Returns the batches before the first evaluation, given as a fraction of an epoch, if the fit gets that far."""
    interval = trainer.val_check_interval
    evaluates = trainer.enable_validation and isinstance(interval, float) and interval < 1.0
    if not evaluates or not _gets_to(trainer, trainer.val_check_batch):
        return None
    return _finite(trainer.val_check_batch)


def train_facts(trainer: Any) -> LoaderFacts:
    """Returns the facts of the train loader, with the Trainer's limits."""
    loader = trainer.train_dataloader
    limit, accumulated = trainer.limit_train_batches, trainer.accumulate_grad_batches
    known = {
        "gradient_accumulation_steps": accumulated if accumulated % 1 == 0 else 1,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "limit_batches": None if limit == 1.0 and isinstance(limit, float) else limit,
    }
    if isinstance(loader, (Mapping, Sequence)):  # several loaders, for which Lightning computes one length
        combined = {"reported_batches": _finite(trainer.num_training_batches), "limit_batches": None}
        return loader_facts(loader, **known | combined)
    return loader_facts(loader, **known)


def loaders_of(trainer: Any) -> dict[str | None, Any]:
    """Returns the loaders of a fit, by the evaluation's name; None for the train loader."""
    validation = getattr(trainer, "val_dataloaders", None)
    loaders: dict[str | None, Any] = {None: trainer.train_dataloader}
    if isinstance(validation, Sequence):
        several = len(validation) > 1
        named = [
            (f"dataloader_idx_{index}" if several else "validation", each) for index, each in enumerate(validation)
        ]
        return loaders | dict(named)
    return loaders | {"validation": validation}


def schedules(trainer: Any, run: RunLength) -> Iterator[Schedule]:
    """Yields the schedules of the schedulers that Lightning steps by itself, as far as their pace is known.

    Lightning steps a scheduler with ``interval="step"`` after the batches whose number its `frequency` divides, if they
    have made an optimizer step; see ``_TrainingEpochLoop._update_learning_rates``.

    Args:
        trainer: The Trainer.
        run: What is known of the run.
    """
    module = trainer.lightning_module
    if not has_library_methods(module, ["lr_scheduler_step"], *_PACKAGES) or not _accumulates_alike(trainer):
        return
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau and (pace := _pace(config, run)) != 0:
            yield Schedule.of(config.scheduler, pace)


def _accumulates_alike(trainer: Any) -> bool:
    """Returns whether each optimizer step has as many batches as the Trainer says."""
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    whole = trainer.accumulate_grad_batches % 1 == 0  # infinity stands for an epoch
    return trainer.lightning_module.automatic_optimization and whole and "GradientAccumulationScheduler" not in kinds


def known_of_steps(trainer: Any, totals: Mapping[str, float]) -> dict[str, float]:
    """Returns totals without those of optimizer steps, where the Trainer does not tell how many batches one has."""
    alike = _accumulates_alike(trainer)
    return {name: value for name, value in totals.items() if alike or name not in _OF_STEPS}


def run_of(trainer: Any) -> tuple[Any, ...] | None:
    """Returns what determines the steps of a run; None if that is not all. A callback may change it while it goes on.

    Args:
        trainer: Lightning's Trainer, in a fit.
    """
    if not _accumulates_alike(trainer):
        return None
    return trainer.max_epochs, trainer.max_steps, trainer.accumulate_grad_batches, trainer.num_training_batches


def ended_by_epochs(trainer: Any) -> bool:
    """Returns whether a fit ends because it has had its `max_epochs`, and nothing else asks it to stop."""
    epochs, done = trainer.max_epochs, trainer.fit_loop.epoch_progress.current.processed
    return not trainer.should_stop and epochs is not None and 0 <= epochs <= done


def begun_batches(trainer: Any) -> int:
    """Returns the batches of the train epoch that were begun, with those before a checkpoint."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _pace(config: Any, run: RunLength) -> Fraction | None:
    """Returns how often a scheduler is stepped per optimizer step; None if the first epoch must show it."""
    accumulated, per_epoch = run.gradient_accumulation_steps, run.steps_per_epoch
    if config.frequency % 1:
        return None
    frequency = abs(int(config.frequency))  # Lightning asks only whether it divides a number
    if config.interval == "step" and frequency == 1:
        return Fraction(1)
    if per_epoch is None:
        return None
    if config.interval == "step":  # it counts the batches of each epoch anew
        return Fraction(per_epoch * accumulated // math.lcm(accumulated, frequency), per_epoch)
    return Fraction(1, per_epoch * frequency)


def last_step(trainer: Any) -> int | None:
    """Returns the optimizer steps after which the current batch may be the last one, by `max_steps`.

    None without that limit. Batches fetched ahead of that batch are never used, so a rank that has fetched more than
    another is not out of step.
    """
    return None if trainer.max_steps < 0 else trainer.max_steps - max(1, len(trainer.optimizers))


def announce_requests(guard: Guard, epoch_loop: Any) -> Callable[[], None]:
    """Tells the guard when this rank requests another batch: Lightning broadcasts before it fetches one.

    Without this, a rank that waits in the broadcast looks as if it had stopped where another rank has begun to
    evaluate. It does nothing for a version of Lightning that has no such broadcast, or not by this name.

    Args:
        guard: Told before the broadcast.
        epoch_loop: The Trainer's loop over the batches of an epoch.

    Returns:
        A function that ends that.
    """
    name = "_broadcast_sigterm_tensor"
    if not hasattr(epoch_loop, name):
        return lambda: None
    return MethodHook(epoch_loop, name, before=guard.batch_requested).remove


def fingerprint_before_transfer(trainer: Any, fit: Fit) -> Callable[[], None]:
    """Takes fingerprints of the epoch's first train batches just before they are moved to their device.

    Ranks are not compared where a strategy shares data among them in a way that its mesh does not show.

    Args:
        trainer: Lightning's Trainer.
        fit: The fit, after its guard's `train_start`.

    Returns:
        A function that ends that, which happens by itself after the last fingerprint.
    """
    data = fit.guard.data
    if not data.fingerprints_due or not _shares_data_among(data.dp_degree, trainer.strategy):
        return lambda: None

    def read(batch: Any, *_: Any, **__: Any) -> None:
        if trainer.training and data.fingerprints_due:
            if fit.guard.once.reads is None:
                fit.epoch_reads()
            fingerprint_batch(data, batch, trainer.train_dataloader)
        if not data.fingerprints_due:
            hook.remove()

    hook = MethodHook(trainer.strategy, "batch_to_device", before=read)
    return hook.remove


def _shares_data_among(degree: int, strategy: Any) -> bool:
    """Returns whether a strategy shares data among so many, as far as it says so; not where it cannot be asked."""
    with contextlib.suppress(Exception):  # of a property of the user's own
        return (getattr(strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", degree) == degree
    return False


def after_teardown(trainer: Any, end: Callable[[], None]) -> MethodHook | None:
    """Calls a function when the Trainer has taken down its loop, which it also does after an exception.

    Args:
        trainer: Lightning's Trainer, in a hook of the run that is to be taken down.
        end: Called without arguments.

    Returns:
        The hook, which removes itself; None for a version of Lightning that does not show which loop is active.
    """
    loop = getattr(trainer, "_active_loop", None)
    if loop is None:
        return None

    def taken_down(*_: Any, **__: Any) -> None:
        hook.remove()
        end()

    hook = MethodHook(loop, "teardown", after=taken_down)
    return hook


def eval_loop(trainer: Any) -> Any:
    """Returns the loop that is evaluating."""
    return {"fit": trainer.fit_loop.epoch_loop.val_loop, "validate": trainer.validate_loop}.get(
        trainer.state.fn, trainer.test_loop
    )


def has_loaders_in_a_row(loop: Any) -> bool:
    """Returns whether an evaluation loop takes several loaders, one after the other, and fetches by itself."""
    loader = loop._data_fetcher.combined_loader
    return loader._mode == "sequential" and len(loader.flattened) > 1 and not module_fetches(loop)


def evaluation_facts_of(loop: Any, own: OwnRank) -> dict[int, LoaderFacts]:
    """Returns the facts of the loaders whose arithmetic proves what they read, by their places. It raises nothing.

    Args:
        loop: The evaluation loop, which has begun an evaluation.
        own: This rank.
    """
    share = {"dp_rank": own.dp_rank, "dp_degree": own.dp_degree}
    with contextlib.suppress(Exception):  # of the user's own objects, or of names outside Lightning's public API
        loader = loop._data_fetcher.combined_loader
        if (len(loader.flattened) > 1 and loader._mode != "sequential") or module_fetches(loop):
            return {}
        found: dict[int, LoaderFacts] = {}
        for place, (each, limit) in enumerate(zip(loader.flattened, loop.max_batches, strict=True)):
            facts = evaluation_facts(each, limit_batches=limit, **share)
            if facts is not None and BatchPlan.of(facts, dp_degree=own.dp_degree).proven:
                found[place] = facts
        return found
    return {}


def metrics_of_evaluation(loop: Any, known: Mapping[int, LoaderFacts], dp_degree: int) -> dict[str, float]:
    """Returns how much an evaluation that has just ended has read; empty if that is not proven. It raises nothing.

    Args:
        loop: The evaluation loop, which has begun this evaluation with its first batch.
        known: The facts of its loaders, by their places.
        dp_degree: Shares into which the data is cut, at least 1.
    """
    with contextlib.suppress(Exception):  # of names outside Lightning's public API
        limits, found = loop.max_batches, dict[str, float]()
        for place, facts in known.items() if loop._data_fetcher.fetched == sum(limits) else ():
            name = f"dataloader_idx_{place}" if len(limits) > 1 else ""  # as in the names of Lightning's own metrics
            found |= evaluation_metrics(facts, batches=limits[place], dp_degree=dp_degree, name=name)
        return found
    return {}


def log(trainer: Any, found: Mapping[str, float], *, constant: bool = True) -> None:
    """Gives numbers, if there are any, to Lightning's own loggers, on rank 0; some hooks do not allow `self.log`.

    CSVLogger and WandbLogger get what is constant with the hyperparameters. Others get metrics: TensorBoardLogger
    replaces the user's hyperparameters by the latest ones, and MLFlowLogger refuses another value of one. A method of
    a user's own is not called: it may know what it is called with, and raise.

    Args:
        trainer: Lightning's Trainer.
        found: The numbers.
        constant: Whether they hold for the whole run.
    """
    if not (found and trainer.is_global_zero):
        return
    step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
    for logger in trainer.loggers:
        if constant and _adds_hyperparameters(logger):
            logger.log_hyperparams(dict(found))
        elif has_library_methods(logger, ["log_metrics", "experiment"], *_PACKAGES):
            logger.log_metrics(dict(found), step=step)


def _adds_hyperparameters(logger: Any) -> bool:
    """Returns whether a logger adds hyperparameters to those that it has, as Lightning's own class or as one of it."""
    kinds = (each.__name__ for each in type(logger).__mro__ if of_library(each, *_PACKAGES))
    own = has_library_methods(logger, ["log_hyperparams", "experiment"], *_PACKAGES)
    return own and not _ADD_HYPERPARAMETERS.isdisjoint(kinds)


def set_length(trainer: Any, batches: int) -> bool:
    """Sets Lightning's length of an epoch if it is longer; returns whether it was set.

    The length is also a limit, so it must never be below the true one.
    """
    loop = trainer.fit_loop
    if getattr(loop, "max_batches", 0) <= batches:
        return False
    loop.max_batches = batches
    interval = trainer.val_check_interval
    if isinstance(interval, float) and getattr(trainer, "val_check_batch", None) is not None:
        trainer.val_check_batch = max(1, int(batches * interval))
    return True
