"""The record in the Trainer's checkpoints of how far a run has come, and where the Trainer goes on after it loads one.

It is part of the callback's state in trainer_state.json. The Trainer keeps that apart for callbacks that are restored,
and restores none by default; it ignores what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from countoff._adapter.checkpoints import without_data
from countoff._adapter.counted_loop import CountedLoop
from countoff.core import Guard, LoaderFacts, Settings
from countoff.core.checks.resume import Restored

__all__ = ["first_epoch", "loaded_record", "restore", "state_of"]

_RECORD = "record"


def state_of(settings: Settings, loop: CountedLoop | None, trainer_state: Any) -> dict[str, Any]:
    """Returns the state of the callback, from which the Trainer can make it anew.

    Args:
        settings: The user's choices.
        loop: The training; None if there is none.
        trainer_state: The TrainerState of that training.
    """
    defaults = vars(Settings())
    values = settings.without_secrets()  # the checkpoint may be shared
    chosen = {name: _as_json(value) for name, value in values.items() if value != defaults[name]}
    state: dict[str, Any] = {"args": chosen, "attributes": {}}
    if loop is None or trainer_state is None:
        return state
    return {**state, _RECORD: {**loop.record(), "steps": trainer_state.global_step}}


def loaded_record(state: Any, name: str, exported: Any) -> Any:
    """Returns the record of the checkpoint that the Trainer has loaded; None if there is none.

    Args:
        state: The TrainerState.
        name: The callback's name in it.
        exported: What `state_of` returned last in this process: that was not loaded.
    """
    found = state.stateful_callbacks.get(name)
    if isinstance(found, list):  # one state for each of several callbacks of that name, and one more at each save
        found = found[-1] if found else None
    if found is exported or not isinstance(found, Mapping):
        return None
    return cast("Mapping[str, Any]", found).get(_RECORD)


def restore(guard: Guard, record: Any, args: Any, state: Any, *, sized: bool) -> None:
    """Takes the record of the checkpoint from which the training resumes, before its first epoch.

    Args:
        guard: The guard of the training.
        record: What stood in the checkpoint.
        args: TrainingArguments.
        state: The TrainerState.
        sized: Whether the train loader has a length. The Trainer's epochs are not those of the data otherwise.
    """
    if args.ignore_data_skip or not sized:  # the user asks not to skip what was trained on
        record = without_data(record)
    if not sized and isinstance(record, Mapping):
        record = {**cast("Mapping[str, Any]", record), "epoch": int(state.epoch or 0), "left": None, "order": None}
    guard.resumes.restore(record, Restored(steps=state.global_step))


def first_epoch(facts: LoaderFacts, args: Any, state: Any) -> int:
    """Returns the epoch in which the Trainer goes on: it divides its steps by those of an epoch as it is now.

    Args:
        facts: The facts of the train loader.
        args: TrainingArguments.
        state: The TrainerState.
    """
    if not facts.reported_batches:
        return int(state.epoch or 0)
    return state.global_step // max(1, -(-facts.reported_batches // args.gradient_accumulation_steps))


def _as_json(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float, bool, dict)) else list(value)
