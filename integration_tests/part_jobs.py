"""Trials that run beside each other on parts of a job's ranks, each with a process group of its own."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff.torch import Countoff
from integration_tests.digits import own_rank, share_loader, weights
from integration_tests.harness import tell
from integration_tests.loops import train_on

PARTS = ([0, 1], [2, 3])


def trials(batches: list[int], options: dict[str, Any], fate: str = "") -> list[Any]:
    """Two trials on each part, with as many batches per rank as given, and other epochs and rates in each part."""
    group, part = _own_group(), own_rank() // 2
    found: list[Any] = []
    for trial in range(2):
        model = _model(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + part))
        loader = share_loader(batches[own_rank()])
        with Countoff(optimizer=optimizer, model=model, group=group, weights_every=4, **options) as countoff:
            taken = 0
            for _ in range(1 + part):
                for batch in countoff.train(loader):
                    taken += 1
                    if fate == "killed" and own_rank() == 3 and taken == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    train_on(model, optimizer, batch)
        tell(f"trial {trial}")
        found.append((taken, countoff.progress()["countoff/dp_degree"], weights(model)))
    return found


def other_parts_later() -> list[int]:
    """A job of all ranks, then parts of three and one, then all ranks again: numbers of fits differ between ranks."""
    dist.init_process_group("gloo")
    three, rank = dist.new_group([1, 2, 3]), own_rank()
    return [_count(None), *([_count(three)] * 2 if rank else []), _count(None), _count(dist.group.WORLD)]


def resumes_with_another_rate() -> None:
    """Each part resumes from its own checkpoint; the second one with another learning rate."""
    group, part = _own_group(), own_rank() // 2
    record: dict[str, Any] = {}
    for rate in (0.1, 0.1 + 0.4 * part):
        model, loader = _model(group), share_loader(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with Countoff(optimizer=optimizer, group=group) as countoff:
            countoff.load_state_dict(record)
            for number, batch in enumerate(countoff.train(loader)):
                if record and number < 3:
                    continue  # trained on before the checkpoint
                train_on(model, optimizer, batch)
                if number == 2:
                    record = countoff.state_dict()
                    break


def asks_for_others() -> str:
    """`Countoff` on a rank that is not in the group; without countoff nothing is refused."""
    dist.init_process_group("gloo")
    first = dist.new_group([0])
    Countoff(group=first, enabled=False).close()
    try:
        Countoff(group=first).close()
        return "made"
    except ValueError as error:
        return str(error)


def _own_group() -> Any:
    dist.init_process_group("gloo")
    return [dist.new_group(ranks) for ranks in PARTS][own_rank() // 2]


def _model(group: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(64, 10), process_group=group)


def _count(group: Any) -> int:
    model, loader = _model(group), share_loader(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Countoff(optimizer=optimizer, group=group) as countoff:
        return sum(train_on(model, optimizer, batch) is None for batch in countoff.train(loader))
