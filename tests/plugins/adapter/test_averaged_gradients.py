"""Optimizer steps by gradients that DistributedDataParallel has not averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff._adapter.averaged_gradients import watch_averaging
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.torch_facts import on_optimizer_step
from countoff._torch.words import WORDS
from countoff.core import Settings

NAMED = "optimizer step {} used gradients that were not averaged: the last backward pass before it ran under no_sync()."


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """One rank with a group of its own; the fit takes it for both of its ranks."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Watched:
    """A DDP and its optimizer, watched in a fit of two ranks, with what is warned of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, models: Sequence[Any] = (), world_size: int = 2) -> None:
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        listed = list(models) or [self.model]
        self.fit = Fit(Settings(), WORDS, OwnRank(0, world_size, 0, world_size), models=lambda: listed)
        self.warned: list[str] = []
        monkeypatch.setattr(self.fit.guard, "warn", lambda verdict: self.warned.append(verdict.sentence))
        counts = on_optimizer_step(lambda _: self._count())
        end = watch_averaging(self.fit)
        self.end = lambda: (end(), counts.remove())
        self.steps = 0
        monkeypatch.setattr(type(self.fit.guard), "steps", property(lambda _: self.steps))

    def _count(self) -> None:
        self.steps += 1

    def run(self, micro_batches: str, optimizer: Any = None) -> None:
        """Runs micro-batches and a step: `s` is averaged, `n` is not, `f` has no backward pass, `c` is a collective."""
        for each in micro_batches:
            with self.model.no_sync() if each in "nf" else contextlib.nullcontext():
                if each == "c":
                    dist.all_reduce(torch.ones(1))
                    continue
                loss = self.model(torch.ones(2, 4)).sum()
                if each != "f":
                    loss.backward()
        (optimizer or self.optimizer).step()
        self.optimizer.zero_grad()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(monkeypatch)
    for _ in range(2):  # with the second pass, DDP arranges its buckets by collectives of its own
        made.run("s")
    yield made
    made.end()
    assert not made.model._forward_hooks


def test_a_step_behind_a_pass_that_is_not_averaged_is_named(watched: Watched) -> None:
    watched.run("snn")
    assert watched.warned == []
    watched.run("snn")
    assert watched.warned == [NAMED.format(3)]


def test_a_step_without_any_averaged_pass_is_named_once_gradients_are_averaged(watched: Watched) -> None:
    """As the last step of an epoch whose batches do not fill it."""
    watched.run("nns")
    watched.run("n")
    watched.run("nns")
    assert watched.warned == [NAMED.format(4)]


@pytest.mark.parametrize(
    "steps",
    [
        ["nns", "nns", "s"],
        ["sf", "sf", "s"],  # a pass without a backward pass adds nothing
        ["n", "n", "nc", "s"],  # gradients are averaged by hand
        ["n", "n", "cn", "cs"],  # and weights
        ["n", "n", "n"],  # a program may average the weights later
    ],
)
def test_steps_that_are_averaged_or_may_be_are_not_named(watched: Watched, steps: list[str]) -> None:
    for each in steps:
        watched.run(each)
    assert watched.warned == []


def test_nothing_is_named_where_ranks_train_apart_on_purpose(watched: Watched) -> None:
    watched.fit.trains_apart = True
    watched.run("snn")
    watched.run("snn")
    assert watched.warned == []


def test_a_step_of_other_parameters_is_not_named(watched: Watched) -> None:
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    for _ in range(2):
        watched.run("snn", torch.optim.SGD([other], lr=0.1))
    assert watched.warned == []


def test_only_a_ddp_that_averages_as_torch_does_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    local: Any = DistributedDataParallel(torch.nn.Linear(4, 4))
    local.register_comm_hook(PostLocalSGDState(None, None, 1), post_localSGD_hook)
    bare = torch.nn.Linear(4, 4)
    compiled: Any = torch.compile(DistributedDataParallel(torch.nn.Linear(4, 4)), backend="eager")
    Watched(monkeypatch, models=[local, bare, compiled])
    alone = Watched(monkeypatch, world_size=1).model
    assert [len(each._forward_hooks) for each in (local, bare, compiled._orig_mod, alone)] == [0, 0, 0, 0]
