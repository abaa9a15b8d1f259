"""A training script for torchrun in which one rank is killed by SIGKILL: `killed_script.py ADAPTER MOMENT RANK`.

Each adapter's job is as people write it. Imports what the adapter needs, and no more.
"""

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from integration_tests.digits import BATCH_SIZE, digits, own_rank

MOMENTS = ("batch", "evaluation", "loader", "start")
BATCHES, AT = 400, 9
"""Batches of a rank's train epoch, and the one in which the rank is killed. The job is far from its end then."""
_LATE_SECONDS = 20.0
_OWN = os.getpid()


def kill() -> None:
    """Kills this rank, from whichever of its processes this is called in."""
    os.kill(_OWN, signal.SIGKILL)
    time.sleep(60)


class Doom:
    """When this rank is killed, if it is the one."""

    def __init__(self, moment: str, rank: int) -> None:
        self.moment = moment
        self.mine = rank == own_rank()
        self.workers = 1 if moment == "loader" else 0

    def strike(self, moment: str, number: int) -> None:
        """Kills this rank, if that is due."""
        if self.mine and moment == self.moment and number == AT:
            kill()

    def before_fit(self) -> None:
        """Has this rank killed while it counts off: the last rank is late."""
        if self.moment != "start":
            return
        if self.mine:
            threading.Thread(target=_kill_when_counting_off, daemon=True).start()
        elif own_rank() == dist.get_world_size() - 1 and dist.get_world_size() > 2:
            time.sleep(_LATE_SECONDS)

    def data(self, moment: str, batches: int) -> "Digits":
        """A dataset for so many batches on each rank."""
        return Digits(self, moment, batches * BATCH_SIZE * int(os.environ["WORLD_SIZE"]))


def _kill_when_counting_off() -> None:
    """Kills this process once all ranks have told that they take part, but for the last one of three or more."""
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]
    ranks = range(dist.get_world_size() if dist.get_world_size() == 2 else dist.get_world_size() - 1)
    place = json.loads(store.get("countoff/0"))  # waits until rank 0 has published it
    client: Any = TCPStore(place["host"], place["port"], is_master=False, wait_for_workers=False)
    while not client.check([f"countoff/{place['nonce']}/0/joined/{rank}" for rank in ranks]):
        time.sleep(0.01)
    kill()


class Digits(Dataset[Any]):
    """So many digits; to read one of them may kill this rank."""

    def __init__(self, doom: Doom, moment: str, samples: int) -> None:
        self._doom, self._moment, self._samples, self._read = doom, moment, samples, 0
        self._images, self._labels = digits()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        if not self._read % BATCH_SIZE:
            self._doom.strike(self._moment, self._read // BATCH_SIZE)
        return self._images[index % len(self._images)], self._labels[index % len(self._images)]


def loaders(doom: Doom, *, sharded: bool) -> tuple[Any, Any]:
    """A train loader and an evaluation loader."""
    made: list[Any] = []
    for data, workers in (
        (doom.data("loader", 20 if doom.moment == "evaluation" else BATCHES), doom.workers),
        (doom.data("evaluation", BATCHES), 0),
    ):
        sampler = DistributedSampler(data) if sharded else None
        made.append(DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=workers))
    return made[0], made[1]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def run_torch(doom: Doom) -> None:
    from countoff.torch import Countoff

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, evaluation = loaders(doom, sharded=True)
    doom.before_fit()
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(train), start=1):
        doom.strike("batch", number)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in countoff.eval(evaluation):
        with torch.no_grad():
            dist.all_reduce(loss_of(model.module, batch))


def run_accelerate(doom: Doom) -> None:
    from accelerate import Accelerator

    from countoff.accelerate import Countoff

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, *loaders(doom, sharded=False))
    doom.before_fit()
    countoff = Countoff(accelerator)
    for number, batch in enumerate(countoff.train(train), start=1):
        doom.strike("batch", number)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    for batch in countoff.eval(evaluation):
        with torch.no_grad():
            accelerator.gather(loss_of(accelerator.unwrap_model(model), batch))


def run_transformers(doom: Doom) -> None:
    from transformers import TrainerCallback

    from countoff.transformers import Countoff
    from integration_tests import trainer_jobs

    class Strikes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            doom.strike("batch", state.global_step)

    train, evaluation = (each.dataset for each in loaders(doom, sharded=False))
    arguments = trainer_jobs.TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=BATCH_SIZE,
        dataloader_num_workers=doom.workers,
        num_train_epochs=1,
        eval_strategy="epoch",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    doom.before_fit()
    trainer_jobs.Trainer(
        model=trainer_jobs.Linear(),
        args=arguments,
        data_collator=trainer_jobs.collate,
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=[Countoff(), Strikes()],
    ).train()


def run_lightning(doom: Doom) -> None:
    import lightning.pytorch as pl

    from integration_tests import lightning_jobs

    class Strikes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            doom.strike("batch", batch_idx)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            doom.before_fit()

    os.environ.setdefault("GROUP_WORLD_SIZE", "1")
    lightning_jobs.quiet()
    train, evaluation = loaders(doom, sharded=False)
    lightning_jobs.Job().make_trainer(max_epochs=1, callbacks=[Strikes()]).fit(
        lightning_jobs.Classifier(eval_sync="step"), train, evaluation
    )


def run_fabric(doom: Doom) -> None:
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(64, 10))
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    train, evaluation = fabric.setup_dataloaders(*loaders(doom, sharded=False))
    doom.before_fit()
    countoff = Countoff(fabric, optimizer=optimizer)
    for number, batch in enumerate(countoff.train(train), start=1):
        doom.strike("batch", number)
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    for batch in countoff.eval(evaluation):
        with torch.no_grad():
            fabric.all_reduce(loss_of(model, batch))


def run_composer(doom: Doom) -> None:
    from composer.core import Callback, Evaluator

    from integration_tests.composer_jobs import Job

    class Strikes(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            doom.strike("batch", int(state.timestamp.batch))

    dist.init_process_group("gloo")
    train, evaluation = loaders(doom, sharded=True)
    trainer = Job().make_trainer(
        train_dataloader=train,
        eval_dataloader=Evaluator(label="digits", dataloader=evaluation),
        eval_interval="1ep",
        max_duration="1ep",
        callbacks=[Strikes()],
    )
    doom.before_fit()
    trainer.fit()
    trainer.close()


RUNS: dict[str, Callable[[Doom], None]] = {
    "torch": run_torch,
    "accelerate": run_accelerate,
    "transformers": run_transformers,
    "lightning": run_lightning,
    "fabric": run_fabric,
    "composer": run_composer,
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", NODE_RANK="0")
    RUNS[sys.argv[1]](Doom(sys.argv[2], int(sys.argv[3])))
