"""Accelerate loops for the tests of `countoff.accelerate`: real Accelerate, digits, and a truth counted by the job."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from countoff.accelerate import Countoff
from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights


class CountingSGD(torch.optim.SGD):
    """Knows how many steps it has really applied."""

    applied = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.applied += 1
        return result


class Stream(IterableDataset[Any]):
    """Samples of the digits, alike on all ranks for Accelerate to deal out; `own`: for this rank alone.

    It reports the length that a test gives it, or none.
    """

    def __init__(self, samples: int, shuffle: bool = False, own: bool = False) -> None:
        self._samples = samples
        self._first = own_rank() * 31 if own else 0
        if shuffle:  # Accelerate broadcasts its state at the start of every pass
            self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self._samples):
            index = (number * 7 + self._first) % len(images)
            yield images[index], labels[index]


class SizedStream(Stream):
    """A stream that also reports how many samples it has, right or wrong."""

    def __init__(self, samples: int, reported: int, shuffle: bool = False) -> None:
        super().__init__(samples, shuffle)
        self._reported = reported

    def __len__(self) -> int:
        return self._reported


@dataclass(frozen=True)
class Loop:
    """What a test varies. Sequences hold one value per rank.

    Attributes:
        batches: Batches of each rank's train stream.
        reported: What it reports, in batches per rank; None: it has no length.
        samples: Use a map-style dataset of so many samples instead, which Accelerate shards.
        drop_last: Of that loader.
        shuffle: Whether it is shuffled, for a stream whether its generator is synchronised.
        evals: Samples of each map-style evaluation loader.
        eval_batches: Batches of each rank's evaluation stream.
        gather: Whether the evaluation gathers its predictions.
        epochs: How many.
        accumulation: Gradient accumulation steps.
        sync_with_dataloader: Whether the last batch of a loader always steps.
        loader: Arguments of DataLoaderConfiguration.
        break_at: By rank, the batches after which it leaves a train epoch.
        eval_break_at: The same for evaluations.
        eval_inside: Evaluates in the middle of each train epoch, after so many batches of it, rather than behind it.
        eval_ranks: The ranks that evaluate; empty: all of them.
        clip: The norm to which gradients are clipped; 0: they are not.
        options: Options of Countoff; None: no countoff at all.
    """

    batches: Sequence[int] = ()
    reported: Sequence[int] | None = None
    samples: int = 0
    drop_last: bool = False
    shuffle: bool = False
    evals: Sequence[int] = ()
    eval_batches: Sequence[int] = ()
    gather: bool = False
    epochs: int = 2
    accumulation: int = 1
    sync_with_dataloader: bool = True
    loader: Mapping[str, Any] = field(default_factory=dict)
    break_at: Mapping[int, int] = field(default_factory=dict)
    eval_break_at: Mapping[int, int] = field(default_factory=dict)
    eval_inside: int = 0
    eval_ranks: Sequence[int] = ()
    clip: float = 0.0
    options: Mapping[str, Any] | None = field(default_factory=dict)

    def accelerator(self) -> Accelerator:
        accumulation = GradientAccumulationPlugin(
            num_steps=self.accumulation, sync_with_dataloader=self.sync_with_dataloader
        )
        return Accelerator(
            cpu=devices.framework_uses_cpu(),
            dataloader_config=DataLoaderConfiguration(**self.loader),
            gradient_accumulation_plugin=accumulation,
        )

    def train_loader(self, world_size: int) -> DataLoader[Any]:
        if self.samples:
            return map_loader(self.samples, shuffle=self.shuffle, drop_last=self.drop_last)
        return stream_loader(
            self.batches[own_rank()],
            world_size,
            reported=self.reported[own_rank()] if self.reported else None,
            shuffle=self.shuffle,
        )

    def eval_loaders(self, world_size: int) -> dict[str, DataLoader[Any]]:
        found = {f"digits {number}": map_loader(samples) for number, samples in enumerate(self.evals)}
        if self.eval_batches:
            found["stream"] = stream_loader(self.eval_batches[own_rank()], world_size)
        return found


def map_loader(samples: int, *, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
    images, labels = digits()
    dataset = TensorDataset(images[:samples], labels[:samples])
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=shuffle, drop_last=drop_last)


def stream_loader(
    batches: int, world_size: int, *, reported: int | None = None, shuffle: bool = False
) -> DataLoader[Any]:
    """A loader that, once prepared, gives this rank so many batches: its share of a stream as long as all ranks'."""
    each = BATCH_SIZE * world_size
    stream = (
        Stream(batches * each, shuffle) if reported is None else SizedStream(batches * each, reported * each, shuffle)
    )
    return DataLoader(stream, batch_size=BATCH_SIZE)


def model_and_optimizer() -> tuple[torch.nn.Module, CountingSGD]:
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 10)
    return model, CountingSGD(model.parameters(), lr=0.1)


@dataclass
class Outcome:
    """What a loop counted by itself, and what countoff counted."""

    weights: str = ""
    batches: list[int] = field(default_factory=list)
    evals: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    steps: int = 0
    counted_batches: list[int] = field(default_factory=list)
    counted_evals: list[int] = field(default_factory=list)
    counted_steps: int = 0
    progress: dict[str, float] = field(default_factory=dict)


def forward_and_back(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any, clip: float = 0.0) -> None:
    images, labels = batch
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
        if clip and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def run(loop: Loop) -> Outcome:
    """Trains and evaluates as the loop describes; prints `trained EPOCH BATCH` after each batch that was trained on."""
    accelerator, outcome = loop.accelerator(), Outcome()
    world_size = accelerator.num_processes
    model, raw = model_and_optimizer()
    evals = loop.eval_loaders(world_size)
    model, optimizer, train, *prepared = accelerator.prepare(model, raw, loop.train_loader(world_size), *evals.values())
    evals = dict(zip(evals, prepared, strict=True))
    countoff = None if loop.options is None else Countoff(accelerator, **taken(loop.options))

    def evaluate_all() -> None:
        for name, loader in evals.items() if own_rank() in (loop.eval_ranks or range(world_size)) else ():
            batches = loader if countoff is None else countoff.eval(loader, name)
            outcome.evals.append(evaluate(accelerator, model, batches, loop, outcome))
            counted = None if loop.eval_inside else countoff
            outcome.counted_evals.append(outcome.evals[-1] if counted is None else counted.guard.batches)

    for epoch in range(loop.epochs):
        batches = 0
        for batch in train if countoff is None else countoff.train(train):
            batches += 1
            forward_and_back(accelerator, model, optimizer, batch, loop.clip)
            print(f"trained {epoch} {batches}", flush=True)
            if batches == loop.eval_inside:
                evaluate_all()
            if batches == loop.break_at.get(own_rank()):
                break
        outcome.batches.append(batches)
        outcome.counted_batches.append(0 if countoff is None else countoff.guard.train_batches)
        if not loop.eval_inside:
            evaluate_all()
    outcome.steps = raw.applied
    outcome.weights = weights(model)
    if countoff is not None:
        outcome.counted_steps, outcome.progress = countoff.guard.steps, countoff.progress()
        countoff.close()
    accelerator.wait_for_everyone()
    return outcome


def evaluate(accelerator: Accelerator, model: Any, loader: Any, loop: Loop, outcome: Outcome) -> int:
    batches = gathered = 0
    alone: Any = accelerator.unwrap_model(model)
    for images, _ in loader:
        batches += 1
        predictions = alone(images)
        if loop.gather:
            gathered += len(accelerator.gather_for_metrics(predictions))
        if batches == loop.eval_break_at.get(own_rank()):
            break
    outcome.gathered.append(gathered)
    return batches


def run_all(loops: Sequence[Loop]) -> list[Outcome]:
    """The loops, one after the other in one process."""
    found: list[Outcome] = []
    for loop in loops:
        AcceleratorState._reset_state()  # else a second Accelerator refuses another configuration
        GradientState._reset_state()
        found.append(run(loop))
    return found


def with_and_without(loops: Sequence[Loop]) -> list[tuple[Outcome, Outcome]]:
    """Each loop without countoff and with it, one after the other in one process."""
    return list(zip(run_all([replace(loop, options=None) for loop in loops]), run_all(loops), strict=True))


def trained(output: str) -> list[tuple[int, int]]:
    """The (epoch, batch) whose gradients a rank has averaged with the others', in order, from its output."""
    lines = [line.split() for line in output.splitlines() if line.startswith("trained ")]
    return [(int(epoch), int(batch)) for _, epoch, batch in lines]
