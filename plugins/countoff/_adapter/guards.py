"""Makes the guard of a fit: the one place where adapters do so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from countoff._adapter.torch_facts import learning_rates, schedule_positions
from countoff._adapter.weights import PendingReplicas
from countoff._adapter.words import Words
from countoff.core import Guard, Settings, SettingsError
from countoff.core.part import Part

__all__ = ["cannot_make_even", "new_guard", "with_common_end"]


def new_guard(
    settings: Settings,
    words: Words,
    *,
    rank: int,
    world_size: int,
    part: Part | None = None,
    optimizers: Callable[[], Iterable[Any]] = tuple,
    schedulers: Callable[[], Iterable[Any]] = tuple,
    ticks_per_step: int = 1,
    models: Callable[[], Iterable[Any]] | None = None,
) -> Guard:
    """Returns a guard for one fit, or for one standalone evaluation.

    Args:
        settings: The user's choices.
        words: The adapter's words.
        rank: This rank.
        world_size: Ranks that are compared.
        part: Which ranks these are, if they are a part of the job.
        optimizers: Returns the optimizers whose learning rates are compared; called every `tick_batches` batches.
        schedulers: Returns the learning-rate schedulers, as far as they are known; a resumed run compares where they
            stand with its checkpoint.
        ticks_per_step: How often a scheduler is stepped at each optimizer step, at most.
        models: Returns the modules whose weights are compared, as the framework wraps them; called every
            `weights_every` optimizer steps. None: none are compared.
    """
    return Guard(
        settings,
        rank=rank,
        world_size=world_size,
        part=part,
        remedies=words.remedies,
        learning_rates=lambda: learning_rates(optimizers()),
        schedules=lambda: schedule_positions(optimizers(), schedulers()),
        ticks_per_step=ticks_per_step,
        weights=None if models is None else lambda: PendingReplicas(models()),
        framework=words.framework,
    )


def cannot_make_even(settings: Settings, framework: str, instead: str = "give every rank as many batches") -> None:
    """Refuses what makes uneven ranks take the same number of batches, for a framework in which nothing does that.

    Args:
        settings: The user's choices.
        framework: Its name.
        instead: What to do.

    Raises:
        SettingsError: If the settings ask for it.
    """
    if settings.keeps_even:
        raise SettingsError(
            f"uneven_train='stop' or 'repeat' and uneven_eval='stop' do not work with {framework}: {instead}"
        )


def with_common_end(settings: Settings, framework: str) -> Settings:
    """Returns the settings of a guard for a framework that itself ends each pass on all ranks with the shortest one.

    Args:
        settings: The user's choices; ``stop`` is what the framework does.
        framework: Its name.

    Raises:
        SettingsError: If short ranks are to repeat batches.
    """
    if settings.uneven_train == "repeat":
        raise SettingsError(
            f"uneven_train='repeat' does not work with {framework}, which ends every epoch on all ranks with the "
            "shortest one ('stop')"
        )
    return replace(
        settings, uneven_train="raise", uneven_eval="warn" if settings.uneven_eval == "stop" else settings.uneven_eval
    )
