"""Runs that end by themselves before their plan, and runs that end as they should, in every framework.

`run_all` runs each job of a framework in one process, with a line between what they print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainerCallback

from integration_tests import composer_jobs, devices, lightning_jobs, lightning_resumes, trainer_jobs
from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader
from integration_tests.lightning_jobs import Classifier, quiet
from integration_tests.loops import model_and_optimizer, train_on

BATCHES = 10
"""Of each of two ranks, in each epoch."""
SAMPLES = BATCHES * BATCH_SIZE * 2


class Digits(Dataset[Any]):
    """Digits that end, without a word, after so many samples of this rank: as where a file is read only once.

    Attributes:
        length: What `len` gives.
    """

    def __init__(self, batches: int | None = None) -> None:
        self._left = -1 if batches is None else batches * BATCH_SIZE
        self._images, self._labels = digits()
        self.length = SAMPLES

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._images[index], self._labels[index]


class Stream(IterableDataset[Any]):
    """A generator's samples: it can be read only once."""

    def __init__(self) -> None:
        self._samples = iter([(image, label) for image, label in zip(*digits(), strict=True)][:SAMPLES])

    def __iter__(self) -> Iterator[Any]:
        return self._samples


class Halves(DistributedSampler[Any]):
    """A sampler of the user's own, whose passes are halves of an epoch from the second one on."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, BATCHES // 2 * BATCH_SIZE
        return iter(list(super().__iter__())[start:])


def once(batches: int = BATCHES, **more: Any) -> DataLoader[Any]:
    """A loader that gives so many batches of one rank in all, whatever its length."""
    return DataLoader(Digits(batches), BATCH_SIZE, **more)


def stateful() -> Any:
    return StatefulDataLoader(Digits(), BATCH_SIZE)


# Lightning


class Calls(pl.Callback):
    """Calls a function with the Trainer at the begin of each train epoch."""

    def __init__(self, function: Callable[[pl.Trainer], object]) -> None:
        self._function = function

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._function(trainer)


class StopsAfter(pl.Callback):
    """Stops the Trainer after an epoch, as early stopping does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= trainer.current_epoch == self._epoch


class LeavesEpoch(Classifier):
    """Leaves each epoch after three batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Reloaded(Classifier):
    """Makes a shorter loader for its second epoch."""

    made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        data = Digits()
        data.length = SAMPLES // self.made
        return DataLoader(data, BATCH_SIZE)


def _fit(loader: Any, model: Any = None, checkpoint: str | None = None, **trainer: Any) -> None:
    made = lightning_jobs.Job().make_trainer(**trainer)
    made.fit(model or Classifier(), loader, ckpt_path=checkpoint)


def _fit_resumed(
    name: str, saves: dict[str, Any], step: int, *, epochs: int, make: Callable[[], Any] = stateful
) -> None:
    folder = f"{os.environ['SHARED_FOLDER']}/{name}"
    saves = {"dirpath": folder, "filename": "{step}", "save_top_k": -1, **saves}
    first = lightning_jobs.Job(options=None).make_trainer(
        callbacks=[ModelCheckpoint(**saves)], enable_checkpointing=True, max_epochs=1
    )
    first.fit(Classifier(), make())
    _fit(make(), checkpoint=f"{folder}/step={step}.ckpt", max_epochs=epochs)


def _shrink(trainer: pl.Trainer) -> None:
    loader: Any = trainer.train_dataloader
    loader.dataset.length = SAMPLES if trainer.current_epoch == 0 else SAMPLES // 2
    loader.sampler.num_samples = loader.dataset.length // 2
    loader.sampler.total_size = loader.dataset.length


def _set_epochs(trainer: pl.Trainer) -> None:
    trainer.fit_loop.max_epochs = 3


STEPS, EPOCH = {"every_n_train_steps": 5}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}
LIGHTNING: dict[str, Callable[[], None]] = {
    "read once": lambda: _fit(once()),
    "fewer in the second epoch": lambda: _fit(once(15)),
    "read once, accumulated": lambda: _fit(once(), accumulate_grad_batches=4),
    "read once, fewer steps than max_steps": lambda: _fit(once(), max_steps=15),
    "nothing at all": lambda: _fit(once(0)),
    "restored at the end of an epoch": lambda: _fit_resumed("end", STEPS, 10, epochs=3),
    "whole": lambda: _fit(stateful()),
    "resumed in mid-epoch": lambda: _fit_resumed("middle", STEPS, 5, epochs=3),
    "resumed after an epoch": lambda: _fit_resumed("after", EPOCH, 10, epochs=3),
    "resumed after the run": lambda: _fit_resumed("over", STEPS, 10, epochs=1),
    "resumed, plain loader": lambda: _fit_resumed("plain", STEPS, 5, epochs=2, make=lambda: DataLoader(Digits(), 4)),
    "max_steps": lambda: _fit(once(), max_steps=10),
    "should_stop": lambda: _fit(once(12), Classifier(stop_at=11)),
    "should_stop after a short epoch": lambda: _fit(once(15), max_epochs=3, callbacks=[StopsAfter(1)]),
    "max_time": lambda: _fit(once(), max_time={"seconds": 0}),
    "limit_train_batches": lambda: _fit(DataLoader(Digits(), BATCH_SIZE), limit_train_batches=3),
    "leaves its epochs": lambda: _fit(DataLoader(Digits(), BATCH_SIZE), LeavesEpoch()),
    "reloaded": lambda: _fit(None, Reloaded(), reload_dataloaders_every_n_epochs=1),
    "a dataset that shrinks": lambda: _fit(DataLoader(Digits(), BATCH_SIZE), callbacks=[Calls(_shrink)]),
    "a sampler of one's own": lambda: _fit(
        DataLoader(data := Digits(), BATCH_SIZE, sampler=Halves(data, 2, own_rank()))
    ),
    "epochs that a callback changes": lambda: _fit(once(), callbacks=[Calls(_set_epochs)]),
    "no length": lambda: _fit(share_loader(5)),
    "a generator": lambda: _fit(DataLoader(Stream(), BATCH_SIZE)),
    "restored by itself": lambda: _fit(lightning_resumes.Positioned()),
    "manual optimization": lambda: _fit(once(), lightning_resumes.Manual("", "step", 0.1, None)),
}


# transformers


class Told(TrainerCallback):
    """Asks the Trainer to stop, or changes its plan, at an event after so many epochs."""

    def __init__(self, event: str, epochs: float, **changes: Any) -> None:
        def act(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.epoch >= epochs:
                control.should_training_stop |= not changes
                vars(state).update(changes)

        setattr(self, event, act)


def _train(
    data: Any,
    *callbacks: TrainerCallback,
    before: bool = False,
    resume: str | None = None,
    first: bool = False,
    **args: Any,
) -> None:
    trainer, *_ = trainer_jobs.Job(samples=SAMPLES, options=None if first else {}).trainer(**args)
    trainer.train_dataset = data
    known = trainer.callback_handler.callbacks
    trainer.callback_handler.callbacks = [*callbacks, *known] if before else [*known, *callbacks]
    trainer.train(resume_from_checkpoint=resume)


def _train_resumed(name: str, step: int, data: Any) -> None:
    folder = f"{os.environ['SHARED_FOLDER']}/{name}"
    _train(Digits(), first=True, output_dir=folder, save_strategy="steps", save_steps=5)
    _train(data, resume=f"{folder}/checkpoint-{step}")


UNSHARED: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
TRANSFORMERS: dict[str, Callable[[], None]] = {
    "read once": lambda: _train(Digits(BATCHES)),
    "fewer in the second epoch": lambda: _train(Digits(15)),
    "nothing at all": lambda: _train(Digits(0)),
    "read once, max_steps": lambda: _train(Digits(BATCHES), max_steps=15),
    "nothing after a resume": lambda: _train_resumed("nothing", 10, Digits(0)),
    "whole": lambda: _train(Digits()),
    "resumed in mid-epoch": lambda: _train_resumed("middle", 5, Digits()),
    "resumed after the run": lambda: _train_resumed("over", 20, Digits(0)),
    "max_steps": lambda: _train(Digits(BATCHES), max_steps=10),
    "stopped by a callback": lambda: _train(Digits(15), Told("on_step_begin", 1)),
    "stopped after a short epoch": lambda: _train(Digits(15), Told("on_epoch_end", 1.2), num_train_epochs=3),
    "stopped before the epoch": lambda: _train(Digits(BATCHES), Told("on_epoch_begin", 1)),
    "the same by an earlier callback": lambda: _train(Digits(BATCHES), Told("on_epoch_begin", 1), before=True),
    "a plan that a callback changes": lambda: _train(Digits(BATCHES), Told("on_step_end", 0, max_steps=30)),
    "accumulated": lambda: _train(Digits(), gradient_accumulation_steps=4),
    "no length": lambda: _train(Stream(), max_steps=100, **UNSHARED),
}


# Composer


def _compose(data: Any, stop: tuple[str, int] = ("", 0), **trainer: Any) -> None:
    """Trains; calls stop_training() at an event after so many batches."""
    from composer.core import Callback

    class Then(Callback):
        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if (event.value, int(state.timestamp.batch)) == stop:
                state.stop_training()

    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False))
    made = composer_jobs.Job().make_trainer(train_dataloader=loader, callbacks=[Then()], **trainer)
    made.fit()
    made.close()


COMPOSER: dict[str, Callable[[], None]] = {
    "read once": lambda: _compose(Digits(BATCHES)),
    "fewer in the second epoch": lambda: _compose(Digits(15)),
    "whole": lambda: _compose(Digits()),
    "batches": lambda: _compose(Digits(15), max_duration="15ba"),
    "fewer, more than batches": lambda: _compose(Digits(25), max_duration="20ba"),
    "stopped": lambda: _compose(Digits(), ("batch_end", 5)),
    "stopped in a short epoch": lambda: _compose(Digits(15), ("batch_end", 15)),
    "stopped after a short epoch": lambda: _compose(Digits(15), ("epoch_end", 15), max_duration="3ep"),
    "train_subset_num_batches": lambda: _compose(Digits(), train_subset_num_batches=3),
}


# Loops that people write


def _loop(
    loader: Any, numbers: range = range(2), *, leaves: Callable[[int, int], bool] | None = None, **told: Any
) -> None:
    """A plain loop."""
    from countoff.torch import Countoff

    model, optimizer = model_and_optimizer()
    with Countoff(optimizer=optimizer, **told) as countoff:
        for epoch in numbers:
            for number, batch in enumerate(countoff.train(loader)):
                train_on(model, optimizer, batch)
                if leaves is not None and leaves(epoch, number):
                    break


def _plain(data: Any, kind: Any = DataLoader) -> Any:
    return kind(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False))


def _resumed(at: int, numbers: range, *, epoch: int | None = None, **told: Any) -> None:
    """A loop whose loader goes on with the state that it had at a batch of its first epoch."""
    from countoff.torch import Countoff

    model, optimizer = model_and_optimizer()
    loader, state = _plain(Digits(), StatefulDataLoader), None
    for number, batch in enumerate(loader, 1):
        train_on(model, optimizer, batch)
        if number == at:
            state = loader.state_dict()
    loader = _plain(Digits(), StatefulDataLoader)
    loader.load_state_dict(state)
    with Countoff(optimizer=optimizer, start_step=at, **told) as countoff:
        for number in numbers:
            for batch in countoff.train(loader, epoch=epoch if number == numbers[0] else None):
                train_on(model, optimizer, batch)


def _accelerated(data: Any, **told: Any) -> None:
    from accelerate import Accelerator

    from countoff.accelerate import Countoff

    accelerator = Accelerator(cpu=devices.framework_uses_cpu())
    bare = torch.nn.Linear(64, 10)
    prepared = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1), DataLoader(data, BATCH_SIZE))
    model, optimizer, loader = prepared
    with Countoff(accelerator, **told) as countoff:
        for _ in range(2):
            for images, labels in countoff.train(loader):
                accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()


def _with_fabric(data: Any, epochs: int | None) -> None:
    from lightning.fabric import Fabric

    from countoff.fabric import Countoff

    fabric = Fabric(**devices.lightning(), strategy="ddp")
    fabric.launch()
    bare = torch.nn.Linear(64, 10)
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH_SIZE))
    with Countoff(fabric, optimizer=optimizer, epochs=epochs) as countoff:
        for _ in range(2):
            for images, labels in countoff.train(loader):
                fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()


LOOPS: dict[str, Callable[[], object]] = {
    "read once": lambda: _loop(_plain(Digits(BATCHES)), epochs=2),
    "restored at the end of an epoch": lambda: _resumed(10, range(1, 2), epochs=2, epoch=1),
    "Accelerate, read once": lambda: _accelerated(Digits(BATCHES), epochs=2),
    "Fabric, read once": lambda: _with_fabric(Digits(BATCHES), 2),
    "no plan": lambda: _loop(_plain(Digits(BATCHES))),
    "the rest of an epoch is empty": lambda: _resumed(10, range(2), epochs=2),
    "the rest of an epoch": lambda: _resumed(5, range(2), epochs=2),
    "an empty pass before the epoch": lambda: _resumed(10, range(2), epochs=2, epoch=1),
    "fewer in the second epoch": lambda: _loop(_plain(Digits(15)), epochs=2),
    "left by a break": lambda: _loop(_plain(Digits(15)), leaves=lambda epoch, number: number == 3, epochs=2),
    "one epoch is enough": lambda: _loop(_plain(Digits(BATCHES)), range(1), epochs=2),
    "a generator": lambda: _loop(DataLoader(Stream(), BATCH_SIZE), epochs=2),
    "Accelerate, whole": lambda: _accelerated(Digits(), epochs=2),
    "Fabric, no plan": lambda: _with_fabric(Digits(BATCHES), None),
}
ALL = {"Lightning": LIGHTNING, "transformers": TRANSFORMERS, "Composer": COMPOSER, "loops": LOOPS}


def run_all(framework: str, folder: str) -> None:
    """Runs each job of a framework, one after the other in one process.

    Args:
        framework: Its name in `ALL`.
        folder: A folder for checkpoints, which all ranks share.
    """
    quiet()
    os.environ["SHARED_FOLDER"] = folder
    if framework in ("loops", "Composer"):
        devices.join()
    for place, job in enumerate(ALL[framework].values()):
        print(f"--- job {place}", flush=True)
        job()


def run_alone() -> None:
    """A job of one process."""
    quiet()
    print("--- job 0", flush=True)
    _fit(once(2 * BATCHES), strategy="auto", devices=1, num_nodes=1)
