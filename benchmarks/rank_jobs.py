"""The functions that `batch_cost` runs on each rank. All ranks must make the same calls, as countoff demands."""

import os
import time
import timeit
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch.nn.parallel import DistributedDataParallel

from benchmarks.results import COUNTOFF, NO_OP, NOTHING, Samples, in_turns
from countoff._adapter.forward_passes import count_forward_passes
from countoff.core import FitPlan, Guard, Settings, constants
from countoff.lightning import Countoff
from integration_tests.constants import put
from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import Classifier, Job, quiet

ADD = "`counter.add()`, which adds 1"
EMPTY_HOOKS = "two hooks that do nothing"
TICK = constants.TICK_BATCHES
CHUNKS = 20  # samples per repeat: each takes about a millisecond, so that other load misses most of them
_CALLS = 5_000
_PAUSE_SECONDS = 0.002
_SAMPLES = 512  # 128 batches of four, 64 of them on each of two ranks


class Counter:
    """The cheapest possible counter."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Adds 1."""
        self.count += 1


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """A hook that does nothing."""


_HOOKS = [name for name in vars(pl.Callback) if name in dir(Countoff) and name.startswith("on_")]
NoOp: type[pl.Callback] = type("NoOp", (pl.Callback,), dict.fromkeys(_HOOKS, _nothing))


def guard_costs(repeats: int) -> Samples:
    """Returns seconds per pass of an empty loop, per call of a method that adds 1, per `Guard.batch()`, and per
    `Guard.micro_batch()`.

    With more than one rank, also per `Guard.batch()` with its ticks. Each sample then holds one tick and is followed by
    a pause, in which the writer thread can run as it could during training.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    guard = _open_guard(10**12, world_size)
    names = {"counter": Counter(), "guard": guard}
    texts = {"`pass`": "pass", ADD: "counter.add()", "`Guard.batch()`": "guard.batch()"}
    texts["`Guard.micro_batch()`"] = "guard.micro_batch()"
    samples = in_turns(
        {name: timeit.Timer(text, globals=names) for name, text in texts.items()}, repeats * CHUNKS, _CALLS
    )
    _close_guard(guard)
    if world_size > 1:
        guard = _open_guard(TICK, world_size)
        timer = timeit.Timer("guard.batch()", globals={"guard": guard})
        name = f"the same with its ticks, one in {TICK} batches"
        samples |= in_turns({name: timer}, repeats * CHUNKS, TICK, _PAUSE_SECONDS)
        _close_guard(guard)
    return samples


def forward_costs(repeats: int) -> Samples:
    """Returns seconds per forward pass of a DDP module of one small layer, with its passes counted and without, and
    with hooks that do nothing, which is the least that counting by hooks can cost.
    """
    dist.init_process_group("gloo")
    guard = _open_guard(10**12, dist.get_world_size())
    modules = {name: DistributedDataParallel(torch.nn.Linear(128, 128)) for name in (NOTHING, EMPTY_HOOKS, COUNTOFF)}
    modules[EMPTY_HOOKS].register_forward_pre_hook(_nothing)
    modules[EMPTY_HOOKS].register_forward_hook(_nothing, always_call=True)
    end = count_forward_passes([modules[COUNTOFF]], guard.micro_batch)
    batch = torch.zeros(8, 128)
    timers = {
        name: timeit.Timer("module(batch)", globals={"module": module, "batch": batch})
        for name, module in modules.items()
    }
    samples = in_turns(timers, repeats * CHUNKS, 200)
    end()
    _close_guard(guard)
    return samples


def _open_guard(tick_batches: int, world_size: int) -> Guard:
    put(TICK_BATCHES=tick_batches)
    guard = Guard(Settings.resolve(), rank=own_rank(), world_size=world_size, learning_rates=lambda: [0.1])
    guard.fit_start(FitPlan())
    guard.train_start(0)
    return guard


def _close_guard(guard: Guard) -> None:
    guard.train_end("stopped")
    guard.fit_end()
    guard.close()


class Dispatching(pl.Callback):
    """Measures Lightning's dispatcher from inside the fit, with each callback in turn alone in the Trainer."""

    def __init__(self, repeats: int) -> None:
        self.back_to_back: Samples = {}
        self.with_pauses: Samples = {}
        self._repeats = repeats

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures once, in a batch that is neither the first nor the last."""
        if batch_idx != 2 or self.back_to_back:
            return
        callbacks_of_fit = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  (set by its callback connector)
        countoff = next(callback for callback in callbacks_of_fit if isinstance(callback, Countoff))
        variants: dict[str, list[pl.Callback]] = {NOTHING: [], NO_OP: [NoOp()], COUNTOFF: [countoff]}
        dispatch = "call._call_callback_hooks(trainer, 'on_train_batch_start', batch, batch_idx)"
        names = {"call": call, "trainer": trainer, "batch": batch, "batch_idx": batch_idx}
        timers = {
            name: timeit.Timer(dispatch, "trainer.callbacks = callbacks", globals={**names, "callbacks": callbacks})
            for name, callbacks in variants.items()
        }
        self.back_to_back = in_turns(timers, self._repeats * CHUNKS, 10 * TICK)
        self.with_pauses = in_turns(timers, self._repeats * CHUNKS, TICK, _PAUSE_SECONDS)
        trainer.callbacks = callbacks_of_fit  # pyright: ignore[reportAttributeAccessIssue]


def hook_costs(repeats: int) -> tuple[Samples, Samples]:
    """Returns seconds per dispatch of `on_train_batch_start`: back to back, and 64 at a time with a pause after them.

    Both include the ticks of `Countoff`. Back to back, the code is in the processor's caches. After a pause, as between
    real batches, less of it is, for every callback.
    """
    measuring = Dispatching(repeats)
    _fit([Countoff(), measuring], epochs=1)
    return measuring.back_to_back, measuring.with_pauses


class TimedEpochs(Classifier):
    """Times the last train epoch, from before its first batch to after its last."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_seconds = self.thread_seconds = 0.0  # per batch
        self._began = 0.0, 0.0

    def on_train_epoch_start(self) -> None:
        """Starts both clocks."""
        self._began = time.perf_counter(), time.thread_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reads both clocks after the last batch."""
        batches = batch_idx + 1
        if batches == int(self.trainer.num_training_batches):
            self.wall_seconds = (time.perf_counter() - self._began[0]) / batches
            self.thread_seconds = (time.thread_time() - self._began[1]) / batches


def epoch_costs(repeats: int) -> tuple[Samples, Samples]:
    """Returns seconds per batch of a fit's second epoch, with each callback in turn: wall time, then CPU time."""
    variants: dict[str, Callable[[], list[Any]]] = {
        NOTHING: lambda: [],
        NO_OP: lambda: [NoOp()],
        COUNTOFF: lambda: [Countoff()],
    }
    wall: Samples = {name: [] for name in variants}
    thread: Samples = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, callbacks in variants.items():
            model = _fit(callbacks(), epochs=2)
            if repeat:  # the first round is the warm-up
                wall[name].append(model.wall_seconds)
                thread[name].append(model.thread_seconds)
    return wall, thread


def _fit(callbacks: list[Any], epochs: int) -> TimedEpochs:
    quiet()
    job = Job(even=_SAMPLES, options=None, trainer={"callbacks": callbacks, "max_epochs": epochs})
    trainer, model = job.make_trainer(), TimedEpochs()
    trainer.fit(model, job.train_loader())
    return model
