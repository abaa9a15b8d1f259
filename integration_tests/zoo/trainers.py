"""Training with the Trainer of transformers: odd arguments, datasets and callbacks."""

from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from countoff.transformers import Countoff
from integration_tests import devices
from integration_tests.zoo.parts import Bucketed, Shares, network, tensors
from integration_tests.zoo.registry import healthy


class Model(torch.nn.Module):
    """What the Trainer wants of a model: a mapping with the loss."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs, labels=None, input_ids=None):
        logits = self.network(inputs)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Samples(Dataset):
    """Samples with token ids of different lengths."""

    def __init__(self, samples):
        self.inputs, self.labels = tensors(samples)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index], "input_ids": [0] * (1 + index * 7 % 11)}


class Streamed(IterableDataset):
    """The same without a length."""

    def __init__(self, samples):
        self.samples = Samples(samples)

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def collate(samples):
    """Stacks what has one length."""
    return {name: torch.stack([each[name] for each in samples]) for name in ("inputs", "labels")}


def trainer(options, *callbacks, train=None, evaluation=None, made=Trainer, more=None, **arguments):
    """A Trainer that is quiet."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    given = {
        "output_dir": "trainer",
        "use_cpu": devices.framework_uses_cpu(),
        "report_to": "none",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        **arguments,
    }
    return made(
        model=Model(),
        args=TrainingArguments(**given),
        train_dataset=Samples(64) if train is None else train,
        eval_dataset=Samples(24) if evaluation is None else evaluation,
        data_collator=collate,
        callbacks=[Countoff(**options), *callbacks],
        **(more or {}),
    )


def _train(options, *callbacks, **given):
    own = trainer(options, *callbacks, **given)
    own.train()
    return own.state.global_step, own.model


@healthy()
def grouped_by_length(options):
    """Samples of like length are grouped."""
    known = {each.name for each in fields(TrainingArguments)}
    by_length = {"train_sampling_strategy": "group_by_length"}  # as newer versions of transformers call it
    return _train(options, **(by_length if by_length.keys() <= known else {"group_by_length": True}))


@healthy(even=True)
def stream_with_a_limit(options):
    """An iterable dataset is trained for eleven steps, over the end of the data."""
    return _train(options, train=Streamed(48), max_steps=11)


@healthy()
def batch_sampler_of_the_users_in_the_trainer(options):
    """A subclass makes a loader whose batch sampler's class does without the constructor of its base class."""

    class Buckets(Trainer):
        def get_train_dataloader(self):
            sampler = Bucketed(64, divides=False)
            return self.accelerator.prepare(DataLoader(Samples(64), batch_sampler=sampler, collate_fn=collate))

    return _train(options, made=Buckets, accelerator_config={"even_batches": False})


@healthy()
def arguments_of_numpy(options):
    """The limit of steps and the batches of a step are numbers of numpy's."""
    return _train(options, max_steps=cast("Any", np.int64(5)), gradient_accumulation_steps=cast("Any", np.int64(2)))


@healthy()
def evaluation_by_steps(options):
    """The model is evaluated every three steps, and before the first one."""
    return _train(options, eval_strategy="steps", eval_steps=3, eval_on_start=True)


@healthy()
def several_evaluation_sets(options):
    """There are two evaluation sets, one of which the ranks cannot divide."""
    return _train(options, evaluation={"odd": Samples(13), "even": Samples(16)}, eval_strategy="epoch")


@healthy()
def metrics_that_are_computed(options):
    """Metrics are computed over all predictions, with accumulation in the evaluation."""

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    own = trainer(options, eval_strategy="epoch", eval_accumulation_steps=2, more={"compute_metrics": accuracy})
    own.train()
    return own.evaluate()["eval_accuracy"], np.asarray(own.predict(Samples(10)).predictions).tolist(), own.model


@healthy()
def accumulation_with_remainder_of_trainer(options):
    """Three batches are accumulated, and eight are an epoch."""
    return _train(options, gradient_accumulation_steps=3)


@healthy()
def stopped_early_by_a_callback(options):
    """Training stops early, by the loss of the evaluation, and the best model is loaded."""
    return _train(
        options,
        EarlyStoppingCallback(1, 9.0),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        num_train_epochs=6,
    )


@healthy()
def stopped_by_all_callbacks(options):
    """A callback stops all ranks in the middle of the second epoch."""

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 11

    return _train(options, Stops())


@healthy()
def fraction_of_an_epoch(options):
    """The run has one epoch and a half."""
    return _train(options, num_train_epochs=1.5)


@healthy()
def last_batch_dropped(options):
    """The last batch is dropped, and the loader has workers that persist."""
    return _train(options, train=Samples(70), dataloader_drop_last=True)


@healthy()
def resumed_by_the_trainer(options):
    """A run is resumed in mid-epoch from a checkpoint."""
    first = trainer(options, save_strategy="steps", save_steps=5, max_steps=5, optim="sgd")
    first.train()
    second = trainer(options, optim="sgd")
    second.train(resume_from_checkpoint="trainer/checkpoint-5")
    return second.state.global_step, second.model


@healthy()
def trained_twice(options):
    """One Trainer trains twice, and evaluates in between."""
    own = trainer(options)
    own.train()
    loss = own.evaluate()["eval_loss"]
    own.train()
    return loss, own.model


@healthy()
def failure_that_is_caught(options):
    """A callback raises on all ranks, the program catches that, and trains with another Trainer."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise ArithmeticError("out of luck")

    failures = 0
    try:
        _train(options, Fails())
    except ArithmeticError:
        failures += 1
    return failures, _train(options)


@healthy()
def batch_size_found_by_the_trainer(options):
    """The Trainer halves its batch size after an error of memory on all ranks."""

    class Fails(TrainerCallback):
        tries = 0

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1 and self.tries < 1:
                self.tries += 1
                raise RuntimeError("CUDA out of memory.")

    return _train(options, Fails(), auto_find_batch_size=True)


@healthy(even=True)
def dispatched_by_the_trainer(options):
    """Rank 0 reads, and sends each rank its batch."""
    return _train(options, accelerator_config={"dispatch_batches": True})


@healthy()
def own_training_step(options):
    """A subclass runs two forward passes in its training step, and one optimizer of its own."""

    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            with torch.no_grad():
                model(**inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    return _train(options, made=Own)


@healthy()
def samplers_of_the_users_in_the_trainer(options):
    """The samplers' classes do without the constructors of their base classes."""

    class InOrder(SequentialSampler):
        def __init__(self, samples):
            self.samples = samples

        def __iter__(self):
            return iter(range(self.samples))

        def __len__(self):
            return self.samples

    runs = []
    for sampler in (InOrder(64), Shares(64)):

        class Own(Trainer):
            chosen = sampler

            def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
                return self.chosen

        runs.append(_train(options, made=Own))
    return runs


@healthy()
def stream_that_raises_a_key_error(options):
    """The streams look attributes up in a dictionary, and raise a KeyError for most that they do not have."""

    class Keyed(Streamed):
        def __getattr__(self, name):
            if name.startswith("_") or name in ("set_epoch", "generator", "n_shards", "num_shards"):
                raise AttributeError(name)
            return {}[name]

    keyed = {"train": Keyed(48), "evaluation": Keyed(24), "max_steps": 9}
    return _train(options, **keyed, eval_strategy="steps", eval_steps=4)


@healthy()
def optimizer_and_scheduler_of_the_users(options):
    """The optimizer holds itself as its optimizer; the scheduler has no functions, and raises where it is asked."""

    class Own(torch.optim.SGD):
        @property
        def optimizer(self):
            return self

    class Schedule:
        lr_lambdas = None

        @property
        def last_epoch(self):
            raise RuntimeError("it does not count")

        def __getattr__(self, name):
            return {}[name]

        def step(self):
            pass

        def get_last_lr(self):
            return [0.1]

        def state_dict(self):
            return {}

    class Made(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer, self.lr_scheduler = Own(cast("Any", self.model).parameters(), lr=0.1), Schedule()

    return _train(options, made=Made, save_strategy="epoch")


@healthy()
def logs_and_metrics_of_the_users(options):
    """A subclass keeps pairs in the history of its logs, and the metrics of its evaluation by numbers."""

    class Own(Trainer):
        def log(self, logs: Any, *_: Any, **__: Any) -> None:
            history: list[Any] = self.state.log_history
            history.append((self.state.global_step, len(logs)))
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

        def evaluate(self, *_: Any, **__: Any) -> Any:
            metrics: Any = {0: 0.5, 1: 0.25}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return _train(options, made=Own, logging_strategy="steps", logging_steps=2, eval_strategy="epoch")
