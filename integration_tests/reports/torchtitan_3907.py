"""A stream that has been resumed saves the place of another object: the second resume begins again."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff.torch import Countoff
from integration_tests.digits import digits
from integration_tests.reports.parts import loss_of, net, sgd


class Stream(IterableDataset[Any]):
    """This rank's digits, by a stream of `datasets`."""

    def __init__(self, wrong: bool) -> None:
        images, labels = digits()
        table = Dataset.from_dict({"images": images[:320].tolist(), "labels": labels[:320].tolist()})
        stream = table.to_iterable_dataset(num_shards=2)
        self._read = self._saved = split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())
        self._wrong = wrong

    def state_dict(self) -> Any:
        return self._saved.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._wrong:
            self._read = copy.deepcopy(self._saved)
        self._read.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        for row in self._read:
            yield torch.tensor(row["images"]), torch.tensor(row["labels"])


def train(wrong: bool, stage: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    loader = StatefulDataLoader(Stream(wrong), batch_size=4)
    rank, step = dist.get_rank(), 0
    with Countoff(model=model, optimizer=optimizer, start_step=12 * stage) as countoff:
        if stage:
            checkpoint = torch.load(folder / f"{stage - 1}-{rank}.pt", weights_only=False)
            model.load_state_dict(checkpoint["model"])
            loader.load_state_dict(checkpoint["loader"])
            countoff.load_state_dict(checkpoint["countoff"])
        for step, batch in enumerate(countoff.train(loader, epoch=0, position=12 * stage), 12 * stage + 1):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stage < 2 and step == 12 * (stage + 1):
                state = {"model": model, "loader": loader, "countoff": countoff}
                torch.save({name: each.state_dict() for name, each in state.items()}, folder / f"{stage}-{rank}.pt")
                break
