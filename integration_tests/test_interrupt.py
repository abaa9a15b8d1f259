"""A rank that is blocked inside a gloo collective raises there, and nothing but the collective is cut off."""

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from countoff.core.ending.gloo import cut_collectives
from countoff.core.ending.shutdown import EXIT_CODE
from countoff.torch import Countoff
from integration_tests.constants import put
from integration_tests.digits import own_rank
from integration_tests.loops import even_loader, model_and_optimizer
from integration_tests.output import assert_named

GRACE_SECONDS = 0.5
LONG = timedelta(seconds=40)


@contextlib.contextmanager
def bystanders() -> Iterator[dict[str, Any]]:
    """A job's other connections: to a server of asyncio's in this process, and to a store of its own."""
    place: dict[str, Any] = {}
    ready = threading.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            place.update(port=server.sockets[0].getsockname()[1], loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await place["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    ready.wait(10)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=10) as client:
        yield {"client": client, "store": store}
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join(10)


def answers(others: dict[str, Any]) -> list[str]:
    others["client"].sendall(b"still here\n")
    others["store"].set("key", "still here")
    return [others["client"].makefile().readline().strip(), others["store"].get("key").decode()]


def blocked_in(collective: str) -> None:
    """Rank 0 blocks in its fourth batch, in a collective that rank 1, which evaluates after its second, never joins."""
    dist.init_process_group("gloo")
    model, _ = model_and_optimizer()
    group = dist.new_group([0, 1])
    loader, evals = even_loader(), even_loader(80)
    # Rank 1 waits for rank 0's exception, which is not to end it: only rank 0 is to be reached in a collective.
    put(GRACE_SECONDS=GRACE_SECONDS if own_rank() == 0 else LONG.total_seconds())
    countoff = Countoff(uneven_eval="raise")
    with bystanders() as others:
        try:
            for number, (images, labels) in enumerate(countoff.train(loader), 1):
                if number == 2 and own_rank() == 1:
                    _store().wait(["blocking"], LONG)
                    for _ in countoff.eval(evals):
                        _store().wait(["raised"], LONG)
                if number == 4:
                    _store().set("blocking", "now")
                    if collective == "backward":
                        torch.nn.functional.cross_entropy(model(images), labels).backward()
                    elif collective == "barrier":
                        dist.barrier()
                    elif collective == "group":
                        dist.all_reduce(torch.ones(1), group=group)
                    else:
                        dist.all_gather_object([None, None], "rank 0")
        except Exception as error:
            print(type(error).__name__, answers(others), flush=True)
            _store().set("raised", "yes")
            raise


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "collective", ["backward", pytest.param("barrier", marks=pytest.mark.nightly), "group", "object"]
)
def test_a_blocked_rank_raises_and_its_other_connections_live(run_ranks, ranks, collective):
    """A rank blocked in a collective raises there, and its other sockets still work."""
    results = run_ranks(blocked_in, ranks, collective, expect=1, deadline_seconds=60)
    everything = "\n".join(map(str, results))
    assert "RuntimeError ['still here', 'still here']" in results[0].output, everything
    assert "UnevenBatches ['still here', 'still here']" in results[1].output, everything
    if sys.version_info >= (3, 11):
        assert "\ncountoff UnevenBatches: rank 1 began validation" in results[0].output.replace("[rank0]: ", ""), (
            everything
        )


def waits_for_a_lock() -> None:
    """Rank 0 is blocked where nothing reaches it."""
    dist.init_process_group("gloo")
    loader, evals = even_loader(), even_loader(80)
    put(GRACE_SECONDS=GRACE_SECONDS)
    countoff = Countoff(uneven_eval="raise")
    for number, _ in enumerate(countoff.train(loader), 1):
        if number == 2 and own_rank() == 1:
            _store().wait(["blocking"], LONG)
            for _ in countoff.eval(evals):
                pass
        if number == 4:
            _store().set("blocking", "now")
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


@pytest.mark.ranks(2)
def test_a_rank_blocked_outside_collectives_ends_too(run_ranks, ranks):
    """A rank that is blocked in a lock ends with countoff's own exit code."""
    results = run_ranks(waits_for_a_lock, ranks, expect=None, deadline_seconds=60, finalise=True)
    assert results[0].exit_code == EXIT_CODE, results[0]
    assert_named(results, "UnevenBatches", [0, 1], "rank 1 began validation after 2 train batches")


def cut_without_a_group() -> int:
    with bystanders() as others:
        cut = cut_collectives()
        assert answers(others) == ["still here", "still here"]
    return cut


def test_without_a_process_group_nothing_is_cut(run_ranks):
    """A process without a process group keeps all its connections."""
    assert run_ranks(cut_without_a_group, 1)[0].value == 0
