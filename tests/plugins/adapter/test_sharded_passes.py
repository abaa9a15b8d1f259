"""Forward passes of models in shards: which models are such, and which passes count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torch", minversion="2.6", reason="fully_shard is in torch.distributed.fsdp since torch 2.6")

from torch.distributed.fsdp import fully_shard

from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.sharded_passes import _issued, count_sharded_passes, sharded_parts, shards_group
from countoff._torch.messages import MESSAGES
from countoff.core import Settings


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """One rank with a group of its own; the fit takes it for both of its ranks."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(*shape: int, units: int = 2) -> Any:
    """Two layers in shards; as one unit, FSDP2 keeps gathered what a pass has gathered, until a backward pass."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", shape or (1,), mesh_dim_names=("replicate", "shard")[-max(1, len(shape)) :])
    if units == 2:
        fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def test_a_model_whose_shards_the_given_ranks_hold_is_one() -> None:
    assert shards_group(sharded(), [0]) is not None
    assert shards_group(torch.compile(sharded(), backend="eager"), [0]) is not None


def test_other_models_are_none() -> None:
    """One without shards, one of other ranks, one with replicas of its shards, and what is no module."""
    assert shards_group(torch.nn.Linear(4, 4), [0]) is None
    assert shards_group(sharded(), [0, 1]) is None
    assert shards_group(sharded(1, 1), [0]) is None
    assert shards_group("net", [0]) is None


def test_the_outermost_sharded_modules_are_the_parts_of_a_model() -> None:
    """As in a wrapper that holds the model twice; torch.compile's wrapper is the part itself."""
    one, other = sharded(), sharded()
    wrapper = torch.nn.Module()
    wrapper.model, wrapper.again, wrapper.other = torch.nn.Sequential(one), one[0], other
    compiled: Any = torch.compile(one, backend="eager")
    assert sharded_parts(wrapper) == [one, other]
    assert sharded_parts(one) == [one]
    assert sharded_parts(torch.nn.Sequential(compiled)) == [compiled]
    assert sharded_parts(torch.nn.Linear(4, 4)) == sharded_parts("net") == []


@pytest.fixture
def one_rank_gathers() -> None:
    """Newer versions of torch gather nothing where one rank holds all shards; the integration tests have two ranks."""
    net, group = sharded(), dist.group.WORLD
    before = _issued(group)
    net(torch.ones(2, 4))
    if _issued(group) == before:
        pytest.skip("this version of torch gathers nothing on one rank")


class Watched:
    """A fit of a model, with what its guard is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *models: Any) -> None:
        monkeypatch.setattr("countoff._adapter.sharded_passes.dist.get_process_group_ranks", lambda _: [0, 1])
        self.fit = Fit(Settings(), MESSAGES, OwnRank(0, 2, 0, 2), models=lambda: models)
        self.end = count_sharded_passes(self.fit)

    @property
    def passes(self) -> int:
        return self.fit.guard.span.passes


@pytest.mark.usefixtures("one_rank_gathers")
def test_passes_that_gather_count_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    watched = Watched(monkeypatch, net)
    net(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        net(torch.ones(2, 4))
    net.eval()(torch.ones(2, 4))
    assert (watched.passes, watched.fit.guard.state.micro_batches.sharded) == (3, True)
    watched.end()
    net(torch.ones(2, 4))
    assert watched.passes == 3


@pytest.mark.usefixtures("one_rank_gathers")
def test_passes_of_a_sharded_part_count_where_the_framework_holds_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    watched = Watched(monkeypatch, torch.nn.ModuleDict({"net": net, "head": torch.nn.Linear(4, 4)}))
    net(torch.ones(2, 4))
    watched.end()
    net(torch.ones(2, 4))
    assert watched.passes == 1


@pytest.mark.usefixtures("one_rank_gathers")
def test_passes_that_gather_nothing_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded(units=1)
    watched = Watched(monkeypatch, net)
    for _ in range(3):
        net(torch.ones(2, 4))
    assert watched.passes == 1


def test_passes_that_raise_or_are_left_out_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    watched = Watched(monkeypatch, net)
    with pytest.raises(RuntimeError):
        net(torch.ones(2, 3))
    watched.fit.trains_apart = True
    net(torch.ones(2, 4))
    assert (watched.passes, watched.fit.guard.state.micro_batches.running) == (0, False)


def test_nothing_is_counted_beside_a_model_without_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    watched = Watched(monkeypatch, net, torch.nn.Linear(4, 4))
    net(torch.ones(2, 4))
    assert not watched.fit.guard.state.micro_batches.sharded
