"""A program as a user writes it, which type checkers must accept in their strictest mode.

Pyright in `tests/test_page_examples.py`, mypy in `tests/test_typing.py`.

It is checked, and never run.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable

import countoff.core
from countoff.accelerate import Countoff as AccelerateCountoff
from countoff.core import BatchPlan, DivergenceError, FitPlan, Guard, LoaderFacts, Settings, SettingsError, Verdict
from countoff.core.arithmetic.ranks import RankMap
from countoff.fabric import Countoff as FabricCountoff
from countoff.lightning import Countoff as LightningCountoff
from countoff.plan.job import Job, RunPlan
from countoff.pytorch_lightning import Countoff as PytorchLightningCountoff
from countoff.torch import Countoff, before_fit
from countoff.transformers import Countoff as TransformersCountoff

version: str = countoff.core.__version__


def loop_of_torch(loader: Iterable[int]) -> dict[str, float]:
    """A loop over a loader, with a checkpoint."""
    before_fit()
    try:
        with Countoff(stall_seconds=60, uneven_train="stop", levels={"Stalled": "raise"}) as countoff:
            countoff.load_state_dict(countoff.state_dict())
            for number in countoff.train(loader, epoch=2, position=8):
                with countoff.uncounted():
                    print(number + 1)
                countoff.micro_batch()
            for number in countoff.eval(loader, "held out"):
                print(number + 1)
            return countoff.progress()
    except DivergenceError as error:
        verdict: Verdict = error.verdict
        ranks: tuple[int, ...] = verdict.ranks
        print(verdict.kind, verdict.sentence, ranks, verdict.to_dict()["restart"])
        raise
    except SettingsError as error:
        raise SystemExit(str(error)) from None


def callbacks() -> list[object]:
    """One of each framework."""
    return [
        LightningCountoff(on_divergence="warn"),
        PytorchLightningCountoff(verdict_file=None),
        TransformersCountoff(trace_dir="runs/today"),
    ]


def loops(accelerator: object, fabric: object, loader: Iterable[int]) -> None:
    """One of each framework that has no trainer."""
    for each in (AccelerateCountoff(accelerator, epochs=3), FabricCountoff(fabric, compare_data=False)):
        each.start()
        for number in each.train(loader):
            print(number + 1)
        print(each.guard.steps)
        each.close()


def own_trainer(loader: list[int]) -> int:
    """A trainer of the user's own, with the calls of the guard."""
    guard = Guard(Settings(weights_every=8), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=len(loader), batch_size=1))
    guard.train_start(0)
    for _ in loader:
        guard.batch()
        guard.step()
    guard.train_end("exhausted")
    guard.fit_end()
    verdict: Verdict | None = guard.verdict
    return guard.steps if verdict is None else 0


def arithmetic() -> tuple[int | None, int, int | None]:
    """A plan, from Python."""
    ranks = RankMap.of("megatron", world_size=4, tp=2)
    plan = RunPlan.of(Job(batch_size=2, sequence_length=2048, steps=1000), world_size=4).batches
    epoch = BatchPlan.of(
        LoaderFacts(reported_batches=3, batch_size=2, drop_last=False, samples_per_rank=6), dp_degree=2
    )
    return plan.tokens_per_step, ranks.dp_degree, epoch.global_batch_size
