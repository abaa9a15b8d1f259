"""Plain loops over models in shards (FSDP), whose ranks may run different numbers of forward passes of them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.utils.checkpoint import checkpoint

from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.digits import own_rank, share_loader, weights
from integration_tests.loops import counted
from integration_tests.micro_jobs import wait_for_notice

BATCHES, PASSES = 10, 2


@dataclass(frozen=True)
class Sharded:
    """What a test varies.

    Attributes:
        kind: How the model is sharded: ``fsdp2``, ``fsdp1``; ``one unit``: FSDP2, which gathers the whole model once
            for several passes; ``hsdp``: replicas of one rank each; ``no_shard``: FSDP1 without shards.
        extra: Batches of train epoch 0, from 1, in which a rank runs one more pass without gradients, by rank.
        frozen: Whether only a layer behind the sharded model is trained, so that all its passes are without gradients.
        model: What else is done with the model: ``checkpoint``, ``compiled``. Empty: nothing.
        aside: How the additional passes are run: ``copy``: of a copy that is not sharded; ``uncounted``;
            ``synced``: in a loop of unequal length whose passes all ranks run; ``gathered``: the other ranks
            gather as much without a pass. Empty: of the model itself.
        options: Options of countoff; None: no countoff.
    """

    kind: str = "fsdp2"
    extra: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    frozen: bool = False
    model: str = ""
    aside: str = ""
    options: dict[str, Any] | None = field(default_factory=lambda: {"TICK_BATCHES": 2})

    @property
    def differs(self) -> bool:
        """Whether a warning is due."""
        uneven = len({tuple(self.extra.get(rank, ())) for rank in range(dist.get_world_size())}) > 1
        counted = self.aside in ("", "gathered") and self.kind in ("fsdp1", "fsdp2")
        return uneven and self.frozen and counted


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self, kind: str, *, outputs: int) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        again = self.kind == "checkpoint" and torch.is_grad_enabled()
        hidden: Any = checkpoint(self.first, images, use_reentrant=False) if again else self.first(images)
        return self.last(hidden.relu())


def shard(net: Any, kind: str) -> Any:
    """A model in shards."""
    if kind in ("fsdp1", "no_shard"):
        strategy = ShardingStrategy.FULL_SHARD if kind == "fsdp1" else ShardingStrategy.NO_SHARD
        more: Any = {"device_id": devices.own_device(), "sharding_strategy": strategy}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: NO_SHARD is deprecated
            net.first = FullyShardedDataParallel(net.first, **more)
            return FullyShardedDataParallel(net, **more)
    shape = (dist.get_world_size(), 1) if kind == "hsdp" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if kind != "one unit":
        fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(cases: Sequence[Sharded]) -> list[dict[str, Any]]:
    """Trains one case after the other; returns what each has found, its weights and the hooks that are left."""
    devices.join()
    return [_train(case) for case in cases]


def _train(case: Sharded) -> dict[str, Any]:
    from countoff.torch import Countoff

    torch.manual_seed(7)
    net = Net(case.model, outputs=32 if case.frozen else 10)
    head = torch.nn.Linear(32, 10) if case.frozen else torch.nn.Identity()
    apart = copy.deepcopy(net)
    sharded = shard(net, case.kind)
    model: Any = torch.compile(sharded, backend="eager") if case.model == "compiled" else sharded
    before = len(sharded._forward_hooks), len(sharded._forward_pre_hooks)
    optimizer = torch.optim.SGD([*(head if case.frozen else sharded).parameters()], lr=0.1)
    loader, countoff = share_loader(BATCHES), None
    if case.options is not None:
        countoff = Countoff(optimizer=optimizer, model=model, **taken(case.options))
    for epoch in range(2):
        for number, (images, labels) in enumerate(counted(countoff, loader), start=1):
            if countoff is not None and case.differs and (epoch, number) == (1, 2):
                wait_for_notice(countoff.guard)
            if not epoch and number in case.extra.get(own_rank(), ()):
                with _aside(case, countoff), torch.no_grad():
                    (apart if case.aside == "copy" else model)(images)
            if case.aside == "synced":
                _generate(model, images, length=number % 3 + own_rank())
            with torch.set_grad_enabled(not case.frozen):
                outputs = torch.stack([model(images) for _ in range(PASSES)])
            torch.nn.functional.cross_entropy(head(outputs.sum(0)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [] if countoff is None else [notice.sentence for notice in countoff.guard.notices]
    if countoff is not None:
        countoff.close()
    kept = weights(head) if case.frozen else [each.sum().item() for each in _local(sharded)]
    after = len(sharded._forward_hooks), len(sharded._forward_pre_hooks)
    return {"said": said, "weights": kept, "hooks": after != before}


def _local(model: Any) -> Iterator[torch.Tensor]:
    """What this rank holds of each parameter."""
    for each in model.parameters():
        yield each.to_local() if hasattr(each, "to_local") else each.detach()


def _aside(case: Sharded, countoff: Any) -> contextlib.AbstractContextManager[Any]:
    return countoff.uncounted() if case.aside == "uncounted" and countoff is not None else contextlib.nullcontext()


def _generate(model: Any, images: torch.Tensor, length: int) -> None:
    """As `generate(synced_gpus=True)`: a rank that has ended runs passes on, until all have."""
    done = 0
    while True:
        left = torch.tensor(float(done < length))
        dist.all_reduce(left)
        if not left:
            return
        with torch.no_grad():
            model(images)
        done += 1


def hang(place: str, kind: str) -> None:
    """Rank 1 runs a pass without gradients alone in batch 7, and the job hangs.

    Args:
        place: Where in the batch: ``before`` its training, or ``after`` its backward pass.
        kind: As for `Sharded`.
    """
    from countoff.torch import Countoff

    devices.join()
    torch.manual_seed(7)
    model = shard(Net("", outputs=10), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = share_loader(BATCHES)
    countoff = Countoff(optimizer=optimizer, model=model, stall_seconds=3)
    for number, (images, labels) in enumerate(countoff.train(loader), start=1):
        for at in ("before", "after"):
            with torch.no_grad():
                for _ in range(1 + (number == 7 and own_rank() == 1 and at == place)):
                    model(images)
            if at == "before":
                torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
