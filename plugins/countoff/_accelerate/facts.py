"""What can be read off an Accelerator and its loaders, and what there is to say about it before the first batch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

from countoff._adapter.prepared_facts import loader_facts
from countoff._adapter.prepared_loaders import source_length
from countoff._adapter.sampling import data_remedies
from countoff._adapter.scheduler_horizons import horizon_of
from countoff._adapter.torch_facts import reported_length
from countoff.core import BatchPlan, LoaderFacts, Verdict
from countoff.core.arithmetic.horizon import Horizon, planned_epochs, run_out, wrong_horizon
from countoff.mesh import data_position

_log = logging.getLogger("countoff")

REMEDIES = {
    "UnevenBatches": (
        "give every rank as many batches: even_batches=True for map-style data, dispatch_batches=True (rank 0 reads "
        "for all) or an iterable that cuts all ranks at the shortest, or itertools.islice(loader, n) with an n that "
        "every rank has; if only some ranks evaluate: attach(..., eval_ranks=[0]); evaluations that may differ: "
        "attach(..., uneven_eval='allow')."
    ),
    "PlanMismatch": "prepare the loader from the same configuration, and load the same checkpoint, on every rank.",
    "UnseenLoader": "attach the very loader that the loop iterates: the one that prepare() returned.",
    "StepMismatch": (
        "step on the same batches everywhere: no condition of one rank around optimizer.step(), and no break of one "
        "rank, which also hides the end of the train loader from accumulate() if it is in an evaluation."
    ),
    "LearningRateMismatch": "give the scheduler the same horizon on every rank, and step it on every rank.",
    "LostRank": "read that rank's own output first; the others only lost their peer.",
    "WrongLength": "make len() of the data set what it yields; nothing else in Accelerate depends on it.",
    "WrongHorizon": (
        "multiply horizon and warm-up by accelerator.num_processes, or "
        "Accelerator(step_scheduler_with_optimizer=False) and step it once per optimizer step, or "
        "Accelerator(split_batches=True)."
    ),
    "NotDistributed": (
        "start it with torchrun or accelerate launch on GPUs; on CPUs set ACCELERATE_USE_CPU=true for torchrun, or "
        "Accelerator(cpu=True)."
    ),
    **data_remedies(
        shares=(
            "let accelerator.prepare() shard the loader, or where it finds nothing to shard, as in a stream of "
            "ready-made batches, give each rank its share by accelerator.process_index."
        ),
        order="iterate the prepared loader to its end, or call its set_epoch(epoch) before every pass.",
        off="attach(..., fingerprint_batches=0)",
    ),
}
TICKS = "accelerator.prepare() makes a scheduler tick once per process at every optimizer step."


def alone(accelerator: Any) -> Verdict | None:
    """A warning, on one process, if the launcher started several and Accelerate has taken each for the only one."""
    launched = os.environ.get("WORLD_SIZE", "")
    known = accelerator.num_processes
    if not launched.isdigit() or int(launched) == known or os.environ.get("RANK", "0") != "0":
        return None
    sentence = (
        f"WORLD_SIZE is {launched}, and Accelerate has num_processes={known}: each process trains a model of its own, "
        "on all of the data."
    )
    return Verdict("NotDistributed", sentence, time=time.time())


def position_of(accelerator: Any) -> tuple[int, int]:
    """This rank's dp_rank and the dp_degree: ranks along tensor, context and sequence parallel dims share data."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return data_position(mesh, rank=accelerator.process_index, world_size=accelerator.num_processes)


def train_facts(accelerator: Any, loader: Any, *, epochs: int | None, max_steps: int | None) -> LoaderFacts:
    """What the prepared train loader and the Accelerator say; nothing is known of a loader that there is not."""
    known: dict[str, Any] = {
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "max_epochs": epochs,
        "max_steps": max_steps,
        "reported_is_cap": False,
        "partial_step": "applied" if accelerator.gradient_state.sync_with_dataloader else "carried",
    }
    if loader is None:
        return LoaderFacts(reported_batches=None, batch_size=None, drop_last=False, samples_per_rank=None, **known)
    dp_rank, dp_degree = position_of(accelerator)
    return loader_facts(loader, num_processes=dp_degree, process_index=dp_rank, **known)


def length_to_agree_on(facts: LoaderFacts) -> int | None:
    """The reported length, where ranks that differ in it cannot both be right.

    With `even_batches=False` they may differ, and inside `join_uneven_inputs` that is what is meant.
    """
    return None if facts.one_pass is not None and facts.one_pass.uneven else facts.reported_batches


def say_lengths(accelerator: Any, name: str, loader: Any) -> None:
    """Logs a length before and after `prepare`, on rank 0: schedules are planned with one and run by the other."""
    before, after = source_length(loader), reported_length(loader)
    if accelerator.is_main_process and before is not None and before != after:
        _log.info("%s: %d batches before prepare(), %d per process after it", name, before, after)


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside Accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def horizons(accelerator: Any) -> Iterator[tuple[Any, Horizon]]:
    """The schedulers that Accelerate ticks by itself and whose length can be read, each with its horizon."""
    for prepared in accelerator._schedulers:
        scheduler = getattr(prepared, "scheduler", None)
        if scheduler is None or not getattr(prepared, "step_with_optimizer", False):
            continue
        ticks_per_step = 1 if prepared.split_batches else accelerator.num_processes
        horizon = horizon_of(scheduler, ticks_per_step=ticks_per_step)
        if horizon is not None:
            yield scheduler, horizon


def horizon_at_start(accelerator: Any, plan: BatchPlan, *, epochs: int | None) -> Verdict | None:
    """A warning about the first scheduler that will not end where the run ends, as far as that can be told yet."""
    for _, horizon in horizons(accelerator):
        if epochs and horizon.ticks in (epochs, epochs * horizon.ticks_per_step):
            continue  # made to be stepped once per epoch, for all that can be known before it is
        total = plan.total_steps
        found = None
        if total:
            found = wrong_horizon(horizon, total_steps=total, slack_steps=(epochs or 0) + 1, why=TICKS)
        elif plan.steps_per_epoch and (planned := planned_epochs(horizon, steps_per_epoch=plan.steps_per_epoch)):
            steps = planned * plan.steps_per_epoch
            found = wrong_horizon(horizon, total_steps=steps, slack_steps=0, why=TICKS)
        if found is not None:
            return found
    return None


def horizon_at_epoch(accelerator: Any, epoch: int) -> Verdict | None:
    """A warning about the first scheduler that is ticked by process and has ended though another epoch begins."""
    for scheduler, horizon in horizons(accelerator):
        if epoch and horizon.ticks_per_step > 1:
            found = run_out(horizon, ticks=scheduler.last_epoch, span=f"train epoch {epoch}", why=TICKS)
            if found is not None:
                return found
    return None
