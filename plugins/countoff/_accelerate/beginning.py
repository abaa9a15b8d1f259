"""Begins the fit of a loop over prepared loaders, whoever says which of them is the train loader."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from countoff._accelerate import accelerator as reading
from countoff._accelerate.loader_facts import evaluation_facts
from countoff._accelerate.loaders import source_length
from countoff._accelerate.observation import follow, observe
from countoff._accelerate.process import not_distributed
from countoff._accelerate.words import TICKS, WORDS
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.observed_loop import ObservedLoop
from countoff._adapter.sampling import asks_for_length
from countoff._adapter.torch_facts import have_no_gradients, reported_length, versions
from countoff._adapter.weight_hashes import Wrappers
from countoff.core import Settings
from countoff.core.totals import Totals

__all__ = ["begin_loop", "goes_on_with"]

NO_EVALUATIONS: Final[Mapping[str, Any]] = MappingProxyType({})


def begin_loop(
    accelerator: Any,
    settings: Settings,
    *,
    train: Any,
    evaluations: Mapping[str, Any] = NO_EVALUATIONS,
    epochs: int | None = None,
    max_steps: int | None = None,
    dataset_size: int | None = None,
    start_epoch: int = 0,
    counts_passes: bool = True,
) -> ObservedLoop:
    """Returns a loop whose fit has begun. Collective: every rank must call it, after `accelerator.prepare()`.

    Args:
        accelerator: The Accelerator that has prepared the loaders.
        settings: The user's choices. Where they turn countoff off, nothing begins.
        train: The prepared train loader; None for none.
        evaluations: The prepared evaluation loaders by name.
        epochs: As for `countoff.accelerate.attach`; so are the next ones.
        max_steps: Optimizer steps after which the run ends, if there is such a limit.
        dataset_size: Samples of the whole train dataset over all ranks.
        start_epoch: Number of the first epoch.
        counts_passes: Whether the passes over these loaders are counted from here on. Otherwise the caller has those
            counted that train, and nothing is asked of the train loader that a pass over it would not ask.
    """
    told = train if counts_passes or asks_for_length(train) else None
    facts = reading.train_facts(accelerator, told, epochs=epochs, max_steps=max_steps)
    dp_rank, dp_degree = reading.position_of(accelerator)
    totals = Totals(facts, dp_degree=dp_degree, framework="len(loader)", dataset_size=dataset_size)
    fit = Fit(
        settings,
        WORDS,
        OwnRank(accelerator.process_index, accelerator.num_processes, dp_rank, dp_degree),
        totals,
        optimizers=lambda: accelerator._optimizers,
        schedulers=lambda: [getattr(each, "scheduler", each) for each in accelerator._schedulers],
        ticks_per_step=accelerator.num_processes,
        models=Wrappers(lambda: accelerator._models),
    )
    steps_of = functools.partial(reading.is_prepared_optimizer, accelerator)
    loop = ObservedLoop(fit, epoch=start_epoch, steps_of=steps_of, counts_all=counts_passes)
    if not settings.enabled:
        return loop
    loaders: dict[str | None, Any] = {**({} if train is None else {None: train}), **evaluations}
    _tell_of(loop, told)
    evaluated = functools.partial(evaluation_facts, num_processes=dp_degree, process_index=dp_rank)
    loop.tell_evaluations(EvaluationTotals(evaluated, dp_degree=dp_degree, several=len(evaluations) > 1))
    source_batches = None if told is None else source_length(told)
    fit.watch_schedules(reading.schedules(accelerator), source_batches=source_batches, why=TICKS)
    loop.until_end(observe(accelerator, loop, train))
    if counts_passes:
        for name, loader in loaders.items():
            reading.log_lengths(accelerator, name or "train", loader)
        loop.passes.expects_train = train is not None
        loop.passes.is_untrained = lambda: have_no_gradients(accelerator._optimizers)
        loop.until_end(follow(loop, loaders))
    common = reading.common_length(facts)
    plan = plan_of(facts, fit.own, batches_per_epoch=common, position=[start_epoch, 0, 0], runs_to_end=False)
    loop.begin(plan, versions("accelerate"), not_distributed(accelerator), loaders=loaders)
    return loop


def goes_on_with(loop: ObservedLoop, accelerator: Any, train: Any) -> None:
    """Takes another prepared loader for the train loader of a loop, from its next epoch on."""
    told = train if asks_for_length(train) else None
    facts = reading.train_facts(accelerator, told, epochs=None, max_steps=None)
    _, dp_degree = reading.position_of(accelerator)
    loop.fit.totals = Totals(facts, dp_degree=dp_degree, framework="len(loader)")
    _tell_of(loop, told)


def _tell_of(loop: ObservedLoop, train: Any) -> None:
    loop.length_now = functools.partial(reported_length, train)
    loop.train_loader = lambda: train
    loop.may_resume = bool(getattr(train, "use_stateful_dataloader", False))
