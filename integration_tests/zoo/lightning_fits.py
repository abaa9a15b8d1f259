"""Fits with Lightning's Trainer: its odd flags, its several loaders, and what comes before and after a fit."""

import copy
import pickle
import tempfile
import time
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader

from countoff.lightning import Countoff
from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import QUIET, quiet
from integration_tests.zoo.parts import (
    Bucketed,
    FractionalShares,
    Listed,
    dataset,
    function_of_no_module,
    network,
    own_batches,
    with_workers,
)
from integration_tests.zoo.registry import healthy


class Module(pl.LightningModule):
    """A classifier with dropout, which logs in training and in evaluation."""

    def __init__(self, **optimizing):
        super().__init__()
        self.network = network()
        self.optimizing = optimizing

    def training_step(self, batch, batch_idx) -> Any:
        loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.network(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(options, *callbacks, **arguments):
    """A Trainer that is quiet."""
    quiet()
    return pl.Trainer(**devices.lightning(), **{**QUIET, **arguments}, callbacks=[Countoff(**options), *callbacks])


def loader(samples=64, *, shuffle=True, **more):
    """A loader that Lightning shards."""
    return with_workers(dataset(samples), batch_size=4, shuffle=shuffle, **more)


def _fit(options, *callbacks, module=None, train=None, val=None, **arguments):
    own, model = trainer(options, *callbacks, **arguments), module or Module()
    own.fit(model, loader() if train is None else train, loader(24, shuffle=False) if val is None else val)
    return own.global_step, own.current_epoch, model


@healthy(even=True)
def limits_as_fractions(options):
    """Fractions of the train and validation loaders are used, with a sanity check before."""
    return _fit(options, limit_train_batches=0.6, limit_val_batches=0.5, num_sanity_val_steps=2)


@healthy(even=True)
def limits_as_numbers(options):
    """Five train batches and no validation batch are used."""
    return _fit(options, limit_train_batches=5, limit_val_batches=0)


@healthy()
def overfitting_on_two_batches(options):
    """The Trainer overfits on two batches."""
    return _fit(options, overfit_batches=2, train=loader(shuffle=False))


@healthy()
def one_quick_run(options):
    """fast_dev_run takes two batches of each loop."""
    return _fit(options, fast_dev_run=2)


@healthy(even=True)
def validation_within_an_epoch(options):
    """Validation runs every three batches of an epoch."""
    return _fit(options, val_check_interval=3)


@healthy()
def validation_by_steps_over_epochs(options):
    """Validation runs every five batches, whatever the epoch."""
    return _fit(options, val_check_interval=5, check_val_every_n_epoch=None, max_epochs=3)


@healthy()
def validation_every_second_epoch(options):
    """Validation runs after every second epoch."""
    return _fit(options, check_val_every_n_epoch=2, max_epochs=4)


@healthy(even=True)
def batch_sampler_of_the_users_in_lightning(options):
    """The batch samplers' class does without the constructor of its base class, and Lightning leaves it alone."""
    bucketed = [torch.utils.data.DataLoader(dataset(), batch_sampler=Bucketed(samples)) for samples in (64, 24)]
    return _fit(options, train=bucketed[0], val=bucketed[1], use_distributed_sampler=False)


@healthy()
def called_by_another_callback(options):
    """A callback of the user's own hands every hook on to countoff's, which is not in the Trainer's list."""
    own = Countoff(**options)

    class Forwarding(pl.Callback):
        def __getattribute__(self, name):
            return (
                getattr(own, name) if name.startswith(("on_", "setup", "teardown")) else super().__getattribute__(name)
            )

    quiet()
    model, forwarding = Module(), Forwarding()
    trainer = pl.Trainer(**devices.lightning(), **QUIET, callbacks=[forwarding])
    trainer.fit(model, loader())
    return trainer.global_step, model


@healthy(even=True)
def loaders_made_again(options):
    """The loaders are made again in each epoch, by hooks of the module, and grow."""

    class Growing(Module):
        def train_dataloader(self):
            return loader(48 + 16 * self.trainer.current_epoch)

        def val_dataloader(self):
            return loader(16, shuffle=False)

    own, model = trainer(options, reload_dataloaders_every_n_epochs=1, max_epochs=3), Growing()
    own.fit(model)
    return own.global_step, model


@healthy()
def several_validation_loaders(options):
    """There are three validation loaders of different lengths."""
    return _fit(options, val=[loader(samples, shuffle=False) for samples in (8, 24, 40)])


@healthy()
def combined_loaders(options):
    """Two train loaders are combined, the shorter one in a cycle."""

    class Combined(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["long"], batch_idx) + super().training_step(batch["short"], batch_idx)

        def log(self, *_, **__):
            pass

    train = CombinedLoader({"long": loader(64), "short": loader(24)}, "max_size_cycle")
    return _fit(options, module=Combined(), train=train)


@healthy()
def combined_to_the_longest(options):
    """Of two train loaders that are combined, the shorter one gives None at the end."""

    class Combined(Module):
        def training_step(self, batch, batch_idx):
            first, second = batch
            return super().training_step(first if second is None else second, batch_idx)

        def log(self, *_, **__):
            pass

    return _fit(options, module=Combined(), train=CombinedLoader([loader(64), loader(24)], "max_size"))


@healthy(even=True)
def manual_optimization(options):
    """The module optimizes by hand, two optimizers in turn, and accumulates for one of them."""

    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = network(3)

        def training_step(self, batch, batch_idx):
            first, second = cast("Any", self.optimizers())
            loss = torch.nn.functional.cross_entropy(self.network(batch[0]) + self.other(batch[0]), batch[1])
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            if batch_idx % 3 == 2:
                second.step()
                second.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.network, self.other)]

    return _fit(options, module=Manual())


@healthy()
def accumulation_that_grows(options):
    """Gradient accumulation changes from epoch to epoch."""
    return _fit(options, GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), max_epochs=3)


@healthy(even=True)
def accumulation_of_three(options):
    """Three batches are accumulated, and eight are an epoch."""
    return _fit(options, accumulate_grad_batches=3)


@healthy(even=True)
def at_most_eleven_steps(options):
    """The run ends after eleven steps."""
    return _fit(options, max_steps=11, max_epochs=-1)


@healthy()
def at_least_some_steps(options):
    """A callback wants to stop at once, and min_steps keeps the run going."""

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = True

    return _fit(options, Stops(), min_steps=5, max_epochs=3)


@healthy()
def early_stopping_of_lightning(options):
    """Training stops early, by the validation loss of all ranks."""
    return _fit(options, EarlyStopping("val", patience=1, min_delta=9.0), max_epochs=6)


@healthy()
def each_rank_monitors_its_own_metric(options):
    """Checkpoints are written, and training stops early, by a metric of each rank's own: the ranks decide together."""

    class Own(Module):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("own", float((self.current_epoch + 1 + own_rank()) % 3))

    with tempfile.TemporaryDirectory() as directory:
        callbacks = EarlyStopping("own", patience=2), ModelCheckpoint(directory, monitor="own", save_top_k=2)
        steps, epoch, _ = _fit(options, *callbacks, module=Own(), enable_checkpointing=True, max_epochs=6)
    return steps, epoch


@healthy()
def keys_of_one_rank_that_nobody_reduces(options):
    """Rank 0 logs a key, and reduces it in no collective, that the other rank does not log."""

    class Own(Module):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)
            if own_rank() == 0:
                self.log("own", 1.0, rank_zero_only=True, sync_dist=True)

    return _fit(options, module=Own())


@healthy()
def all_loops_before_the_fit(options):
    """Validation, test and prediction run before the fit, and once more after it, with one Trainer."""
    own, model = trainer(options), Module()
    val = loader(24, shuffle=False)
    before = own.validate(model, val, verbose=False), own.test(model, val, verbose=False)
    predictions = own.predict(model, val)
    own.fit(model, loader(), val)
    after = own.test(model, val, verbose=False), own.validate(model, val, verbose=False)
    return before, predictions, after, model


@healthy(even=True)
def two_fits_of_one_trainer(options):
    """A Trainer fits twice, with more epochs and another loader the second time."""
    own, model = trainer(options), Module()
    own.fit(model, loader())
    own.fit_loop.max_epochs = 4
    own.fit(model, loader(48))
    return own.global_step, own.current_epoch, model


@healthy()
def two_trainers_at_once(options):
    """Within a fit's validation, another module is fitted on no rank, and a second Trainer validates."""

    class Nested(Module):
        def on_train_epoch_end(self):
            if self.trainer.is_global_zero:
                list(loader(16))

    return _fit(options, module=Nested())


@healthy()
def fit_that_fails_and_is_repeated(options):
    """A callback raises in the third batch on all ranks, on rank 1 a second later; they catch that, and fit again."""

    class Raises(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                time.sleep(own_rank())
                raise ArithmeticError("the loss is not finite")

    model = Module()
    failures = 0
    try:
        trainer(options, Raises()).fit(model, loader())
    except ArithmeticError:
        failures += 1
    again = trainer(options)
    again.fit(model, loader())
    return failures, again.global_step, model


@healthy()
def batch_left_out_by_all(options):
    """A hook leaves out the rest of the epoch on all ranks, and training_step returns None in some batches."""

    class LeavesOut(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.trainer.current_epoch == 1 and batch_idx == 4 else None

    return _fit(options, module=LeavesOut(), max_epochs=3)


@healthy(even=True)
def own_loader_of_batches(options):
    """The train loader is a class of the program's own, which Lightning does not shard."""
    return _fit(options, train=Listed(own_batches(7)))


@healthy()
def averaged_by_lightning(options):
    """Stochastic weight averaging begins in the second epoch."""
    return _fit(options, StochasticWeightAveraging(0.05, swa_epoch_start=1), max_epochs=3)


@healthy()
def stepped_schedules(options):
    """A schedule is stepped per batch and as long as estimated_stepping_batches says."""

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return _fit(options, module=Scheduled(), max_epochs=3)


@healthy()
def callback_that_is_copied(options):
    """Countoff's callback is copied and pickled between two fits, as a tuner does."""
    callback = Countoff(**options)
    model = Module()
    quiet()
    for each in (callback, copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        own = pl.Trainer(
            **devices.lightning(),
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[each],
        )
        own.fit(model, loader(32))
    return model


@healthy()
def resumed_within_lightning(options):
    """A checkpoint is saved after five steps, and another Trainer goes on from it."""
    first, model = trainer(options, max_steps=8, max_epochs=3), Module()
    first.fit(model, loader(shuffle=False))
    first.save_checkpoint("zoo.ckpt")
    second = trainer(options, max_epochs=3)
    second.fit(model, loader(shuffle=False), ckpt_path="zoo.ckpt")
    return second.global_step, model


@healthy()
def work_of_rank_zero_in_hooks(options):
    """Rank 0 reads another loader and steps another optimizer in its hooks."""

    class Probing(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if own_rank() == 0 and batch_idx % 3 == 0:
                probe = torch.nn.Linear(2, 2)
                torch.optim.SGD(probe.parameters(), lr=0.1).step()
                list(loader(8))

    return _fit(options, module=Probing())


@healthy()
def iterated_by_the_program(options):
    """The program iterates the train loader itself, before the fit and after it."""
    train = loader()
    before = sum(1 for _ in train)
    steps, epochs, model = _fit(options, train=train)
    return before, steps, epochs, sum(1 for _ in train), model


def _refuses(metrics, *_, **__):
    """What a logger of the user's own does with a name that its program does not log."""
    if not set(metrics) <= {"train_step", "train_epoch", "val", "epoch", "step"}:
        raise ValueError(f"unknown: {sorted(metrics)}")


@healthy()
def logger_that_stands_for_another(options):
    """The logger's class has no method of a logger: its objects hand on what they are asked for."""

    class Stands:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    with tempfile.TemporaryDirectory() as directory:
        return _fit(options, logger=[cast("Any", Stands(CSVLogger(directory)))])


@healthy()
def loggers_that_know_their_metrics(options):
    """One logger of Lightning's has an experiment of the user's own, one a function in the place of its method."""

    class Experiment:
        metrics: tuple[()] = ()
        log_metrics = log_hparams = staticmethod(_refuses)

        def save(self):
            pass

    class Own(CSVLogger):
        @property
        def experiment(self) -> Any:
            return Experiment()

    with tempfile.TemporaryDirectory() as directory:
        placed = CSVLogger(directory)
        vars(placed).update(log_metrics=_refuses, log_hyperparams=_refuses)
        return _fit(options, logger=[Own(directory), placed], log_every_n_steps=2)


@healthy(even=True)
def limits_that_are_no_ints(options):
    """The limit of steps is a float, and the batches of a step are a number of numpy's."""
    return _fit(options, max_steps=cast("Any", 1e1), max_epochs=-1, accumulate_grad_batches=cast("Any", np.int64(2)))


@healthy()
def accumulation_until_the_end(options):
    """Each epoch is one step, because the batches of a step are infinitely many."""
    return _fit(options, accumulate_grad_batches=cast("Any", float("inf")))


@healthy()
def frequencies_of_schedules(options):
    """A scheduler is stepped with a frequency that is a float, and another one with a negative one."""

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, step) for step in (6, 1)]
            often: list[dict[str, Any]] = [{"interval": "step", "frequency": 2.0}, {"frequency": -1}]
            return [optimizer], [{"scheduler": each, **more} for each, more in zip(schedulers, often, strict=True)]

    return _fit(options, module=Scheduled())


@healthy()
def strategy_that_shares_nothing(options):
    """The user's own strategy raises where it is asked how data is shared, which nobody does."""

    class Strategy(DDPStrategy):
        @property
        def distributed_sampler_kwargs(self):
            raise NotImplementedError

        @property
        def device_mesh(self):
            raise NotImplementedError

    return _fit(options, strategy=Strategy(), use_distributed_sampler=False)


@healthy()
def hook_of_no_module(options):
    """The hook that steps the scheduler was made by exec, and tells no module that it is from."""

    class Scheduled(Module):
        lr_scheduler_step = function_of_no_module("self, scheduler, metric", "scheduler.step()")

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return _fit(options, module=Scheduled())


@healthy()
def accumulation_by_a_class_of_the_users(options):
    """Gradient accumulation changes by a class made from Lightning's, and the schedule is made for that."""

    class Accumulation(GradientAccumulationScheduler):
        pass

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8 + 2 + 2 + 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return _fit(options, Accumulation({0: 1, 1: 4}), module=Scheduled(), max_epochs=3)


@healthy()
def scheduler_of_the_users(options):
    """The scheduler is a class of the user's own, which raises KeyError for an attribute that it does not have."""

    class Scheduler:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def __getattr__(self, name):
            raise KeyError(name)

        def state_dict(self):
            return {}

        load_state_dict = step = state_dict

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [Scheduler(optimizer)]

        def lr_scheduler_step(self, scheduler: Any, metric):
            scheduler.step()

    return _fit(options, module=Scheduled())


@healthy()
def sampler_that_counts_in_floats(options):
    """The distributed sampler of the user's own has divided its samples, and holds a float."""
    data = dataset(64)
    return _fit(options, train=torch.utils.data.DataLoader(data, batch_size=4, sampler=FractionalShares(data)))
