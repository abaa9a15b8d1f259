"""`no_sync()` leaves out the wrong micro-batch: the first of four averages gradients, and the last does not."""

import contextlib
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from countoff.torch import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    dataset = rows()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    with Countoff(model=model, optimizer=optimizer) as countoff:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index, batch in enumerate(countoff.train(loader)):
                steps = (index + 1) % 4 == 0
                averages = index % 4 == 0 if wrong else steps
                with contextlib.nullcontext() if averages else model.no_sync():
                    (loss_of(model, batch) / 4).backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
