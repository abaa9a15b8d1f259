"""Jobs that hear a remedy, each beside the same job with that remedy applied to the letter.

tests/golden/remedies.yaml names them: there, each remedy of the golden messages has its jobs, or a reason why it has
none. No job synchronises its ranks in the loop, so a verdict ends only its own job, and one launch runs all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import countoff.accelerate
import countoff.torch
from countoff.core import DivergenceError, Verdict
from integration_tests.digits import digits, own_rank
from integration_tests.harness import RankResult

BATCH_SIZE = 4
Heard = list[Verdict]
_patience = 0.0
"""Seconds for which a job waits at its end to hear of its fault: it is shorter than any job of a user's."""


@dataclass(frozen=True)
class Case:
    """A job with a fault, and what its message says to do.

    Attributes:
        fault: Runs the job, and returns what its rank hears.
        mended: By the words of the remedy, the same job with it.
        hears: Kinds of what the user is still told then, by these words: what is accepted is said once.
    """

    fault: Callable[[], Heard]
    mended: Mapping[str, Callable[[], Heard]]
    hears: Mapping[str, str] = field(default_factory=dict)


class Rows(IterableDataset[Any]):
    """So many samples of this rank's own, of which it may report another number."""

    def __init__(self, batches: int, first: int | None = None, every: int = 1) -> None:
        self.batches = batches
        self.first = own_rank() * 100 if first is None else first
        self.every = every

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self.batches * BATCH_SIZE):
            index = self.first + number * self.every
            yield images[index], labels[index]


class Drawn(IterableDataset[Any]):
    """Samples drawn at random, with a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        rng = random.Random(self.seed)
        for _ in range(5 * BATCH_SIZE):
            index = rng.randrange(len(images))
            yield images[index], labels[index]


def rows(*batches: int) -> DataLoader[Any]:
    """A loader without a length over this rank's own samples, with so many batches on each rank."""
    return DataLoader(Rows(batches[own_rank()]), BATCH_SIZE)


def whole(samples: int = 40) -> TensorDataset:
    """The same samples on every rank."""
    images, labels = digits()
    return TensorDataset(images[:samples], labels[:samples])


def sampled(data: Any = None, *, shuffle: bool = False) -> DataLoader[Any]:
    data = whole() if data is None else data
    return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=shuffle))


def share() -> Subset[Any]:
    """Every second sample, from this rank's on."""
    return Subset(whole(), range(own_rank(), 40, 2))


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that is not wrapped: nothing synchronises the ranks."""
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def heard(own: Any, loop: Callable[[], None]) -> Heard:
    """What this rank hears in a job: the verdict that ends it, and its warnings.

    Args:
        own: What counts the loop.
        loop: The loop.
    """
    found: Heard = []
    try:
        loop()
        until = time.monotonic() + _patience
        while own.guard.verdict is None and not own.guard.notices and time.monotonic() < until:
            time.sleep(0.01)
        own.close()
    except DivergenceError as error:
        found.append(error.verdict)
        own._loop.abandon()
    return [*found, *own.guard.notices]


def plain(
    loader: Any,
    *,
    batches: Callable[[Any], Iterable[Any]] = lambda loader: loader,
    epochs: int = 1,
    before_epoch: Callable[[int], None] = lambda _: None,
    evaluate: Callable[[Any], None] = lambda _: None,
    passes: Callable[[int], int] = lambda _: 1,
    steps: Callable[[int], bool] = lambda _: True,
    stops: Callable[[int], bool] = lambda _: False,
    schedule: Callable[[Any], Any] | None = None,
    counts_passes: bool = False,
    first_epoch: int = 0,
    **options: Any,
) -> Heard:
    """Runs a plain loop.

    Args:
        loader: What the loop iterates.
        batches: What it makes of that in each epoch, before countoff counts it.
        epochs: Passes over the loader.
        before_epoch: Called with the number of each epoch.
        evaluate: Called after it, with what counts the loop.
        passes: Forward and backward passes for a batch; those beyond the first have a loss of 0.
        steps: Whether this rank steps after a batch.
        stops: Whether it leaves the loop after a batch.
        schedule: Makes the scheduler.
        counts_passes: Whether countoff counts forward passes.
        first_epoch: The number of the first epoch.
        options: Of Countoff.
    """
    model, optimizer = model_and_optimizer()
    scheduler = None if schedule is None else schedule(optimizer)
    apart: Any = contextlib.nullcontext()
    if schedule is not None:  # what proves that the ranks hold one model
        model = DistributedDataParallel(model)
        apart = model.no_sync()

    known: dict[str, Any] = {"optimizer": optimizer}
    known |= {"model": model} if counts_passes or schedule is not None else {}
    own = countoff.torch.Countoff(**known, **options)

    def loop() -> None:
        for epoch in range(first_epoch, first_epoch + epochs):
            before_epoch(epoch)
            for number, (images, labels) in enumerate(own.train(batches(loader), epoch=epoch)):
                for again in range(passes(number)):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    (loss * 0 if again else loss).backward()
                if steps(number):
                    optimizer.step()
                    optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                if stops(number):
                    break
            evaluate(own)

    with apart:
        return heard(own, loop)


def evaluating(evaluation: Any, *, alone: bool = False, **options: Any) -> Heard:
    """A plain loop that evaluates after its epoch; `alone`: on rank 0 only."""

    def evaluate(own: Any) -> None:
        if not alone or own_rank() == 0:
            for _ in own.eval(evaluation):
                pass

    return plain(rows(3, 3), epochs=2, evaluate=evaluate, **options)


def counted(batches: Callable[[], Iterable[Any]], **options: Any) -> Heard:
    """A loop without a loader."""
    model, optimizer = model_and_optimizer()
    own = countoff.torch.Countoff(optimizer=optimizer, **options)

    def loop() -> None:
        for images, labels in own.train(batches()):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return heard(own, loop)


def mine(number: int) -> bool:
    """Whether this is rank 1 in its third batch."""
    return own_rank() == 1 and number == 2


def all_decide_in(number: int) -> bool:
    """Whether some rank wants to stop in a batch, as rank 1 in its third."""
    flag = torch.tensor([float(mine(number))])
    dist.all_reduce(flag)
    return bool(flag)


def falling(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def shuffled_by_rank(seed: int) -> DataLoader[Any]:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"number": list(range(48))}).shuffle(seed=seed).with_format("torch")
    return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False), collate_fn=_as_digits)  # pyright: ignore[reportArgumentType]


def _as_digits(found: list[Any]) -> Any:
    images, labels = digits()
    numbers = [int(each["number"]) for each in found]
    return images[numbers], labels[numbers]


def _epochs_of(loader: DataLoader[Any]) -> Callable[[int], None]:
    return loader.sampler.set_epoch  # pyright: ignore[reportAttributeAccessIssue]


def in_order(*, sets: bool, shuffle: bool = True) -> Heard:
    loader = sampled(shuffle=shuffle)
    return plain(loader, epochs=3, before_epoch=_epochs_of(loader) if sets else lambda _: None)


ANY = "Countoff(..., uneven_train='stop')"
TORCH: Mapping[str, Case] = {
    "torch: a rank's stream is short": Case(
        lambda: plain(rows(5, 3)),
        {
            "DataLoader(sampler=DistributedSampler(dataset))": lambda: plain(sampled()),
            "countoff.train(itertools.islice(loader, n))": lambda: plain(
                rows(5, 3), batches=lambda all: itertools.islice(all, 3)
            ),
            "countoff.train(itertools.islice(loader, n)), with a smaller n": lambda: plain(
                rows(5, 3), batches=lambda all: itertools.islice(all, 2), epochs=2
            ),
            ANY: lambda: plain(rows(5, 3), epochs=2, uneven_train="stop"),
        },
        {ANY: "Truncated"},
    ),
    "torch: a rank leaves the loop": Case(
        lambda: plain(rows(5, 5), stops=mine),
        {"all-reduce the flag before any rank acts on it": lambda: plain(rows(5, 5), stops=all_decide_in)},
    ),
    "torch: evaluations are uneven": Case(
        lambda: evaluating(rows(3, 2)),
        {
            "Countoff(..., uneven_eval='allow')": lambda: evaluating(rows(3, 2), uneven_eval="allow"),
            "give every rank the same number of evaluation batches": lambda: evaluating(rows(2, 2)),
            "Countoff(..., uneven_eval='stop')": lambda: evaluating(rows(3, 2), uneven_eval="stop"),
        },
        {"Countoff(..., uneven_eval='stop')": "Truncated"},
    ),
    "torch: rank 0 evaluates alone": Case(
        lambda: evaluating(rows(2, 2), alone=True),
        {
            "Countoff(..., uneven_eval='off')": lambda: evaluating(rows(2, 2), alone=True, uneven_eval="off"),
            "let all ranks evaluate after the same batch": lambda: evaluating(rows(2, 2)),
        },
    ),
    "torch: a rank skips a step": Case(
        lambda: plain(rows(5, 5), steps=lambda number: not mine(number)),
        {"no condition of one rank around optimizer.step()": lambda: plain(rows(5, 5))},
    ),
    "torch: a rank runs another micro-batch": Case(
        lambda: plain(rows(5, 5), passes=lambda number: 1 + mine(number), counts_passes=True),
        {
            "empty micro-batches, any valid input with a loss of 0": lambda: plain(
                rows(5, 5), passes=lambda number: 1 + (number == 2), counts_passes=True
            )
        },
    ),
    "torch: schedules of different lengths": Case(
        lambda: plain(rows(5, 5), schedule=falling(20 + own_rank())),
        {"make the scheduler with the same length": lambda: plain(rows(5, 5), schedule=falling(20))},
    ),
    "torch: batch sizes differ": Case(
        lambda: plain(rows(5, 5), batch_size=4 + own_rank()),
        {"use the same batch_size on every rank": lambda: plain(rows(5, 5), batch_size=4)},
    ),
    "torch: accumulation differs": Case(
        lambda: plain(rows(4, 4), gradient_accumulation_steps=1 + own_rank()),
        {"the same number of batches per optimizer step": lambda: plain(rows(4, 4), gradient_accumulation_steps=1)},
    ),
    "torch: positions differ": Case(
        lambda: plain(rows(5, 5), first_epoch=own_rank()),
        {"resume every rank from the same checkpoint": lambda: plain(rows(5, 5), first_epoch=1)},
    ),
    "torch: all ranks read the same": Case(
        lambda: plain(DataLoader(whole(), BATCH_SIZE)),
        {
            "DataLoader(sampler=DistributedSampler(dataset))": lambda: plain(sampled()),
            "every world_size-th sample of an iterable dataset": lambda: plain(
                DataLoader(Rows(5, first=own_rank(), every=2), BATCH_SIZE)
            ),
            "seed these draws by rank (seed + rank)": lambda: plain(DataLoader(Drawn(7 + own_rank()), BATCH_SIZE)),
            "Countoff(..., compare_data=False)": lambda: plain(DataLoader(whole(), BATCH_SIZE), compare_data=False),
        },
    ),
    "torch: a share is sharded again": Case(
        lambda: plain(sampled(share())),
        {
            "give it all of the data on every rank": lambda: plain(sampled(whole())),
            "keep your own shares, and leave out the DistributedSampler": lambda: plain(
                DataLoader(share(), BATCH_SIZE)
            ),
            "Countoff(..., compare_data=False)": lambda: plain(sampled(share()), compare_data=False),
        },
    ),
    "torch: rows in another order": Case(
        lambda: plain(shuffled_by_rank(own_rank())),
        {
            "shuffle with the same seed on all ranks": lambda: plain(shuffled_by_rank(3)),
            "Countoff(..., compare_data=False)": lambda: plain(shuffled_by_rank(own_rank()), compare_data=False),
        },
    ),
    "torch: set_epoch is not called": Case(
        lambda: in_order(sets=False),
        {
            "call loader.sampler.set_epoch(epoch)": lambda: in_order(sets=True),
            "shuffle=False": lambda: in_order(sets=False, shuffle=False),
        },
    ),
    "torch: a counted iterable is short": Case(
        lambda: counted(lambda: list(rows(5, 3))),
        {
            "countoff.train(itertools.islice(batches, n))": lambda: counted(lambda: itertools.islice(rows(5, 3), 3)),
            ANY: lambda: counted(lambda: list(rows(5, 3)), uneven_train="stop"),
        },
        {ANY: "Truncated"},
    ),
    "torch: all ranks draw the same": Case(
        lambda: counted(lambda: DataLoader(Drawn(7), BATCH_SIZE)),
        {
            "seed + rank": lambda: counted(lambda: DataLoader(Drawn(7 + own_rank()), BATCH_SIZE)),
            "every world_size-th sample": lambda: counted(
                lambda: DataLoader(Rows(5, first=own_rank(), every=2), BATCH_SIZE)
            ),
            "Countoff(..., compare_data=False)": lambda: counted(
                lambda: DataLoader(Drawn(7), BATCH_SIZE), compare_data=False
            ),
        },
    ),
    "torch: uneven_train differs": Case(
        lambda: plain(rows(5, 5), uneven_train="stop" if own_rank() else "raise"),
        {"give every rank the same uneven_train": lambda: plain(rows(5, 5), uneven_train="stop")},
    ),
    "torch: weights_every differs": Case(
        lambda: plain(rows(5, 5), counts_passes=True, weights_every=2 + own_rank()),
        {"give every rank the same weights_every": lambda: plain(rows(5, 5), counts_passes=True, weights_every=2)},
    ),
    "torch: a rank without data, with 'stop'": Case(
        lambda: plain(rows(3, 0), uneven_train="stop"),
        {"give every rank data for at least one batch": lambda: plain(rows(3, 3), uneven_train="stop")},
    ),
    "torch: uneven_train='stop'": Case(
        lambda: plain(rows(5, 3), uneven_train="stop"),
        {"give every rank the same number of batches": lambda: plain(rows(3, 3), uneven_train="stop")},
    ),
    "torch: uneven_eval='stop'": Case(
        lambda: evaluating(rows(3, 2), uneven_eval="stop"),
        {"give every rank the same number of evaluation batches": lambda: evaluating(rows(2, 2), uneven_eval="stop")},
    ),
}


class Dealt(IterableDataset[Any]):
    """The same samples on every rank, which Accelerate deals out; some ranks may end earlier."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches[own_rank()]

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(2 * self.batches * BATCH_SIZE):
            yield images[number], labels[number]


class OwnBegin(Dealt):
    """Samples that begin elsewhere on each rank."""

    def __init__(self, first: int) -> None:
        super().__init__(5, 5)
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(40):
            yield images[self.first + number], labels[self.first + number]


class ReadyMade(IterableDataset[Any]):
    """Ready-made batches, of which this rank takes every so many, from its own on."""

    def __init__(self, first: int, every: int) -> None:
        self.first, self.every = first, every

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for start in range(self.first, 10, self.every):
            yield (
                images[start * BATCH_SIZE : (start + 1) * BATCH_SIZE],
                labels[start * BATCH_SIZE : (start + 1) * BATCH_SIZE],
            )


def accelerated(
    loader: Any,
    *,
    batches: Callable[[Any], Iterable[Any]] = lambda loader: loader,
    config: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    epochs: int = 1,
    evaluation: Any = None,
    evaluates: Callable[[], bool] = lambda: True,
    steps: Callable[[int], bool] = lambda _: True,
    stops: Callable[[int], bool] = lambda _: False,
    schedule: Callable[[Any], Any] | None = None,
    as_one: bool = False,
    tells_epochs: bool = False,
    first_epoch: int = 0,
    **options: Any,
) -> Heard:
    """Runs a loop over prepared loaders; the model is not prepared, so that nothing synchronises the ranks.

    Args:
        loader: The train loader, before `prepare()`.
        batches: What the loop makes of the counted batches in each epoch.
        config: Arguments of DataLoaderConfiguration.
        accumulation: Gradient accumulation steps.
        epochs: Passes over the loader.
        evaluation: An evaluation loader, before `prepare()`; evaluated after each epoch.
        evaluates: Whether this rank evaluates.
        steps: Whether this rank steps after a batch.
        stops: Whether it leaves the loop after a batch.
        schedule: Makes the scheduler.
        as_one: Whether the train loader is prepared as for one process.
        tells_epochs: Whether Countoff is told the number of epochs.
        first_epoch: The number of the first epoch.
        options: Of Countoff.
    """
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state()  # else a second Accelerator refuses another configuration
    GradientState._reset_state()
    settings = {"dispatch_batches": False, **(config or {})}
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=DataLoaderConfiguration(**settings)
    )
    model, optimizer = model_and_optimizer()
    scheduler = None if schedule is None else accelerator.prepare(schedule(optimizer))
    apart: Any = contextlib.nullcontext()
    if schedule is not None:  # what proves that the ranks hold one model
        model = accelerator.prepare(model)
        apart = model.no_sync()
    optimizer = accelerator.prepare(optimizer)
    if as_one:
        loader = prepare_data_loader(
            loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )
    else:
        loader = accelerator.prepare(loader)
    evaluation = None if evaluation is None else accelerator.prepare(evaluation)
    known = {"epochs": epochs} if tells_epochs else {}
    own = countoff.accelerate.Countoff(accelerator, **known, **options)

    def loop() -> None:
        for epoch in range(first_epoch, first_epoch + epochs):
            for number, (images, labels) in enumerate(batches(own.train(loader, epoch=epoch))):
                with accelerator.accumulate(model):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                    if steps(number):
                        optimizer.step()
                        optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
                if stops(number):
                    break
            if evaluation is not None and evaluates():
                for _ in own.eval(evaluation):
                    pass

    with apart:
        return heard(own, loop)


def dealt(*batches: int) -> DataLoader[Any]:
    return DataLoader(Dealt(*batches), BATCH_SIZE)


def mapped(samples: int = 40, **more: Any) -> DataLoader[Any]:
    return DataLoader(whole(samples), BATCH_SIZE, **more)


def _two(loader: Any) -> Iterable[Any]:
    return itertools.islice(loader, 2)


def _three(loader: Any) -> Iterable[Any]:
    return itertools.islice(loader, 3)


STOPS = "Countoff(..., uneven_train='stop')"
OFF = "Countoff(..., compare_data=False)"
AS_ONE = "prepare_data_loader(loader, num_processes=1, process_index=0)"
ACCELERATE: Mapping[str, Case] = {
    "accelerate: a rank's stream is short": Case(
        lambda: accelerated(dealt(5, 3)),
        {
            "even_batches=True, the default": lambda: accelerated(mapped(36)),
            "itertools.islice(countoff.train(loader), n)": lambda: accelerated(dealt(5, 3), batches=_three),
            "n a multiple of gradient_accumulation_steps": lambda: accelerated(
                dealt(5, 2), batches=_two, accumulation=2, epochs=2
            ),
            STOPS: lambda: accelerated(dealt(5, 3), epochs=2, uneven_train="stop"),
            f"{STOPS}, with accumulation": lambda: accelerated(
                dealt(5, 3), epochs=2, accumulation=2, uneven_train="stop"
            ),
        },
        {STOPS: "Truncated", f"{STOPS}, with accumulation": "Truncated"},
    ),
    "accelerate: batches that are not even": Case(
        lambda: accelerated(mapped(36), config={"even_batches": False}),
        {"even_batches=True, the default": lambda: accelerated(mapped(36))},
    ),
    "accelerate: datasets of other lengths": Case(
        lambda: accelerated(mapped(40 - 8 * own_rank())),
        {"even_batches=True, the default, and the same dataset on every rank": lambda: accelerated(mapped(40))},
    ),
    "accelerate: a rank leaves the loop": Case(
        lambda: accelerated(mapped(), stops=mine),
        {"all-reduce the flag before any rank acts on it": lambda: accelerated(mapped(), stops=all_decide_in)},
    ),
    "accelerate: evaluations are uneven": Case(
        lambda: accelerated(mapped(), evaluation=mapped(36), config={"even_batches": False}),
        {
            "Countoff(..., uneven_eval='allow')": lambda: accelerated(
                mapped(), evaluation=mapped(36), config={"even_batches": False}, uneven_eval="allow"
            ),
            "give every rank the same number of evaluation batches": lambda: accelerated(
                mapped(), evaluation=mapped(36)
            ),
            "Countoff(..., uneven_eval='stop')": lambda: accelerated(
                mapped(), evaluation=mapped(36), config={"even_batches": False}, uneven_eval="stop"
            ),
        },
        {"Countoff(..., uneven_eval='stop')": "Truncated"},
    ),
    "accelerate: rank 0 evaluates alone": Case(
        lambda: accelerated(
            dealt(3, 3), evaluation=dealt(2, 2), evaluates=lambda: own_rank() == 0, epochs=2, compare_data=False
        ),
        {
            "Countoff(..., uneven_eval='off')": lambda: accelerated(
                dealt(3, 3), evaluation=dealt(2, 2), evaluates=lambda: own_rank() == 0, uneven_eval="off", epochs=2
            ),
            "let all ranks evaluate after the same batch": lambda: accelerated(
                dealt(3, 3), evaluation=dealt(2, 2), epochs=2
            ),
        },
    ),
    "accelerate: a rank skips a step": Case(
        lambda: accelerated(mapped(), steps=lambda number: not mine(number)),
        {"no condition of one rank around optimizer.step()": lambda: accelerated(mapped())},
    ),
    "accelerate: schedules of different lengths": Case(
        lambda: accelerated(mapped(), schedule=falling(40 + own_rank())),
        {"make the scheduler with the same length": lambda: accelerated(mapped(), schedule=falling(40))},
    ),
    "accelerate: islice without a multiple": Case(
        lambda: accelerated(dealt(5, 3), batches=_three, accumulation=2),
        {
            "no break of one rank": lambda: accelerated(
                dealt(5, 2), batches=lambda all: itertools.islice(all, 2), accumulation=2
            )
        },
    ),
    "accelerate: positions differ": Case(
        lambda: accelerated(mapped(), first_epoch=own_rank()),
        {"resume every rank from the same checkpoint": lambda: accelerated(mapped(), first_epoch=1)},
    ),
    "accelerate: epochs differ": Case(
        lambda: accelerated(mapped(), epochs=1 + own_rank(), tells_epochs=True),
        {"give every rank the same number of epochs": lambda: accelerated(mapped(), epochs=2, tells_epochs=True)},
    ),
    "accelerate: max_steps differ": Case(
        lambda: accelerated(mapped(), max_steps=5 + own_rank()),
        {"give every rank the same number of steps": lambda: accelerated(mapped(), max_steps=5)},
    ),
    "accelerate: all ranks read the same": Case(
        lambda: accelerated(DataLoader(ReadyMade(0, 1), batch_size=None), as_one=True),
        {
            "let accelerator.prepare() shard the loader": lambda: accelerated(mapped()),
            "give each rank a share of its own, by accelerator.process_index": lambda: accelerated(
                DataLoader(ReadyMade(own_rank(), 2), batch_size=None), as_one=True
            ),
            OFF: lambda: accelerated(DataLoader(ReadyMade(0, 1), batch_size=None), as_one=True, compare_data=False),
        },
    ),
    "accelerate: a share is sharded again": Case(
        lambda: accelerated(DataLoader(share(), BATCH_SIZE)),
        {
            "give it all of the data on every rank": lambda: accelerated(mapped()),
            AS_ONE: lambda: accelerated(DataLoader(share(), BATCH_SIZE), as_one=True),
            OFF: lambda: accelerated(DataLoader(share(), BATCH_SIZE), compare_data=False),
        },
    ),
    "accelerate: streams overlap": Case(
        lambda: accelerated(DataLoader(OwnBegin(4 * own_rank()), BATCH_SIZE)),
        {
            "let every rank yield the same samples in the same order": lambda: accelerated(
                DataLoader(OwnBegin(0), BATCH_SIZE)
            ),
            OFF: lambda: accelerated(DataLoader(OwnBegin(4 * own_rank()), BATCH_SIZE), compare_data=False),
        },
    ),
    "accelerate: datasets of other lengths, shuffled": Case(
        lambda: accelerated(mapped(40 - own_rank(), shuffle=True)),
        {
            "give every rank the same dataset": lambda: accelerated(mapped(40, shuffle=True)),
            OFF: lambda: accelerated(mapped(40 - own_rank(), shuffle=True), compare_data=False),
        },
    ),
}
CASES: Mapping[str, Case] = {**TORCH, **ACCELERATE}


def faults(names: list[str]) -> dict[str, list[tuple[str, str]]]:
    """What this rank hears in each job: kinds and remedies."""
    global _patience
    _patience = 10.0
    dist.init_process_group("gloo")
    return {name: [(each.kind, each.remedy) for each in CASES[name].fault()] for name in names}


def mended(names: list[str]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The same of each job with each of its remedies applied."""
    dist.init_process_group("gloo")
    return {
        (name, words): [(each.kind, each.sentence) for each in job()]
        for name in names
        for words, job in CASES[name].mended.items()
    }


def still_heard(results: Sequence[RankResult]) -> dict[tuple[str, str], set[str]]:
    """What ranks have heard in each job of `mended`, but for what the user has accepted."""
    found: dict[tuple[str, str], set[str]] = {}
    for result in results:
        for (name, words), heard in result.value.items():
            kinds = {kind for kind, _ in heard} - {CASES[name].hears.get(words)}
            found.setdefault((name, words), set()).update(kinds)
    return found
