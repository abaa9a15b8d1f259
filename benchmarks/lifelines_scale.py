"""Measures what the lifelines of a large job cost rank 0: its sockets, and its processor time.

Real: rank 0's `Lifelines`, the store, and one TCP connection per other host, from one process that only greets. Rank 0
makes no other use of a lifeline than to look, ten times a second, whether it has broken.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from benchmarks.results import Table, progress
from benchmarks.simulated import PREFIX, RANKS_PER_HOST
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.session.liveness.lifelines import GREETING, Lifelines
from countoff.core.session.store.channel import Channel
from countoff.core.session.threads.watchdog import LOOK_SECONDS

SIZES = 64, 512, 4096
_LOOKS = 500
_SECONDS = 60.0


def greet(orders: Connection) -> None:
    """Connects the first rank of each other host to rank 0, and holds the connections until the order's end."""
    port, nonce, ranks = orders.recv()
    ends: list[socket.socket] = []
    for rank in ranks:
        ends.append(socket.create_connection(("127.0.0.1", port)))
        ends[-1].sendall(GREETING.pack(nonce, rank))
    orders.send(len(ends))
    orders.recv()


def measure(world_size: int) -> dict[str, Any]:
    """Lets all hosts greet rank 0, and measures what that costs it, and what looking at them costs.

    Raises:
        TimeoutError: If not all have greeted it within a minute.
    """
    progress(f"lifelines: {world_size} ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = Channel("127.0.0.1", store.port, PREFIX)
    lifelines = Lifelines(0, range(world_size), 15.0, Heartbeats(0, range(world_size)))
    others = range(RANKS_PER_HOST, world_size, RANKS_PER_HOST)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=greet, args=(there,))
    process.start()
    before = descriptors()
    try:
        lifelines.open(channel)
        assert lifelines.hub is not None
        received = 0.0
        here.send((lifelines.hub.port, lifelines.hub.nonce, list(others)))
        deadline = time.monotonic() + _SECONDS
        while len(lifelines.sockets) < len(others):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(lifelines.sockets)} of {len(others)} hosts have greeted rank 0")
            received += cost_of(lifelines, 1)
            time.sleep(LOOK_SECONDS / 20)
        looks = cost_of(lifelines, _LOOKS)
        return {
            "ranks": world_size,
            "hosts": len(others) + 1,
            "sockets of rank 0": descriptors() - before - 1,  # one is the instance of epoll
            "CPU to receive all, ms": received * 1e3,
            "CPU of a look, µs": looks / _LOOKS * 1e6,
            "CPU of looks per second, µs": looks / _LOOKS / LOOK_SECONDS * 1e6,
        }
    finally:
        lifelines.close()
        process.kill()
        process.join()


def cost_of(lifelines: Lifelines, looks: int) -> float:
    """Processor time of so many looks, in seconds."""
    began = time.thread_time()
    for _ in range(looks):
        lifelines.poll()
    return time.thread_time() - began


def descriptors() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def tables(quick: bool, sizes: Sequence[int] = ()) -> Iterator[Table]:
    """Yields the costs of lifelines on rank 0."""
    sizes = sizes or (SIZES[:2] if quick else SIZES)
    yield Table(
        "Lifelines: what they cost rank 0",
        [measure(size) for size in sizes],
        [f"{RANKS_PER_HOST} ranks per host. Rank 0 looks at them every {LOOK_SECONDS:g} s. Nothing is sent meanwhile."],
    )
