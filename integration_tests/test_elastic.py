"""Elastic runs: after a rank was killed, the next attempt counts off on what is there, and finishes."""

import os
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs

from countoff.torch import Countoff
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import tell
from integration_tests.loops import model_and_optimizer, train_on
from integration_tests.output import verdict_lines

BATCHES = 6
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun keeps one store for all attempts. gloo then reads addresses of the attempt before."""
SECOND = "second attempt: "
SCRIPT = f"""
import os, signal
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from countoff.torch import Countoff

rank, killed = int(os.environ["RANK"]), Path("killed")
first = not killed.exists()
if not first:
    print(f"{SECOND}rank {{rank}} begins", flush=True)
dist.init_process_group("gloo")
loader = DataLoader(TensorDataset(torch.ones({BATCHES}, 2)), batch_size=1)
countoff = Countoff()
for number, (batch,) in enumerate(countoff.train(loader), start=1):
    if first and rank == 1 and number == {BATCHES // 2}:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(batch)
print(f"rank {{rank}} trained on {{number}} batches", flush=True)
"""
"""Rank 1 of the first attempt dies in the middle of its epoch."""


def said_in_second_attempt(output: str) -> str:
    """What torchrun's second attempt printed; nothing of the first one lives when it begins."""
    return output.partition(SECOND)[2]


@pytest.mark.nightly
@pytest.mark.torchrun
def test_under_torchrun_a_second_attempt_finishes_without_a_word(run_torchrun):
    run = run_torchrun(SCRIPT, 2, options=["--max-restarts=1"], env=OWN_STORE)
    assert run.exit_code == 0, run.output
    said = said_in_second_attempt(run.output)
    assert all(f"rank {rank} trained on {BATCHES} batches" in said for rank in range(2)), run.output
    assert "countoff" not in said, run.output


@pytest.mark.torchrun
@pytest.mark.nightly
def test_under_torchrun_on_two_hosts_too(run_torchrun_on_hosts):
    """The host of the rank that was killed restarts it, the other host its own, and both attempts are the second."""
    runs = run_torchrun_on_hosts(SCRIPT, hosts=2, per_host=1, options=["--max-restarts=1"], env=OWN_STORE)
    assert [run.exit_code for run in runs] == [0, 0], runs
    for run in runs:
        said = said_in_second_attempt(run.output)
        assert f"trained on {BATCHES} batches" in said, run.output
        assert "countoff" not in said, run.output


class Watched(PrefixStore):
    """A store that tells the test once a rank has looked for where the others meet."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__("default_pg", store)
        self._watched: Any = PrefixStore("default_pg", store)

    def check(self, keys: list[str]) -> bool:
        found = self._watched.check(keys)
        if not found:
            tell("looked")
        return found

    def get(self, key: str) -> bytes:
        value = self._watched.get(key)
        tell("looked")
        return value


def make_group(attempt: int) -> TCPStore:
    """Makes the process group of one attempt.

    gloo gets keys of its own, which torchrun's shared store would owe it. All else is where torchrun has it.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    of_gloo = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=of_gloo, rank=own_rank(), world_size=int(os.environ["WORLD_SIZE"]))
    group = dist.distributed_c10d._get_default_group()
    groups = dist.distributed_c10d._world.pg_map
    groups[group] = (groups[group][0], Watched(store))
    return store


def train_until_killed() -> None:
    make_group(1)
    model, optimizer = model_and_optimizer()
    loader = share_loader(10_000)
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        train_on(model, optimizer, batch)
        if number == 3:
            tell("training")


def train_with_several_guards() -> list[int]:
    """Rank 0 counts off once another rank has looked. Four fits follow one another, with a pass each."""
    store = make_group(2)
    model, optimizer = model_and_optimizer()
    trained = []
    if own_rank() == 0:
        store.get("another rank has looked")
    for _ in range(2):
        fits = [Countoff(), Countoff()]  # the second one ends the first one where it begins
        for fit in fits:
            batches = 0
            for batch in fit.train(share_loader(BATCHES)):
                train_on(model, optimizer, batch)
                batches += 1
            trained.append(batches)
        for fit in fits:
            fit.close()
    return trained


@pytest.mark.parametrize("early", [1, 2])
def test_no_rank_meets_where_an_earlier_attempt_has_met(run_ranks, early):
    """In a store that lives on, a rank of the next attempt waits for its own rank 0, however early it comes."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port)}

    def kill(watch: Any) -> None:
        for rank in range(3):
            watch.wait_for(rank, "training")
        for rank in range(3):
            watch.kill(rank)

    def release_rank_0(watch: Any) -> None:
        watch.wait_for(early, "looked")
        store.set("another rank has looked", "")

    run_ranks(train_until_killed, 3, env=env, expect=None, while_running=kill)
    for result in run_ranks(train_with_several_guards, 3, env=env, while_running=release_rank_0):
        assert result.value == [BATCHES] * 4, result
        assert verdict_lines(result) == [], result
