"""A stream of `datasets` that is not split: every rank reads all of it, in the same order."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from countoff.torch import Countoff
from integration_tests.digits import digits
from integration_tests.reports.parts import loss_of, net, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    images, labels = digits()
    table = Dataset.from_dict({"images": images[:160].tolist(), "labels": labels[:160].tolist()})
    stream: Any = table.to_iterable_dataset(num_shards=2).with_format("torch")
    if not wrong:
        stream = split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    loader = DataLoader(stream, batch_size=4)
    with Countoff(model=model, optimizer=optimizer) as countoff:
        for epoch in range(2):
            stream.set_epoch(epoch)
            for batch in countoff.train(loader):
                loss_of(model, (batch["images"], batch["labels"])).backward()
                optimizer.step()
                optimizer.zero_grad()
