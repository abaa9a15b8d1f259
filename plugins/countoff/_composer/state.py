"""Reads Composer's State: the length and the position in force, and what all ranks must agree on."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from countoff._adapter.mesh_position import data_position
from countoff._composer.loader_report import LoaderReport
from countoff.core import FitPlan

__all__ = ["exception_at_close", "length_of", "plan_of", "position_of"]


def length_of(state: Any) -> int | None:
    """Returns the batches after which Composer stops the pass over its current loader; None for no limit."""
    return None if state.dataloader_len is None else int(state.dataloader_len)


def position_of(state: Any, *, rank: int, world_size: int) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree by the mesh that `parallelism_config` makes.

    Without a mesh every rank reads its own data.

    Args:
        state: Composer's State.
        rank: This rank.
        world_size: Ranks in the job.
    """
    return data_position(getattr(state, "device_mesh", None), rank=rank, world_size=world_size)


def plan_of(
    state: Any, train: LoaderReport | None, evaluations: Mapping[str, LoaderReport], *, position: tuple[int, int]
) -> FitPlan:
    """Returns what all ranks must agree on at the start of a fit, or of an evaluation that stands alone.

    Args:
        state: Composer's State.
        train: The report of the train loader, if a fit begins.
        evaluations: The reports of the evaluators' loaders, by label.
        position: This rank's dp_rank and the dp_degree.
    """
    proven = sorted((label, report.proven) for label, report in evaluations.items())
    plan = FitPlan(evaluations=zlib.crc32(repr(proven).encode()), dp_rank=position[0], dp_degree=position[1])
    if train is None:
        return plan
    timestamp = state.timestamp
    return replace(
        plan,
        batches_per_epoch=train.totals.plan.reported_batches_per_epoch,
        proven_batches_per_epoch=train.proven,
        batch_size=train.facts.batch_size,
        max_epochs=train.facts.max_epochs,
        max_steps=train.facts.max_steps,
        position=[int(timestamp.epoch), int(timestamp.batch_in_epoch), int(timestamp.batch)],
    )


def exception_at_close() -> BaseException:
    """Returns the exception that is being handled, or the program's last; a `SystemExit` without a code if none."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None) or SystemExit()
