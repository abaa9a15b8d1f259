"""Lightning, ranks of different lengths that take the same number of batches (`uneven_train`, `uneven_eval`)."""

import contextlib
import copy
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from countoff.core import DivergenceError
from countoff.lightning import Countoff
from integration_tests.digits import BATCH_SIZE, Listed, digits, own_rank, share_loader
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.lightning_jobs import Classifier, Job, outcome, quiet
from integration_tests.output import assert_named, verdict_lines


class Part(IterableDataset[Any]):
    """So many batches of one rank's part of the digits."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self._batches * BATCH_SIZE):
            index = (number * 7 + own_rank() * 31) % len(images)
            yield images[index], labels[index]


class SizedPart(Part):
    """A part that reports its own length, in samples."""

    def __len__(self) -> int:
        return self._batches * BATCH_SIZE


@dataclass(frozen=True)
class Case:
    """A job with uneven ranks.

    Attributes:
        train: Batches of each rank's train loader, for each epoch; the last ones hold for later epochs too.
        common: Batches that every rank takes, for each epoch.
        sized: Whether the loaders report their lengths.
        mapped: Whether the loaders are map-style: their lengths are proven.
        val: Batches of each rank's validation loaders.
        common_val: Batches of them that every rank takes.
        trainer: Arguments of the Trainer.
        model: Arguments of the Classifier.
    """

    train: Sequence[Sequence[int]]
    common: Sequence[int]
    sized: bool = False
    mapped: bool = False
    val: Sequence[Sequence[int]] = ()
    common_val: Sequence[int] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def loader(self, epoch: int, by_hand: bool) -> Any:
        """This rank's train loader."""
        own, common = (
            self.train[min(epoch, len(self.train) - 1)][own_rank()],
            self.common[min(epoch, len(self.common) - 1)],
        )
        part: Any = (SizedPart if self.sized else Part)(common if by_hand else own)
        data: Any = list(part) if self.mapped else part
        return DataLoader(data, batch_size=BATCH_SIZE)

    def val_loaders(self, by_hand: bool) -> Any:
        """This rank's validation loaders."""
        own = self.val[own_rank()] if self.val else ()
        return [DataLoader(Part(count), batch_size=BATCH_SIZE) for count in (self.common_val if by_hand else own)]


class Seen(Classifier):
    """Has loaders of its own, and keeps what it has seen."""

    def __init__(self, case: Case, by_hand: bool) -> None:
        super().__init__(**case.model)
        self._case = case
        self._by_hand = by_hand
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return self._case.loader(self.current_epoch, self._by_hand)

    def val_dataloader(self) -> Any:
        return self._case.val_loaders(self._by_hand)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("train", self.current_epoch, float(batch[0].sum())))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("steps", self.trainer.global_step))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("validation", dataloader_idx, float(batch[0].sum())))
        super().validation_step(batch, batch_idx, dataloader_idx)


def train(case: Case, by_hand: bool, **options: Any) -> dict[str, Any]:
    """Trains with loaders that are made even, or that were cut by hand, without countoff."""
    if not by_hand:
        options = {"uneven_train": "stop", "uneven_eval": "stop", **options}
    job = Job(trainer=copy.deepcopy(case.trainer), options=None if by_hand else options)
    trainer, model = job.make_trainer(use_distributed_sampler=False), Seen(case, by_hand)
    trainer.fit(model)
    return {**outcome(trainer, model), "seen": model.seen}


def train_both(cases: Mapping[str, Case]) -> dict[str, Any]:
    quiet()
    return {name: [train(case, by_hand=True), train(case, by_hand=False)] for name, case in cases.items()}


def same(length: int) -> list[list[int]]:
    return [[length, length]]


def accumulate(batches: int) -> dict[str, Any]:
    return {"accumulate_grad_batches": batches}


RELOAD = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
THREE_EPOCHS = [[7, 5], [3, 6], [4, 4]]
VAL = {"val": [[2], [3]], "common_val": [2]}
TWO_VAL = {"val": [[2, 4], [3, 1]], "common_val": [2, 1], "model": {"eval_sync": "step"}}
# Of two ranks. The second number is what every rank takes.
TWO = {
    "short last": Case([[7, 5]], [5]),
    "short first": Case([[5, 7]], [5]),
    "one and four": Case([[1, 4]], [1]),
    "none": Case([[0, 5]], [0]),
    "equal": Case(same(5), [5]),
    "equal, sized": Case(same(5), [5], sized=True, **VAL),
    "accumulation of 2": Case([[7, 5]], [5], trainer=accumulate(2)),
    "accumulation of 3": Case([[4, 9]], [4], trainer=accumulate(3)),
    "three epochs": Case(THREE_EPOCHS, [5, 3, 4], trainer={**RELOAD, **accumulate(2)}, **VAL),
    "three epochs, sized": Case(THREE_EPOCHS, [5, 3, 4], sized=True, trainer={**RELOAD, **accumulate(2)}, **VAL),
    "validation": Case([[7, 5]], [5], **VAL),
    "validation in mid-epoch": Case([[7, 5]], [5], trainer={"val_check_interval": 2}, **VAL),
    "validation in mid-epoch, proven": Case([[13, 9]], [9], mapped=True, trainer={"val_check_interval": 0.5}, **VAL),
    "sized": Case([[5, 7]], [5], sized=True, trainer=accumulate(2), **VAL),
    "sized, short last": Case([[13, 9]], [9], sized=True, trainer=accumulate(2), **VAL),
    "proven": Case([[13, 9]], [9], mapped=True, trainer=accumulate(2), **VAL),
    "max_steps before the end": Case([[7, 5]], [5], trainer={"max_steps": 4, "max_epochs": -1}, **VAL),
    "max_steps at the end": Case([[7, 5]], [5], trainer={"max_steps": 5, "max_epochs": -1}, **VAL),
    "max_steps after the end": Case([[7, 5]], [5], trainer={"max_steps": 6, "max_epochs": -1}, **VAL),
    "max_steps, accumulated": Case([[5, 7]], [5], trainer={"max_steps": 5, "max_epochs": -1, **accumulate(2)}, **VAL),
    "a limit below the end": Case([[7, 5]], [5], trainer={"limit_train_batches": 3}, **VAL),
    "a limit below the end, sized": Case([[7, 5]], [5], sized=True, trainer={"limit_train_batches": 3}, **VAL),
    "early stopping": Case([[7, 5]], [5], model={"stop_at": 3}, **VAL),
    "early stopping by a metric": Case(
        [[7, 5]],
        [5],
        trainer={"max_epochs": 4, "callbacks": [EarlyStopping("val", min_delta=99.0, patience=1)]},
        model={"eval_sync": "epoch"},
        **VAL,
    ),
    "gradient clipping": Case([[7, 5]], [5], trainer={"gradient_clip_val": 0.1, **accumulate(2)}),
    "evaluations synchronised": Case([[7, 5]], [5], val=[[2], [5]], common_val=[2], model={"eval_sync": "step"}),
    "several evaluations": Case([[5, 7]], [5], trainer={"val_check_interval": 2}, **TWO_VAL),
    "a limit of evaluations": Case([[5, 7]], [5], trainer={"limit_val_batches": 2}, **TWO_VAL),
}


def assert_as_by_hand(results: Sequence[Any]) -> None:
    """Every rank took the batches, the steps and the validations of the job whose loaders were cut by hand."""
    everything = "\n".join(map(str, results))
    for name in results[0].value:
        for result in results:
            by_hand, even = result.value[name]
            assert even == by_hand, (name, result.rank, everything)
        assert len({result.value[name][1]["weights"] for result in results}) == 1, name


def test_uneven_ranks_train_as_if_cut_by_hand(run_ranks):
    """Ranks of different lengths train to the bits of the job whose loaders were cut by hand."""
    assert_as_by_hand(run_ranks(train_both, 2, TWO, deadline_seconds=300))


FOUR = {
    "unsized": Case([[13, 9, 11, 10]], [9], trainer=accumulate(2), val=[[2], [3], [1], [2]], common_val=[1]),
    "proven": Case([[13, 9, 11, 10]], [9], mapped=True, trainer=accumulate(4)),
}


def test_four_uneven_ranks_train_as_if_cut_by_hand(run_ranks):
    """So do four ranks of four lengths."""
    results = run_ranks(train_both, 4, FOUR, deadline_seconds=200)
    assert_as_by_hand(results)
    said = [line for line in verdict_lines(results[0]) if line.startswith("countoff: ")]
    # Reports of a validation and of the epoch that ends with it are gathered in the background: either may be first.
    assert sorted(line.split(" on every rank")[0] for line in said) == [
        "countoff: Truncated: train epoch 0 stopped",
        "countoff: Truncated: train epoch 0 stopped",
        "countoff: Truncated: validation stopped",
    ]
    assert [verdict_lines(result) for result in results[1:]] == [[], [], []]


class Fetching(Classifier):
    """Fetches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, _, _ = next(dataloader_iter)
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, 0)


class OfTwo(Classifier):
    """Trains on two batches at once, the shorter loader of which begins again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += [float(batch["a"][0].sum()), float(batch["b"][0].sum())]
        return super().training_step(batch["a"], batch_idx)


def fit_itself(by_hand: bool, sized: bool) -> dict[str, Any]:
    case = Case([[7, 5]], [5], sized=sized, mapped=sized)
    options = None if by_hand else {"uneven_train": "stop"}
    trainer, model = Job(options=options).make_trainer(use_distributed_sampler=False), Fetching()
    trainer.fit(model, case.loader(0, by_hand))
    return {**outcome(trainer, model), "seen": model.seen}


def fit_two_loaders(by_hand: bool, sized: bool) -> dict[str, Any]:
    case, other = Case([[7, 5]], [5], sized=sized), Case([[2, 2]], [2], sized=sized)
    options = None if by_hand else {"uneven_train": "stop"}
    trainer, model = Job(options=options).make_trainer(), OfTwo()
    trainer.fit(model, {"a": case.loader(0, by_hand), "b": other.loader(0, by_hand)})
    return {**outcome(trainer, model), "seen": model.seen}


def evaluate_alone(by_hand: bool) -> dict[str, Any]:
    case = Case([[5, 5]], [5], val=[[4, 2], [3, 5]], common_val=[3, 2], model={"eval_sync": "step"})
    trainer = Job(options=None if by_hand else {"uneven_eval": "stop"}).make_trainer()
    model = Seen(case, by_hand)
    found = trainer.validate(model, verbose=False), trainer.test(model, case.val_loaders(by_hand), verbose=False)
    return {"weights": "", "seen": model.seen, "found": found}


def fit_all(_: int) -> dict[str, Any]:
    quiet()
    fits = {
        f"{function.__name__}, {sized}": [function(by_hand, sized) for by_hand in (True, False)]
        for function in (fit_itself, fit_two_loaders)
        for sized in (False, True)
    }
    return {**fits, "evaluate_alone": [evaluate_alone(by_hand) for by_hand in (True, False)]}


def test_more_ways_to_take_batches(run_ranks):
    """So they do where the module fetches by itself, with several train loaders, and in evaluations alone."""
    assert_as_by_hand(run_ranks(fit_all, 2, 0, deadline_seconds=200))


def stop_alone() -> None:
    """One rank alone sets `should_stop` in its second batch."""
    model = Classifier(stop_at=2 if own_rank() == 1 else None)
    trainer = Job(options={"uneven_train": "stop"}).make_trainer()
    quiet()
    trainer.fit(model, Case([[9, 7]], [7]).loader(0, by_hand=False))


def validate_at(lengths: Sequence[int], interval: float | Sequence[int], **limits: int) -> list[Any]:
    """Trains on loaders that report their lengths, which nothing proves; returns the batches before each validation."""
    quiet()
    case = Case([lengths], [min(lengths)], sized=True, **VAL)
    own = interval if isinstance(interval, (int, float)) else interval[own_rank()]
    job = Job(trainer={"val_check_interval": own}, options={"uneven_train": "stop", "uneven_eval": "stop"})
    trainer, model = job.make_trainer(**{"max_epochs": 1, **limits}), Seen(case, by_hand=False)
    trainer.fit(model)
    kinds = "".join(each[0][0] for each in model.seen if each[0] != "steps")
    return [len(part) for part in re.findall("t+(?=v)", kinds)]


def test_a_fraction_of_different_lengths_is_refused_before_the_first_batch(run_ranks):
    """A fraction of lengths that are not proven is another batch on each rank. The remedy is a whole number."""
    results = run_ranks(validate_at, 2, [5, 9], 0.5, expect=None, deadline_seconds=40)
    found = "batches_between_evaluations is 2 on rank 0, 4 on rank 1."
    assert_named(results, "PlanMismatch", [0, 1], found, "do:  set Trainer(val_check_interval=N) to a whole")


TOGETHER = [
    (([5, 9], 2), {}, [2, 2]),
    (([5, 4], 0.5), {}, [2, 2]),
    (([5, 9], 1.0), {}, [5]),
    (([5, 9], 0.5), {"max_steps": 1}, []),
    (([5, 9], 0.5), {"check_val_every_n_epoch": 2}, []),
]


def validate_at_each(cases: Sequence[tuple[Any, dict[str, int], Any]]) -> list[list[Any]]:
    return [validate_at(*case, **limits) for case, limits, _ in cases]


def test_ranks_of_different_lengths_that_validate_together_train_on(run_ranks):
    """Whole numbers are not refused, nor a fraction that is the same on all ranks or is never reached, nor 1.0."""
    for result in run_ranks(validate_at_each, 2, TOGETHER, deadline_seconds=90):
        assert result.value == [expected for _, _, expected in TOGETHER], result


def test_ranks_that_validate_at_different_batches_are_out_of_step(run_ranks):
    """Ranks with intervals of their own get a verdict that names the interval, before the first batch."""
    results = run_ranks(validate_at, 2, [9, 9], [2, 3], expect=None, deadline_seconds=40)
    assert_named(results, "PlanMismatch", [0, 1], "val_check_interval is 2 on rank 0, 3 on rank 1.")


def torn(number: int) -> None:
    if own_rank() == 1 and number == 3 * BATCH_SIZE:
        raise ValueError("shard 3 is torn")


def fail_in_the_loader(options: Mapping[str, Any], val: bool) -> None:
    quiet()
    job = Job(train=[9, 7], val=[3, 2], options=options, before=None if val else torn)
    model, loader = Classifier(eval_sync="step"), share_loader(5, before=torn)
    job.make_trainer().fit(model, job.train_loader(), loader if val else None)


def test_a_rank_that_stops_alone_is_still_named(run_ranks):
    """A rank that leaves an epoch by itself is out of step, whatever its loader has."""
    results = run_ranks(stop_alone, 2, expect=None, deadline_seconds=40)
    assert all(any("countoff: UnevenBatches: " in line for line in verdict_lines(result)) for result in results), (
        results
    )
    assert all(result.exit_code for result in results)


@pytest.mark.parametrize("val", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["train", "validation"])
def test_a_rank_that_raises_while_others_wait_for_it_is_named(run_ranks, val):
    """An exception in one rank's loader ends the wait of the others, and the verdict names that rank."""
    options = {"uneven_train": "stop", "uneven_eval": "stop"}
    results = run_ranks(fail_in_the_loader, 2, options, val, expect=None, deadline_seconds=40)
    assert_named(results, "LostRank", [1], "rank 1 raised ValueError: shard 3 is torn")


class Ended(Exception):
    """What a fit ends with."""


class End(pl.Callback):
    """Ends a fit in its third batch of the second epoch, or not at all."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        fetcher = trainer.fit_loop._data_fetcher
        for each in (copy.deepcopy(fetcher), pickle.loads(pickle.dumps(fetcher))):
            assert each.iterator is each.combined_loader
        if self._ends and trainer.current_epoch == 1 and batch_idx == 2:
            raise Ended


class SizedList(Listed):
    def __len__(self) -> int:
        return len(self._batches)


def look_at_a_fit(sized: bool, ends: str) -> list[Any]:
    """What is left of a fit on Lightning's objects that was not there before, and the threads that are left."""
    quiet()
    end = End(ends == "exception")
    model = Classifier(stop_at=2 if ends == "verdict" and own_rank() == 1 else None)
    options = {"uneven_train": "stop", "uneven_eval": "stop", "GRACE_SECONDS": 0.5}
    trainer = Job(options=options).make_trainer(callbacks=[end])
    own = (7, 5)[own_rank()]
    loop: Any = trainer.fit_loop
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    names = {name: sorted(vars(each)) for name, each in (("loop", loop), ("epoch loop", loop.epoch_loop))}
    with contextlib.suppress(Ended, DivergenceError, RuntimeError):
        trainer.fit(model, (SizedList if sized else Listed)(own), share_loader(2 + own_rank()))
    after = {name: sorted(vars(each)) for name, each in (("loop", loop), ("epoch loop", loop.epoch_loop))}
    expected = own if sized else math.inf
    return [
        names == after,
        "_state_dicts" in vars(loop._combined_loader),
        trainer.val_check_batch == expected,
        loop.max_batches == expected,
        loop._data_fetcher is None or loop._data_fetcher.iterator in (None, loop._combined_loader),
        [type(each.guard).__name__ for each in callbacks if isinstance(each, Countoff)],
    ]


def look_at_fits(cases: Sequence[tuple[bool, str]]) -> list[list[Any]]:
    return [look_at_a_fit(*case) for case in cases]


FITS = [(sized, ends) for sized in (True, False) for ends in ("", "exception")]


def test_lightnings_objects_are_as_before(run_ranks):
    """Lightning's numbers, loops and fetchers are its own again after a fit, and copies of a fetcher hold nothing."""
    for result in run_ranks(look_at_fits, 2, FITS, deadline_seconds=120):
        for case, found in zip(FITS, result.value, strict=True):
            assert found == [True, False, True, True, True, ["NoneType"]], (case, result)


def test_lightnings_objects_are_as_before_after_a_verdict(run_ranks):
    """So they are after a verdict."""
    for result in run_ranks(look_at_fits, 2, [(True, "verdict")], expect=None, deadline_seconds=60):
        assert "UnevenBatches" in result.output, result
        assert result.value == [[True, False, True, True, True, ["NoneType"]]], result


def numbers(by: str) -> Any:
    """This rank's StatefulDataLoader: of 7 or 5 batches, with a length or without one, or from a worker."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    part: Any = Part((7, 5)[own_rank()])
    data: Any = list(part) if by == "sized" else part
    workers = by == "workers"
    return StatefulDataLoader(
        data,
        batch_size=BATCH_SIZE,
        num_workers=int(workers),
        multiprocessing_context="fork" if workers else None,  # a new interpreter for each pass takes seconds
    )


class Resumed(Seen):
    """Has a loader that can be resumed."""

    def __init__(self, by: str) -> None:
        super().__init__(Case([[7, 5]], [5]), by_hand=False)
        self._by = by

    def train_dataloader(self) -> Any:
        return numbers(self._by)


def resume(by: str) -> dict[int, list[Any]]:
    """What is left of an uninterrupted run after each step, and what a run takes that is resumed there."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found: dict[int, list[Any]] = {}
    job = Job(trainer={"enable_checkpointing": True}, options={"uneven_train": "stop"})

    def run(steps: int | None) -> tuple[list[Any], dict[str, Any]]:
        saves = ModelCheckpoint(dirpath=f"{by}-{steps}", filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer, model = job.make_trainer(use_distributed_sampler=False, callbacks=[saves]), Resumed(by)
        trainer.fit(model, ckpt_path=None if steps is None else f"{by}-None/step={steps}.ckpt")
        return [each for each in model.seen if each[0] == "train"], outcome(trainer, model)

    whole, ending = run(None)
    for steps in (2, 4, 7):
        found[steps] = [(whole[steps:], ending), run(steps)]
    return found


def resume_all(_: int) -> dict[str, dict[int, list[Any]]]:
    quiet()
    return {by: resume(by) for by in ("sized", "unsized", "workers")}


def test_a_resumed_run_takes_the_batches_that_were_left(run_ranks):
    """A run resumed in mid-epoch with torchdata's loader takes, batch for batch, what the whole run took from there."""
    for result in run_ranks(resume_all, 2, 0, deadline_seconds=200):
        for by, found in result.value.items():
            for steps, (expected, resumed) in found.items():
                assert resumed == expected, (by, steps, result)


class Rated(Seen):
    """Draws random numbers for each batch, and makes its schedule of Lightning's estimate."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, by_hand=False)
        self.layer: Any = torch.nn.Sequential(self.layer, torch.nn.Dropout(0.2))
        self.estimate: float = 0

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.estimate) if math.isfinite(self.estimate) and self.estimate > 0 else 99
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class DrawingPart(SizedPart):
    """Draws for each sample where it is read."""

    def __iter__(self) -> Iterator[Any]:
        for image, label in super().__iter__():
            yield image + 0.1 * torch.randn_like(image), label


class OneBatch:
    """A loader that fills the memory of one batch again for each batch."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        memory = [each.clone() for each in self.batches[0]]
        for batch in self.batches:
            for kept, new in zip(memory, batch, strict=True):
                kept.copy_(new)
            yield memory


@dataclass(frozen=True)
class OddCase(Case):
    """A job whose loader is easily disturbed.

    Attributes:
        refilled: Whether it fills the memory of one batch again; otherwise it draws random numbers.
    """

    refilled: bool = False

    def loader(self, epoch: int, by_hand: bool) -> Any:
        own = self.train[0][own_rank()]
        part = SizedPart(own) if self.refilled else DrawingPart(own)
        loader = DataLoader(part, batch_size=BATCH_SIZE)
        return OneBatch(loader) if self.refilled else loader


def train_rated(cases: Mapping[str, Case], policies: Sequence[str | None]) -> dict[str, Any]:
    """Trains with each policy; None: without countoff."""
    quiet()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        for policy in policies:
            torch.manual_seed(own_rank())
            options = None if policy is None else {"uneven_train": policy}
            trainer = Job(options=options).make_trainer(use_distributed_sampler=False)
            model = Rated(case)
            trainer.fit(model)
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            drawn = torch.get_rng_state().sum().item()
            found[f"{name}, {policy}"] = (outcome(trainer, model)["weights"], rate, drawn, model.estimate)
    return found


def test_loaders_of_one_length_train_to_the_same_bits(run_ranks):
    """Where all ranks report one length, each batch is read where Lightning reads it, and no sooner.

    Where they do not, a schedule of `estimated_stepping_batches` has one length all the same.
    """
    equal = {"drawing": OddCase(same(5), [5]), "refilled": OddCase(same(5), [5], refilled=True)}
    uneven = {"sized": Case([[7, 5]], [5], sized=True), "proven": Case([[13, 9]], [9], mapped=True)}
    jobs = {
        "equal": (train_rated, equal, [None, "stop"]),
        "uneven": (train_rated, uneven, ["stop"]),
    }
    results = run_ranks(in_turn, 2, jobs, deadline_seconds=180)
    for result in results:
        trained = result.value["equal"]
        for name in equal:
            assert trained[f"{name}, stop"] == trained[f"{name}, None"], name
    epochs = 2
    for name, common in (("sized", 5), ("proven", 9)):
        found = [result.value["uneven"][f"{name}, stop"] for result in results]
        assert [each[3] for each in found] == [common * epochs] * 2
        assert found[0][:2] == found[1][:2], name
    said = [line for result in results for line in said_in_turn(result)["uneven"]]
    assert not any("WrongHorizon" in line for line in said), results


class Looking(Classifier):
    """Keeps what it has validated on, and draws for it."""

    def __init__(self) -> None:
        super().__init__(eval_sync="step")
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(batch[0].sum()) + float(torch.rand(())))
        super().validation_step(batch, batch_idx, dataloader_idx)


def validate_on(lengths: Sequence[int]) -> list[Any]:
    """Validates on a loader that fills one memory again, and on one that draws, with and without countoff."""
    quiet()
    found: list[Any] = []
    common, own = min(lengths), lengths[own_rank()]
    for refilled, options in [
        (True, None),
        (True, {"uneven_eval": "stop"}),
        (False, None),
        (False, {"uneven_eval": "stop"}),
    ]:
        torch.manual_seed(own_rank())
        batches = own if options else common
        loader: Any = DataLoader((SizedPart if refilled else DrawingPart)(batches), batch_size=BATCH_SIZE)
        model = Looking()
        Job(options=options).make_trainer().validate(model, OneBatch(loader) if refilled else loader, verbose=False)
        found.append(model.seen)
    return found


def test_validation_batches_are_read_where_lightning_reads_them(run_ranks):
    """So they are those of a job whose loaders were cut by hand, whatever the loader does with its memory."""
    jobs = {str(lengths): (validate_on, lengths) for lengths in ([4, 4], [5, 3])}
    for result in run_ranks(in_turn, 2, jobs):
        for name, (refilled, refilled_even, drawn, drawn_even) in result.value.items():
            assert refilled_even == refilled, name
            assert drawn_even == drawn, name
            assert len(drawn) == min(jobs[name][1]), name
