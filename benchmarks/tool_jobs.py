"""One plain DDP loop for the tools that are compared: its model and loaders, and what each tool adds to it.

Imports nothing but torch, countoff and, where it is asked for, nvidia-resiliency-ext.
"""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff.torch import Attached, attach

NOTHING, COUNTOFF, JOIN = "nothing", "countoff", "`Join`"
COUNTERS, HEARTBEAT = "`all_reduce` of step counters", "nvidia-resiliency-ext's heartbeat"
DETAIL = "`TORCH_DISTRIBUTED_DEBUG=DETAIL`"
WIDTH = 128


class Batches:
    """A loader of so many batches, all the same, which cost nothing to make; calls `ended` when it holds no more."""

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
    """What every loop needs, on this rank."""

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
    """Makes the process group, with its time-out, and the model."""
    # torch was imported before this rank got its environment.
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Training(dist.get_rank(), dist.get_world_size(), model, optimizer)


@contextlib.contextmanager
def equipped(
    tool: str,
    training: Training,
    train: Batches,
    evals: Batches | None = None,
    *,
    beat: Callable[[], None],
    attached: Callable[[Attached], object] = lambda handle: None,
) -> Iterator[Callable[[], None]]:
    """Adds a tool to the loop inside; yields what the loop has to call after every batch.

    Args:
        tool: Its name.
        training: The training that it watches.
        train: The loop's loader.
        evals: Its evaluation loader.
        beat: What `monitored` has yielded.
        attached: Called with countoff's handle.
    """
    if tool == COUNTOFF:
        with attach(train=train, eval=evals, optimizer=training.optimizer, uneven_eval="raise") as handle:
            attached(handle)
            yield _nothing
    elif tool == JOIN:
        with training.model.join(throw_on_early_termination=True):
            yield _nothing
    elif tool == COUNTERS:
        yield lambda: compare_counters(training)
    elif tool == HEARTBEAT:
        yield beat
    else:
        yield _nothing


def compare_counters(training: Training) -> None:
    """Sums all ranks' counters; equal ones are world_size times one's own."""
    own = torch.tensor([training.batches, training.steps])
    total = own.clone()
    dist.all_reduce(total)
    if not torch.equal(total, own * training.world_size):
        raise RuntimeError(f"counters {own.tolist()} here, {total.tolist()} over all ranks")


@contextlib.contextmanager
def monitored(tools: Sequence[str], patience_seconds: float) -> Iterator[Callable[[], None]]:
    """Starts the monitor process of a rank that is to send heartbeats; yields the client's beat.

    Before the process group is made: a child that has inherited its sockets would keep them open after its death.

    Raises:
        ImportError: If nvidia-resiliency-ext is not installed.
    """
    if HEARTBEAT not in tools:
        yield _nothing
        return
    from nvidia_resiliency_ext import fault_tolerance  # pyright: ignore[reportMissingImports]  (optional)

    settings = fault_tolerance.FaultToleranceConfig(
        initial_rank_heartbeat_timeout=patience_seconds, rank_heartbeat_timeout=patience_seconds
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
    """A tool that the loop need not call."""
