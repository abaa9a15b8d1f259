"""Reads an Accelerator and its prepared loaders, and finds what to warn of before the first batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from countoff._accelerate.loader_facts import is_divided, loader_facts
from countoff._accelerate.loaders import epoch_length, is_prepared
from countoff._accelerate.process import unwrapped
from countoff._adapter.mesh_position import data_position
from countoff._adapter.sampling import asks_for_length, known_length
from countoff._adapter.schedule_watch import Schedule
from countoff._adapter.torch_facts import shown_facts
from countoff.core import LoaderFacts

_log = logging.getLogger("countoff")


def position_of(accelerator: Any) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree; tensor, context and sequence parallel ranks share their data."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return data_position(mesh, rank=accelerator.process_index, world_size=accelerator.num_processes)


def train_facts(accelerator: Any, loader: Any, *, epochs: int | None, max_steps: int | None) -> LoaderFacts:
    """Returns the facts of the train loader.

    Args:
        accelerator: The Accelerator.
        loader: The train loader; None for none, of which nothing is known.
        epochs: Epochs of the run, if known.
        max_steps: Optimizer steps after which the run ends, if there is such a limit.
    """
    known: dict[str, Any] = {
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "max_epochs": epochs,
        "max_steps": max_steps,
        "reported_is_cap": False,
        "partial_step": "applied" if accelerator.gradient_state.sync_with_dataloader else "carried",
    }
    if not is_prepared(loader):  # one that the loop shards by itself, or none
        return shown_facts(loader, known_length(loader), **known)
    dp_rank, dp_degree = position_of(accelerator)
    if not asks_for_length(loader):
        facts = shown_facts(loader.base_dataloader, None, **known)
        read = facts.batch_size
        if read is None or not getattr(loader, "split_batches", False):
            return facts
        return replace(facts, batch_size=max(read // dp_degree, 1))  # one rank reads it for all
    if is_divided(loader, num_processes=dp_degree, process_index=dp_rank):
        facts = loader_facts(loader, num_processes=dp_degree, process_index=dp_rank, **known)
    else:  # prepared as for one process: each rank reads all of it
        facts = shown_facts(loader.base_dataloader, known_length(loader.base_dataloader), **known)
    return replace(facts, reported_batches=epoch_length(loader))


def reported_batches(loader: Any) -> int | None:
    """Returns the batches of an epoch that a loader reports, where that calls nothing that a pass would not call."""
    if not is_prepared(loader):
        return known_length(loader)
    return epoch_length(loader) if asks_for_length(loader) else None


def common_length(facts: LoaderFacts) -> int | None:
    """Returns the batches of an epoch on which all ranks must agree; None if they may differ.

    With `even_batches=False` lengths may differ, and inside `join_uneven_inputs` they do so on purpose.
    """
    return None if facts.one_pass is not None and facts.one_pass.uneven else facts.reported_batches


def log_length(accelerator: Any, before: int | None, after: int | None) -> None:
    """Logs the train loader's batches before and after `prepare`, on rank 0, if they differ.

    Schedules are often planned with the length before, and the loop runs by the length after.
    """
    if accelerator.is_main_process and None not in (before, after) and before != after:
        _log.info("train: %d batches before prepare(), %d per process after it", before, after)


def is_prepared_optimizer(accelerator: Any, optimizer: Any) -> bool:
    """Returns whether the Accelerator has prepared a torch optimizer; True if it has prepared none at all."""
    prepared = [unwrapped(each) for each in getattr(accelerator, "_optimizers", ())]
    return not prepared or any(each is optimizer for each in prepared)


def schedules(accelerator: Any) -> Iterator[Schedule]:
    """Yields the schedules of the prepared schedulers."""
    for prepared in accelerator._schedulers:
        scheduler = getattr(prepared, "scheduler", None)
        if scheduler is not None:
            per_process = getattr(prepared, "step_with_optimizer", False) and not prepared.split_batches
            yield Schedule.of(scheduler, reasons={accelerator.num_processes: "once per process"} if per_process else {})
