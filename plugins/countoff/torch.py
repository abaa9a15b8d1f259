"""countoff for a plain PyTorch loop: ``attach(train=train_loader, eval=eval_loader)``, once, on every rank.

Loaders are observed where they are iterated, so the loop stays as it is: a pass opens a span, every batch is counted
as it is handed out, and the pass closes when the loader is exhausted or the loop leaves it. Torch's own hook counts
optimizer steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("PyTorch", facade="countoff.torch", install="'countoff[torch]'"):
    from countoff._adapter.evaluation_totals import EvaluationTotals, evaluation_facts
    from countoff._adapter.even_loaders import proven_length, saves_state
    from countoff._adapter.fit import Fit, OwnRank, plan_of
    from countoff._adapter.handle import Attached
    from countoff._adapter.observed_loaders import evaluation_loaders, observe_loaders
    from countoff._adapter.observed_loop import ObservedLoop
    from countoff._adapter.schedule_watch import Schedule
    from countoff._adapter.torch_facts import (
        NamedOptimizers,
        have_no_gradients,
        loader_facts,
        part_of,
        rank_and_world_size,
        reported_length,
        versions,
    )
    from countoff.core.threads.before_fit import watch
from countoff._adapter.mesh_position import dp_position, loader_position
from countoff._adapter.options import own_arguments
from countoff._torch.words import WITHOUT_LOADER, WORDS
from countoff.core import LoaderFacts, Settings, SettingsError
from countoff.core.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Attached", "attach", "before_fit"]


def attach(
    *,
    train: Any = None,
    eval: Any = None,  # the name that every adapter uses
    optimizer: Any = None,
    scheduler: Any = None,
    model: Any = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    gradient_accumulation_steps: int = 1,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    start_epoch: int = 0,
    start_step: int = 0,
    group: Any = None,
    mesh: Any = None,
    data_dims: Sequence[str] | None = None,
    **options: Unpack[OptionValues],
) -> Attached:
    """Watches a plain training loop. Collective: every rank, or every rank of `group`, must call it.

    Call it after `init_process_group`.

    It waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms, but for the
    next batch where `uneven_train` or `uneven_eval` makes ranks take the same number.

    Args:
        train: The loader of the training loop: a DataLoader, or any object whose class is written in Python. None for a
            loop without a loader, which takes its batches from `Attached.counted`.
        eval: The evaluation loader, or a mapping from names to loaders.
        optimizer: The optimizer, or a list of them; their learning rates and steps are compared between ranks. None:
            the steps of all optimizers are, and no learning rates.
        scheduler: The learning-rate scheduler, or a list of them. A warning says if one does not end where the run
            does, as soon as a few optimizer steps have shown how often it is stepped; a resumed run compares where it
            stands with its checkpoint.
        model: The model as it is trained, or a list of such: wrapped in DistributedDataParallel, or with `fully_shard`
            applied. Forward passes for training are counted as micro-batches, and a warning names ranks that run
            different numbers of them per optimizer step. Weights are compared with `weights_every`. None: neither is
            done.
        epochs: Epochs of the whole run, at least 0, if known: schedules are compared with it.
        max_steps: Optimizer steps after which the whole run ends, at least 0, if there is such a limit.
        gradient_accumulation_steps: Batches of one rank per optimizer step, at least 1.
        batch_size: Samples of one rank per batch; None: what the loader shows.
        dataset_size: Samples of the whole train dataset over all ranks, at least 1. A warning says if each rank reads
            only a share of its share. None: that is found only where the objects or the data show it.
        start_epoch: Number of the first epoch of a resumed run.
        start_step: Optimizer steps that were applied before the checkpoint from which the run resumes, at least 0.
        group: The process group of the ranks that train together, where these are a part of the job: several trials,
            or ranks that only evaluate. Messages number ranks as the job does. None: all ranks of the job.
        mesh: The ``DeviceMesh`` of these ranks, where some ranks share their data (tensor, context, pipeline parallel):
            batches are then counted per data rank. None: every rank reads its own.
        data_dims: Names of the mesh's dims along which different data is read; None: those whose names frameworks use
            for data.
        options: Those of `countoff.core.Settings`.

    Returns:
        A handle, which is also a context manager. If it is not used as one, the fit ends when the program ends.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value, or `weights_every` has no `model`.
        TypeError: If a loader cannot be observed; then none of them is.
        RuntimeError: If WORLD_SIZE announces several ranks and torch.distributed is not initialised.
        PlanMismatch: If ranks begin with different plans.
        RankMapError: If the loaders' distributed samplers do not divide the data as the mesh does.
        ValueError: If `dataset_size` is below 1, if this rank is not in `group`, if the mesh does not show which ranks
            share their data, or if this rank is not in it.
    """
    settings = Settings.resolve(*own_arguments(attach), **options)
    rank, world_size = rank_and_world_size()
    part = part_of(group) if settings.enabled else None
    if settings.enabled and world_size == 1:
        _check_single_rank("attach")
    if settings.enabled and settings.weights_every and world_size > 1 and model is None:
        raise SettingsError("weights_every needs the model whose weights are compared: attach(model=…)")
    optimizers, schedulers, models = _listed(optimizer), _listed(scheduler), _listed(model)
    ranks = range(world_size) if part is None else part.ranks
    dp_rank, dp_degree = _position(mesh, data_dims, rank, ranks)
    own = OwnRank(rank, len(ranks), dp_rank, dp_degree, part)
    facts = loader_facts(
        train,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_epochs=epochs,
        max_steps=max_steps,
        reported_is_cap=False,
        partial_step="dropped",
    )
    if batch_size is not None:
        facts = _with_batch_size(facts, batch_size)
    totals = Totals(facts, dp_degree=dp_degree, framework="len(loader)", dataset_size=dataset_size)
    fit = Fit(
        settings,
        WITHOUT_LOADER if train is None else WORDS,
        own,
        totals,
        steps_before=start_step,
        optimizers=lambda: optimizers,
        schedulers=lambda: schedulers,
        models=lambda: models,
    )
    loop = ObservedLoop(fit, epoch=start_epoch, steps_of=NamedOptimizers(optimizers) if optimizers else None)
    loop.batches_before = start_step * gradient_accumulation_steps
    if not settings.enabled:
        return Attached(loop)
    loop.length_now, loop.may_resume = functools.partial(reported_length, train), saves_state(train)
    loop.train_loader = lambda: train
    plan = plan_of(
        facts,
        own,
        batches_per_epoch=facts.reported_batches,
        proven_batches_per_epoch=proven_length(train, totals, settings),
        position=[start_epoch, 0, start_step],
        loader_position=None if mesh is None else loader_position(train),
        runs_to_end=False,
    )
    evaluations = evaluation_loaders(eval)
    loaders: dict[str | None, Any] = {**({} if train is None else {None: train}), **evaluations}
    facts_of = functools.partial(evaluation_facts, dp_rank=dp_rank, dp_degree=dp_degree, reported_is_cap=False)
    loop.tell_evaluations(EvaluationTotals(facts_of, dp_degree=dp_degree, several=len(evaluations) > 1))
    loop.passes.expects_train, loop.passes.has_loader = True, train is not None
    loop.passes.is_untrained = functools.partial(have_no_gradients, optimizers)
    fit.watch_schedules(map(Schedule.of, schedulers), source_batches=facts.reported_batches)
    observe_loaders(loop, loaders, models)
    loop.begin(plan, versions(), loaders=loaders)
    return Attached(loop)


def before_fit() -> None:
    """Watches for a stall before the fit begins, while checkpoints are loaded and data is prepared.

    Call it on every rank, after `init_process_group`; it waits for nobody. If ranks have waited for another one in the
    same call into torch.distributed for `stall_seconds`, and no fit has begun, rank 0 prints a `Stalled` with each
    rank's line of code. Nothing is ended. The settings are those of the environment. The watching ends when a fit
    begins, or the process group is destroyed. A second call does nothing, nor does the first one below
    ``python -m countoff.run``, which watches by itself.

    Raises:
        SettingsError: If a ``COUNTOFF_*`` variable has a bad value.
        RuntimeError: If WORLD_SIZE announces several ranks and torch.distributed is not initialised.

    Example:
        >>> before_fit()  # alone, there is nobody to wait for
    """
    settings = Settings.resolve()
    if settings.enabled and rank_and_world_size()[1] == 1:
        _check_single_rank("before_fit")
    watch(settings)


def _with_batch_size(facts: LoaderFacts, batch_size: int) -> LoaderFacts:
    """Returns the facts with the user's batch size; it proves nothing of lengths where the loader shows another one."""
    if batch_size == facts.batch_size:
        return facts
    return replace(facts, batch_size=batch_size, samples_per_rank=None, dataset_size=None, sampling="unknown")


def _listed(given: Any) -> list[Any]:
    """Returns what an argument gives that takes one object or a list of them; None stands for none."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _check_single_rank(caller: str) -> None:
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE is {announced}, but torch.distributed is not initialised: call {caller}() after "
            "init_process_group()"
        )


def _position(mesh: Any, data_dims: Sequence[str] | None, rank: int, ranks: Sequence[int]) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree among these ranks; without a mesh each reads its own data."""
    if mesh is None:
        return ranks.index(rank), len(ranks)
    position = dp_position(mesh, data_dims)
    if position is None:
        raise ValueError(f"rank {rank} is not in the mesh: give the mesh of the whole job")
    return position
