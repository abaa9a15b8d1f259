"""The agent: starts ranks as torchrun's does, hosts their store, and reports how each of them ended.

Importing Lightning takes many seconds on a small machine. So one process imports it once, and every rank is a fork of
that process which then ends as a script does. Unlike torchrun's, this agent ends nobody by itself when a rank fails:
how each rank ends is what the demo wants to show.
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
from typing import NoReturn

from countoff.demo.data import Data

_PORT_DIGITS = 5
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Order:
    """One run of the job.

    Attributes:
        data: What to train on, on how many ranks.
        directory: Where every rank's files go.
        mended: Whether the ranks get as many samples.
        guarded: Whether countoff is there.
        deadline_seconds: When a rank ends itself, should nobody else have done it.
    """

    data: Data
    directory: Path
    mended: bool
    guarded: bool
    deadline_seconds: float


def main(descriptor: int) -> None:
    """Runs orders until the other end of the connection is closed; every rank returns from here, too."""
    parent = Connection(descriptor)
    began = time.monotonic()
    from countoff.core.runtime import monitor  # noqa: F401  # this and the next are for the ranks
    from countoff.demo import job  # noqa: F401

    gc.freeze()  # else every rank's collector visits, and so copies, all that has been imported
    parent.send(("ready", time.monotonic() - began))
    while True:
        order = _receive(parent)
        if isinstance(order, Order):
            _run(order, parent)


def _receive(parent: Connection) -> object:
    """The next message; whoever cannot be heard has gone, and all that was started for them goes with them."""
    try:
        return parent.recv()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # a group of our own: this process and its ranks


def _run(order: Order, parent: Connection) -> None:
    port_in, port_out = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(order.data.ranks):
        pid = os.fork()
        if pid == 0:
            parent.close()
            os.close(port_out)
            _be_rank(order, rank, port_in)
        ranks[rank] = pid
    os.close(port_in)

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public in its documentation

    # After the forks: the store brings threads, which a fork would not have.
    store = TCPStore("127.0.0.1", 0, order.data.ranks, is_master=True, wait_for_workers=False)
    os.write(port_out, f"{store.port:{_PORT_DIGITS}}".encode() * order.data.ranks)
    os.close(port_out)
    _watch(ranks, parent)
    del store


def _watch(ranks: dict[int, int], parent: Connection) -> None:
    """Reports every rank's end, and passes on to those that are left the signals it is sent."""
    while ranks:
        for rank, pid in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[rank]
                parent.send(("ended", rank, os.waitstatus_to_exitcode(status)))
        # Not once all have ended: what comes then is the next order.
        if ranks and parent.poll(_POLL_SECONDS):
            number = _receive(parent)
            for pid in ranks.values():
                os.kill(pid, int(str(number)))


def _be_rank(order: Order, rank: int, port_in: int) -> NoReturn:
    """What a rank does; it leaves by an exception that passes through all of the agent to the interpreter's end."""
    _redirect(order.directory / f"rank{rank}.log", order.directory / f"rank{rank}.stacks")
    faulthandler.dump_traceback_later(order.deadline_seconds, exit=True)
    port = os.read(port_in, _PORT_DIGITS).decode()
    os.close(port_in)
    os.environ.update(_torchrun_environment(order, rank, port.strip()))
    from countoff.demo.job import train

    train(order.data, order.directory, mended=order.mended, guarded=order.guarded)
    sys.exit(0)


def _redirect(log: Path, stacks: Path) -> None:
    """Sends what this process prints to one file, and its stacks, on SIGUSR1, to another."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=os.open(stacks, os.O_WRONLY | os.O_CREAT, 0o600), all_threads=True)


def _torchrun_environment(order: Order, rank: int, port: str) -> Mapping[str, str]:
    ranks = str(order.data.ranks)
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
        "TORCHELASTIC_RUN_ID": order.directory.name,
        "TORCHELASTIC_ERROR_FILE": str(order.directory / f"rank{rank}-error.json"),
    }
