"""`countoff run`: starts a command, in which every Python process places the hooks, and ends as it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from countoff._run.environment import REPORT, with_hooks
from countoff.core import formats
from countoff.core.flag import FLAG, FLAG_TEXTS

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CommandError", "describe", "run", "trace_directory", "variables"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OWN_LOOP = "stalls are reported; in a loop of its own, batches are compared only with Countoff() in the code"
_ADDED_TO = {
    "lightning": "the callback is added to every Trainer",
    "pytorch-lightning": "the callback is added to every Trainer",
    "mosaicml": "the callback is added to every Trainer",
    "transformers": "the callback is added to every Trainer",
    "accelerate": _OWN_LOOP,
    "torch": _OWN_LOOP,
}
"""What becomes of a program, by the distribution of its framework."""


class CommandError(Exception):
    """The command cannot be started; the message is one line.

    Attributes:
        code: The exit code: 2 for a bad option, and as in a shell 127 where there is no such command, 126 where it is
            no program.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def variables(chosen: Any) -> dict[str, str]:
    """Returns the variables for the settings that flags and the environment give, once they are checked.

    Args:
        chosen: What the command line gives, with an attribute for each setting; None where it is not given.

    Raises:
        CommandError: If one of them is bad.
    """
    given = {name: text for name, text in vars(chosen).items() if isinstance(text, str)}
    if not given and not any(name.startswith(f"{FLAG}_") for name in os.environ):
        return {}  # the settings know all checks, and take a tenth of a second to be imported
    from countoff.core.settings import OptionValues, Settings, SettingsError, variable_of

    found = {variable_of(name): given[name] for name in OptionValues.__annotations__ if name in given}
    try:
        settings = Settings.of_environment({**os.environ, **found})
    except SettingsError as error:
        flags = {variable: f"--{variable.removeprefix(f'{FLAG}_').lower().replace('_', '-')}" for variable in found}
        text = str(error)
        for variable, flag in flags.items():
            text = text.replace(f"environment variable {variable} ", f"{flag} ")
        raise CommandError(text, 2) from None
    for name in ("trace_dir", "verdict_file"):  # made absolute here: the job may begin in another directory
        if name in given:
            found[variable_of(name)] = str(getattr(settings, name))
    return found


def trace_directory(variables: dict[str, str]) -> str:
    """Returns the directory of the trace, which is one of this day and time in the working directory if none is given.

    Args:
        variables: Those for the settings; gets that of the directory.
    """
    variable = f"{FLAG}_TRACE_DIR"
    given = variables.get(variable) or os.environ.get(variable, "").strip()
    if not given:
        given = variables[variable] = os.path.abspath(time.strftime("countoff-%Y%m%d-%H%M%S"))
    return given


def describe(command: Sequence[str], variables: Mapping[str, str], *, as_json: bool = False) -> None:
    """Prints what would be run, in which environment, and what becomes of the frameworks that are installed.

    Args:
        command: The program and its arguments.
        variables: Variables that the command gets besides.
        as_json: Whether a program is to read it.
    """
    environment = with_hooks({**os.environ, **variables})
    added = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    is_on = not _is_off(environment)
    versions = {name: _version(name) for name in _ADDED_TO}
    if as_json:
        import json

        hooked = [
            {"name": name, "version": version, "hooked": is_on and version is not None, "text": _ADDED_TO[name]}
            for name, version in versions.items()
        ]
        found = {"command": [*command], "environment": added, "enabled": is_on, "frameworks": hooked}
        print(json.dumps({"format": formats.JSON_OUTPUT, **found}, indent=2))
        return
    import shlex

    print(f"would run: {shlex.join(command)}")
    for name, value in added.items():
        print(f"  with {name}={value}")
    if not is_on:
        print(f"  {FLAG}={environment[FLAG]} turns countoff off: nothing would be hooked")
        return
    print("in each Python process below:")
    for name, version in versions.items():
        known = f" {version}: {_ADDED_TO[name]}" if version is not None else ": not installed beside countoff"
        print(f"  {name}{known}")


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs a command, with the hooks in every Python process below it, and passes signals on to it.

    Args:
        command: The program and its arguments.
        variables: Variables that the command gets besides.

    Returns:
        Its exit code; 128 and the signal's number if a signal has ended it, as in a shell.

    Raises:
        CommandError: If it cannot be started.
    """
    place = os.environ.get("TMPDIR") or "/tmp"
    report = os.path.join(place, f"countoff-run-{os.getpid()}-{time.time_ns()}")
    environment = with_hooks({**os.environ, **variables, REPORT: report})
    try:
        code = _run_and_pass_on(command, environment)
        ran = code == 0 or code > 128  # else it is said already what was wrong
        if ran and not os.path.exists(report) and not _is_off(environment):
            _say_nobody_came(command)
        return code
    finally:
        if os.path.exists(report):
            os.unlink(report)


def _is_off(environment: Mapping[str, str]) -> bool:
    return not FLAG_TEXTS.get(environment[FLAG].strip().lower(), True)


def _run_and_pass_on(command: Sequence[str], environment: Mapping[str, str]) -> int:
    waited = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)  # so that no signal is lost while the command starts
    try:
        try:
            process = os.posix_spawnp(command[0], [*command], environment, setsigmask=before)
        except FileNotFoundError:
            raise CommandError(f"there is no command {command[0]!r}", 127) from None
        except OSError as error:
            raise CommandError(f"cannot run {command[0]!r}: {error.strerror}", 126) from None
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            _pass_on(signal.sigwaitinfo(waited), process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_on(received: Any, process: int) -> None:
    """Passes a signal on that another process has sent; one of the terminal's keys has reached the command itself."""
    if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
        os.kill(process, received.si_signo)


def _say_nobody_came(command: Sequence[str]) -> None:
    shown = " ".join(command)
    shown = shown if len(shown) <= 80 else f"{shown[:79]}…"  # shlex, and the functions for words, take longer to import
    print(
        f"countoff: nothing was compared: no Python process below `{shown}` has made a process group with the hooks in "
        "it. One rank alone has nothing to compare. If several have trained, they ran as python -I, -E or -S, or on "
        "another host, or the launcher dropped PYTHONPATH: put -m countoff.run in front of the script.",
        file=sys.stderr,
    )
