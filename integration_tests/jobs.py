"""The training jobs of the integration tests: scikit-learn's digits, real Lightning, any numbers of batches."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from countoff.lightning import Countoff
from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.harness import RankResult, tell

BATCH_SIZE = 4
_ONE_LINE = re.compile(r"(countoff: .*) See the output of rank \d+\.")
"""What a rank prints where another rank of its host prints the verdict whole."""
_ABORTED = "countoff: this rank has not ended "
"""What a rank says of itself after a verdict, where NCCL's communicators had to be aborted."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, scaled to 0–1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def own_rank() -> int:
    """This process's rank, from torchrun's environment."""
    return int(os.environ["RANK"])


def weights(model: Any) -> str:
    """Its weights, as a hash of their bits."""
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(bits).hexdigest()


class Share(IterableDataset[Any]):
    """One rank's share of the digits: with as many batches as the test asks for.

    `before` is called with the number of the sample that is about to be yielded.
    """

    def __init__(self, batches: int, before: Callable[[int], None] | None = None) -> None:
        self._batches = batches
        self._before = before

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self._batches * BATCH_SIZE):
            if self._before is not None:
                self._before(number)
            index = (number * 7 + own_rank() * 31) % len(images)
            yield images[index], labels[index]


class SizedShare(Share):
    """A share that also reports a length in samples, right or wrong."""

    def __init__(self, batches: int, reported: int, before: Callable[[int], None] | None = None) -> None:
        super().__init__(batches, before)
        self._reported = reported

    def __len__(self) -> int:
        return self._reported * BATCH_SIZE


def share_loader(batches: int, reported: int | None = None, before: Callable[[int], None] | None = None) -> Any:
    """A loader over this rank's share; unsized unless `reported` (batches) is given."""
    share = Share(batches, before) if reported is None else SizedShare(batches, reported, before)
    return DataLoader(share, batch_size=BATCH_SIZE)


class Listed:
    """A train loader without a length, which can be pickled while it is iterated."""

    def __init__(self, batches: int) -> None:
        images, labels = digits()
        self._batches = [(images[start : start + 4], labels[start : start + 4]) for start in range(0, 4 * batches, 4)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Classifier(pl.LightningModule):
    """A linear classifier of digits, with what a test wants to be synchronised."""

    def __init__(self, train_sync: str = "", eval_sync: str = "", stop_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)
        self._train_sync = train_sync
        self._eval_sync = eval_sync
        self._stop_at = stop_at
        self.validations = 0

    def on_validation_epoch_end(self) -> None:
        self.validations += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        if self._train_sync:
            self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self._stop_at is not None and self.global_step >= self._stop_at:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        if self._eval_sync:
            step = self._eval_sync == "step"
            self.log("val", loss, on_step=step, on_epoch=not step, sync_dist=True, add_dataloader_idx=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Job:
    """What a test varies. Sequences hold one value per rank.

    Attributes:
        train: Batches of each rank's train loader.
        reported: What it reports, or None: unsized.
        val: Batches of each rank's validation loader, or of several of them.
        even: Use a map-style dataset of so many samples instead, which Lightning shards.
        trainer: Arguments of the Trainer.
        model: Arguments of the Classifier.
        options: Options of the callback; None: no callback at all.
        before: Called in a rank's train loader with the number of the sample it is about to yield.
    """

    train: Sequence[int] = ()
    reported: Sequence[int] | None = None
    val: Sequence[int | Sequence[int]] | None = None
    even: int = 0
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = field(default_factory=dict)
    before: Callable[[int], None] | None = None

    def train_loader(self) -> Any:
        if self.even:
            images, labels = digits()
            return DataLoader(TensorDataset(images[: self.even], labels[: self.even]), batch_size=BATCH_SIZE)
        rank = own_rank()
        return share_loader(self.train[rank], self.reported[rank] if self.reported else None, self.before)

    def val_loaders(self) -> Any:
        if self.val is None:
            return None
        mine = self.val[own_rank()]
        return share_loader(mine) if isinstance(mine, int) else [share_loader(batches) for batches in mine]

    def callbacks(self) -> list[Any]:
        return [] if self.options is None else [Countoff(**taken(self.options))]

    def make_trainer(self, **more: Any) -> pl.Trainer:
        arguments: dict[str, Any] = {
            **devices.lightning(),
            "strategy": "ddp",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": True,
        }
        own = {**self.trainer, **more}
        callbacks = [*self.callbacks(), *own.pop("callbacks", [])]
        return pl.Trainer(**{**arguments, **own}, callbacks=callbacks)


def quiet() -> None:
    """Silences the Trainer's own output; verdicts are still printed."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def fit(job: Job) -> dict[str, Any]:
    """Trains on one rank and returns the outcome."""
    quiet()
    trainer, model = job.make_trainer(), Classifier(**job.model)
    trainer.fit(model, job.train_loader(), job.val_loaders())
    return outcome(trainer, model)


def fit_resumed(job: Job) -> dict[str, Any]:
    """Trains on one rank from a checkpoint saved after three steps, or at the end, and returns the outcome."""
    quiet()
    first, model = job.make_trainer(max_steps=3), Classifier(**job.model)
    first.fit(model, job.train_loader(), job.val_loaders())
    first.save_checkpoint("resume.ckpt")
    second, model = job.make_trainer(), Classifier(**job.model)
    second.fit(model, job.train_loader(), job.val_loaders(), ckpt_path="resume.ckpt")
    return outcome(second, model)


def outcome(trainer: pl.Trainer, model: torch.nn.Module) -> dict[str, Any]:
    """Final weights, as a hash of their bits, and the counters."""
    return {"weights": weights(model), "steps": trainer.global_step, "epoch": trainer.current_epoch}


def logged(directory: Path) -> dict[str, float]:
    """The last value of every metric that a CSVLogger wrote, and its hyperparameters."""
    import csv

    import yaml

    values: dict[str, float] = {}
    for path in directory.rglob("metrics.csv"):
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                values |= {name: float(value) for name, value in line.items() if value}
    for path in directory.rglob("hparams.yaml"):
        values |= yaml.safe_load(path.read_text())
    return values


def csv_logger() -> CSVLogger:
    """A logger into the rank's working directory."""
    return CSVLogger(os.getcwd(), name="log")


def sleep_once(rank: int, sample: int, seconds: float, number: int) -> None:
    """Lets one rank's loader sleep before one sample: a `before`, with all but the last argument bound."""
    if number == sample and own_rank() == rank:
        tell("asleep")
        time.sleep(seconds)


def printed_lines(result: RankResult) -> list[str]:
    """The lines of this rank's output that countoff wrote, without the rank."""
    prefix = f"[rank {result.rank}] "
    return [line.removeprefix(prefix) for line in result.output.splitlines() if line.startswith(prefix)]


def verdict_lines(result: RankResult) -> list[str]:
    """The lines of `printed_lines` but what a rank says of itself; of one line of a verdict, all of its error file."""
    lines: list[str] = []
    for line in _of_the_job(result):
        first = _ONE_LINE.fullmatch(line)
        whole = json.loads(result.error_file)["message"]["extraInfo"]["countoff"].splitlines() if first else [line]
        assert first is None or whole[0] == first[1], result
        lines += whole
    return lines


def _of_the_job(result: RankResult) -> list[str]:
    """The lines of `printed_lines`, but what a rank says of itself after a verdict."""
    lines = printed_lines(result)
    return [line for number, line in enumerate(lines) if not (number and line.startswith(_ABORTED))]


def named_ranks(text: str) -> list[int]:
    """The ranks that the line below a verdict's headline names; none if there is no such line."""
    named = re.search(r"^  (?:out of step|ran out first|differ|lost): ranks? ([\d, –]+) of", text, re.MULTILINE)
    return [] if named is None else ranks_in(named[1])


def behind_ranks(text: str) -> list[int]:
    """The ranks of which a verdict says that they have not got as far as the place in dispute."""
    behind = re.search(r"; ranks? ([\d, –]+) ha(?:s|ve) not got so far", text)
    return [] if behind is None else ranks_in(behind[1])


def ranks_in(text: str) -> list[int]:
    """The ranks of a list such as ``0, 2–4``."""
    ends = [[int(end) for end in item.split("–")] for item in text.split(", ")]
    return [rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)]


def whole_message(results: Sequence[RankResult]) -> str:
    """What the first of these ranks on each host printed whole. Each of the others printed one line."""
    everything = "\n".join(map(str, results))
    hosts: dict[str, list[RankResult]] = {}
    for result in results:
        hosts.setdefault(result.host, []).append(result)
    texts = {"\n".join(_of_the_job(first)) for first, *_ in hosts.values()}
    assert len(texts) == 1, everything
    text = texts.pop()
    for first, *others in hosts.values():
        line = f"{text.splitlines()[0]} See the output of rank {first.rank}."
        assert all(_of_the_job(result) == [line] for result in others), everything
    return text


def assert_named(results: Sequence[RankResult], kind: str, odd: Sequence[int], *words: str | tuple[str, ...]) -> None:
    """Every rank ended badly, with the same verdict: its kind, the ranks that it names, and `words` in its text.

    Of a tuple of words one must be there: a slow rank may have ended its span as well before it received the verdict.
    """
    everything = "\n".join(map(str, results))
    text = whole_message(results)
    assert f"countoff: {kind}: " in text, everything
    assert sorted(named_ranks(text)) == sorted(odd), everything
    for word in words:
        assert any(each in text for each in (word if isinstance(word, tuple) else (word,))), everything
    assert all(result.exit_code != 0 for result in results), everything
    assert all(f"countoff {kind}: " in result.error_file for result in results), everything
