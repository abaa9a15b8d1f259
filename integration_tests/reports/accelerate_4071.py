"""`skip_first_batches` makes a loader that begins with epoch 0: a run resumed in epoch 1 reads the order of epoch 0."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from countoff.accelerate import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = net()
    loader = DataLoader(rows(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    with Countoff(accelerator) as countoff:
        if stage == 1:
            accelerator.load_state(str(folder))
        for epoch in range(stage, 3):
            loader.set_epoch(epoch)
            active: Any = loader
            if stage == 1 and epoch == 1:
                active = accelerator.skip_first_batches(loader, 8)
                if wrong:
                    active.iteration = 0  # as in the release of the report
            for number, batch in enumerate(countoff.train(active, epoch=epoch), 1):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if (stage, epoch, number) == (0, 1, 8):
                    accelerator.save_state(str(folder))
                    return
