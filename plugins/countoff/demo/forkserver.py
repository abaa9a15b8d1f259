"""The fork server: imports torch and Lightning once, forks the ranks, hosts their store, reports how each rank ended.

Importing Lightning takes many seconds on a small machine. So one process imports it once, and each rank is a fork of
that process, which then exits as a script does. torchrun's agent stops the other ranks when one fails; this server does
not, because the demo shows how each rank ends.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from countoff.demo.data import Data

_PORT_DIGITS = 5
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class JobSpec:
    """One run of the job.

    Attributes:
        data: What to train on, and on how many ranks.
        directory: Where the files of all ranks go.
        even: Whether every rank gets the same number of samples.
        with_countoff: Whether the Trainer has countoff's callback.
        stops: Whether the callback ends every epoch on all ranks with the shortest one.
        deadline_seconds: Seconds after which a rank ends itself, if nothing has ended it before.
        device: Where the ranks run: ``cpu``, or ``cuda`` for a GPU each.
        trace_dir: Where the callback writes the ranks' traces; None: no trace.
    """

    data: Data
    directory: Path
    even: bool
    with_countoff: bool
    deadline_seconds: float
    stops: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    trace_dir: Path | None = None


def main(descriptor: int) -> None:
    """Runs one job after the other until the parent closes the connection. Every rank returns from here, too."""
    parent = Connection(descriptor)
    began = time.monotonic()
    from countoff.demo import job  # noqa: F401  # imported here once, for all ranks

    gc.freeze()  # otherwise each rank's garbage collector touches, and so copies, everything that was imported
    parent.send(("ready", time.monotonic() - began))
    while True:
        message = _receive(parent)
        if isinstance(message, JobSpec):
            _run(message, parent)


def _receive(parent: Connection) -> object:
    """Returns the next message. If the parent has gone, kills this process and all ranks."""
    try:
        return parent.recv()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # our own process group: this process and its ranks


def _run(spec: JobSpec, parent: Connection) -> None:
    port_in, port_out = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(spec.data.ranks):
        pid = os.fork()
        if pid == 0:
            parent.close()
            os.close(port_out)
            _run_rank(spec, rank, port_in)
        ranks[rank] = pid
    os.close(port_in)

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public in its documentation

    # After the forks: the store starts threads, and a fork does not inherit threads.
    store = TCPStore("127.0.0.1", 0, spec.data.ranks, is_master=True, wait_for_workers=False)
    os.write(port_out, f"{store.port:{_PORT_DIGITS}}".encode() * spec.data.ranks)
    os.close(port_out)
    _supervise(ranks, parent)
    del store


def _supervise(ranks: dict[int, int], parent: Connection) -> None:
    """Reports the exit code of each rank; forwards the parent's signals to the ranks that still run."""
    while ranks:
        for rank, pid in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[rank]
                parent.send(("ended", rank, os.waitstatus_to_exitcode(status)))
        # Not after the last rank has ended: the next message is then the next job.
        if ranks and parent.poll(_POLL_SECONDS):
            number = _receive(parent)
            for pid in ranks.values():
                os.kill(pid, int(str(number)))


def _run_rank(spec: JobSpec, rank: int, port_in: int) -> NoReturn:
    """Trains as one rank. Leaves by an exception, so that the interpreter shuts down as at the end of a script."""
    _redirect(spec.directory / f"rank{rank}.log", spec.directory / f"rank{rank}.stacks")
    faulthandler.dump_traceback_later(spec.deadline_seconds, exit=True)
    port = os.read(port_in, _PORT_DIGITS).decode()
    os.close(port_in)
    os.environ.update(_torchrun_environment(spec, rank, port.strip()))
    from countoff.demo.job import train

    train(
        spec.data,
        spec.directory,
        even=spec.even,
        with_countoff=spec.with_countoff,
        stops=spec.stops,
        on_gpu=spec.device == "cuda",
        trace_dir=spec.trace_dir,
    )
    sys.exit(0)


def _redirect(log: Path, stacks: Path) -> None:
    """Sends this process's output to one file, and its stacks (on SIGUSR1) to another."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=os.open(stacks, os.O_WRONLY | os.O_CREAT, 0o600), all_threads=True)


def _torchrun_environment(spec: JobSpec, rank: int, port: str) -> Mapping[str, str]:
    ranks = str(spec.data.ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.directory.name,
        "TORCHELASTIC_ERROR_FILE": str(spec.directory / f"rank{rank}-error.json"),
    }
