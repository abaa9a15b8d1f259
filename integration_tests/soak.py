"""A long run of random healthy jobs, in which countoff must print nothing.

    python -m integration_tests.soak --runs 200 --minutes 60
    python -m integration_tests.soak --runs 100 --device auto
    python -m integration_tests.soak --runs 100 --hosts 2
    python -m integration_tests.soak --runs 20 --hosts 2 --delay-seconds 0.03 --stall-seconds 3

Every job is trained without countoff and with it, on the same ranks, one after the other in one process. What must
hold after each: the same bits of weights, no verdict and no warning, no thread of countoff's, no file descriptor more
than training itself has left open, and no more keys in the store than one guard may leave.
"""

import argparse
import contextlib
import gc
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from countoff.core.messages import count_of
from integration_tests import accelerate_jobs, composer_jobs, devices, lightning_jobs
from integration_tests.constants import taken
from integration_tests.devices import DeviceError, choose_device
from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader, weights
from integration_tests.harness import RankResult, RanksFailed, run_ranks
from integration_tests.hosts import run_hosts, why_impossible
from integration_tests.output import verdict_lines

FITS = 3
KEYS_PER_RANK = 12
"""Keys that one guard may leave in the store, per rank: heartbeat, exit, address, the log's last entries."""


@dataclass(frozen=True)
class TorchJob:
    """A plain training loop.

    Attributes:
        samples: Of all ranks together, sharded by a DistributedSampler.
        workers: Loader workers per rank.
        accumulation: Gradient accumulation steps.
        evals: Evaluation batches of each rank.
        eval_inside: Evaluates after so many batches of an epoch; 0: after it.
        break_at: Batches after which every rank leaves an epoch; 0: none.
        start_epoch: The first epoch that is trained, of two.
        options: Options of Countoff; None: it is off.
        before: Called before each batch with its number.
    """

    samples: int = 80
    workers: int = 0
    accumulation: int = 1
    evals: int = 0
    eval_inside: int = 0
    break_at: int = 0
    start_epoch: int = 0
    options: dict[str, Any] | None = field(default_factory=dict[str, Any])
    before: Callable[[int], None] | None = None


def fit_torch(job: TorchJob) -> str:
    """Trains two epochs and returns the weights as a hash."""
    from countoff.torch import Countoff
    from integration_tests.loops import model_and_optimizer, train_on

    if not dist.is_initialized():
        devices.join()
    model, optimizer = model_and_optimizer()
    images, labels = digits()
    dataset = TensorDataset(images[: job.samples], labels[: job.samples])
    context = "fork" if job.workers else None
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=job.workers, multiprocessing_context=context)
    evals = share_loader(job.evals)
    options: dict[str, Any] = {"enabled": False} if job.options is None else taken(job.options)
    countoff = Countoff(optimizer=optimizer, model=model, gradient_accumulation_steps=job.accumulation, **options)
    for epoch in range(job.start_epoch, 2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(countoff.train(loader, epoch=epoch), 1):
            if job.before is not None:
                job.before(number)
            if number % job.accumulation == 0:
                train_on(model, optimizer, batch)
            if number == job.eval_inside:
                for _ in countoff.eval(evals):
                    pass
            if number == job.break_at:
                break
        for _ in countoff.eval(evals) if not job.eval_inside else ():
            pass
    countoff.close()
    return weights(model)


@dataclass(frozen=True)
class LightningJob(lightning_jobs.Job):
    """A job of Lightning's, resumed from a checkpoint or not."""

    resumed: bool = False


def fit_lightning(job: LightningJob) -> dict[str, Any]:
    """Trains with Lightning."""
    return lightning_jobs.fit_resumed(job) if job.resumed else lightning_jobs.fit(job)


def fit_accelerate(loop: accelerate_jobs.Loop) -> str:
    """Trains with Accelerate and returns the weights as a hash."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()  # else a second Accelerator refuses another configuration
    GradientState._reset_state()
    return accelerate_jobs.run(loop).weights


def fit_transformers(job: Any) -> str:
    """Trains with the transformers Trainer and returns the weights as a hash."""
    from accelerate.state import AcceleratorState, GradientState

    from integration_tests.trainer_jobs import train

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return train(job).weights


def lag(rank: int, seconds: float, number: int) -> None:
    """Makes one rank slow: a `before` with all but the last argument bound."""
    del number
    if own_rank() == rank:
        time.sleep(seconds)


def options_of(dice: random.Random) -> dict[str, Any]:
    """Options of countoff, strict, with ticks as often as chance has it."""
    return {"uneven_eval": "raise", "TICK_BATCHES": dice.choice([2, 3, 8, 64]), "weights_every": 5}


def before_of(dice: random.Random, ranks: int) -> Callable[[int], None] | None:
    """Mostly nothing; else one slow rank."""
    return partial(lag, dice.randrange(ranks), dice.choice([0.002, 0.01, 0.05])) if dice.random() < 0.4 else None


def torch_job(dice: random.Random, ranks: int) -> TorchJob:
    batches = dice.randint(3, 12)
    return TorchJob(
        samples=batches * ranks * BATCH_SIZE - dice.choice([0, 0, 1, ranks]),
        workers=dice.choice([0, 0, 0, 2]),
        accumulation=dice.choice([1, 1, 2, 3]),
        evals=dice.choice([0, 1, 3]),
        eval_inside=dice.choice([0, 0, 2]),
        break_at=dice.choice([0, 0, 0, 2]),
        start_epoch=dice.choice([0, 0, 1]),
        options=options_of(dice),
        before=before_of(dice, ranks),
    )


def lightning_job(dice: random.Random, ranks: int) -> LightningJob:
    batches = dice.randint(3, 8)
    trainer: dict[str, Any] = {"accumulate_grad_batches": dice.choice([1, 1, 2, 3])}
    val = dice.choice([None, 1, 3, [2, 1]])
    if val is not None:
        trainer |= {"num_sanity_val_steps": dice.choice([0, 2]), "val_check_interval": dice.choice([1.0, 1.0, 0.5])}
    even = dice.random() < 0.6 or trainer.get("val_check_interval") == 0.5
    return LightningJob(
        train=() if even else [batches] * ranks,
        even=batches * ranks * BATCH_SIZE - dice.choice([0, 1]) if even else 0,
        val=None if val is None else [val] * ranks,
        trainer=trainer | ({"max_steps": 5} if dice.random() < 0.2 else {}),
        model={"train_sync": dice.choice(["", "epoch"])},
        options=options_of(dice),
        before=before_of(dice, ranks),
        resumed=dice.random() < 0.3,
    )


def accelerate_job(dice: random.Random, ranks: int) -> accelerate_jobs.Loop:
    batches = dice.randint(3, 8)
    streamed = dice.random() < 0.4
    return accelerate_jobs.Loop(
        batches=[batches] * ranks if streamed else (),
        samples=0 if streamed else batches * ranks * BATCH_SIZE - dice.choice([0, 0, 1, 5]),
        drop_last=dice.random() < 0.2,
        shuffle=dice.random() < 0.5,
        evals=dice.choice([(), (13,), (8, 21)]),
        gather=dice.random() < 0.5,
        accumulation=dice.choice([1, 1, 2, 4]),
        loader=dice.choice([{}, {}, {"split_batches": True} if BATCH_SIZE % ranks == 0 else {}]),
        eval_inside=dice.choice([0, 0, 2]),
        options=options_of(dice),
    )


def transformers_job(dice: random.Random, ranks: int) -> Any:
    from integration_tests.trainer_jobs import Job

    evals = dice.choice([(), (13,)])
    arguments = {"gradient_accumulation_steps": dice.choice([1, 2])} | ({"eval_strategy": "epoch"} if evals else {})
    samples = dice.randint(3, 6) * ranks * BATCH_SIZE
    return Job(samples=samples, evals=evals, args=arguments, options=options_of(dice), resume=dice.random() < 0.3)


def composer_job(dice: random.Random, ranks: int) -> composer_jobs.Job:
    batches = dice.randint(3, 6)
    evals = dice.choice([None, 2, [1, 3]])
    return composer_jobs.Job(
        even=batches * ranks * BATCH_SIZE,
        evals=None if evals is None else [evals] * ranks,
        trainer={"eval_interval": dice.choice(["1ep", "2ba"])} if evals else {},
        options=options_of(dice),
    )


Kind = tuple[Callable[[random.Random, int], Any], Callable[[Any], Any]]
KINDS: dict[str, Kind] = {
    "torch": (torch_job, fit_torch),
    "lightning": (lightning_job, fit_lightning),
    "accelerate": (accelerate_job, fit_accelerate),
    "transformers": (transformers_job, fit_transformers),
    "composer": (composer_job, composer_jobs.fit),
}


@dataclass(frozen=True)
class Fit:
    """One job, without and with countoff, as one rank saw it.

    Attributes:
        same: Whether it came to the same end, to the bit.
        threads: Names of the threads of countoff's that were left.
        descriptors: Descriptors that it left open, more than the same job without countoff.
        keys: Keys that it left in the store, of all ranks together.
        kibibytes: Memory of the process at its largest.
    """

    same: bool
    threads: tuple[str, ...]
    descriptors: int
    keys: int
    kibibytes: int


def fit_twice(kind: str, drawn: Sequence[Any]) -> list[Fit]:
    """Trains every job without countoff, and with it, on this rank."""
    fit = KINDS[kind][1]
    found: list[Fit] = []
    fit(replace(drawn[0], options=None))  # what a framework opens once for all
    fit(drawn[0])  # and countoff: its connections to the store serve all fits of a process
    for job in drawn:
        before = _descriptors()
        plain = fit(replace(job, options=None))
        between = _descriptors()
        keys = _keys()
        counted = fit(job)
        left = _descriptors() - between - max(0, between - before)
        names = tuple(each.name for each in threading.enumerate() if each.name.startswith("countoff"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found.append(Fit(plain == counted, names, left, _keys() - keys, peak))
    return found


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _keys() -> int:
    """Keys in the job's store, once every rank has got here: what is left is then left for good."""
    if not dist.is_initialized():
        return 0
    dist.barrier()
    keys = dist.distributed_c10d._get_default_store().num_keys()  # pyright: ignore[reportAttributeAccessIssue]
    dist.barrier()
    return keys


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that want a processor each, beside the job."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


@dataclass
class KindTotals:
    """What the sessions of one kind have shown: the fits with countoff, and in words each session with a wrong one."""

    runs: int = 0
    wrong: list[str] = field(default_factory=list[str])
    keys: list[float] = field(default_factory=list[float])
    growth: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Where:
    """Where the ranks of a job are.

    Attributes:
        hosts: Number of hosts; 1: this machine itself.
        most_ranks: The most ranks of a job.
        delay_seconds: How long the store's replies to all hosts but the first take; None for no relay on the way.
        stall_seconds: How long they take now and then; 0 for never.
        device: Where they train, as in `choose_device`; not on the CPU only on one host.
    """

    hosts: int
    most_ranks: int
    delay_seconds: float | None
    stall_seconds: float
    device: str = "cpu"

    def draw(self, dice: random.Random) -> int:
        """A number of ranks that the hosts share evenly."""
        counts = (1, 2, 2, 3, 4, 4, 8)
        return dice.choice([count for count in counts if count <= self.most_ranks and count % self.hosts == 0])

    def run(self, ranks: int, *args: Any, directory: Path) -> list[RankResult]:
        """Runs `fit_twice` on fresh ranks."""
        if self.hosts == 1:
            device = choose_device(self.device, ranks)
            return run_ranks(
                fit_twice, ranks, *args, directory=directory, deadline_seconds=420, finalise=True, device=device
            )
        return run_hosts(
            fit_twice,
            *args,
            hosts=self.hosts,
            per_host=ranks // self.hosts,
            directory=directory,
            deadline_seconds=420,
            finalise=True,
            delay_seconds=self.delay_seconds,
            while_running=(lambda watch: watch.stall_now_and_then(self.stall_seconds, every=4 * self.stall_seconds))
            if self.stall_seconds
            else None,
        )


def session(kind: str, dice: random.Random, where: Where, directory: Path, total: KindTotals) -> str:
    """Draws a few jobs, runs them on fresh ranks, and notes what is wrong with any of them; returns it in words."""
    ranks = where.draw(dice)
    drawn = [KINDS[kind][0](dice, ranks) for _ in range(FITS)]
    hog = dice.choice([0, 0, 1, 2])
    total.runs += FITS
    words = f"{kind}, {ranks} ranks on {count_of(where.hosts, 'host')}, {hog} processes beside it"
    with hogs(hog):
        try:
            results = where.run(ranks, kind, drawn, directory=directory)
        except RanksFailed as error:
            total.wrong.append(f"{words}: {drawn}\n{error}")
            return words
    wrong: list[str] = []
    for result in results:
        said = [line for line in verdict_lines(result) if line.startswith("countoff")]
        fits: list[Fit] = result.value
        bad = [each for each in fits if not each.same or each.threads or each.descriptors > 0]
        bad += [each for each in fits if each.keys > KEYS_PER_RANK * ranks + 80]
        if said or bad:
            wrong.append(f"{words}: {drawn}\nrank {result.rank}: {bad} {said}\n{result.output[-3000:]}")
        total.keys += [each.keys / ranks for each in fits]
        total.growth.append((fits[-1].kibibytes - fits[0].kibibytes) / 1024)
    if wrong:
        total.wrong.append("\n".join(wrong))
    return words


def sessions(
    kinds: Sequence[str], where: Where, *, runs: int = 200, minutes: float = 60, seed: int = 0
) -> dict[str, KindTotals]:
    """Runs sessions of each kind in turn, until there were so many fits or the time is up; returns what they showed."""
    dice, totals = random.Random(seed), {kind: KindTotals() for kind in kinds}
    until, number = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory() as directory:
        while sum(total.runs for total in totals.values()) < runs and time.monotonic() < until:
            kind = kinds[number % len(kinds)]
            number += 1
            wrong, began = len(totals[kind].wrong), time.monotonic()
            words = session(kind, random.Random(dice.random()), where, Path(directory), totals[kind])
            verdict = "ok" if len(totals[kind].wrong) == wrong else f"WRONG: {totals[kind].wrong[-1]}"
            print(f"{number}: {words}, {time.monotonic() - began:.0f} s: {verdict}", file=sys.stderr, flush=True)
    return totals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs sessions until there were enough runs or the time is up; 1 if anything was wrong."""
    parser = argparse.ArgumentParser("python -m integration_tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="fits with countoff, in all (default: 200)")
    parser.add_argument("--minutes", type=float, default=60, help="when to stop in any case (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same jobs (default: 0)")
    parser.add_argument("--ranks", type=int, default=8, help="the most ranks of a job (default: 8)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="which adapters (default: all)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts that share the ranks evenly (default: 1)")
    parser.add_argument("--delay-seconds", type=float, help="how late the store answers to all hosts but the first")
    parser.add_argument("--stall-seconds", type=float, default=0, help="how late it does so now and then (default: 0)")
    devices.add_device_option(parser)
    given = parser.parse_args(arguments)
    if given.hosts > 1 and (reason := why_impossible()):
        parser.error(reason)
    if given.hosts == 1 and (given.delay_seconds is not None or given.stall_seconds):
        parser.error("--delay-seconds and --stall-seconds need --hosts 2 or more")
    if given.hosts > 1 and given.device != "cpu":
        parser.error(f"--device {given.device} needs --hosts 1")
    try:
        choose_device(given.device, given.ranks)
    except DeviceError as error:
        parser.error(f"--{error}")
    delay_seconds = given.delay_seconds or (0.0 if given.stall_seconds else None)
    where = Where(given.hosts, given.ranks, delay_seconds, given.stall_seconds, given.device)
    kinds = [kind for kind in given.only if find_spec(kind) is not None]
    totals = sessions(kinds, where, runs=given.runs, minutes=given.minutes, seed=given.seed)
    print_table(totals, given.seed)
    return int(any(total.wrong for total in totals.values()))


def print_table(totals: dict[str, KindTotals], seed: int) -> None:
    """Prints what was found, as markdown."""
    print(f"Healthy runs, seed {seed}:\n")
    print("| adapter | runs | wrong | keys left per rank and guard, median | MiB more after the last fit, median |")
    print("|---|---|---|---|---|")
    for kind, total in totals.items():
        keys = f"{statistics.median(total.keys):.1f}" if total.keys else "?"
        growth = f"{statistics.median(total.growth):.1f}" if total.growth else "?"
        print(f"| {kind} | {total.runs} | {len(total.wrong)} | {keys} | {growth} |")


if __name__ == "__main__":
    from integration_tests.soak import main as imported  # by its name, by which the ranks will look for its functions

    sys.exit(imported())
