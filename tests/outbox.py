"""Reads the actions that a `State` has put into its outbox, for tests that have no runtime."""

from typing import Any

from countoff.core import Verdict
from countoff.core.protocol.actions import PrintWarning, WriteEntry
from countoff.core.session.state import State


def drain(state: State) -> list[Any]:
    """Empties the outbox and returns its actions, oldest first."""
    actions: list[Any] = []
    while not state.outbox.empty():
        actions.append(state.outbox.get())
    return actions


def written(state: State) -> list[dict[str, Any]]:
    """Empties the outbox and returns the entries for the log."""
    return [action.entry for action in drain(state) if isinstance(action, WriteEntry)]


def printed(state: State) -> list[Verdict]:
    """Empties the outbox and returns the warnings to be printed."""
    return [action.verdict for action in drain(state) if isinstance(action, PrintWarning)]
