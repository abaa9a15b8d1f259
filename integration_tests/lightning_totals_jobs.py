"""What Lightning's progress bars and loggers show of jobs whose lengths Lightning does not know, or has wrong."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights
from integration_tests.lightning_jobs import quiet

_DRAWN = re.compile(r"(Epoch \d+|Validation|Testing)(?:/\d+)?(?: +DataLoader (\d))?[^\r\n]*? (\d+)/(\d+|\?|--)")

Drawn = tuple[str, int, int | None]
"""What a bar is of, how many batches it counts, and of how many."""


class Stream(IterableDataset[Any]):
    """A stream that has so many batches in its first pass, its second one, and so on; the last number holds for all."""

    def __init__(self, *batches: int, reported: int | None = None) -> None:
        self._batches = list(batches)
        self._reported = reported

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        batches = self._batches.pop(0) if len(self._batches) > 1 else self._batches[0]
        for number in range(batches * BATCH_SIZE):
            index = (number * 7 + own_rank() * 31) % len(images)
            yield images[index], labels[index]


class SizedStream(Stream):
    """The same with a length, right or wrong, which counts the batches."""

    def __len__(self) -> int:
        assert self._reported is not None
        return self._reported * BATCH_SIZE


class TooLong(DataLoader[Any]):
    """A loader that reports the batches of two ranks, as one whose author has not divided."""

    def __len__(self) -> int:
        return 2 * super().__len__()


def stream(*batches: int, reported: int | None = None) -> Any:
    """A loader of a stream; without a length unless one is given."""
    kind = Stream if reported is None else SizedStream
    return DataLoader(kind(*batches, reported=reported), batch_size=BATCH_SIZE)


def whole(samples: int, kind: type[DataLoader[Any]] = DataLoader) -> Any:
    """A loader of a dataset that each rank has whole, and that Lightning divides."""
    images, labels = digits()
    return kind(TensorDataset(images[:samples], labels[:samples]), batch_size=BATCH_SIZE)


def two_loaders() -> Any:
    """Two loaders, of which Lightning makes one batch."""
    return {"a": whole(64), "b": whole(32)}


@dataclass(frozen=True)
class Case:
    """A job.

    `val` are its validation loaders, and `trainer` the Trainer's arguments. `bar` is ``tqdm`` or ``rich``, or one of
    Lightning's with another method (``counts samples``, ``own total``, ``looks``), or ``every third`` batch, or none.
    """

    train: Callable[[], Any]
    val: Sequence[Callable[[], Any]] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    bar: str = "tqdm"
    package: str = "lightning.pytorch"
    stops: bool = False
    resumes_after: int = 0
    tests: int = 0


@dataclass(frozen=True)
class Found:
    """What a job has drawn on rank 0, and what it has done."""

    drawn: list[Drawn]
    weights: str
    steps: int
    validated: list[int]

    def totals(self, of: str) -> list[int | None]:
        """The total of each bar of a kind once a batch is done in it, without repetition."""
        shown = [total for name, done, total in self.drawn if name == of and done]
        return [each for place, each in enumerate(shown) if not place or shown[place - 1] != each]


def model_of(package: Any) -> Any:
    """A linear classifier of the package's module class, which notes the steps at which it was validated."""

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layer = torch.nn.Linear(64, 10)
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch["a"] if isinstance(batch, dict) else batch
            return torch.nn.functional.cross_entropy(self.layer(images), labels)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.training_step(batch, batch_idx), sync_dist=True, on_epoch=True)

        test_step = validation_step

        def on_validation_epoch_end(self) -> None:
            self.validated.append(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def bar_of(callbacks: Any, kind: str) -> Any:
    """A progress bar of the package."""

    class CountsSamples(callbacks.TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.train_progress_bar.update(len(batch[0]))

    class OwnTotal(callbacks.TQDMProgressBar):
        @property
        def total_train_batches(self) -> int:
            return 1000

    class Looks(callbacks.TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.colour = "green"
            return bar

    class Rich(callbacks.RichProgressBar):
        """Draws each change at once. Rich's thread draws when its time has come, and leaves some out."""

        def refresh(self, hard: bool = False) -> None:
            if self.progress:
                self.progress.refresh()

    if kind == "rich":
        drawn = {"file": sys.stdout, "force_terminal": True, "width": 120}
        return Rich(refresh_rate=1, console_kwargs=drawn)
    if kind == "every third":
        return callbacks.TQDMProgressBar(refresh_rate=3)
    kinds = {"counts samples": CountsSamples, "own total": OwnTotal, "looks": Looks}
    return kinds.get(kind, callbacks.TQDMProgressBar)()


def trainer_of(case: Case, options: Mapping[str, Any] | None, **more: Any) -> Any:
    """The case's Trainer, with countoff unless its options are None."""
    package = importlib.import_module(case.package)
    adapter = importlib.import_module(
        "countoff.lightning" if case.package.startswith("lightning.") else "countoff.pytorch_lightning"
    )
    callbacks: list[Any] = [] if options is None else [adapter.Countoff(**options)]
    callbacks += [bar_of(package.callbacks, case.bar)] if case.bar else []
    callbacks += [package.callbacks.EarlyStopping("val", patience=1)] if case.stops else []
    own: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "strategy": "ddp",
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": bool(case.bar),
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
    }
    return package.Trainer(**own | dict(case.trainer) | more)


made: list[str] = []
"""The checkpoints of this process."""


def fitted(case: Case, options: Mapping[str, Any] | None) -> Found:
    """Trains, and returns what is found; the output of a run before a resume is left out."""
    package = importlib.import_module(case.package)
    drawn, path = io.StringIO(), None
    if case.resumes_after:
        saves = {"every_n_train_steps": case.resumes_after, "dirpath": os.getcwd(), "filename": f"resume{len(made)}"}
        first = trainer_of(case, options, max_steps=case.resumes_after, enable_checkpointing=True)
        first.callbacks.append(saving := package.callbacks.ModelCheckpoint(**saves))
        with contextlib.redirect_stdout(io.StringIO()):
            first.fit(model_of(package), case.train())
        made.append(path := saving.best_model_path)
    with contextlib.redirect_stdout(drawn):
        trainer, model = trainer_of(case, options), model_of(package)
        trainer.fit(model, case.train(), [each() for each in case.val] or None, ckpt_path=path)
        for _ in range(case.tests):
            trainer.test(model, [each() for each in case.val], verbose=False)
    return Found(list(read_bars(drawn.getvalue())), weights(model), trainer.global_step, model.validated)


def read_bars(text: str) -> Iterator[Drawn]:
    """Yields what bars have drawn."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for name, loader, done, total in _DRAWN.findall(plain):
        yield (
            f"{name} {loader}" if loader not in ("", "0") else name,
            int(done),
            int(total) if total.isdigit() else None,
        )


def all_fitted(cases: Mapping[str, tuple[Case, Sequence[Mapping[str, Any] | None]]]) -> dict[str, list[Found]]:
    """Trains each case once with each of its options."""
    quiet()
    return {name: [fitted(case, options) for options in each] for name, (case, each) in cases.items()}


def logged_by(options: Sequence[Mapping[str, Any] | None]) -> list[tuple[list[str], str]]:
    """Trains with a CSVLogger, and with a subclass of it; returns the columns of its metrics, and its hyperparameters.

    Each has another logger beside it, whose methods are the user's own.
    """
    from lightning.pytorch.loggers import CSVLogger

    class Named(CSVLogger):
        """Differs by its name only."""

    class Knows(CSVLogger):
        """Knows the metrics that its program logs."""

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            assert set(metrics) == {"val", "epoch"}

        def log_hyperparams(self, params: Any = None) -> None:
            raise AssertionError

    quiet()
    found: list[tuple[list[str], str]] = []
    for number, (each, kind) in enumerate(product(options, (CSVLogger, Named))):
        logger = kind(os.getcwd(), name=f"log{number}")
        trained = {"logger": [logger, Knows(os.getcwd())], "accumulate_grad_batches": 2}
        case = Case(partial(whole, 83), [partial(whole, 20)], trained, bar="")
        fitted(case, each)
        if own_rank() == 0:
            directory = Path(logger.log_dir)
            columns = (directory / "metrics.csv").read_text().splitlines()[0].split(",")
            parameters = directory / "hparams.yaml"
            found.append((columns, parameters.read_text() if parameters.exists() else ""))
    return found
