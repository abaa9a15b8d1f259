"""What Composer's training jobs are made of: a model, and loaders of digits. Imports Composer and streaming.

The tests themselves import neither, because that takes as long as many of them: only the ranks do.
"""

import copy
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from composer.core import Callback
from composer.models import ComposerModel
from composer.utils import dist, get_device
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from integration_tests import devices
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.objects import outcome, seen


def world_size() -> int:
    """The number of ranks, from torchrun's environment."""
    return int(os.environ["WORLD_SIZE"])


class Classifier(ComposerModel):
    """A linear classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, batch: Any) -> torch.Tensor:
        images = batch[0]
        return self.layer(images.flatten(1))

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self(batch) if outputs is None else outputs

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"MulticlassAccuracy": MulticlassAccuracy(num_classes=10)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Share(IterableDataset[Any]):
    """One rank's share of the digits, with a length in samples, right or wrong, or with none."""

    def __init__(self, samples: int, before: Callable[[int], None] | None) -> None:
        self.samples = samples
        self.before = before

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self.samples):
            if self.before is not None:
                self.before(number)
            index = (number * 7 + own_rank() * 31) % len(images)
            yield images[index], labels[index]


class SizedShare(Share):
    """A share that reports a length."""

    def __init__(self, samples: int, reported: int, before: Callable[[int], None] | None) -> None:
        super().__init__(samples, before)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported


class GlobalLength(DataLoader[Any]):
    """The mistake with a sampler: the loader reports all ranks' batches."""

    def __len__(self) -> int:
        return super().__len__() * world_size()


def share_loader(batches: int, reported: int | None = None, before: Callable[[int], None] | None = None) -> Any:
    """A loader over this rank's share; unsized unless `reported` (batches) is given."""
    samples = batches * BATCH_SIZE
    share = Share(samples, before) if reported is None else SizedShare(samples, reported * BATCH_SIZE, before)
    return DataLoader(share, batch_size=BATCH_SIZE)


def digits_loader(samples: int, kind: type[DataLoader[Any]] = DataLoader) -> Any:
    """A loader over so many digits of all ranks together, sharded by torch's sampler."""
    images, labels = digits()
    dataset = TensorDataset(images[:samples].reshape(-1, 1, 8, 8), labels[:samples])
    return kind(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset))


def write_shards(out: Any, samples: int, size_limit: int = 1400) -> None:
    """Writes digits as MDS shards, of four samples each unless `size_limit` (bytes) says otherwise.

    `out` is a directory, or a directory and the remote place that the shards are sent to.
    """
    images, labels = digits()
    columns = {"image": "ndarray:float32:64", "label": "int"}
    with MDSWriter(out=out, columns=columns, size_limit=size_limit) as writer:
        for number in range(samples):
            index = number % len(images)
            writer.write({"image": images[index].numpy().astype(np.float32), "label": int(labels[index])})


class Digits(StreamingDataset):
    """Digits out of MDS shards."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return torch.from_numpy(sample["image"].copy()), sample["label"]


class SizeForLength(Digits):
    """The mistake: the samples of all ranks where those of one rank are meant."""

    def __len__(self) -> int:
        return self.size


def streaming_loader(samples: list[int], mistaken: bool, workers: int, arguments: Mapping[str, Any]) -> Any:
    """A loader over MDS shards in as many streams as there are numbers of samples; every rank calls it.

    Args:
        samples: Samples of each stream.
        mistaken: Whether the dataset's length is its size.
        workers: The loader's `num_workers`.
        arguments: More for the dataset.
    """
    use_own_temporary_directory()
    streams = []
    for place, count in enumerate(samples):
        directory = f"stream{place}"
        if own_rank() == 0 and not os.path.exists(directory):
            write_shards(f"writing{place}", count)
            os.rename(f"writing{place}", directory)
        wait_for_file(f"{directory}/index.json")
        streams.append(Stream(local=directory))
    kind = SizeForLength if mistaken else Digits
    dataset = kind(**{"streams": streams, "batch_size": BATCH_SIZE, **arguments})
    # As in a script: a rank of the harness would otherwise start a forkserver of its own, which imports all that again.
    context = "fork" if workers else None
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers, multiprocessing_context=context)


def start() -> None:
    """Makes the process group, as llm-foundry does before its loaders: streaming would make one and destroy it."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("NODE_RANK", "0")  # which Composer's launcher sets, and torchrun does not
    dist.initialize_dist(get_device(devices.accelerator()))


def use_own_temporary_directory() -> None:
    """Has streaming lock files in the run's own directory, where it meets no other run."""
    os.makedirs("tmp", exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.abspath("tmp")


def wait_for_file(path: str) -> None:
    """Returns once another rank has written a file.

    Raises:
        TimeoutError: After half a minute.
    """
    patience = time.monotonic() + 30
    while not os.path.exists(path):
        if time.monotonic() > patience:
            raise TimeoutError(f"nobody has written {path}")
        time.sleep(0.01)


class StopsAfterAnEpoch(Callback):
    """Ends a fit after its first epoch, as a job that is killed."""

    def epoch_end(self, state: Any, logger: Any) -> None:
        state.stop_training()


class Looks(Callback):
    """Looks at the objects of a Trainer at its second batch, which it may fail, and at those of its evaluations."""

    def __init__(self, fails: bool) -> None:
        self.during = list[Any]()
        self.copies = list[str]()
        self.fails = fails

    def batch_start(self, state: Any, logger: Any) -> None:
        del logger
        if int(state.timestamp.batch) == 2:
            self.during.append((seen(state.train_dataloader), sorted(vars(state))))
            self.copies += [outcome(copy.deepcopy, each) for each in state.callbacks if each is not self]
            if self.fails:
                raise ArithmeticError("out of luck")

    def eval_batch_start(self, state: Any, logger: Any) -> None:
        del logger
        self.during.append(seen(state.dataloader))
