"""A batch sampler begins each epoch behind the samples before the checkpoint: later epochs have only their end."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from countoff.torch import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


class ConsumedBatches:
    """Batches of this rank, behind the samples that the run has read."""

    def __init__(self, samples: int, consumed: int, batch_size: int, wrong: bool) -> None:
        self._samples, self._consumed, self._batch_size, self._wrong = samples, consumed, batch_size, wrong

    def __len__(self) -> int:
        return self._samples // self._batch_size // dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        whole = self._batch_size * dist.get_world_size()
        first, mine = self._consumed % self._samples, dist.get_rank() * self._batch_size
        for start in range(first + mine, self._samples, whole):
            if not self._wrong:
                self._consumed += whole
            yield list(range(start, start + self._batch_size))


def train(wrong: bool, stage: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    dataset = rows()
    with Countoff(model=model, optimizer=optimizer, start_step=8 * stage) as countoff:
        consumed = 0
        if stage == 1:
            checkpoint = torch.load(folder / "last.pt", weights_only=False)
            model.load_state_dict(checkpoint["model"])
            countoff.load_state_dict(checkpoint["countoff"])
            consumed = checkpoint["consumed"]
        loader = DataLoader(dataset, batch_sampler=ConsumedBatches(len(dataset), consumed, 4, wrong))
        for epoch in range(3):
            done = 8 if stage == 1 and epoch == 0 else 0
            for number, batch in enumerate(countoff.train(loader, epoch=epoch, position=done), done + 1):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if (stage, epoch, number) == (0, 0, 8):
                    state = {"model": model.state_dict(), "countoff": countoff.state_dict(), "consumed": 8 * 4 * 2}
                    if dist.get_rank() == 0:
                        torch.save(state, folder / "last.pt")
                    return
