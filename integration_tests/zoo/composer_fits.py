"""Fits with Composer's Trainer. Only the ranks import Composer, because that takes as long as many of these fits."""

import time
from typing import Any

import numpy as np
import torch

from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.zoo.registry import healthy


def trainer(options, **arguments):
    """A Trainer that is quiet."""
    from composer import Trainer

    from countoff.composer import Countoff
    from integration_tests.composer_parts import Classifier, digits_loader, start

    start()
    model = Classifier()
    given: dict[str, Any] = {
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_dataloader": digits_loader(64),
        "device": devices.accelerator(),
        "precision": "fp32",
        "max_duration": "2ep",
        "progress_bar": False,
        "seed": 7,
        **arguments,
    }
    callbacks = [Countoff(**options), *given.pop("callbacks", [])]
    return Trainer(**given, callbacks=callbacks)


def _fit(options, **arguments):
    own = trainer(options, **arguments)
    own.fit()
    own.close()
    return str(own.state.timestamp.batch), own.state.model


@healthy()
def microbatches_of_composer(options):
    """Each batch is trained in two micro-batches."""
    return _fit(options, device_train_microbatch_size=2)


@healthy()
def distributed_sampler_of_the_users(options):
    """The distributed sampler's class does without the constructor of its base class."""
    from torch.utils.data import DataLoader

    from integration_tests.composer_parts import digits_loader
    from integration_tests.zoo.parts import Shares

    loader = DataLoader(digits_loader(64).dataset, batch_size=4, sampler=Shares(64))
    return _fit(options, train_dataloader=loader, device_train_microbatch_size=2)


@healthy()
def duration_in_batches(options):
    """The run ends in the middle of its third epoch."""
    return _fit(options, max_duration="19ba")


@healthy()
def duration_in_samples(options):
    """The run ends after so many samples."""
    return _fit(options, max_duration="100sp")


@healthy()
def part_of_the_train_loader(options):
    """An epoch takes five batches of the train loader."""
    return _fit(options, train_subset_num_batches=5)


@healthy()
def several_evaluators(options):
    """Evaluators of different lengths and intervals."""
    from composer.core import Evaluator

    from integration_tests.composer_parts import share_loader

    evaluators = [
        Evaluator(label="long", dataloader=share_loader(4, 4), eval_interval="1ep"),
        Evaluator(label="short", dataloader=share_loader(1, 1), eval_interval="3ba"),
    ]
    return _fit(options, eval_dataloader=evaluators)


@healthy()
def evaluation_apart_from_the_fit(options):
    """The model is evaluated before and after the fit."""
    from composer.core import Evaluator

    from integration_tests.composer_parts import share_loader

    own = trainer(options)
    evaluator = Evaluator(label="apart", dataloader=share_loader(3, 3))
    own.eval(evaluator)
    own.fit()
    own.eval(evaluator)
    own.close()
    return own.state.model


@healthy()
def fit_in_two_parts(options):
    """fit is called twice, the second time with another loader."""
    from integration_tests.composer_parts import digits_loader

    own = trainer(options)
    own.fit(duration="1ep")
    own.fit(train_dataloader=digits_loader(40), duration="1ep")
    own.close()
    return own.state.model


@healthy()
def stopped_by_a_callback(options):
    """A callback stops the training of all ranks in the middle of an epoch."""
    from composer.core import Callback

    class Stops(Callback):
        def batch_end(self, state, logger):
            if int(state.timestamp.batch) == 5:
                state.stop_training()

    return _fit(options, callbacks=[Stops()])


@healthy()
def algorithms_of_composer(options):
    """Algorithms smooth labels, clip gradients and average weights."""
    from composer.algorithms import EMA, GradientClipping, LabelSmoothing

    algorithms = [LabelSmoothing(0.1), GradientClipping("norm", 1.0), EMA(half_life="10ba")]
    return _fit(options, algorithms=algorithms)


@healthy()
def specification_of_data(options):
    """A DataSpec transforms each batch, and tells its samples."""
    from composer.core import DataSpec

    from integration_tests.composer_parts import digits_loader

    def transform(batch):
        return batch[0] * 2, batch[1]

    return _fit(options, train_dataloader=DataSpec(digits_loader(64), batch_transforms=transform))


@healthy()
def stream_without_a_length_in_composer(options):
    """The train loader has no length."""
    from integration_tests.composer_parts import share_loader

    return _fit(options, train_dataloader=share_loader(6), max_duration="11ba")


@healthy()
def work_of_rank_zero_in_composer(options):
    """A callback of rank 0 reads another loader."""
    from composer.core import Callback

    from integration_tests.composer_parts import share_loader

    class Reads(Callback):
        def epoch_end(self, state, logger):
            if own_rank() == 0:
                list(share_loader(2))

    return _fit(options, callbacks=[Reads()])


@healthy(alone=True, nightly=True)
def streaming_in_composer(options):
    """A StreamingDataset of two streams, shuffled."""
    from integration_tests.composer_parts import start, streaming_loader

    start()
    return _fit(options, train_dataloader=streaming_loader([40, 24], False, 0, {"shuffle": True}))


def _fails_in(batch):
    """A callback that raises in one batch, on rank 1 a second later."""
    from composer import Callback

    class Fails(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == batch:
                time.sleep(own_rank())
                raise ArithmeticError("the loss is not finite")

    return Fails()


@healthy()
def composer_fit_that_fails(options):
    """All ranks raise in one batch, the program catches that, and another Trainer fits while the first one still is."""
    first, failures = trainer(options, callbacks=[_fails_in(3)]), 0
    try:
        first.fit()
    except ArithmeticError:
        failures += 1
    return failures, _fit(options), str(first.state.timestamp.batch)


@healthy()
def composer_fit_that_fails_and_is_closed(options):
    """All ranks raise in one batch; each closes its Trainer where it handles that, and fits again with another one."""
    first, failures = trainer(options, callbacks=[_fails_in(3)]), 0
    try:
        first.fit()
    except ArithmeticError:
        failures += 1
        first.close()
    return failures, _fit(options)


def _specified(loader):
    """A DataSpec for a loader that Composer cannot ask for anything."""
    from composer.core import DataSpec

    return DataSpec(loader, get_num_samples_in_batch=lambda _: 4, get_num_tokens_in_batch=lambda _: 4)


@healthy()
def scheduler_with_a_configuration(options):
    """The user's own scheduler holds a dict whose attributes are its items, and raises KeyError for others."""

    class Configuration(dict[str, Any]):
        __getattr__ = dict.__getitem__

    class Scheduler:
        def __init__(self):
            self.configuration = Configuration(factor=0.5)

        def __call__(self, state, ssr=1.0):
            return self.configuration.factor

    return _fit(options, schedulers=[Scheduler()])


@healthy()
def interval_of_no_module(options):
    """The function that tells when to evaluate was made by exec, and tells no module that it is from."""
    from integration_tests.composer_parts import share_loader
    from integration_tests.zoo.parts import function_of_no_module

    interval = function_of_no_module("state, event", "return event.value == 'epoch_end'")
    return _fit(options, eval_dataloader=share_loader(3, 3), eval_interval=interval)


@healthy()
def loader_without_a_dataset(options):
    """The train loader raises where it is asked for its dataset, and a static method makes its iterator."""
    from integration_tests.composer_parts import digits_loader

    batches = list(digits_loader(64))

    class Loader:
        __iter__ = staticmethod(lambda: iter(batches))

        @property
        def dataset(self):
            raise NotImplementedError

        def __len__(self):
            return len(batches)

    return _fit(options, train_dataloader=_specified(Loader()), device_train_microbatch_size=4)


@healthy()
def loader_that_is_indexed(options):
    """The train loader has no __iter__: Python asks it for one item after the other."""
    from integration_tests.composer_parts import digits_loader

    batches = list(digits_loader(64))

    class Loader:
        def __getitem__(self, index):
            return batches[index]

        def __len__(self):
            return len(batches)

    return _fit(options, train_dataloader=_specified(Loader()), device_train_microbatch_size=4)


@healthy()
def function_in_a_logger(options):
    """In one of Composer's loggers, a function of the user's stands in the place of a method, and knows its metrics."""
    from composer.loggers import InMemoryLogger

    def log_metrics(metrics, step=None):
        if any(name.startswith("countoff/") for name in metrics):
            raise ValueError(f"unknown: {sorted(metrics)}")

    logger = InMemoryLogger()
    logger.log_metrics = log_metrics
    return _fit(options, loggers=[logger])


@healthy()
def part_counted_by_numpy(options):
    """How many batches are evaluated is a number of numpy's."""
    from integration_tests.composer_parts import share_loader

    return _fit(options, eval_dataloader=share_loader(4, 4), eval_subset_num_batches=np.int64(2))
