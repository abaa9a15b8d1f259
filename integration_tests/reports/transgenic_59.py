"""A resumed loop passes over the batches before the checkpoint, of a permutation that is drawn anew."""

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from countoff.accelerate import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


def train(wrong: bool, stage: int, folder: Path) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=not wrong)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    model = net()
    loader = DataLoader(rows(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    with Countoff(accelerator) as countoff:
        resume_step = 0
        if stage == 1:
            accelerator.load_state(str(folder))
            resume_step = 3
        for epoch in range(stage, 3):
            loader.set_epoch(epoch)
            for step, batch in enumerate(countoff.train(loader, epoch=epoch)):
                if epoch == 1 and step < resume_step:
                    continue
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if (stage, epoch, step) == (0, 1, 2):
                    accelerator.save_state(str(folder))
                    return
