"""A loader whose saved state is the end of an epoch is restored in the next one: that epoch has no batch."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff.torch import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    dataset = rows()
    sampler = DistributedSampler(dataset)
    loader = StatefulDataLoader(dataset, batch_size=4, sampler=sampler)
    rank = dist.get_rank()
    with Countoff(model=model, optimizer=optimizer, epochs=3, start_step=20 * stage) as countoff:
        if stage == 1:
            checkpoint = torch.load(folder / f"{rank}.pt", weights_only=False)
            model.load_state_dict(checkpoint["model"])
            countoff.load_state_dict(checkpoint["countoff"])
            if wrong:
                loader.load_state_dict(checkpoint["loader"])
        for epoch in range(stage, 3):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(countoff.train(loader, epoch=epoch), 1):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if (stage, epoch, number) == (0, 0, 20):
                    state = {"model": model, "loader": loader, "countoff": countoff}
                    torch.save({name: each.state_dict() for name, each in state.items()}, folder / f"{rank}.pt")
                    return
