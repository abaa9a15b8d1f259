"""The demo's own side of the agent: starts it, gives it orders under a deadline, and takes everything down again."""

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

from countoff.demo.agent import Order

_TAIL_LINES = 15
_SECONDS_TO_DIE = 2.0


class DemoFailed(Exception):
    """Something went otherwise than the demo says it does; the message is for the user."""


def tail(path: Path) -> str:
    """The last lines of a file that may not be there."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return ""


class Run:
    """One run of the job under way.

    Attributes:
        order: What was ordered.
        ended: Exit codes of the ranks that have ended; negative for a signal.
    """

    def __init__(self, order: Order, agent: Agent) -> None:
        self.order = order
        self.ended: dict[int, int] = {}
        self._agent = agent
        self._deadline = time.monotonic() + order.deadline_seconds

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.order.data.ranks) if rank not in self.ended]

    def wait(self, seconds: float) -> bool:
        """Waits for a rank's end, at most `seconds`; whether any rank is left.

        Raises:
            DemoFailed: If the run's deadline has passed.
        """
        if self.alive and self._agent.hears(seconds):
            _, rank, code = self._agent.receive()
            self.ended[int(str(rank))] = int(str(code))
        if self.alive and time.monotonic() > self._deadline:
            raise self.failure(f"still running after {self.order.deadline_seconds:g} s")
        return bool(self.alive)

    def kill(self) -> None:
        """Ends the ranks that are left, after each has written down its stacks."""
        left = self.alive
        self._agent.send(int(signal.SIGUSR1))
        patience = time.monotonic() + 2
        while self.wait(0.05) and time.monotonic() < patience:
            if all("File " in tail(self.file(rank, "stacks")) for rank in left):
                break
        if self.alive:
            self._agent.send(int(signal.SIGKILL))
        while self.wait(0.1):
            pass

    def file(self, rank: int, kind: str) -> Path:
        """A file of one rank: ``log``, ``stacks``, ``met`` or ``json``."""
        return self.order.directory / f"rank{rank}.{kind}"

    def failure(self, what: str) -> DemoFailed:
        """An error that shows the end of what ranks have printed: the worst ended first, two of them."""
        order = sorted(range(self.order.data.ranks), key=lambda rank: self.ended.get(rank, -99) == 0)
        ends = [f"rank {rank} ({self._state(rank)}):\n{tail(self.file(rank, 'log'))}" for rank in order[:2]]
        return DemoFailed("\n\n".join([what, *ends]))

    def _state(self, rank: int) -> str:
        return f"exit code {self.ended[rank]}" if rank in self.ended else "running"


class Agent:
    """The process that all ranks are forked from, with everything in it that takes long to import.

    Args:
        directory: Where its output goes.
    """

    def __init__(self, directory: Path) -> None:
        self._log = directory / "agent.log"
        self._connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from countoff.demo.agent import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=_environment(directory),
                start_new_session=True,  # a Ctrl-C is ours alone, and the group can be killed as a whole
            )

    def hears(self, seconds: float) -> bool:
        """Whether a message is there, or comes within so many seconds."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[object, ...]:
        """The agent's next message.

        Raises:
            DemoFailed: If it has died instead.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise DemoFailed(f"the process that starts the ranks has died\n\n{tail(self._log)}") from None

    def send(self, message: object) -> None:
        """Gives the agent an order, or a signal for its ranks."""
        with contextlib.suppress(OSError):  # dead: the next `receive` says so
            self._connection.send(message)

    def begin(self, order: Order) -> Run:
        """Starts the job."""
        order.directory.mkdir()
        self.send(order)
        return Run(order, self)

    def close(self) -> None:
        """Kills the agent and the ranks of its group, which is there for as long as the agent is not waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        # The ranks are not our children: they are gone when their group is, and until then may hold their files.
        patience = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < patience:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.01)


@contextlib.contextmanager
def agent(directory: Path) -> Iterator[Agent]:
    """An agent, and nothing left of it afterwards."""
    one = Agent(directory)
    try:
        yield one
    finally:
        one.close()


def _environment(directory: Path) -> dict[str, str]:
    """This process's environment: countoff found and not switched on or off, one thread per rank as under torchrun."""
    import countoff

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    roots = [str(Path(part).resolve().parent) for part in countoff.__path__]
    path = os.pathsep.join([*roots, *filter(None, [inherited.get("PYTHONPATH")])])
    # torch leaves directories of its own among the temporary ones.
    own = {"PYTHONPATH": path, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**inherited, **own}
