"""How the ranks of one job behave: the training scripts ask it wherever a fault may happen."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.harness import tell

_EVALUATION_OPENS_SECONDS = 0.3
"""How long the data of an evaluation takes to open, where ranks evaluate at different batches.

Without it, a busy machine may let a collective of the evaluation meet one of the training before a verdict can arrive.
The two have different sizes, and gloo aborts the process then.
"""
_OF_ONE_DATASET = ("F29", "F30", "F31")
AT = 3
"""The batch of the first epoch, from 0, at which most faults happen."""
_PAUSE_SECONDS = float(os.environ.get("FAULTS_PAUSE_SECONDS", "2"))


def world_size() -> int:
    """Ranks in the job, from torchrun's environment."""
    return int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class RankBehavior:
    """What every rank of a job does.

    Attributes:
        fault: Its name in the matrix: F1, F2, …
        culprits: The ranks that have it.
        batches: Batches of a healthy rank's train epoch.
        epochs: Train epochs.
        eval_batches: Batches of a healthy rank's evaluation; 0: there is none.
        accumulation: Batches per optimizer step.
        workers: Processes of the train loader.
        sized: Whether loaders report how many batches a healthy rank has.
        pace_seconds: How long a healthy rank takes for a batch beyond what it computes.
        options: Options of countoff.
    """

    fault: str
    culprits: tuple[int, ...]
    batches: int = 6
    epochs: int = 2
    eval_batches: int = 0
    accumulation: int = 1
    workers: int = 0
    sized: bool = False
    pace_seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mine(self) -> bool:
        """Whether this rank has the fault."""
        return own_rank() in self.culprits

    def has(self, *faults: str) -> bool:
        """Whether this rank has one of these faults."""
        return self.fault in faults and self.mine

    def length(self, epoch: int) -> int:
        """Batches of this rank's train epoch."""
        if self.has("F1"):
            return self.batches - 1
        if self.has("F17") and epoch:
            return self.batches // 2
        return self.batches

    @property
    def eval_length(self) -> int:
        """Batches of this rank's evaluation."""
        return self.eval_batches - self.has("F2")

    @property
    def reported(self) -> int | None:
        """The length that the train loader reports, in batches; None: it has none."""
        if self.fault == "F7":
            return self.batches * world_size()
        return self.batches if self.sized else None

    @property
    def batch_size(self) -> int:
        """Samples per batch of this rank's train loader."""
        return BATCH_SIZE - self.has("F14")

    @property
    def evaluates_at(self) -> int:
        """Batches of a train epoch after which this rank evaluates, where that is inside of the epoch."""
        return AT + (not self.mine)

    @property
    def resumes(self) -> bool:
        """Whether the job writes a checkpoint and goes on from it, and not as it should."""
        return self.fault in ("F21", "F22", "F23")

    def steps_after(self, number: int) -> bool:
        """Whether this rank applies an optimizer step after this batch of an epoch, from 0."""
        if self.has("F12") and number == AT:
            return False
        return (number + self.has("F12b")) % self.accumulation == self.accumulation - 1

    def runs_extra(self, number: int) -> bool:
        """Whether this rank runs the model forwards and backwards once more in this batch, for the same step."""
        return self.has("F25") and number == AT

    def breaks_after(self, number: int) -> bool:
        """Whether this rank's loop leaves the epoch after this batch."""
        return self.has("F16") and number == AT

    def before_batch(self, epoch: int, number: int) -> None:
        """What happens in this rank's loader before it gives a batch."""
        if self.has("F18") and (epoch, number) == (0, 0):
            time.sleep(_PAUSE_SECONDS)
        if not self.has("F3", "F3w", "F4", "F4w") or (epoch, number) != (0, AT):
            return
        stamp("fault")
        if self.fault in ("F4", "F4w"):
            raise ValueError("shard 3 is torn")
        while True:
            signal.pause()

    def before_fit(self, model: Any) -> None:
        """What this rank does to its model once that is wrapped, and before countoff compares it."""
        if self.has("F28"):
            os.environ["NCCL_ALGO"] = "Ring"
        if self.has("F26"):
            adapter = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            getattr(model, "module", model).register_parameter("adapter", adapter)
        if self.has("F26", "F28"):
            stamp("fault")

    def after_batch(self, epoch: int, number: int, model: Any) -> None:
        """What happens in this rank's loop after a batch of the model's training."""
        time.sleep(self.pace_seconds * (3 if self.has("F10") else 1))
        if (epoch, number) == (0, 1):
            tell("training")
            if self.fault == "F18":
                time.sleep(_PAUSE_SECONDS)
        if (epoch, number) == (0, AT) and self.mine:
            self._strike(model)

    def after_epoch(self, epoch: int) -> None:
        """What this rank does after an epoch: one rank writes a checkpoint, and the others wait for it in a barrier."""
        if self.has("F18") and not epoch:
            time.sleep(2 * _PAUSE_SECONDS)

    def _strike(self, model: Any) -> None:
        if self.fault == "F24":
            stamp("fault")
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
        if self.fault in ("F5", "F6"):
            stamp("fault")
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "F5" else signal.SIGSTOP)
        if self.fault == "F18":
            ctypes.PyDLL(None).usleep(2_500_000)  # with the interpreter's lock held, as by a long garbage collection

    def train_loader(self, *, sharded_over: int = 1) -> DataLoader[Any]:
        """This rank's train loader.

        Args:
            sharded_over: Ranks over which the framework shards every rank's stream. The streams are then the same.
        """
        if self.fault == "F15":
            dataset = rows(self.batches)
            return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=True))
        if self.fault == "F19":
            return _dealt_out(_own_share(self.batches), sharded_over)
        if self.fault in _OF_ONE_DATASET:
            return _dealt_out(self._train_set(), sharded_over)
        kind = Samples if self.reported is None else SizedSamples
        return DataLoader(
            kind(self, sharded_over),
            batch_size=self.batch_size,
            num_workers=self.workers,
        )

    def eval_loader(self, *, sharded_over: int = 1) -> DataLoader[Any] | None:
        """This rank's evaluation loader."""
        if self.fault == "F30":
            return _dealt_out(self._parts()[1], sharded_over)
        kind = SizedEvalSamples if self.sized else EvalSamples
        return DataLoader(kind(self, sharded_over), batch_size=BATCH_SIZE) if self.eval_batches else None

    def _train_set(self) -> Dataset[Any]:
        """The dataset of which each rank is given a share."""
        if self.fault == "F30":
            return self._parts()[0]
        if self.fault == "F31":
            return ReadOnce(self.batches)
        return rows(self.batches, left_out=3 * self.mine)

    def _parts(self) -> tuple[Subset[Any], Subset[Any]]:
        """What this rank trains on and evaluates with, of one dataset."""
        return _parts(self.batches, self.eval_batches, first=5 * self.mine)


@functools.cache
def _parts(batches: int, eval_batches: int, *, first: int) -> tuple[Subset[Any], Subset[Any]]:
    """Splits one dataset."""
    whole, share = rows(batches + eval_batches), batches * BATCH_SIZE * world_size()
    order = [*range(first, len(whole)), *range(first)]
    return Subset(whole, order[:share]), Subset(whole, order[share:])


def rows(batches: int, left_out: int = 0) -> TensorDataset:
    """Digits for so many batches on each rank, but for the last few samples."""
    images, labels = digits()
    samples = batches * BATCH_SIZE * world_size() - left_out
    return TensorDataset(images[:samples], labels[:samples])


def _own_share(batches: int) -> Subset[Any]:
    """This rank's share of the digits, for so many batches on each rank if it is dealt out once more."""
    whole, ranks = rows(batches * world_size()), world_size()
    return Subset(whole, range(own_rank(), len(whole) // ranks * ranks, ranks))


def _dealt_out(dataset: Any, sharded_over: int) -> DataLoader[Any]:
    """A loader over a rank's share, or over everything if the framework deals it out."""
    sampler = None if sharded_over > 1 else DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


class ReadOnce(Dataset[Any]):
    """Digits that end, without a word, after so many batches of a rank: as those of a file that is read only once."""

    def __init__(self, batches: int) -> None:
        self._rows = rows(batches)
        self._left = batches * BATCH_SIZE

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        if not self._left:
            stamp("fault")
            raise StopIteration
        self._left -= 1
        return self._rows[index]


class Samples(IterableDataset[Any]):
    """One rank's share of the digits, epoch after epoch, as its behavior requires."""

    def __init__(self, behavior: RankBehavior, sharded_over: int) -> None:
        self.behavior = behavior
        self.sharded_over = sharded_over
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for number in range(self.behavior.length(epoch)):
            self.behavior.before_batch(epoch, number)
            yield from self.batch(epoch * self.behavior.batches + number)
        if self.behavior.length(epoch) < self.behavior.batches or (self.behavior.fault == "F7" and not epoch):
            stamp("fault")

    def batch(self, number: int) -> Iterator[Any]:
        """The samples of a batch, for as many ranks as the framework shards it over."""
        images, labels = digits()
        reader = 0 if self.sharded_over > 1 else self.behavior.culprits[0] if self.behavior.has("F9") else own_rank()
        for place in range(self.behavior.batch_size * self.sharded_over):
            swapped = place ^ 1 if self.behavior.has("F20") else place
            index = (number * 97 + swapped * 7 + reader * 31) % len(images)
            yield images[index], labels[index]


class SizedSamples(Samples):
    """A share that reports a length, in samples."""

    def __len__(self) -> int:
        return (self.behavior.reported or 0) * self.behavior.batch_size * self.sharded_over


class EvalSamples(Samples):
    """What one rank evaluates on."""

    def __iter__(self) -> Iterator[Any]:
        if self.behavior.fault == "F8":
            time.sleep(_EVALUATION_OPENS_SECONDS)
        for number in range(self.behavior.eval_length):
            yield from self.batch(number)
        if self.behavior.eval_length < self.behavior.eval_batches:
            stamp("fault")


class SizedEvalSamples(EvalSamples):
    """The same with a length."""

    def __len__(self) -> int:
        return self.behavior.eval_batches * BATCH_SIZE * self.sharded_over


def stamp(what: str) -> None:
    """Records when something first happened on this rank, for the table's milliseconds."""
    with contextlib.suppress(FileExistsError), Path(f"{what}-{own_rank()}").open("x", encoding="ascii") as file:
        file.write(repr(time.time()))
