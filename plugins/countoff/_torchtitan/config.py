"""Reads a trainer of TorchTitan and its config: the run, the facts of its loader, and schedules that do not fit."""

from __future__ import annotations

from typing import Any

from countoff.core import LoaderFacts, Verdict
from countoff.core.checks.horizon import WRONG_HORIZON
from countoff.plan.checks import check_job
from countoff.plan.job import Job
from countoff.plan.readers import torchtitan_python

__all__ = ["facts_of", "job_of", "position_of", "wrong_horizons"]


def job_of(trainer: Any) -> Job:
    """Returns the run as its config describes it; versions of TorchTitan name the config's attribute differently."""
    return torchtitan_python.read(getattr(trainer, "config", None) or trainer.job_config)


def facts_of(trainer: Any, job: Job) -> LoaderFacts:
    """Returns the facts of the trainer's loader, with the limits of its config."""
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


def position_of(trainer: Any, job: Job, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the dp_rank and the dp_degree of TorchTitan's loader; of any other loader, those of the config."""
    loader = trainer.dataloader
    if hasattr(loader, "dp_rank") and hasattr(loader, "dp_world_size"):
        return int(loader.dp_rank), int(loader.dp_world_size)
    ranks = job.rank_map(world_size)
    return ranks.dp_rank(rank), ranks.dp_degree


def wrong_horizons(job: Job, world_size: int) -> list[Verdict]:
    """Returns a warning about the first schedule of the config that does not fit the run, if there is one."""
    issues = check_job(job, world_size=world_size)
    found = [issue for issue in issues if issue.level == "silent" and issue.code in ("horizon", "warm-up")]
    return [WRONG_HORIZON.found(f"{issue.wrong}.", remedy=f"{issue.remedy}.") for issue in found[:1]]
