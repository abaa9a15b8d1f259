"""Runs the job on ranks of this machine: each ends in its own way, and none ends another one.

Importing Lightning takes many seconds on a small machine. So multiprocessing's fork server imports it once (`preload`),
and each rank is a fork of the server. torchrun's agent would stop the other ranks when one fails; here nobody does,
because the demo shows how each rank ends. All of these processes end with the demo, however that ends, and a rank ends
itself at its deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final
from unittest import mock

from countoff.demo.data import Data

IMPORT_SECONDS: Final = 240.0
"""Seconds after which the server ends itself, if it has not imported everything before."""
_SERVER_DIED: Final = "the process that starts the ranks has died"
_TAIL_LINES: Final = 15
_SECONDS_TO_PRINT_STACKS: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1
_UNKNOWN: Final = 255
"""The exit code that multiprocessing gives a process whose server has died."""


class DemoFailed(Exception):
    """The demo did not go as it describes; the message is for the user."""


class Run:
    """One run of the job, in progress or ended.

    Args:
        data: What it trains on.
        directory: Where the files of all ranks are.
        ranks: The process of each rank.
        deadline_seconds: How long they may run.
    """

    def __init__(self, data: Data, directory: Path, ranks: Sequence[BaseProcess], deadline_seconds: float) -> None:
        self.data = data
        self.directory = directory
        self._ranks = ranks
        self._deadline_seconds = deadline_seconds
        self._deadline = time.monotonic() + deadline_seconds

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended; negative for a signal."""
        return {rank: process.exitcode for rank, process in enumerate(self._ranks) if process.exitcode is not None}

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self._ranks) if process.exitcode is None]

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a rank to end; returns whether any rank still runs.

        Raises:
            DemoFailed: If the run's deadline has passed, or the fork server has died.
        """
        connection.wait([self._ranks[rank].sentinel for rank in self.running], seconds)
        if _UNKNOWN in self.exit_codes.values():
            raise self.failure(_SERVER_DIED)
        if self.running and time.monotonic() > self._deadline:
            raise self.failure(f"still running after {self._deadline_seconds:g} s")
        return bool(self.running)

    def kill(self) -> list[int]:
        """Kills the ranks that still run, and returns them. Each writes its stacks to a file before it dies."""
        killed = self.running
        # They are stopped first: the death of one would wake those that wait for it, and change their stacks.
        for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGCONT):
            for rank in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._ranks[rank].pid or 0, number)
        give_up_at = time.monotonic() + _SECONDS_TO_PRINT_STACKS
        for rank in killed:
            self._ranks[rank].join(max(0.0, give_up_at - time.monotonic()))
        _end([self._ranks[rank] for rank in killed])
        return killed

    def read(self, rank: int, kind: str) -> str:
        """Returns one rank's file: ``log``, ``stacks``, ``error``, ``all_reduces`` or ``json``; "" if there is none."""
        return _read(self.directory / f"rank{rank}.{kind}")

    def failure(self, reason: str) -> DemoFailed:
        """Returns an error with the last output of two ranks, those that failed or still run first."""
        codes = self.exit_codes
        order = sorted(range(self.data.ranks), key=lambda rank: codes.get(rank) == 0)
        states = {rank: f"exit code {codes[rank]}" if rank in codes else "running" for rank in order}
        outputs = [f"rank {rank} ({states[rank]}):\n{_tail(self.read(rank, 'log'))}" for rank in order[:2]]
        return DemoFailed("\n\n".join([reason, *outputs]))


@contextlib.contextmanager
def fork_server(directory: Path) -> Iterator[None]:
    """Has multiprocessing fork all processes from a server that imports everything; kills that server in the end.

    Args:
        directory: Where all of them put their temporary files.
    """
    forkserver.set_forkserver_preload(["countoff.demo.preload"])
    with mock.patch.dict(os.environ, _environment(directory), clear=True):
        try:
            resource_tracker.ensure_running()  # the server needs it, and its start unblocks SIGINT
            # The server and its forks inherit the mask: Ctrl-C is for this process, which ends them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            yield
        finally:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(pid := int(server_file("pid").read_text()), signal.SIGKILL)
                os.waitpid(pid, 0)


def server_file(kind: str) -> Path:
    """Returns the path of a file of the fork server: ``log`` or ``pid``."""
    return Path(os.environ["TMPDIR"], f"server.{kind}")


def wait_for_server() -> None:
    """Waits until the fork server has imported everything.

    Raises:
        DemoFailed: If it dies.
    """
    _start(int).join()


@contextlib.contextmanager
def started(
    data: Data,
    parent: Path,
    deadline_seconds: float,
    on_gpu: bool,
    name: str,
    *,
    callback: Mapping[str, Any] | None,
    even: bool = False,
) -> Iterator[Run]:
    """Starts the job on every rank, and kills what is left of it in the end.

    Args:
        data: What it trains on.
        parent: Where the directory with the files of all ranks is made.
        deadline_seconds: Seconds after which a rank ends itself, if nothing has ended it before.
        on_gpu: As for `job.train`.
        name: Of that directory.
        callback: As for `job.train`.
        even: As for `job.train`.

    Raises:
        DemoFailed: If the fork server has died.
    """
    directory = parent / name
    directory.mkdir()
    options = {"even": even, "callback": callback, "on_gpu": on_gpu}
    port, theirs = multiprocessing.Pipe(duplex=False)
    processes: list[BaseProcess] = []
    try:
        with theirs:
            processes.append(_start(_host_store, theirs, data.ranks))
        with port:
            call = functools.partial(_run_rank, data, directory, port.recv(), deadline_seconds, options)
        processes.extend(_start(call, rank) for rank in range(data.ranks))
        yield Run(data, directory, processes[1:], deadline_seconds)
    finally:
        _end(processes)


def end_with_parent() -> None:
    """Has the kernel kill this process as soon as the one that has started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(function: Callable[..., object], *args: object) -> BaseProcess:
    """Calls `function(*args)` in a new process, once the fork server has imported everything.

    Raises:
        DemoFailed: If the server dies, or has died.
    """
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args, daemon=True)
    try:
        process.start()
    except (EOFError, OSError):
        raise DemoFailed(f"{_SERVER_DIED}\n\n{_tail(_read(server_file('log')))}") from None
    return process


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _host_store(port: Connection, ranks: int) -> None:
    """Hosts the store at which the ranks meet, as torchrun's agent does, until this process is killed."""
    end_with_parent()
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public in its documentation

    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def _run_rank(data: Data, run: Path, port: int, deadline_seconds: float, options: Mapping[str, Any], rank: int) -> None:
    """Trains as one rank, whose output goes to one file, and its stacks, if SIGUSR1 ends it, to another."""
    end_with_parent()
    output = os.open(run / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(deadline_seconds, exit=True)
    faulthandler.register(signal.SIGUSR1, file=(run / f"rank{rank}.stacks").open("w"), all_threads=True, chain=True)
    os.environ.update(_environment_of_rank(run, rank, data.ranks, port))
    os.chdir(run)
    from countoff.demo.job import train

    train(data, run, **options)


def _environment_of_rank(run: Path, rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns what torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run.name,
        "TORCHELASTIC_ERROR_FILE": str(run / f"rank{rank}.error"),
    }


def _environment(directory: Path) -> dict[str, str]:
    """Returns the environment of all processes: this one's, without COUNTOFF variables, and one thread per rank."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    # torch's TCPStore makes a reverse DNS look-up on each connection; a name server that does not answer costs 5 s.
    inherited.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": str(directory),  # torch leaves directories of its own in it
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # A framework may ask on import whether there is a GPU. By default CUDA itself answers, and no fork can use CUDA
        # after that.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
