"""Measures what one batch costs on a GPU: a small transformer in bf16, in a plain loop and in Lightning.

1. A plain loop whose loader hands out its batches on the GPU, on two ranks that share it, so that countoff's threads
   run. Each rank trains a model of its own, because gloo's collectives would take most of the time. The loop has its
   batches from the loader, from a generator that does nothing, from countoff, and from countoff with fingerprints.
2. A fit of Lightning's on one rank, with no callback, with one that does nothing, and with `Countoff`.
3. A fingerprint of a batch on the GPU: what it takes to begin it, and to complete it at a later batch.

The variants take turns within one process. A pass is timed from before its first batch until the GPU has done its last.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.fingerprint_cost import BATCHES, SMALL
from benchmarks.rank_jobs import NoOp
from benchmarks.ranks import on_ranks
from benchmarks.results import COUNTOFF, NO_OP, NOTHING, THREAD_TIME, WALL_TIME, Samples, Table, compared, progress
from countoff import lightning
from countoff import torch as plain
from countoff.core.data.fingerprint import PendingFingerprint, begin_fingerprint
from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.gpu_jobs import on_device
from integration_tests.lightning_jobs import Job, quiet

BARE, GENERATOR = "the loader itself", "a generator that does nothing"
WITHOUT, WITH = "countoff without fingerprints", "countoff"
BEGIN, COMPLETE = "beginning a fingerprint of", "completing a fingerprint of"
CLOCKS = {WALL_TIME: time.perf_counter, THREAD_TIME: time.thread_time}
_WORDS = 1000


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        repeats: Passes of each variant that are counted; one more before them is the warm-up.
        batches: Batches of a pass.
        samples: Sequences in a batch.
        tokens: Tokens in a sequence.
        width: Of the model's layers; a multiple of 4, for as many heads.
        layers: Of the model.
    """

    repeats: int = 15
    batches: int = 128
    samples: int = 16
    tokens: int = 512
    width: int = 512
    layers: int = 6


def tables(quick: bool) -> Iterator[Table]:
    """Yields the costs on a GPU; without one, what they need."""
    if not torch.cuda.is_available():
        yield Table("`gpu`", [{"not measured": "needs a GPU, found 0"}])
        return
    size = Size(repeats=3) if quick else Size()
    progress("gpu: a plain loop, 2 ranks")
    for clock, samples in on_ranks(plain_costs, 2, size, device="shared")[0].items():
        yield compared(f"A batch of a plain loop on a GPU, {clock}, 2 ranks share it", "µs", samples, against=GENERATOR)
    progress("gpu: Lightning, 1 rank")
    for clock, samples in on_ranks(lightning_costs, 1, size, device="cuda")[0].items():
        yield compared(f"A batch of Lightning's `Trainer.fit` on a GPU, {clock}, 1 rank", "µs", samples, against=NO_OP)
    progress("gpu: fingerprints")
    samples = on_ranks(fingerprint_costs, 1, 40 if quick else 200, device="cuda")[0]
    yield compared(
        "A fingerprint of a batch on a GPU, on the training thread", "µs", samples, against=f"{BEGIN} {SMALL}"
    )


class Transformer(pl.LightningModule):
    """A small language model, which times its passes in a fit.

    Attributes:
        seconds: By clock, seconds per batch of the last pass.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(7)
        layer = torch.nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(_WORDS, size.width)
        self.encoder = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(size.width, _WORDS)
        self.seconds: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        """Returns the loss of guessing each token from all of them."""
        logits = self.head(self.encoder(self.embedding(batch)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns a plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        """Starts the clocks, when the device has nothing left to do."""
        _finish(self.device)
        self._began = {name: clock() for name, clock in CLOCKS.items()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reads the clocks after the last batch."""
        batches = batch_idx + 1
        if batches == int(self.trainer.num_training_batches):
            self.take_times(batches)

    def take_times(self, batches: int) -> None:
        """Takes the time of a pass of so many batches, when the device has done the last."""
        thread = CLOCKS[THREAD_TIME]()  # before it waits for the device, which may take a processor
        _finish(self.device)
        ended = {WALL_TIME: CLOCKS[WALL_TIME](), THREAD_TIME: thread}
        self.seconds = {name: (ended[name] - self._began[name]) / batches for name in CLOCKS}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Tokens:
    """A loader that hands out batches of tokens on a device, from pinned memory where that is a GPU."""

    def __init__(self, size: Size, device: torch.device) -> None:
        shape = size.batches, size.samples, size.tokens
        tokens = torch.randint(0, _WORDS, shape, generator=torch.Generator().manual_seed(own_rank()))
        self._batches = list(tokens.pin_memory() if device.type == "cuda" else tokens)
        self._device = device

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self._batches:
            yield batch.to(self._device, non_blocking=True)


def plain_costs(size: Size) -> dict[str, Samples]:
    """Returns seconds per batch of a plain loop by clock, with each source of batches in turn."""
    device = devices.join()
    model = Transformer(size).to(device, torch.bfloat16)
    optimizer, loader = model.configure_optimizers(), Tokens(size, device)
    variants = {BARE: None, GENERATOR: None, WITHOUT: {"compare_data": False}, WITH: {}}

    def passes(name: str, options: dict[str, Any] | None) -> dict[str, float]:
        countoff = None if options is None else plain.Countoff(optimizer=optimizer, **options)
        batches = (each for each in loader) if name == GENERATOR else loader
        if countoff is not None:
            countoff.start()  # the roll call is not timed
            batches = countoff.train(loader)
        model.on_train_epoch_start()
        for number, batch in enumerate(batches, 1):
            model.training_step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == size.batches:
                model.take_times(number)
        if countoff is not None:
            countoff.close()
        return model.seconds

    return _in_turns({name: lambda name=name, options=of: passes(name, options) for name, of in variants.items()}, size)


def lightning_costs(size: Size) -> dict[str, Samples]:
    """Returns seconds per batch of a fit's second epoch by clock, with each callback in turn."""
    quiet()
    variants: dict[str, Callable[[], list[Any]]] = {
        NOTHING: lambda: [],
        NO_OP: lambda: [NoOp()],
        COUNTOFF: lambda: [lightning.Countoff()],
    }

    def fit(callbacks: list[Any]) -> dict[str, float]:
        chosen = {**devices.lightning(), "precision": "bf16-true", "callbacks": callbacks}
        model = Transformer(size)
        Job(options=None, trainer=chosen).make_trainer().fit(model, Tokens(size, devices.own_device()))
        return model.seconds

    return _in_turns({name: lambda make=make: fit(make()) for name, make in variants.items()}, size)


def _in_turns(variants: dict[str, Callable[[], dict[str, float]]], size: Size) -> dict[str, Samples]:
    """Returns the seconds of each variant, by clock."""
    found: dict[str, Samples] = {clock: {name: [] for name in variants} for clock in CLOCKS}
    for repeat in range(size.repeats + 1):
        for name, run in variants.items():
            seconds = run()
            for clock in CLOCKS if repeat else ():
                found[clock][name].append(seconds[clock])
    return found


def fingerprint_costs(repeats: int) -> Samples:
    """Returns the seconds of this thread to begin a fingerprint of a batch on the device, and to complete it."""
    device, found = devices.own_device(), Samples()
    for name, make in BATCHES.items():
        batch = on_device(make(), device)
        begin, complete = found.setdefault(f"{BEGIN} {name}", []), found.setdefault(f"{COMPLETE} {name}", [])
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            pending = begin_fingerprint(batch)
            begun = time.perf_counter()
            _finish(device)
            collected = time.perf_counter()
            if isinstance(pending, PendingFingerprint):
                pending.collect()
            if repeat:  # the first one gets its pinned memory
                begin.append(begun - began)
                complete.append(time.perf_counter() - collected)
    return found
