"""What countoff puts on Lightning's objects: it is taken back after each end of a fit, and no copy ever holds it."""

import copy
import csv
import gc
import os
import pickle
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from countoff.lightning import Countoff
from integration_tests.digits import Listed
from integration_tests.in_turn import in_turn
from integration_tests.lightning_jobs import Classifier, Job, csv_logger, quiet
from integration_tests.output import verdict_lines

HOOKED = ("_start_profiler", "_stop_profiler", "_broadcast_sigterm_tensor", "batch_to_device", "teardown")
"""Methods of Lightning's objects that countoff calls functions before or after."""
LIGHTNINGS = {"log", "log_dict"}
"""What Lightning puts on every callback."""


class Broken(Exception):
    """What a fit ends with."""


def named(trainer: pl.Trainer) -> dict[str, Any]:
    """Lightning's objects that a fit works with."""
    loop: Any = trainer.fit_loop
    return {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "fit loop": loop,
        "epoch loop": loop.epoch_loop,
        "validation loop": loop.epoch_loop.val_loop,
        "fetcher": loop._data_fetcher,
        "module": trainer.lightning_module,
        "progress bar": trainer.progress_bar_callback,
    }


def shape(thing: Any) -> dict[str, Any]:
    """An object's class, the names of its attributes, and its hooked methods."""
    methods = {name: getattr(getattr(thing, name, None), "__qualname__", "") for name in HOOKED}
    return {"class": str(type(thing)), "names": sorted(getattr(thing, "__dict__", ())), "methods": methods}


def shapes(trainer: pl.Trainer) -> dict[str, Any]:
    """The shape of each object, and whether it can be pickled and copied."""
    found: dict[str, Any] = {}
    for name, thing in named(trainer).items():
        found[name] = {**shape(thing), "pickled": said_of(pickle.dumps, thing), "copied": said_of(copy.deepcopy, thing)}
    return found


def said_of(function: Any, thing: Any) -> str:
    """The exception that a function raises, by its type; empty if it raises none."""
    try:
        function(thing)
    except Exception as error:
        return type(error).__name__
    return ""


def pickled_and_loaded(thing: Any) -> Any:
    """A copy by way of a pickle."""
    return pickle.loads(pickle.dumps(thing))


def methods_of_a_copy(trainer: pl.Trainer) -> dict[str, Any]:
    """The hooked methods of a copied Trainer's objects, and whether they are those of the copy."""
    loop: Any = trainer.fit_loop
    found: dict[str, Any] = {}
    for owner in (loop._data_fetcher, loop.epoch_loop, trainer.strategy):
        for name in HOOKED:
            if hasattr(owner, name):
                method = getattr(owner, name)
                own = method.__self__ in (owner, loop.epoch_loop)
                found[f"{type(owner).__name__}.{name}"] = type(method).__name__, method.__qualname__, own
    return found


class Probe(pl.Callback):
    """Looks at Lightning's objects in the middle of each epoch, and may end the fit there."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks
        self.seen: list[Any] = []
        self.guards: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.guards += [weakref.ref(each.guard) for each in trainer.callbacks if isinstance(each, Countoff)]  # pyright: ignore[reportAttributeAccessIssue]
        if batch_idx not in (0, 3):
            return
        for name, each in shapes(trainer).items():
            self.seen.append((name, each["pickled"], each["copied"]))
        for function in (copy.deepcopy, pickled_and_loaded):
            if not said_of(function, trainer):
                self.seen.append(methods_of_a_copy(function(trainer)))
        if self._breaks and batch_idx == 3:
            raise Broken


def threads_left() -> list[str]:
    """Names of countoff's threads that are alive after a second."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and any(each.name.startswith("countoff") for each in threading.enumerate()):
        time.sleep(0.01)
    return [each.name for each in threading.enumerate() if each.name.startswith("countoff")]


def watch_a_fit(job: Job, own_batches: int, breaks: bool) -> dict[str, Any]:
    """Fits, and returns what is to be seen on Lightning's objects before, during and after it."""
    probe, model = Probe(breaks), Classifier()
    trainer = job.make_trainer(callbacks=[probe, TQDMProgressBar()], enable_progress_bar=True)
    before = shapes(trainer)
    ended = ""
    try:
        trainer.fit(model, Listed(own_batches))
    except BaseException as error:
        ended = repr(error)
    threads = threads_left()
    callbacks: list[Any] = [each for each in trainer.callbacks if isinstance(each, Countoff)]  # pyright: ignore[reportAttributeAccessIssue]
    own = [sorted(vars(pickled_and_loaded(each)).keys() - LIGHTNINGS) for each in callbacks]
    after = shapes(trainer)
    gc.collect()
    return {
        "before": before,
        "during": probe.seen,
        "after": after,
        "ended": ended,
        "threads": threads,
        "own": own,
        "guards": [guard() is None for guard in probe.guards],
    }


def watch_fits(breaks: bool) -> list[dict[str, Any]]:
    """One fit without countoff and one with it."""
    quiet()
    job = Job(trainer={"max_epochs": 2, "strategy": "auto" if os.environ["WORLD_SIZE"] == "1" else "ddp"})
    return [watch_a_fit(replace(job, options=options), 5, breaks) for options in (None, {})]


def watch_verdict(own_batches: list[int]) -> dict[str, Any]:
    """A fit that a verdict ends."""
    quiet()
    job = Job(options={"GRACE_SECONDS": 0.5})
    return watch_a_fit(job, own_batches[int(os.environ["RANK"])], breaks=False)


def assert_taken_back(plain: dict[str, Any], counted: dict[str, Any]) -> None:
    for when in ("before", "during", "after"):
        assert counted[when] == plain[when], when
    assert counted["ended"] == plain["ended"]
    assert counted["threads"] == []
    assert counted["own"] == [["settings"]]
    assert counted["guards"]
    assert all(counted["guards"])


def test_lightnings_objects_are_as_without_countoff(run_ranks):
    """Objects have the same classes, attributes and methods after a fit; they can be pickled as without countoff.

    So they are after an exception in the fit, on every rank.
    """
    endings = {"a fit": "", "an exception": "Broken()"}
    jobs = {name: (watch_fits, bool(ended)) for name, ended in endings.items()}
    for result in run_ranks(in_turn, 2, jobs):
        for name, ended in endings.items():
            plain, counted = result.value[name]
            assert counted["ended"] == ended, name
            assert_taken_back(plain, counted)


def test_lightnings_objects_are_as_without_countoff_on_one_rank(run_ranks):
    """So they are on one rank, where Lightning's objects can be pickled in the middle of a fit."""
    (result,) = run_ranks(watch_fits, 1, False)
    plain, counted = result.value
    assert any(isinstance(each, dict) for each in plain["during"])
    assert_taken_back(plain, counted)


def test_lightnings_objects_are_as_without_countoff_after_a_verdict(run_ranks):
    """After a verdict nothing of countoff's is left on Lightning's objects, and no thread."""
    results = run_ranks(watch_verdict, 2, [6, 5], expect=None)
    for result in results:
        assert any("UnevenBatches" in line for line in verdict_lines(result)), result
        found = result.value
        assert found["ended"]
        assert found["threads"] == []
        assert found["own"] == [["settings"]]
        assert all(found["guards"])
        for each in found["after"].values():
            assert not [method for method in each["methods"].values() if "MethodHook" in method]
            assert not set(each["names"]) & {"_broadcast_sigterm_tensor", "batch_to_device", "teardown"}


def rows_logged(job: Job) -> list[list[dict[str, str]]]:
    """The rows of a CSVLogger without countoff and with it."""
    quiet()
    found = []
    for number, options in enumerate((None, job.options)):
        Path(str(number)).mkdir(exist_ok=True)
        os.chdir(str(number))
        trainer = replace(job, options=options).make_trainer(logger=csv_logger(), log_every_n_steps=1)
        trainer.fit(Classifier(train_sync="epoch"), job.train_loader())
        os.chdir("..")
        found.append(rows_of(Path(str(number))) if trainer.is_global_zero else [])
    return found


def rows_of(directory: Path) -> list[dict[str, str]]:
    """The values of each row, by column; those that say which row it is are left out."""
    (path,) = directory.rglob("metrics.csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if value and name not in ("epoch", "step")} for row in rows]


def test_loggers_get_no_row_more(run_ranks):
    """A CSVLogger gets the rows that it gets without countoff."""
    results = run_ranks(rows_logged, 2, Job(even=40, trainer={"max_epochs": 3}))
    plain, counted = results[0].value
    assert counted == plain != []
