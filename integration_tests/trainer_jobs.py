"""Jobs of the transformers Trainer for the tests of `countoff.transformers`: a linear model of the digits, no hub."""

import contextlib
import gc
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, get_linear_schedule_with_warmup
from transformers.modelcard import make_markdown_table, parse_log_history

from countoff.transformers import Countoff
from integration_tests import devices
from integration_tests.accelerate_jobs import CountingSGD, SizedStream, Stream
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights
from integration_tests.objects import assert_gone_soon, differences, seen, trace


class Digits(Dataset[Any]):
    """The first so many digits."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._images, self._labels = digits()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._images[index], self._labels[index]


class Linear(torch.nn.Module):
    """What the Trainer wants of a model: a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: Sequence[Any]) -> dict[str, torch.Tensor]:
    return {
        "images": torch.stack([image for image, _ in samples]),
        "labels": torch.stack([label for _, label in samples]),
    }


class Truth(TrainerCallback):
    """The Trainer's own events."""

    def __init__(self) -> None:
        self.evaluations = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"trained {int(state.epoch)} {state.global_step}", flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluations += 1


class StopsAlone(TrainerCallback):
    """Ends training on one rank only."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if own_rank() == self._rank and state.global_step == self._step:
            control.should_training_stop = True


class Fails(TrainerCallback):
    """Ends training on every rank by an exception that the program knows."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ArithmeticError("out of luck")


class Around:
    """A loader of the user's own class around another, which does not show what it reads."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


def of_one_own(kind: str, trainer: Trainer) -> Any:
    """A train loader that Accelerate has not prepared, or that stands around one that it has."""
    if kind == "around prepared":
        return Around(Trainer.get_train_dataloader(trainer))
    dataset: Any = trainer.train_dataset
    sampler = None if isinstance(dataset, IterableDataset) else DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate)
    return {"plain": lambda: loader, "around plain": lambda: Around(loader), "list": lambda: list(loader)}[kind]()


class OwnLoader(Trainer):
    """A Trainer whose subclass makes the train loader."""

    kind = ""

    def get_train_dataloader(self) -> Any:
        return of_one_own(self.kind, self) if self.kind else super().get_train_dataloader()


def all_ranks_batch() -> int:
    """Samples of one batch of every rank."""
    return BATCH_SIZE * int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Job:
    """What a test varies. Sequences hold one value per rank.

    Attributes:
        batches: Batches of each rank's train stream.
        reported: What it reports, in batches per rank; None: it has no length.
        samples: Use a map-style dataset of so many samples instead.
        evals: Samples of each map-style evaluation dataset.
        eval_batches: Batches of each rank's evaluation stream.
        args: TrainingArguments.
        stop: Rank and step at which one rank stops alone.
        horizon: Calls of a linear schedule of the user's own; 0: the Trainer makes one.
        options: Options of Countoff; None: no callback.
        resume: Train up to a checkpoint first, then resume from it in another Trainer.
        loader: The train loader that a subclass makes, as `of_one_own` names it; empty: the Trainer's.
    """

    batches: Sequence[int] = ()
    reported: Sequence[int] | None = None
    samples: int = 0
    evals: Sequence[int] = ()
    eval_batches: Sequence[int] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[int, int] | None = None
    horizon: int = 0
    options: Mapping[str, Any] | None = field(default_factory=dict)
    resume: bool = False
    loader: str = ""

    def train_set(self) -> Any:
        if self.samples:
            return Digits(self.samples)
        samples = self.batches[own_rank()] * (BATCH_SIZE if self.loader else all_ranks_batch())
        if self.reported is None:
            return Stream(samples, own=self.loader in ("plain", "around plain", "list"))
        return SizedStream(samples, self.reported[own_rank()] * all_ranks_batch())

    def eval_set(self) -> Any:
        if self.eval_batches:
            return Stream(self.eval_batches[own_rank()] * all_ranks_batch())
        return {str(number): Digits(samples) for number, samples in enumerate(self.evals)} or None

    def trainer(self, **more: Any) -> tuple[Trainer, CountingSGD, Countoff | None, Truth]:
        arguments: dict[str, Any] = {
            "output_dir": "out",
            "use_cpu": devices.framework_uses_cpu(),
            "report_to": "none",
            "per_device_train_batch_size": BATCH_SIZE,
            "per_device_eval_batch_size": BATCH_SIZE,
            "num_train_epochs": 2,
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "dataloader_pin_memory": False,
            "remove_unused_columns": False,
            "label_names": ["labels"],
        }
        model = Linear()
        optimizer = CountingSGD(model.parameters(), lr=0.1)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, self.horizon) if self.horizon else None
        countoff = None if self.options is None else Countoff(**taken(self.options))
        truth = Truth()
        callbacks: list[TrainerCallback] = [truth, *([countoff] if countoff else [])]
        if self.stop is not None:
            callbacks.append(StopsAlone(*self.stop))
        trainer = OwnLoader(
            model=model,
            args=TrainingArguments(**{**arguments, **self.args, **more}),
            train_dataset=self.train_set(),
            eval_dataset=self.eval_set(),
            data_collator=collate,
            optimizers=(optimizer, scheduler),
            callbacks=callbacks,
        )
        trainer.kind = self.loader
        return trainer, optimizer, countoff, truth


@dataclass
class Outcome:
    """What the Trainer did, and what countoff counted."""

    weights: str
    steps: int
    applied: int
    evaluations: int
    counted_steps: int
    counted_batches: int | None
    progress: dict[str, float]
    history: list[dict[str, Any]]


def train(job: Job) -> Outcome:
    """Trains on one rank and returns the outcome."""
    resume = None
    if job.resume:
        first, *_ = job.trainer(save_strategy="steps", save_steps=3, max_steps=3)
        first.train()
        resume = "out/checkpoint-3"
    trainer, optimizer, countoff, truth = job.trainer()
    trainer.train(resume_from_checkpoint=resume)
    guard = countoff.guard if countoff else None
    return Outcome(
        weights=weights(trainer.model),
        steps=trainer.state.global_step,
        applied=optimizer.applied,
        evaluations=truth.evaluations,
        counted_steps=guard.steps if guard else 0,
        counted_batches=guard.train_batches if guard else None,
        progress=countoff.progress() if countoff else {},
        history=trainer.state.log_history,
    )


class Reporter(TrainerCallback):
    """Keeps the logs as they were handed to it, as the Trainer's reporters get them: before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **of_trainer: Any) -> None:
        self.logs.append(dict(logs))


@dataclass
class Shown:
    """What a training shows: its bar's numbers, the logs that reporters get, its history, and its weights."""

    drawn: list[tuple[int, int]]
    logs: list[dict[str, Any]]
    history: list[dict[str, Any]]
    weights: str


def shown_by(jobs: Sequence[Job]) -> list[Shown]:
    """Trains each job with the Trainer's bar, logging every step; returns what it has shown on rank 0."""
    found: list[Shown] = []
    for job in jobs:
        shows: dict[str, Any] = {"disable_tqdm": False, "logging_strategy": "steps", "logging_steps": 1}
        resume = None
        if job.resume:
            first, *_ = job.trainer(save_strategy="steps", save_steps=8)
            first.train()
            resume = "out/checkpoint-8"
        trainer, *_ = job.trainer(**shows)
        reporter, drawn = Reporter(), io.StringIO()
        trainer.callback_handler.callbacks.insert(0, reporter)
        with contextlib.redirect_stderr(drawn), contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        bars = re.findall(r"\| (\d+)/(\d+) \[", drawn.getvalue())
        numbers = [(int(done), int(total)) for done, total in bars]
        found.append(Shown(numbers, reporter.logs, trainer.state.log_history, weights(trainer.model)))
    return found


def tables_of(jobs: Sequence[Job]) -> list[str]:
    """Trains each job, logging no step; returns the table of the model card on rank 0."""
    found: list[str] = []
    for job in jobs:
        trainer, *_ = job.trainer(logging_strategy="steps", logging_steps=1000)
        trainer.train()
        _, rows, _ = parse_log_history(trainer.state.log_history)
        found.append(make_markdown_table(rows))
    return found


def train_all(jobs: Sequence[Job]) -> list[Outcome]:
    """Each job as it is, one after the other in one process."""
    return [train(job) for job in jobs]


def with_and_without(jobs: Sequence[Job]) -> list[tuple[Outcome, Outcome]]:
    """Each job without countoff and with it, one after the other in one process."""
    return [(train(replace(job, options=None)), train(job)) for job in jobs]


def once_more_after_a_failure() -> tuple[int, int, bool]:
    """Trains again with another Trainer after an exception that the program has caught.

    Returns:
        Steps of the second training, steps counted, and whether countoff has let go of Accelerate's classes.
    """
    original = DataLoaderShard.__iter__
    job = Job(samples=80)
    failing, *_ = job.trainer()
    failing.add_callback(Fails())
    with contextlib.suppress(ArithmeticError):
        failing.train()
    del failing
    gc.collect()
    trainer, _, countoff, _ = job.trainer()
    trainer.train()
    assert countoff is not None
    assert countoff.guard is not None
    return trainer.state.global_step, countoff.guard.steps, DataLoaderShard.__iter__ is original


class Looks(TrainerCallback):
    """Looks at the Trainer's objects at its second step, which it may fail."""

    def __init__(self, trainer: Trainer, fails: bool) -> None:
        self.trainer = trainer
        self.fails = fails
        self.during: Any = None

    def look(self) -> dict[str, Any]:
        return {"trainer": seen(self.trainer), "accelerator": seen(self.trainer.accelerator)}

    def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if state.global_step == 2:
            self.during = {**self.look(), "loader": seen(of_trainer["train_dataloader"])}
            if self.fails:
                raise ArithmeticError("out of luck")


class FailsBesideVerdict(TrainerCallback):
    """Rank 0 raises what a collective does, in its second epoch, once it knows of the verdict."""

    def __init__(self, countoff: Countoff) -> None:
        self.countoff = countoff

    def on_step_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if own_rank() == 0 and state.global_step == 4:
            _store().set("inside", "yes")
            while self.countoff.guard is None or self.countoff.guard.verdict is None:
                time.sleep(0.01)
            raise RuntimeError("Connection closed by peer")

    def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        if own_rank() == 1 and state.global_step == 4:  # its next batch proves the verdict
            _store().wait(["inside"])


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]


def survives_its_verdict() -> str:
    """The exception that ended training, which the program has caught."""
    job = Job(batches=[4, 5], args={"accelerator_config": {"dispatch_batches": False}, "max_steps": 1000})
    trainer, _, countoff, _ = job.trainer()
    assert countoff is not None
    trainer.add_callback(FailsBesideVerdict(countoff))
    try:
        trainer.train()
    except RuntimeError as error:
        return type(error).__name__
    return ""


def objects_during_and_after(job: Job, fails: bool = False) -> tuple[Any, Any]:
    """What is seen of a Trainer's objects at its second step, and when its training has ended or failed."""
    trainer, *_ = job.trainer()
    looks = Looks(trainer, fails)
    trainer.add_callback(looks)
    with contextlib.suppress(ArithmeticError, RuntimeError):  # a verdict is a RuntimeError, and so is one of gloo
        trainer.train()
    return looks.during, looks.look()


def objects_without_and_with() -> dict[str, Any]:
    """Asserts that objects are the same without countoff and with it, also after an exception and after a verdict."""

    def left() -> dict[str, Any]:
        gc.collect()
        return trace({}, {"__iter__": DataLoaderShard.__iter__})

    job = Job(samples=40)
    objects_during_and_after(replace(job, options=None))  # torch sets an excepthook with the process group
    before = left()
    for fails in (False, True):
        plain = objects_during_and_after(replace(job, options=None), fails)
        counted = objects_during_and_after(job, fails)
        assert [differences(*each) for each in zip(plain, counted, strict=True)] == [{}, {}]
        assert_gone_soon(before, left)
    uneven = Job(batches=[4, 5], args={"accelerator_config": {"dispatch_batches": False}, "max_steps": 1000})
    objects_during_and_after(uneven)
    given_back = ("step hooks", "methods")
    deadline = time.monotonic() + 10
    while [(after := left())[name] for name in given_back] != [before[name] for name in given_back]:
        assert time.monotonic() < deadline, (before, after)
    return plain[0]
