"""countoff for Hugging Face Accelerate: ``attach(accelerator, train=…, eval=…)``, once, after ``prepare()``.

Accelerate has no callbacks. Passes are observed where its loaders are iterated, optimizer steps where torch applies
them, and resuming in the hooks of `save_state` and `load_state`; the loop stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("Accelerate", facade="countoff.accelerate", install="'countoff[accelerate]'"):
    from countoff._accelerate.loader_facts import evaluation_facts
    from countoff._accelerate.loaders import is_prepared, source_length
    from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._accelerate import accelerator as reading
from countoff._accelerate.observation import observe
from countoff._accelerate.process import not_distributed
from countoff._accelerate.words import TICKS, WORDS
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.handle import Attached
from countoff._adapter.observed_loaders import argument_of, evaluation_loaders
from countoff._adapter.observed_loop import ObservedLoop
from countoff._adapter.options import own_arguments
from countoff._adapter.torch_facts import reported_length, versions
from countoff._adapter.weight_hashes import Wrappers
from countoff.core import Settings
from countoff.core.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Attached", "attach"]


def attach(
    accelerator: Any,
    *,
    train: Any = None,
    eval: Any = None,  # the name that every adapter uses
    epochs: int | None = None,
    max_steps: int | None = None,
    dataset_size: int | None = None,
    start_epoch: int = 0,
    **options: Unpack[OptionValues],
) -> Attached:
    """Watches a loop over prepared loaders. Collective: every rank must call it, after `accelerator.prepare()`.

    It waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms, except that
    `accelerator.load_state()` begins another fit at the checkpoint's position.

    Args:
        accelerator: The Accelerator that has prepared the loaders.
        train: The prepared train loader.
        eval: The prepared evaluation loader, or a mapping from names to loaders.
        epochs: Epochs of the run, at least 0, if known: learning-rate schedules are compared with it.
        max_steps: Optimizer steps after which the run ends, at least 0, if there is such a limit.
        dataset_size: Samples of the whole train dataset over all ranks, at least 1. A warning says if each rank reads
            only a share of its share. None: that is found only where the objects or the data show it.
        start_epoch: Number of the first epoch, where a run resumes by other means than `accelerator.load_state()`.
        options: Those of `countoff.core.Settings`.

    Returns:
        A handle, which is also a context manager. If it is not used as one, the fit ends when the program ends.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
        TypeError: If a loader was not prepared, or there is none.
        PlanMismatch: If ranks begin with different plans.
        ValueError: If `dataset_size` is below 1.
    """
    settings = Settings.resolve(*own_arguments(attach), **options)
    loaders: dict[str | None, Any] = {**({} if train is None else {None: train}), **evaluation_loaders(eval)}
    _check_prepared(loaders)
    facts = reading.train_facts(accelerator, train, epochs=epochs, max_steps=max_steps)
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
    loop = ObservedLoop(fit, epoch=start_epoch, steps_of=steps_of)
    if not settings.enabled:
        return Attached(loop)
    loop.length_now = functools.partial(reported_length, train)
    loop.train_loader = lambda: train
    loop.may_resume = bool(getattr(train, "use_stateful_dataloader", False))
    for name, loader in loaders.items():
        reading.log_lengths(accelerator, name or "train", loader)
    evaluated = functools.partial(evaluation_facts, num_processes=dp_degree, process_index=dp_rank)
    several = len(evaluation_loaders(eval)) > 1
    loop.tell_evaluations(EvaluationTotals(evaluated, dp_degree=dp_degree, several=several))
    source_batches = None if train is None else source_length(train)
    fit.watch_schedules(reading.schedules(accelerator), source_batches=source_batches, why=TICKS)
    loop.until_end(observe(accelerator, loop, loaders))
    common = reading.common_length(facts)
    plan = plan_of(facts, fit.own, batches_per_epoch=common, position=[start_epoch, 0, 0], runs_to_end=False)
    loop.begin(plan, versions("accelerate"), not_distributed(accelerator), loaders=loaders)
    return Attached(loop)


def _check_prepared(loaders: Mapping[str | None, Any]) -> None:
    if not loaders:
        raise TypeError("attach() needs a loader to watch: attach(accelerator, train=…, eval=…)")
    for name, loader in loaders.items():
        if not is_prepared(loader):
            raise TypeError(
                f"attach({argument_of(name)}=…) got a {type(loader).__name__} that Accelerate has not prepared: call "
                "attach() after accelerator.prepare(), with the loader that prepare() returned"
            )
