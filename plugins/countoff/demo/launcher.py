"""Starts the fork server, sends it jobs, enforces their deadlines, and ends every process afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path

from countoff.demo.forkserver import JobSpec

_TAIL_LINES = 15
_SECONDS_TO_DIE = 2.0


class DemoFailed(Exception):
    """The demo did not go as it describes; the message is for the user."""


def tail(path: Path) -> str:
    """Returns the last lines of a file; "" if there is no such file."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return ""


class Run:
    """One run of the job, in progress or ended.

    Attributes:
        spec: What runs.
        exit_codes: Exit codes of the ranks that have ended; negative for a signal.
    """

    def __init__(self, spec: JobSpec, server: ForkServer) -> None:
        self.spec = spec
        self.exit_codes: dict[int, int] = {}
        self._server = server
        self._deadline = time.monotonic() + spec.deadline_seconds

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.spec.data.ranks) if rank not in self.exit_codes]

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a rank to end; returns whether any rank still runs.

        Raises:
            DemoFailed: If the run's deadline has passed.
        """
        if self.running and self._server.poll(seconds):
            _, rank, code = self._server.receive()
            self.exit_codes[int(str(rank))] = int(str(code))
        if self.running and time.monotonic() > self._deadline:
            raise self.failure(f"still running after {self.spec.deadline_seconds:g} s")
        return bool(self.running)

    def kill(self) -> None:
        """Kills the ranks that still run, after each has written its stacks to a file."""
        remaining = self.running
        self._server.send(int(signal.SIGUSR1))
        give_up_at = time.monotonic() + 2
        while self.wait(0.05) and time.monotonic() < give_up_at:
            if all("File " in tail(self.file(rank, "stacks")) for rank in remaining):
                break
        if self.running:
            self._server.send(int(signal.SIGKILL))
        while self.wait(0.1):
            pass

    def file(self, rank: int, kind: str) -> Path:
        """Returns the path of one rank's file: ``log``, ``stacks``, ``all_reduces`` or ``json``."""
        return self.spec.directory / f"rank{rank}.{kind}"

    def failure(self, reason: str) -> DemoFailed:
        """Returns an error with the last output of two ranks, those that failed or still run first."""
        order = sorted(range(self.spec.data.ranks), key=lambda rank: self.exit_codes.get(rank, -99) == 0)
        outputs = [f"rank {rank} ({self._state(rank)}):\n{tail(self.file(rank, 'log'))}" for rank in order[:2]]
        return DemoFailed("\n\n".join([reason, *outputs]))

    def _state(self, rank: int) -> str:
        return f"exit code {self.exit_codes[rank]}" if rank in self.exit_codes else "running"


class ForkServer:
    """The process that all ranks are forked from; it has imported everything that takes long to import.

    Args:
        directory: Where its output goes.
    """

    def __init__(self, directory: Path) -> None:
        self._log = directory / "forkserver.log"
        self._connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from countoff.demo.forkserver import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=_environment(directory),
                start_new_session=True,  # Ctrl-C reaches this process only, and the group can be killed as a whole
            )

    def poll(self, seconds: float) -> bool:
        """Returns whether a message is there, or arrives within `seconds`."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[object, ...]:
        """Returns the server's next message.

        Raises:
            DemoFailed: If the server has died.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise DemoFailed(f"the process that starts the ranks has died\n\n{tail(self._log)}") from None

    def send(self, message: object) -> None:
        """Sends the server a job, or a signal for its ranks."""
        with contextlib.suppress(OSError):  # it has died: the next `receive` reports it
            self._connection.send(message)

    def start(self, spec: JobSpec) -> Run:
        """Starts a job."""
        spec.directory.mkdir()
        self.send(spec)
        return Run(spec, self)

    def close(self) -> None:
        """Kills the server and its ranks, and waits until they are gone.

        The ranks are in the server's process group, which exists at least until the server has been waited for.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        # The ranks are not our children, so we cannot wait for them. They may hold their files open until the process
        # group is gone.
        give_up_at = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < give_up_at:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.01)


@contextlib.contextmanager
def fork_server(directory: Path) -> Iterator[ForkServer]:
    """Yields a fork server; ends it and its ranks afterwards."""
    server = ForkServer(directory)
    try:
        yield server
    finally:
        server.close()


def _environment(directory: Path) -> dict[str, str]:
    """Returns the environment of the server and its ranks.

    It is this process's own, without COUNTOFF variables, with countoff's location, and with one thread per rank as
    under torchrun.
    """
    import countoff

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    # torch's TCPStore makes a reverse DNS look-up on each connection; a name server that does not answer costs 5 s.
    inherited.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    roots = [str(Path(part).resolve().parent) for part in countoff.__path__]
    path = os.pathsep.join([*roots, *filter(None, [inherited.get("PYTHONPATH")])])
    return {
        **inherited,
        "PYTHONPATH": path,
        "TMPDIR": str(directory),  # torch leaves directories of its own in it
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # A framework may ask on import whether there is a GPU. By default CUDA itself answers, and no fork can use CUDA
        # after that.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
