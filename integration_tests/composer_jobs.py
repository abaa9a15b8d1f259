"""Composer's training jobs: real Trainers on digits, as uneven and as wrong as a test asks for. Imports no Composer."""

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.digits import own_rank, weights
from integration_tests.harness import RankResult
from integration_tests.objects import assert_gone, seen, trace

needs_composer = pytest.mark.skipif(find_spec("composer") is None, reason="Composer needs torch 2.7.0")


@dataclass(frozen=True)
class Job:
    """What a test varies. Sequences hold one value per rank.

    Attributes:
        train: Batches of each rank's train loader.
        reported: What it reports in batches; None: it is unsized.
        even: Samples of a map-style dataset instead, sharded by torch's sampler.
        streams: Samples of each stream of a StreamingDataset instead.
        streaming: More arguments for that.
        workers: `num_workers` of its loader.
        mistaken: Whether the length of the loader is that of all ranks together.
        evals: Batches of each rank's evaluator, or of its several evaluators.
        trainer: Arguments of the Trainer.
        options: Those of the callback; None: no callback at all.
        before: Called in a rank's train loader with the number of the sample that it is about to yield.
        cut_mix: Whether an algorithm changes the batches.
    """

    train: Sequence[int] = ()
    reported: Sequence[int] | None = None
    even: int = 0
    streams: Sequence[int] = ()
    streaming: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    mistaken: bool = False
    evals: Sequence[int | Sequence[int]] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = field(default_factory=dict)
    before: Callable[[int], None] | None = None
    cut_mix: bool = False

    def train_loader(self) -> Any:
        from integration_tests import composer_parts as parts

        if self.even:
            return parts.digits_loader(self.even, parts.GlobalLength if self.mistaken else parts.DataLoader)
        if self.streams:
            return parts.streaming_loader(list(self.streams), self.mistaken, self.workers, self.streaming)
        rank = own_rank()
        return parts.share_loader(self.train[rank], self.reported[rank] if self.reported else None, self.before)

    def evaluators(self) -> Any:
        from composer.core import Evaluator

        from integration_tests.composer_parts import share_loader

        if self.evals is None:
            return None
        mine = self.evals[own_rank()]
        most = max(max([each] if isinstance(each, int) else each) for each in self.evals)
        return [
            Evaluator(label=f"digits{place}", dataloader=share_loader(batches, most))
            for place, batches in enumerate([mine] if isinstance(mine, int) else mine)
        ]

    def make_trainer(self, **more: Any) -> Any:
        from composer import Trainer
        from composer.algorithms import CutMix
        from torch.optim import SGD

        from countoff.composer import Countoff
        from integration_tests.composer_parts import Classifier, start

        start()
        model = Classifier()
        arguments: dict[str, Any] = {
            "model": model,
            "optimizers": SGD(model.parameters(), lr=0.1),
            "train_dataloader": more["train_dataloader"] if "train_dataloader" in more else self.train_loader(),
            "eval_dataloader": self.evaluators(),
            "device": devices.accelerator(),
            "precision": "fp32",  # as on the CPU: on a GPU it is half precision, whose scaler leaves steps out
            "max_duration": "2ep",
            "progress_bar": False,
            "seed": 7,
            "algorithms": [CutMix(alpha=1.0)] if self.cut_mix else [],
            "callbacks": [] if self.options is None else [Countoff(**taken(self.options))],
        }
        given = {**arguments, **self.trainer, **more}
        return Trainer(**{**given, "callbacks": [*arguments["callbacks"], *more.get("callbacks", [])]})


def remove_shared_memory(directory: Path) -> None:
    """Removes what streaming has left in shared memory for data sets below a directory, when its process was killed."""
    for place in Path("/dev/shm").glob("[0-9]*_locals"):
        if str(directory).encode() in place.read_bytes():
            for each in place.parent.glob(place.name.replace("locals", "*")):
                each.unlink(missing_ok=True)


def outcome(trainer: Any) -> dict[str, Any]:
    """Final weights, as a hash of their bits, and the counters."""
    time = trainer.state.timestamp
    return {"weights": weights(trainer.state.model), "batches": int(time.batch), "epoch": int(time.epoch)}


def fit(job: Job) -> dict[str, Any]:
    """Trains on one rank and returns the outcome."""
    trainer = job.make_trainer()
    trainer.fit()
    result = outcome(trainer)
    trainer.close()
    return result


def fit_several(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Trains one job after the other in one process, with a line between what they print."""
    results = []
    for place, job in enumerate(jobs):
        print(f"--- job {place}", flush=True)
        results.append(fit(job))
    return results


def said(result: RankResult) -> list[str]:
    """What countoff printed on this rank in each of several jobs."""
    prefix = f"[rank {result.rank}] "
    parts = result.output.split("--- job ")[1:]
    return [
        "\n".join(line.removeprefix(prefix) for line in part.splitlines() if line.startswith(prefix)) for part in parts
    ]


def fit_with_and_without(jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """Trains every job twice in one process, without the callback and with it."""
    return [[fit(replace(job, options=None)), fit(job)] for job in jobs]


def fit_and_record_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Trains one job after the other in one process, with a line between what they print."""
    results = []
    for place, job in enumerate(jobs):
        print(f"--- job {place}", flush=True)
        results.append(fit_and_record(job))
    return results


def fit_and_record(job: Job) -> dict[str, Any]:
    """Trains and returns what the user sees: the console's lines and the learning rate of every batch, and the logs."""
    from composer.core import Callback
    from composer.loggers import InMemoryLogger, LoggerDestination, ProgressBarLogger
    from composer.optim import LinearWithWarmupScheduler

    rates: list[float] = []

    class Record(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    class Knows(LoggerDestination):
        """A user's own logger, which knows what Composer logs."""

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            assert not any(name.startswith("countoff") for name in metrics)

    console, memory = io.StringIO(), InMemoryLogger()
    with open(f"bar{own_rank()}.txt", "w+") as bar:
        trainer = job.make_trainer(
            callbacks=[Record()],
            loggers=[memory, Knows(), ProgressBarLogger(stream=bar)],
            schedulers=LinearWithWarmupScheduler(t_warmup="1ep"),
            log_to_console=True,
            console_stream=console,
            console_log_interval="1ba",
        )
        trainer.fit()
        result = outcome(trainer)
        trainer.close()
        bar.seek(0)
        bars = {found.group(1) for found in re.finditer(r"/(\d+) *\[", bar.read())}  # drawn when there is time
    lines = [line.rstrip(":") for line in console.getvalue().splitlines() if line.startswith("[")]
    logged = {name: values[-1][1] for name, values in memory.data.items() if name.startswith("countoff/")}
    told = [line.strip() for line in console.getvalue().splitlines() if "countoff/" in line]
    return {**result, "console": lines, "rates": rates, "logged": logged, "bars": bars, "told": told}


def objects_during_and_after(job: Job, fails: bool = False) -> tuple[Any, Any, list[str]]:
    """What is seen of a Trainer's objects in its fit, then when it is closed, and the copies of its callbacks."""
    from integration_tests.composer_parts import Looks

    looks = Looks(fails)
    trainer = job.make_trainer(callbacks=[looks])
    loader = trainer.state.train_dataloader
    excused: tuple[type[Exception], ...] = ()
    try:
        trainer.fit()
    except ArithmeticError:
        pass
    except RuntimeError:  # a verdict, which may have cut the connections that the barrier of `close` needs
        excused = (RuntimeError,)
    with contextlib.suppress(*excused):
        trainer.close()
    return looks.during, (type(loader), seen(loader), sorted(vars(trainer.state))), looks.copies


def objects_without_and_with() -> None:
    """Asserts that objects are the same without countoff and with it, also after an exception and after a verdict."""
    job = Job(even=64, evals=[2, 2])
    plain = objects_during_and_after(replace(job, options=None))  # which also makes the process group
    before = trace({})
    for fails in (False, True):
        plain = objects_during_and_after(replace(job, options=None), fails)
        counted = objects_during_and_after(job, fails)
        assert counted[:2] == plain[:2]
        assert sorted(counted[2]) == sorted([*plain[2], "Countoff"])
        assert_gone(before, trace({}))
    objects_during_and_after(replace(job, evals=[3, 2], options={"uneven_eval": "raise"}))
    assert_gone(before, trace({}))
