"""Each rank has a seed of its own, and splits the data by it: rows that one rank validates on train another."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, random_split

from countoff.accelerate import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = net()
    set_seed(1234 + 12345 * accelerator.process_index)
    split = torch.default_generator if wrong else torch.Generator().manual_seed(1234)
    train_rows, val_rows = random_split(rows(200), [160, 40], generator=split)
    train_loader = DataLoader(train_rows, batch_size=4, shuffle=True)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, sgd(model), train_loader, DataLoader(val_rows, batch_size=4)
    )
    with Countoff(accelerator) as countoff:
        for _ in range(2):
            for batch in countoff.train(train_loader):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for batch in countoff.eval(val_loader):
                    loss_of(model, batch)
