"""Run a script under real torchrun: slower than the harness (each rank imports for itself), and the real thing."""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
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
    if isinstance(script, str):
        path = directory / "script.py"
        path.write_text(script)
        script = path
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    # With the fault handler, SIGABRT makes a worker print its stacks.
    fixed = {"PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **NAME_LOOKUPS}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    log = directory / "torchrun.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options, str(script), *arguments],
            cwd=directory,
            env={**inherited, **fixed, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            _print_stacks(process)
            text = log.read_text(errors="replace")
            raise TorchrunTimedOut(f"torchrun still runs after {deadline_seconds:g} s\n{text}") from None
        finally:
            _signal(family(process.pid) if process.returncode is None else [], signal.SIGKILL)
            process.wait()
    return CompletedRun(exit_code, log.read_text(errors="replace"))


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
