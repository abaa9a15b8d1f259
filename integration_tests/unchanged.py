"""Programs that do not mention countoff, one for each framework: `python unchanged.py FRAMEWORK DIRECTORY`.

Each trains on digits twice, in one process: first on ranks that are even, then with the last rank a batch short. It
prints what the model weighs after each fit that ends.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset

BATCH_SIZE, BATCHES = 8, 6
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Stream(IterableDataset[Any]):
    """Some of the digits.

    Args:
        batches: How many batches of them.
        rank: The share that they are from.
        ranks: Shares into which the digits are cut.
    """

    def __init__(self, batches: int, rank: int = RANK, ranks: int = RANKS) -> None:
        self._samples = batches * BATCH_SIZE
        images, labels = load_digits(return_X_y=True)
        self._images = torch.tensor(images[rank::ranks], dtype=torch.float32) / 16
        self._labels = torch.tensor(labels[rank::ranks])

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self._images[: self._samples], self._labels[: self._samples], strict=True)


def loader(*, short: bool) -> Any:
    return DataLoader(Stream(BATCHES - (short and RANK == RANKS - 1)), batch_size=BATCH_SIZE)


def linear() -> torch.nn.Linear:
    torch.manual_seed(7)
    return torch.nn.Linear(64, 10)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def weigh(model: torch.nn.Module) -> None:
    values = torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().tobytes()
    print(f"rank {RANK} weighs {hashlib.sha256(values).hexdigest()[:16]}", flush=True)


def with_lightning(directory: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss_of(self.layer, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for short in (False, True):
        model = Model()
        trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp",
            max_epochs=2,
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader(short=short))
        weigh(model)


def with_fabric(directory: str) -> None:
    """A loop of its own. It steps after every fourth batch, so a short rank makes as many steps as the others."""
    del directory
    from lightning.fabric import Fabric

    for short in (False, True):
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        fabric.launch()
        module = linear()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        stream = Stream(14 - (short and RANK == RANKS - 1))
        for _ in range(2):
            for number, batch in enumerate(fabric.setup_dataloaders(DataLoader(stream, batch_size=BATCH_SIZE)), 1):
                with fabric.no_backward_sync(model, enabled=number % 4 != 0):
                    fabric.backward(loss_of(model, batch))
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.zero_grad()
        weigh(module)


def with_transformers(directory: str) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.layer, (images, labels))}

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"images": torch.stack(images), "labels": torch.stack(labels)}

    for short in (False, True):
        model = Model()
        batches = BATCHES - (short and RANK == RANKS - 1)
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=2 * BATCHES,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            accelerator_config={"dispatch_batches": False},
        )
        # Accelerate deals out one stream, the same on all ranks.
        stream = Stream(RANKS * batches, rank=0, ranks=1)
        Trainer(model, arguments, train_dataset=stream, data_collator=collate).train()
        weigh(model)


def with_composer(directory: str) -> None:
    del directory
    from composer import ComposerModel, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, batch: Any) -> Any:
            return loss_of(self.layer, batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            del batch
            return outputs

    for short in (False, True):
        model = Model()
        trainer = Trainer(
            model=model,
            train_dataloader=loader(short=short),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration=f"{2 * BATCHES}ba",
            device="cpu",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
        weigh(model)


def with_accelerate(directory: str) -> None:
    """It steps after every second batch and at the end, so a short rank makes as many steps as the others."""
    del directory
    from accelerate import Accelerator, DataLoaderConfiguration

    sharding = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=sharding)
    for short in (False, True):
        module = linear()
        # Accelerate deals out one stream, the same on all ranks.
        stream = Stream(RANKS * (BATCHES - (short and RANK == RANKS - 1)), rank=0, ranks=1)
        model, optimizer, batches = accelerator.prepare(
            module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(stream, batch_size=BATCH_SIZE)
        )
        for _ in range(2):
            for batch in batches:
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
        weigh(module)


def with_torch(directory: str) -> None:
    """Steps as with Fabric."""
    del directory
    torch.distributed.init_process_group("gloo")
    for short in (False, True):
        module = linear()
        model = torch.nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = Stream(14 - (short and RANK == RANKS - 1))
        for _ in range(2):
            for number, batch in enumerate(DataLoader(stream, batch_size=BATCH_SIZE), 1):
                if number % 4:
                    with model.no_sync():
                        loss_of(model, batch).backward()
                else:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.zero_grad()
        weigh(module)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[f"with_{sys.argv[1]}"](sys.argv[2])
