"""Makes the guard of a fit: the one place where adapters do so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from countoff._adapter.torch_facts import learning_rates
from countoff.core import Guard, Settings
from countoff.core.verdict import Kind

__all__ = ["new_guard"]


def new_guard(
    settings: Settings,
    *,
    rank: int,
    world_size: int,
    remedies: Mapping[Kind, str],
    optimizers: Callable[[], Iterable[Any]] = tuple,
) -> Guard:
    """Returns a guard for one fit, or for one evaluation that stands alone.

    Args:
        settings: The user's choices.
        rank: This rank.
        world_size: Ranks in the job.
        remedies: What to do about each kind of verdict, in the framework's terms.
        optimizers: Returns the optimizers whose learning rates are compared; called every `tick_batches` batches.
    """
    return Guard(
        settings,
        rank=rank,
        world_size=world_size,
        remedies=remedies,
        learning_rates=lambda: learning_rates(optimizers()),
    )
