"""countoff for TorchTitan: ``attach(trainer)`` between building the trainer and ``trainer.train()``, on every rank.

Or without a line of code, in place of ``-m torchtitan.train``::

    torchrun --nproc-per-node 8 -m countoff.torchtitan --module llama3 --config llama3_8b

A batch is what the trainer takes from its loader at once: a micro-batch, where a pipeline reads those one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from countoff._adapter.requirements import needs
from countoff.core.checks.horizon import WRONG_HORIZON

with needs("TorchTitan", facade="countoff.torchtitan", install="torchtitan"):
    from torchtitan.components.dataloader import DataloaderExhaustedError  # pyright: ignore[reportMissingImports]
from countoff._adapter.guards import cannot_make_even, new_guard
from countoff._adapter.handle import Attached
from countoff._adapter.options import own_arguments
from countoff._adapter.remedies import data_remedies
from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff.core import FitPlan, LoaderFacts, Settings, Verdict
from countoff.core.totals import Totals
from countoff.core.verdict import Remedies
from countoff.plan.checks import check_job
from countoff.plan.job import Job
from countoff.plan.readers import torchtitan_python

__all__ = ["attach", "main"]

REMEDIES: Remedies = {
    "UnevenBatches": {
        "": (
            "let the loader start over at its end (infinite=True, the default), or set training.steps to what every "
            "data rank has. TorchTitan cancels the step in which data runs out, on that rank alone."
        ),
    },
    "PlanMismatch": "start every rank with the same config.",
    "StepMismatch": "let all ranks step after the same batches: no condition of one rank around optimizers.step().",
    "LearningRateMismatch": "give lr_scheduler the same steps on every rank.",
    "RankMapError": "read with the dp_rank and dp_world_size that TorchTitan gives to dataloader.build().",
    **data_remedies(
        shares="read with the dp_rank and dp_world_size that TorchTitan gives to dataloader.build().",
        order="give every epoch its own seed.",
        off="attach(trainer, fingerprint_batches=0)",
    ),
}


def attach(trainer: Any, **options: Any) -> Attached:
    """Watches a TorchTitan trainer from the moment at which it begins to read. Every rank must call it.

    Call it before ``trainer.train()``. The fit begins when the checkpoint has been loaded; then it waits for the other
    ranks at most `deadline_seconds`.

    Args:
        trainer: A ``torchtitan.trainer.Trainer``, or one of its subclasses.
        **options: The options of every adapter; see `Settings`.

    Returns:
        The handle; it is detached when ``train()`` returns.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """
    settings = Settings.resolve(*own_arguments(attach), **options)
    cannot_make_even(settings, "TorchTitan")
    rank, world_size = rank_and_world_size()
    job = _job(trainer)
    facts = _facts(trainer, job)
    dp_rank, dp_degree = _position(trainer, job, rank, world_size)
    make_guard = functools.partial(
        new_guard,
        settings,
        "TorchTitan",
        rank=rank,
        world_size=world_size,
        remedies=REMEDIES,
        optimizers=lambda: trainer.optimizers,
        models=lambda: trainer.model_parts,
    )
    attached = Attached(make_guard, Totals(facts, dp_degree=dp_degree, framework="TorchTitan"), settings, epoch=0)
    if not settings.enabled:
        return attached
    plan = FitPlan(
        batch_size=facts.batch_size,
        gradient_accumulation_steps=facts.gradient_accumulation_steps,
        max_steps=facts.max_steps,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
    )
    read, train = trainer.batch_generator, trainer.train

    def begin(loader: Any) -> Iterator[Any]:
        batches = trainer.step * facts.gradient_accumulation_steps
        resumed = dataclasses.replace(plan, position=[0, batches, trainer.step])
        attached.begin(resumed, versions("torchtitan"), give_back, *_horizon(job, world_size))
        trainer.metrics_processor.logger.log(attached.progress(), trainer.step)
        return _counted(attached, read(loader), batches)

    def watched() -> None:
        try:
            with attached:
                train()
        finally:
            give_back()

    give_back = _replace_methods(trainer, batch_generator=begin, train=watched)
    return attached


def main() -> None:
    """Runs TorchTitan's own training program with every trainer attached."""
    from torchtitan import train as program  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    trainer_class: Any = program.Trainer
    original: Callable[[Any], None] = trainer_class.train

    def train(trainer: Any) -> None:
        trainer_class.train = original
        attach(trainer)
        trainer.train()

    trainer_class.train = train
    program.main()


def _replace_methods(trainer: Any, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Replaces methods of one trainer; returns a function that gives it its own back, and may be called again."""
    before = {name: value for name, value in vars(trainer).items() if name in methods}
    vars(trainer).update(methods)

    def give_back() -> None:
        for name in methods:
            vars(trainer).pop(name, None)
        vars(trainer).update(before)

    return give_back


def _job(trainer: Any) -> Job:
    """Returns the run as its config describes it; versions of TorchTitan name the config's attribute differently."""
    return torchtitan_python.read(getattr(trainer, "config", None) or trainer.job_config)


def _facts(trainer: Any, job: Job) -> LoaderFacts:
    micro_batches = 1
    for name in ("num_pipeline_parallel_microbatches", "num_pp_microbatches"):
        micro_batches = getattr(trainer, name, micro_batches)
    return LoaderFacts(
        reported_batches=None,
        # Where the config counts only tokens, a batch is one packed row.
        batch_size=1 if job.batch_size is None else getattr(trainer.dataloader, "batch_size", job.batch_size),
        drop_last=True,
        samples_per_rank=None,
        gradient_accumulation_steps=trainer.gradient_accumulation_steps * micro_batches,
        max_steps=job.steps,
        sequence_length=job.tokens_per_micro_batch or job.sequence_length,
        reported_is_cap=False,
        partial_step="dropped",
    )


def _position(trainer: Any, job: Job, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the dp_rank and the dp_degree of TorchTitan's loader; of any other loader, those of the config."""
    loader = trainer.dataloader
    if hasattr(loader, "dp_rank") and hasattr(loader, "dp_world_size"):
        return int(loader.dp_rank), int(loader.dp_world_size)
    ranks = job.rank_map(world_size)
    return ranks.dp_rank(rank), ranks.dp_degree


def _horizon(job: Job, world_size: int) -> list[Verdict]:
    """Returns a warning about the first schedule of the config that does not fit the run, if there is one."""
    issues = check_job(job, world_size=world_size)
    silent = [issue.text for issue in issues if issue.level == "silent" and issue.code in ("horizon", "warm-up")]
    found = [text.rpartition("; ") for text in silent[:1]]  # what is wrong, and what to set
    return [WRONG_HORIZON.found(f"{wrong}.", remedy=f"{remedy}.") for wrong, _, remedy in found]


def _counted(attached: Attached, batches: Iterator[Any], position: int) -> Iterator[Any]:
    """Yields the batches, counted. TorchTitan's own error, which ends its loop, is counted as the end of the data."""
    ended: list[DataloaderExhaustedError] = []

    def until_the_end() -> Iterator[Any]:
        try:
            yield from batches
        except DataloaderExhaustedError as error:
            ended.append(error)

    yield from attached.passes.follow(until_the_end(), None, position=position)
    raise ended[0] if ended else DataloaderExhaustedError


if __name__ == "__main__":
    sys.exit(main())
