"""A run as a configuration or the command line describes it, and what follows from it on so many ranks.

``Job`` is the one value into which every format is read, each number with where it came from. ``RunPlan`` is a ``Job``
on a world size: its ``RankMap``, and the ``BatchPlan`` that adapters use as well. Nothing that does not divide is
rounded: it is refused, with the numbers that would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from countoff.core.arithmetic.batches import check_count, distributed_samples_per_rank
from countoff.core.arithmetic.samples import strided_pass
from countoff.core.configs.issues import ConfigIssue
from countoff.core.configs.schedules import Schedule
from countoff.core.plan import BatchPlan, LoaderFacts
from countoff.core.ranks import INFERRED, RankMap

__all__ = ["Job", "JobError", "Origin", "RunPlan"]

_MINIMA = {
    "batch_size": 1,
    "tokens_per_micro_batch": 1,
    "sequence_length": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 1,
    "tokens_per_step": 1,
    "steps": 1,
    "epochs": 1,
    "dataset_size": 1,
    "world_size": 1,
    "micro_batch_size": 1,
}


class JobError(ValueError):
    """A run that cannot be: its numbers do not fit each other or the ranks. The message is one line."""


@dataclass(frozen=True)
class Origin:
    """Where a number came from.

    Attributes:
        key: Its name there: ``training.batch_size``, ``--batch-size``.
        given: Whether it is written there; if not, it is the default of what reads that name.
    """

    key: str
    given: bool = True


@dataclass(frozen=True)
class Job:
    """A run, before anybody knows on how many ranks. What is not said is plain data parallel, or unknown.

    Attributes:
        framework: What reads the configuration: ``torchtitan``, ``lingua``, …; empty for the command line's own flags.
        names: The dims of the mesh, outermost first.
        sizes: Ranks along each; at most one is -1 and takes what the others leave over.
        data_dims: The dims along which different data is read.
        batch_size: Samples per dp_rank and batch; None if unknown or counted in tokens.
        tokens_per_micro_batch: Tokens per dp_rank and micro-batch, for a framework that counts in tokens alone.
        sequence_length: Tokens per sample; None if unknown.
        gradient_accumulation_steps: Batches per optimizer step; None: it follows from global_batch_size, else 1.
        global_batch_size: Samples per optimizer step over all dp_ranks; None: it follows from the others.
        tokens_per_step: Tokens per optimizer step over all dp_ranks, where the framework counts in tokens alone.
        pipeline_microbatches: Micro-batches into which, or by which, a pipeline divides or multiplies a batch.
        microbatches_inside: Whether those are cut out of batch_size; if not, a batch is that many times batch_size.
        steps: Optimizer steps of the run; None if unlimited or unknown.
        epochs: Passes over the dataset; None if unlimited or unknown.
        dataset_size: Samples of the dataset; None if unknown or endless.
        drop_last: Whether a last batch that is not full is thrown away.
        strided: Whether the dataset is dealt out in turns without being filled up, so that dp_ranks may have unequally
            many samples; if not, as torch's DistributedSampler does.
        world_size: Ranks, for a format that says it; None for the others.
        micro_batch_size: Samples of one forward and backward pass, for a framework that cuts a batch by it.
        chunks: Files of each source of data, for a framework that deals out whole files.
        data_ends: Whether each dp_rank reads its own data to its end, and nothing makes these ends the same.
        refilled_dim: The dim that the framework sets to what fits where the sizes do not multiply to the world size.
        expert_parallel: Ranks among which experts are shared; they are borrowed from the others.
        experts_must_divide: Whether the framework refuses, before anything else, experts that do not divide.
        learning_rate: The configured learning rate.
        schedule: The learning-rate schedule, where its curve is known.
        origins: Where each of these came from, by its name here.
        findings: What was noticed while reading.

    Raises:
        ValueError: If a number is outside its domain.
    """

    framework: str = ""
    names: tuple[str, ...] = ("dp",)
    sizes: tuple[int, ...] = (INFERRED,)
    data_dims: tuple[str, ...] = ("dp",)
    batch_size: int | None = None
    tokens_per_micro_batch: int | None = None
    sequence_length: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    tokens_per_step: int | None = None
    pipeline_microbatches: int = 1
    microbatches_inside: bool = True
    steps: int | None = None
    epochs: int | None = None
    dataset_size: int | None = None
    drop_last: bool = False
    strided: bool = False
    world_size: int | None = None
    micro_batch_size: int | None = None
    chunks: Mapping[str, int] = field(default_factory=dict[str, int])
    data_ends: bool = False
    refilled_dim: str | None = None
    expert_parallel: int = 1
    experts_must_divide: bool = False
    learning_rate: float | None = None
    schedule: Schedule | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    issues: tuple[ConfigIssue, ...] = ()

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value: object = getattr(self, name)
            if value is not None:
                check_count(self.key(name), value, minimum=minimum)
        check_count(self.key("pipeline_microbatches"), self.pipeline_microbatches, minimum=1)
        check_count(self.key("expert_parallel"), self.expert_parallel, minimum=1)
        for name, size in zip(self.names, self.sizes, strict=True):
            if size != INFERRED:
                check_count(self.key(name), size, minimum=1)

    def key(self, name: str) -> str:
        """The name that this configuration has for one of these numbers, for messages.

        Example:
            >>> Job("", ("dp",), (-1,), ("dp",), origins={"batch_size": Origin("--batch-size")}).key("batch_size")
            '--batch-size'
        """
        return self.origins[name].key if name in self.origins else name

    def rank_map(self, world_size: int) -> RankMap:
        """Returns which rank reads which share, on so many ranks.

        Args:
            world_size: The ranks of the job, at least 1.

        Raises:
            JobError: If the dims do not fit, or the experts do not divide the ranks that they borrow.
        """
        sizes = dict(zip(self.names, self.sizes, strict=True))
        try:
            if self.refilled_dim is not None and not self.fits(world_size):
                sizes[self.refilled_dim] = INFERRED
            ranks = RankMap.fit(self.names, list(sizes.values()), self.data_dims, world_size=world_size)
        except ValueError as error:
            raise JobError(f"the dims do not fit {world_size} ranks: {error}") from None
        if self.experts_must_divide and self.uneven_experts(ranks) is not None:
            raise JobError(f"{self.key('expert_parallel')}: {self.uneven_experts(ranks)}")
        return ranks

    def fits(self, world_size: int) -> bool:
        """Whether the sizes as written multiply to so many ranks, or one is left to be inferred."""
        product = 1
        for size in self.sizes:
            product *= size
        return INFERRED in self.sizes or product == world_size

    def uneven_experts(self, ranks: RankMap) -> str | None:
        """Says by how much the experts miss the ranks that they borrow, None if they do not."""
        sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
        lent = [name for name in ("dp_shard", "cp", "tp") if name in sizes]
        pool = 1
        for name in lent:
            pool *= sizes[name]
        if self.expert_parallel == 1 or pool % self.expert_parallel == 0:
            return None
        return f"{self.expert_parallel} must divide {' × '.join(lent)} = {pool}"


@dataclass(frozen=True)
class RunPlan:
    """A job on so many ranks.

    Attributes:
        job: The run.
        ranks: Which rank reads which share.
        batch_size: Samples per dp_rank and batch as configured, before pipeline micro-batches outside it.
        batches: The plan of epochs, steps, samples and tokens.
    """

    job: Job
    ranks: RankMap
    batch_size: int | None
    batches: BatchPlan
    gradient_accumulation_steps: int

    @classmethod
    def of(cls, job: Job, *, world_size: int) -> RunPlan:
        """Returns what follows from a job on so many ranks.

        Args:
            job: The run.
            world_size: The ranks, at least 1.

        Raises:
            JobError: If the dims do not fit the ranks, or a batch does not divide.

        Example:
            >>> job = Job("", ("dp",), (-1,), ("dp",), batch_size=2, sequence_length=2048, steps=10)
            >>> RunPlan.of(job, world_size=4).batches.tokens_per_step
            16384
        """
        ranks = job.rank_map(world_size)
        batch_size, accumulation = _batch(job, ranks)
        outside = 1 if job.microbatches_inside else job.pipeline_microbatches
        rows = job.tokens_per_micro_batch is not None
        # A framework that counts in tokens alone reads packed rows: one per micro-batch, that many tokens long.
        batch = outside if rows else None if batch_size is None else batch_size * outside
        facts = LoaderFacts(
            reported_batches=None,
            batch_size=batch,
            # Without a dataset's size the stream is endless, and every batch of it full.
            drop_last=job.drop_last or job.dataset_size is None,
            gradient_accumulation_steps=accumulation,
            max_epochs=job.epochs,
            max_steps=job.steps,
            sequence_length=job.tokens_per_micro_batch if rows else job.sequence_length,
            partial_step="applied",
            **_dataset(job, batch, ranks.dp_degree),
        )
        return cls(job, ranks, batch_size, BatchPlan.of(facts, dp_degree=ranks.dp_degree), accumulation)

    @property
    def identity(self) -> str:
        """How the tokens, or else the samples, of a step come about, as a sum that a person can follow.

        Example:
            >>> job = Job("", ("dp",), (-1,), ("dp",), batch_size=2, sequence_length=2048)
            >>> RunPlan.of(job, world_size=4).identity
            '2 sequences × 2,048 tokens × 4 data ranks × 1 accumulation = 16,384 tokens per step'
        """
        job, plan = self.job, self.batches
        factors: list[str] = []
        if job.tokens_per_micro_batch is not None:
            factors.append(f"{job.tokens_per_micro_batch:,} tokens")
        elif self.batch_size is None:
            return "the batch size is not known: give --batch-size"
        elif job.sequence_length is None:
            factors.append(_count(self.batch_size, "sample"))
        else:
            factors += [_count(self.batch_size, "sequence"), _count(job.sequence_length, "token")]
        if not job.microbatches_inside and job.pipeline_microbatches > 1:
            factors.append(f"{job.pipeline_microbatches:,} pipeline micro-batches")
        factors += [_count(plan.dp_degree, "data rank"), f"{self.gradient_accumulation_steps:,} accumulation"]
        if plan.tokens_per_step is None:
            return f"{' × '.join(factors)} = {plan.global_batch_size:,} samples per step"
        return f"{' × '.join(factors)} = {plan.tokens_per_step:,} tokens per step"


def _dataset(job: Job, batch: int | None, dp_degree: int) -> dict[str, Any]:
    """Returns the facts of the dataset and of how it is shared out."""
    size = job.dataset_size
    if size is None:
        return {"samples_per_rank": None}
    if job.strided:
        one_pass = (
            None
            if batch is None
            else strided_pass(size, batch_size=batch, drop_last=job.drop_last, dp_degree=dp_degree)
        )
        return {"samples_per_rank": None, "dataset_size": size, "one_pass": one_pass}
    share = distributed_samples_per_rank(size, dp_degree=dp_degree, drop_last=False)
    return {"samples_per_rank": share, "dataset_size": size, "sampling": "distributed"}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _misunderstood(job: Job, product: int, ranks: RankMap) -> str:
    """Says which of the usual slips would make three batch numbers agree; nothing if none does."""
    total, degree = job.global_batch_size or 0, ranks.dp_degree
    if degree > 1 and product == total * degree:
        accumulation = job.key("gradient_accumulation_steps")
        return f"{accumulation} is that of one rank, and must not count the batches of all data ranks; "
    if degree < ranks.world_size and product * (ranks.world_size // degree) == total:
        return f"it would be right if all {ranks.world_size} ranks read their own data; "
    return ""


def _batch(job: Job, ranks: RankMap) -> tuple[int | None, int]:
    """Returns the samples per dp_rank and batch, and the batches per step; whichever is missing of three follows.

    Raises:
        JobError: If the three do not fit each other.
    """
    outside, dp_degree = 1 if job.microbatches_inside else job.pipeline_microbatches, ranks.dp_degree
    if job.tokens_per_micro_batch is not None:
        steps = _quotient(job, "tokens_per_step", "tokens_per_micro_batch", "tokens", outside, dp_degree)
        return None, steps or 1
    size, accumulation, total = job.batch_size, job.gradient_accumulation_steps, job.global_batch_size
    if total is None:
        return size, accumulation or 1
    if size is not None and accumulation is not None:
        product = size * outside * accumulation * dp_degree
        if product != total:
            batches = f"{job.key('gradient_accumulation_steps')} {accumulation}"
            raise JobError(
                f"{job.key('global_batch_size')} {total} is not {job.key('batch_size')} {size} × {batches} × "
                f"{_count(dp_degree, 'data rank')} = {product}: {_misunderstood(job, product, ranks)}change one of "
                f"them, or leave one out"
            )
        return size, accumulation
    if size is not None:
        return size, _quotient(job, "global_batch_size", "batch_size", "samples", outside, dp_degree) or 1
    accumulation = accumulation or 1
    divisor = accumulation * outside * dp_degree
    if total % divisor:
        raise JobError(
            f"{job.key('global_batch_size')} {total} does not divide into {_count(dp_degree, 'data rank')} × "
            f"{accumulation * outside} batches each: {total} = {total // divisor} × {divisor} + {total % divisor}; "
            f"{_nearest(total, divisor)} would"
        )
    return total // divisor, accumulation


def _quotient(job: Job, total_name: str, size_name: str, unit: str, outside: int, dp_degree: int) -> int | None:
    """Returns how many batches per step make up the total; None if there is none."""
    total, size = getattr(job, total_name), getattr(job, size_name)
    if total is None:
        return None
    divisor = size * outside * dp_degree
    if total % divisor:
        inside = f" × {outside} pipeline micro-batches" if outside > 1 else ""
        raise JobError(
            f"{job.key(total_name)} {total} is no multiple of {job.key(size_name)} {size}{inside} × "
            f"{_count(dp_degree, 'data rank')} = {divisor} {unit}: {_nearest(total, divisor)} would do"
        )
    return total // divisor


def _nearest(total: int, divisor: int) -> str:
    below = total // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
