"""The loader that skips the batches before the checkpoint is used in all later epochs, too."""

from pathlib import Path

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
        resume_step = 0
        if stage == 1:
            accelerator.load_state(str(folder))
            resume_step = 8
        for epoch in range(3):
            loader.set_epoch(epoch)
            active = loader
            if resume_step and (wrong or epoch == 0):
                active = accelerator.skip_first_batches(loader, resume_step)
            for number, batch in enumerate(countoff.train(active, epoch=epoch), 1):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if (stage, epoch, number) == (0, 0, 8):
                    accelerator.save_state(str(folder))
                    return
