"""A plain DDP loop for comparing tools: its model and loaders, and what each tool adds to it.

Imports only torch, countoff and, if its heartbeat is measured, nvidia-resiliency-ext.
"""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff.torch import Countoff

NOTHING, COUNTOFF, JOIN = "nothing", "countoff", "`Join`"
COUNTERS, HEARTBEAT = "`all_reduce` of step counters", "nvidia-resiliency-ext's heartbeat"
DETAIL = "`TORCH_DISTRIBUTED_DEBUG=DETAIL`"
WIDTH = 128


class Batches:
    """A loader of `count` equal batches, made once; calls `ended` after the last one."""

    def __init__(self, count: int, ended: Callable[[], object] = lambda: None) -> None:
        self._count = count
        self._ended = ended
        self._batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._count):
            yield self._batch
        self._ended()


@dataclass
class Training:
    """The model, optimizer and counters of one rank."""

    rank: int
    world_size: int
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    batches: int = 0
    steps: int = 0

    def backward(self, batch: torch.Tensor) -> None:
        self.batches += 1
        self.model(batch).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1


def begin(timeout_seconds: float) -> Training:
    """Makes the process group, with this timeout, and the model."""
    # torch read its debug level at import, before this rank got its environment.
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Training(dist.get_rank(), dist.get_world_size(), model, optimizer)


@dataclass(frozen=True)
class Equipment:
    """What a loop needs for a tool.

    Attributes:
        after_batch: What the loop must call after every batch.
        train: Returns what the loop iterates for a pass over the train loader.
        evaluate: Returns what it iterates for one over the evaluation loader.
        countoff: countoff's object, if that is the tool.
    """

    after_batch: Callable[[], object]
    train: Callable[[Batches], Iterable[torch.Tensor]]
    evaluate: Callable[[Batches], Iterable[torch.Tensor]]
    countoff: Countoff | None = None


@contextlib.contextmanager
def equipped(tool: str, training: Training, send_heartbeat: Callable[[], None]) -> Iterator[Equipment]:
    """Adds a tool to the loop in the block.

    Args:
        tool: Name of the tool.
        training: The training that it observes.
        send_heartbeat: What `monitored` yields.
    """
    after_batch = {COUNTERS: lambda: compare_counters(training), HEARTBEAT: send_heartbeat}.get(tool, _nothing)
    if tool == COUNTOFF:
        with Countoff(optimizer=training.optimizer, uneven_eval="raise") as countoff:
            yield Equipment(after_batch, countoff.train, countoff.eval, countoff)
        return
    joined = training.model.join(throw_on_early_termination=True) if tool == JOIN else contextlib.nullcontext()
    with joined:
        yield Equipment(after_batch, iter, iter)


def compare_counters(training: Training) -> None:
    """Sums the counters over all ranks; raises unless the sum is world_size times this rank's own. Collective."""
    own = torch.tensor([training.batches, training.steps])
    total = own.clone()
    dist.all_reduce(total)
    if not torch.equal(total, own * training.world_size):
        raise RuntimeError(f"counters {own.tolist()} here, {total.tolist()} over all ranks")


@contextlib.contextmanager
def monitored(tools: Sequence[str], timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Starts the monitor process of a rank, if the heartbeat is among the tools; yields what sends a heartbeat.

    Must come before the process group: the monitor would inherit the group's sockets and keep them open after the rank
    has died.

    Raises:
        ImportError: If nvidia-resiliency-ext is not installed.
    """
    if HEARTBEAT not in tools:
        yield _nothing
        return
    from nvidia_resiliency_ext import fault_tolerance  # pyright: ignore[reportMissingImports]  (optional)

    settings = fault_tolerance.FaultToleranceConfig(
        initial_rank_heartbeat_timeout=timeout_seconds, rank_heartbeat_timeout=timeout_seconds
    )
    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory) / "monitor")
        os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = socket
        monitor = fault_tolerance.RankMonitorServer.run_in_subprocess(
            settings, socket, mp_ctx=multiprocessing.get_context("fork")
        )
        client = fault_tolerance.RankMonitorClient()
        client.init_workload_monitoring()
        try:
            yield client.send_heartbeat
            client.shutdown_workload_monitoring()
        finally:
            monitor.terminate()


def _nothing() -> None:
    """Does nothing: the loop need not call this tool."""
