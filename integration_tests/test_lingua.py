"""Lingua's loop with its own arithmetic of ranks, on real ranks: whose data is read, and that it is counted.

Lingua is no package that can be installed; what is its own here (the mesh, the position along it, the reading of every
n-th line of a file, the loop) is written anew from what it does.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from countoff.core import DivergenceError
from countoff.lingua import Countoff
from integration_tests.constants import put
from integration_tests.harness import RankResult

RunRanks = Callable[..., list[RankResult]]
CHUNKS, LINES = 2, 64


def arguments(**changes: int) -> Any:
    sound = {"batch_size": 2, "seq_len": 8, "grad_acc_steps": 2, "steps": 4}
    numbers = {**sound, **changes}
    data = SimpleNamespace(batch_size=numbers["batch_size"], seq_len=numbers["seq_len"])
    return SimpleNamespace(data=data, grad_acc_steps=numbers["grad_acc_steps"], steps=numbers["steps"])


def dp_mesh(replicate: int, shard: int) -> Any:
    """Lingua's mesh: dp_shard is dropped where it is 1."""
    dims = {"dp_replicate": replicate, **({"dp_shard": shard} if shard > 1 else {})}
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def position(mesh: Any, *, wrong: bool) -> tuple[int, int]:
    """Lingua's lines for dp_rank and dp_degree, with the factor as it was or as it has to be."""
    rank, degree = mesh["dp_replicate"].get_local_rank(), mesh["dp_replicate"].size()
    if "dp_shard" in mesh.mesh_dim_names:
        factor = degree if wrong else mesh["dp_shard"].size()
        rank = rank * factor + mesh["dp_shard"].get_local_rank()
        degree *= mesh["dp_shard"].size()
    return rank, degree


def lines(dp_rank: int, dp_degree: int) -> Iterator[tuple[int, int]]:
    """The lines of one share, for ever: as many ranks per chunk as there are, each with every n-th line of it."""
    per_chunk = dp_degree // CHUNKS
    while True:
        yield from ((dp_rank // per_chunk, line) for line in range(dp_rank % per_chunk, LINES, per_chunk))


def batches(dp_rank: int, dp_degree: int, size: int) -> Iterator[list[tuple[int, int]]]:
    source = lines(dp_rank, dp_degree)
    while True:
        yield [next(source) for _ in range(size)]


def train(
    args: Any, mesh: Any, *, wrong: bool = False, stops_early: bool = False, **options: Any
) -> list[tuple[int, int]]:
    """Lingua's loop over optimizer steps; the lines that this rank read."""
    dp_rank, dp_degree = position(mesh, wrong=wrong)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    read: list[tuple[int, int]] = []
    step = acc_step = 0
    with contextlib.ExitStack() as stack:
        countoff = stack.enter_context(
            Countoff(args, mesh=mesh, dp_rank=dp_rank, dp_degree=dp_degree, optimizer=optimizer, **options)
        )
        loader = iter(countoff.train(batches(dp_rank, dp_degree, args.data.batch_size)))
        while step < args.steps and not (stops_early and step == args.steps // 2 and dist.get_rank() == 1):
            acc_step = (acc_step + 1) % args.grad_acc_steps
            read += next(loader)
            parameter.grad = torch.ones(1)
            dist.all_reduce(parameter.grad)
            if acc_step == 0:
                optimizer.step()
                step += 1
    return read


def train_on_every_mesh() -> dict[str, Any]:
    """What this rank read, or what was raised, on meshes of eight ranks, one fit after the other."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    two_by_four, four_by_two, eight = dp_mesh(2, 4), dp_mesh(4, 2), dp_mesh(8, 1)
    put(GRACE_SECONDS=900)  # the job goes on after a verdict, and must not be ended for it on a slow machine
    fits: dict[str, Callable[[], Any]] = {
        "right": lambda: train(arguments(), two_by_four),
        "by luck": lambda: train(arguments(), eight, wrong=True),
        "2 x 4": lambda: train(arguments(), two_by_four, wrong=True),
        "4 x 2": lambda: train(arguments(), four_by_two, wrong=True),
        "other steps": lambda: train(arguments(grad_acc_steps=1 + (dist.get_rank() == 5)), eight),
    }
    for name, each in fits.items():
        try:
            found[name] = each()
        except DivergenceError as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.ranks(8)
def test_linguas_ranks_read_each_line_once_or_are_named(run_ranks: RunRanks, ranks: int) -> None:
    """Lingua's arithmetic of ranks reads each line once, or the wrong map of ranks is a verdict."""
    results = [result.value for result in run_ranks(train_on_every_mesh, ranks)]
    for name in ("right", "by luck"):
        read = [line for found in results for line in found[name]]
        # 4 steps × 2 batches × 2 lines on each of 8 ranks, none twice.
        assert len(read) == len(set(read)) == 4 * 2 * 2 * 8, name
    for found in results:
        assert (
            "RankMapError: 2 of 8 dp_ranks belong to no rank (6, 7): 25 % of the data is never read" in found["2 x 4"]
        )
        assert "RankMapError: 4 of 8 ranks have a dp_rank outside 0 to 7 (rank 4: 8, the largest 13)" in found["4 x 2"]
        assert (
            "PlanMismatch: before the first batch, gradient_accumulation_steps is 2 on rank 5" in found["other steps"]
        )


def stop_early() -> None:
    """Rank 1 leaves lingua's loop at half of its steps."""
    dist.init_process_group("gloo")
    train(arguments(steps=8), dp_mesh(2, 1), stops_early=True)


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_linguas_loop_is_named(run_ranks: RunRanks, ranks: int) -> None:
    """A rank that leaves lingua's loop early is named."""
    stayed = run_ranks(stop_early, ranks, expect=None)[0]
    assert stayed.exit_code != 0
    assert "UnevenBatches: rank 1 stopped after 8 batches of train epoch 0; rank 0 has begun batch 9" in stayed.output
