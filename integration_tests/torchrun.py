"""Run a script under real torchrun: slower than the harness (each rank imports for itself), and the real thing."""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from integration_tests.harness import NAME_LOOKUPS, python_path

_SECONDS_TO_PRINT_STACKS: Final = 1.0


@dataclass(frozen=True)
class CompletedRun:
    """How torchrun ended, and all that it and its workers printed."""

    exit_code: int
    output: str


class TorchrunTimedOut(AssertionError):
    """torchrun was running at the deadline; the message holds the output, which ends with its workers' stacks."""


def run_torchrun(
    script: str | Path,
    world_size: int,
    *arguments: str,
    directory: Path,
    env: Mapping[str, str] | None = None,
    deadline_seconds: float = 180.0,
    options: Sequence[str] = (),
) -> CompletedRun:
    """Run a script on `world_size` ranks under torchrun and return its exit code and output.

    Args:
        script: A path, or the text of a script, which is then written into `directory`.
        world_size: Ranks, all on this host.
        *arguments: The script's own.
        directory: Working directory of torchrun and its ranks.
        env: More environment. COUNTOFF variables of pytest's own do not get through.
        deadline_seconds: Past it the workers print their stacks and all are killed.
        options: More options of torchrun.

    Raises:
        TorchrunTimedOut: If it is running at the deadline.
    """
    how = ["--standalone", f"--nproc-per-node={world_size}", *options]
    with started(write_script(script, directory), *arguments, options=how, directory=directory, env=env) as torchrun:
        return torchrun.finish(time.monotonic() + deadline_seconds)


def write_script(script: str | Path, directory: Path) -> Path:
    """The path of a script: the given one, or, for a text, one in `directory` that is written here."""
    if isinstance(script, Path):
        return script
    path = directory / "script.py"
    path.write_text(script)
    return path


class Torchrun:
    """A torchrun in progress, with its workers.

    Args:
        process: torchrun, or what runs it.
        log: Where it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def finish(self, deadline: float) -> CompletedRun:
        """Wait for its end.

        Args:
            deadline: By `time.monotonic()`.

        Raises:
            TorchrunTimedOut: At the deadline, if it is still running; its workers' stacks have then been printed.
        """
        try:
            exit_code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _print_stacks(self._process)
            raise TorchrunTimedOut(f"torchrun still runs at its deadline\n{self.output()}") from None
        return CompletedRun(exit_code, self.output())

    def output(self) -> str:
        """What it and its workers have printed so far."""
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def started(
    script: Path,
    *arguments: str,
    options: Sequence[str],
    directory: Path,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    log: str = "torchrun.log",
) -> Iterator[Torchrun]:
    """Start torchrun, and end it and its workers at the end of the block.

    Args:
        script: The script.
        *arguments: The script's own.
        options: Those of torchrun.
        directory: Working directory of torchrun and its ranks.
        env: More environment. COUNTOFF variables of pytest's own do not get through.
        within: A command that runs the command that follows it, as `nsenter`.
        log: Name of the file for the output, in `directory`.
    """
    command = [*within, sys.executable, "-m", "torch.distributed.run", *options, str(script), *arguments]
    with launched(command, directory=directory, env=env, log=log) as torchrun:
        yield torchrun


@contextlib.contextmanager
def launched(
    command: Sequence[str], *, directory: Path, env: Mapping[str, str] | None = None, log: str = "torchrun.log"
) -> Iterator[Torchrun]:
    """Start any launcher by its command line, and end it and its workers at the end of the block; see `started`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    # With the fault handler, SIGABRT makes a worker print its stacks.
    fixed = {"PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **NAME_LOOKUPS}
    path = directory / log
    with path.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**inherited, **fixed, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Torchrun(process, path)
    finally:
        _signal(family(process.pid) if process.returncode is None else [], signal.SIGKILL)
        process.wait()


def _print_stacks(process: subprocess.Popen[bytes]) -> None:
    workers = list(family(process.pid))[1:]
    os.kill(process.pid, signal.SIGSTOP)  # else it would tidy up while the workers print
    _signal(workers, signal.SIGCONT)
    for worker in workers:  # one after another: they write into the same file
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(worker)
            os.kill(worker, signal.SIGABRT)
            select.select([ended], [], [], _SECONDS_TO_PRINT_STACKS)
            os.close(ended)


def family(pid: int) -> Iterator[int]:
    """A process and its descendants, by /proc: torchrun's workers are in sessions of their own."""
    yield pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        for child in itertools.chain.from_iterable(lists):
            yield from family(int(child))


def _signal(pids: Iterator[int] | Sequence[int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
