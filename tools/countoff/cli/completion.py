"""``countoff completion``: a script with which a shell completes commands, flags, files and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from countoff.cli.explain import names
from countoff.plan.issues import CODES

__all__ = ["SHELLS", "script"]

SHELLS = tuple(shtab.SUPPORTED_SHELLS)
_FILES = {"CONFIG": shtab.FILE, "FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
"""How an argument is completed, by what the help calls its value."""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the script for a shell.

    Args:
        parser: The parser of the whole command line.
        shell: One of `SHELLS`.
    """
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = _FILES[str(action.metavar)]  # pyright: ignore[reportAttributeAccessIssue]  # as shtab asks
        elif action.metavar == "SHELL":
            action.choices = list(SHELLS)
        elif action.metavar == "CODE":
            action.choices = list(CODES)
        elif action.metavar == "NAME" and action.dest == "names":
            action.choices = names()
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of its commands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
