"""Makes the guard of a fit: the one place where adapters do so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from countoff._adapter.torch_facts import learning_rates
from countoff.core import Guard, Settings
from countoff.core.verdict import Remedies

__all__ = ["new_guard"]


def new_guard(
    settings: Settings,
    *,
    rank: int,
    world_size: int,
    remedies: Remedies,
    optimizers: Callable[[], Iterable[Any]] = tuple,
) -> Guard:
    """Returns a guard for one fit, or for one standalone evaluation.

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
