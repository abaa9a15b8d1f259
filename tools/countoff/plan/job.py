"""A run as a configuration or the command line describes it, and what follows from it on a number of ranks.

Every format is read into one ``Job``, which also holds where each number is written. ``RunPlan`` is a ``Job`` on a
world size: its ``RankMap``, and the ``BatchPlan`` that adapters use as well. A number that does not divide is never
rounded: it is refused, and the error names the nearest numbers that divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from countoff.core.arithmetic.batches import check_count, distributed_samples_per_rank
from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts
from countoff.core.arithmetic.prepared_loader import PreparedFacts, prepared_pass
from countoff.core.arithmetic.ranks import INFERRED, RankMap
from countoff.core.arithmetic.samples import strided_pass
from countoff.plan.issues import ConfigIssue, counted
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["Job", "JobError", "Origin", "RunPlan"]

# The smallest value of each number that may also be None.
_MINIMA = {
    "batch_size": 1,
    "tokens_per_micro_batch": 1,
    "sequence_length": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 1,
    "tokens_per_step": 1,
    "steps": 1,
    "dataset_size": 1,
    "world_size": 1,
}


class JobError(ValueError):
    """A run whose numbers do not fit each other or the ranks. The message is one line."""


@dataclass(frozen=True)
class Origin:
    """Where a number comes from.

    Attributes:
        key: Its name in the configuration or on the command line: ``training.batch_size``, ``--batch-size``.
        given: Whether it is written there; if not, it is the framework's default for that name.
        written: The number as it is written there, where that is in another unit; None if it is in the unit of ``Job``.
    """

    key: str
    given: bool = True
    written: str | None = None


@dataclass(frozen=True)
class Job:
    """A run, before the number of its ranks is known. The defaults are plain data parallel, and unknown numbers.

    Attributes:
        framework: The framework of the configuration: ``torchtitan``, ``lingua``, …; empty for flags alone.
        names: The dims of the mesh, outermost first.
        sizes: Ranks along each dim; at most one is -1, which takes the ranks that the others leave over.
        data_dims: The dims along which different data is read.
        batch_size: Samples per dp_rank and batch; None if unknown or counted in tokens.
        tokens_per_micro_batch: Tokens per dp_rank and micro-batch; None unless the framework counts in tokens alone.
        sequence_length: Tokens per sample; None if unknown.
        gradient_accumulation_steps: Batches per optimizer step; None: follows from global_batch_size, else 1.
        global_batch_size: Samples per optimizer step over all dp_ranks; None: follows from the others.
        tokens_per_step: Tokens per optimizer step over all dp_ranks; None unless the framework counts in tokens alone.
        pipeline_microbatches: Pipeline micro-batches per batch, at least 1.
        microbatches_inside: Whether micro-batches are cut out of batch_size samples; if not, each of them has
            batch_size samples.
        steps: Optimizer steps of the run; None if unlimited or unknown.
        epochs: Passes over the dataset, also a fraction of one, above 0; None if unlimited or unknown.
        dataset_size: Samples of the dataset; None if unknown or endless.
        drop_last: Whether each dp_rank drops a last batch that is not full.
        strided: Whether dp_rank r reads samples r, r + dp_degree, … and nothing is filled up, so that dp_ranks may have
            different numbers of samples; if not, the dataset is sharded as by torch's DistributedSampler.
        accelerate_shards: How Accelerate shards the loader: it deals out whole ``batches``, or cuts each batch into
            ``pieces`` (``split_batches``); None if the framework does not use it.
        world_size: Ranks of the job, for a format that has this number; else None.
        run_samples: Samples of the run, where its length is given in samples; steps then follows from it; else None.
        ramp: The first global batch, the increment, and the samples over which the global batch grows; None if it does
            not grow.
        batch_stages: The global batches that follow each other, each with the samples after which it begins; empty if
            there is one only.
        chunks: Number of files of each data source, for a framework that gives whole files to dp_ranks.
        data_ends: Whether each dp_rank reads its own data once, so that dp_ranks may run out at different steps.
        refilled_dim: The dim that the framework changes where the sizes do not multiply to the world size; else None.
        schedule: The learning-rate schedule; None if its end is unknown.
        origins: Where each of these numbers comes from, by its name here.
        issues: What the reader of the configuration found wrong, or worth knowing.
        own_checks: What is checked for this framework alone: each returns issues of the run and of its ranks.

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
    epochs: int | float | None = None
    dataset_size: int | None = None
    drop_last: bool = False
    strided: bool = False
    accelerate_shards: Literal["batches", "pieces"] | None = None
    world_size: int | None = None
    run_samples: int | None = None
    ramp: tuple[int, int, int] | None = None
    batch_stages: tuple[tuple[int, int], ...] = ()
    chunks: Mapping[str, int] = field(default_factory=dict[str, int])
    data_ends: bool = False
    refilled_dim: str | None = None
    schedule: ConfiguredSchedule | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    issues: tuple[ConfigIssue, ...] = ()
    own_checks: tuple[Callable[[Job, RankMap], Iterable[ConfigIssue]], ...] = ()

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value: object = getattr(self, name)
            if value is not None:
                check_count(self.key(name), value, minimum=minimum)
        if self.epochs is not None and (isinstance(self.epochs, bool) or not 0 < self.epochs < math.inf):
            raise ValueError(f"{self.key('epochs')} must be a number above 0, got {self.epochs}")
        check_count(self.key("pipeline_microbatches"), self.pipeline_microbatches, minimum=1)
        for name, size in zip(self.names, self.sizes, strict=True):
            if size != INFERRED:
                check_count(self.key(name), size, minimum=1)

    def key(self, name: str) -> str:
        """Returns the configuration's own name of a number, for messages.

        Example:
            >>> Job("", ("dp",), (-1,), ("dp",), origins={"batch_size": Origin("--batch-size")}).key("batch_size")
            '--batch-size'
        """
        return self.origins[name].key if name in self.origins else name

    def stated(self, name: str, value: int, verb: str = "is ") -> str:
        """Returns a number with its name, for messages; a default, which is not written there, is marked.

        Args:
            name: Its name here.
            value: The number.
            verb: What stands between the two: ``is`` and a space, or nothing.

        Example:
            >>> job = Job("", ("dp",), (-1,), ("dp",), origins={"steps": Origin("training.steps", given=False)})
            >>> job.stated("steps", 10000)
            'training.steps is 10,000 by default'
        """
        origin = self.origins.get(name)
        default = "" if origin is None or origin.given else " by default"
        return f"{self.key(name)} {verb}{self.written(name, value)}{default}"

    def written(self, name: str, value: int) -> str:
        """Returns a number as the configuration has it, for messages.

        Example:
            >>> job = Job(origins={"steps": Origin("--train-samples", written="25,600")})
            >>> job.written("steps", 100)
            '25,600'
        """
        origin = self.origins.get(name)
        return f"{value:,}" if origin is None or origin.written is None else origin.written

    def rank_map(self, world_size: int) -> RankMap:
        """Returns which rank reads which share of the data.

        Args:
            world_size: Ranks of the job, at least 1.

        Raises:
            JobError: If the dims do not fit.
        """
        sizes = dict(zip(self.names, self.sizes, strict=True))
        try:
            if self.refilled_dim is not None and not self.fits(world_size):
                sizes[self.refilled_dim] = INFERRED
            return RankMap.fit(self.names, list(sizes.values()), self.data_dims, world_size=world_size)
        except ValueError as error:
            raise JobError(f"the dims do not fit {world_size} ranks: {error}") from None

    def fits(self, world_size: int) -> bool:
        """Whether the configured sizes multiply to this number of ranks, or one of them is to be inferred."""
        return INFERRED in self.sizes or math.prod(self.sizes) == world_size


@dataclass(frozen=True)
class RunPlan:
    """A job on a number of ranks.

    Attributes:
        job: The run.
        ranks: Which rank reads which share of the data.
        batch_size: Samples per dp_rank and batch; where a batch is several pipeline micro-batches of batch_size, those
            of one micro-batch. None if unknown.
        batches: The plan of epochs, steps, samples and tokens.
        gradient_accumulation_steps: Batches per optimizer step.
    """

    job: Job
    ranks: RankMap
    batch_size: int | None
    batches: BatchPlan
    gradient_accumulation_steps: int

    @classmethod
    def of(cls, job: Job, *, world_size: int) -> RunPlan:
        """Returns the plan of a job.

        Args:
            job: The run.
            world_size: Ranks of the job, at least 1.

        Raises:
            JobError: If the dims do not fit the ranks, or a batch does not divide.

        Example:
            >>> job = Job("", ("dp",), (-1,), ("dp",), batch_size=2, sequence_length=2048, steps=10)
            >>> RunPlan.of(job, world_size=4).batches.tokens_per_step
            16384
        """
        ranks = job.rank_map(world_size)
        batch_size, accumulation = _batch_size_and_accumulation(job, ranks)
        micro_batches = _micro_batches_outside(job)
        in_tokens = job.tokens_per_micro_batch is not None
        # A framework that counts in tokens alone reads packed rows: one per micro-batch, with all of its tokens.
        batch = micro_batches if in_tokens else None if batch_size is None else batch_size * micro_batches
        endless = job.dataset_size is None and job.steps is not None
        facts = LoaderFacts(
            reported_batches=None,
            batch_size=batch,
            # A dataset of unknown size is an endless stream, in which every batch is full.
            drop_last=job.drop_last or job.dataset_size is None,
            gradient_accumulation_steps=accumulation,
            # Where nothing says how long an epoch is, the steps are the only end that can be known.
            max_epochs=None if job.epochs is None or endless else math.ceil(job.epochs),
            max_steps=job.steps,
            sequence_length=job.tokens_per_micro_batch if in_tokens else job.sequence_length,
            partial_step="applied",
            **_dataset_facts(job, batch, ranks.dp_degree),
        )
        batches = BatchPlan.of(facts, dp_degree=ranks.dp_degree)
        steps = _steps_of_epochs(job, batches)
        if steps is not None and batches.total_steps is not None and steps < batches.total_steps:
            facts = replace(facts, max_epochs=None, max_steps=steps)
            batches = BatchPlan.of(facts, dp_degree=ranks.dp_degree)
        return cls(job, ranks, batch_size, batches, accumulation)

    @property
    def length_flags(self) -> tuple[str, ...]:
        """The flags of which each gives the steps of the run, where these are not known."""
        job = self.job
        if job.dataset_size is not None and self.batch_size is None:
            return "--steps N", "--batch-size N"
        if job.epochs is None:
            return ("--steps N",)
        return "--steps N", "--dataset-size N"

    @property
    def identity(self) -> str:
        """The tokens of a step as a product of what they are made of; the samples, where no tokens are known.

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
            factors.append(counted(self.batch_size, "sample"))
        else:
            factors += [counted(self.batch_size, "sequence"), counted(job.sequence_length, "token")]
        if not job.microbatches_inside and job.pipeline_microbatches > 1:
            factors.append(f"{job.pipeline_microbatches:,} pipeline micro-batches")
        factors += [counted(plan.dp_degree, "data rank"), f"{self.gradient_accumulation_steps:,} accumulation"]
        if plan.tokens_per_step is None:
            return f"{' × '.join(factors)} = {plan.global_batch_size:,} samples per step"
        return f"{' × '.join(factors)} = {plan.tokens_per_step:,} tokens per step"


def _steps_of_epochs(job: Job, batches: BatchPlan) -> int | None:
    """Returns the steps of a run that ends within an epoch; None for any other."""
    if job.epochs is None or job.epochs == int(job.epochs) or not batches.steps_per_epoch:
        return None
    return math.ceil(job.epochs * batches.steps_per_epoch)


def _dataset_facts(job: Job, batch: int | None, dp_degree: int) -> dict[str, Any]:
    """Returns the facts of the dataset and of how it is sharded."""
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
    if job.accelerate_shards is not None:
        in_pieces = job.accelerate_shards == "pieces"
        prepared = PreparedFacts(
            "BatchSamplerShard",
            samples=size,
            batch_size=batch if batch is None or not in_pieces else batch * dp_degree,
            num_processes=dp_degree,
            drop_last=job.drop_last,
            split_batches=in_pieces,
        )
        return {
            "samples_per_rank": None,
            "dataset_size": size,
            "one_pass": None if batch is None else prepared_pass(prepared, process_index=0),
        }
    share = distributed_samples_per_rank(size, dp_degree=dp_degree, drop_last=False)
    return {"samples_per_rank": share, "dataset_size": size, "sampling": "distributed"}


def _micro_batches_outside(job: Job) -> int:
    """Returns the pipeline micro-batches by which a batch is multiplied; 1 if they are cut out of it."""
    return 1 if job.microbatches_inside else job.pipeline_microbatches


def _batch_size_and_accumulation(job: Job, ranks: RankMap) -> tuple[int | None, int]:
    """Returns the samples per dp_rank and batch, and the batches per step; of three numbers the missing one follows.

    Raises:
        JobError: If the three do not fit each other.
    """
    if job.tokens_per_micro_batch is not None:
        if job.tokens_per_step is None:
            return None, 1
        return None, _accumulation(job, ranks, "tokens_per_step", "tokens_per_micro_batch", "tokens")
    if job.global_batch_size is None:
        return job.batch_size, job.gradient_accumulation_steps or 1
    if job.batch_size is None:
        accumulation = job.gradient_accumulation_steps or 1
        return _batch_size(job, ranks, job.global_batch_size, accumulation), accumulation
    if job.gradient_accumulation_steps is None:
        return job.batch_size, _accumulation(job, ranks, "global_batch_size", "batch_size", "samples")
    _check_product(job, ranks, job.global_batch_size, job.batch_size, job.gradient_accumulation_steps)
    return job.batch_size, job.gradient_accumulation_steps


def _accumulation(job: Job, ranks: RankMap, total_name: str, size_name: str, unit: str) -> int:
    """Returns how many batches of one size on every dp_rank make up the total of a step."""
    total: int = getattr(job, total_name)
    size: int = getattr(job, size_name)
    micro_batches, dp_degree = _micro_batches_outside(job), ranks.dp_degree
    divisor = size * micro_batches * dp_degree
    if total % divisor:
        factors = f" × {micro_batches} pipeline micro-batches" if micro_batches > 1 else ""
        raise JobError(
            f"{job.key(total_name)} {total:,} is no multiple of {job.stated(size_name, size, '')}{factors} × "
            f"{counted(dp_degree, 'data rank')} = {divisor:,} {unit}: {_nearest(total, divisor)} would do"
        )
    return total // divisor


def _batch_size(job: Job, ranks: RankMap, total: int, accumulation: int) -> int:
    """Returns the samples per dp_rank and batch into which a global batch divides."""
    batches = accumulation * _micro_batches_outside(job)
    divisor = batches * ranks.dp_degree
    if total % divisor:
        key = job.key("global_batch_size")
        noun = "batch" if batches == 1 else "batches"
        raise JobError(
            f"{key} {total:,} does not divide into {counted(ranks.dp_degree, 'data rank')} × {batches:,} {noun} each: "
            f"{total:,} = {total // divisor:,} × {divisor:,} + {total % divisor:,}; {_nearest(total, divisor)} would"
        )
    return total // divisor


def _check_product(job: Job, ranks: RankMap, total: int, size: int, accumulation: int) -> None:
    product = size * _micro_batches_outside(job) * accumulation * ranks.dp_degree
    if product != total:
        batches = f"{job.key('gradient_accumulation_steps')} {accumulation}"
        raise JobError(
            f"{job.key('global_batch_size')} {total:,} is not {job.key('batch_size')} {size:,} × {batches} × "
            f"{counted(ranks.dp_degree, 'data rank')} = {product:,}: {_likely_mistake(job, ranks, total, product)}"
            f"change one of them, or leave one out"
        )


def _likely_mistake(job: Job, ranks: RankMap, total: int, product: int) -> str:
    """Returns the usual mistake that explains why three batch numbers disagree; an empty text if none does."""
    degree = ranks.dp_degree
    if degree > 1 and product == total * degree:
        accumulation = job.key("gradient_accumulation_steps")
        return f"{accumulation} is that of one rank, and must not count the batches of all data ranks; "
    if degree < ranks.world_size and product * (ranks.world_size // degree) == total:
        return f"it would be right if all {ranks.world_size} ranks read their own data; "
    return ""


def _nearest(total: int, divisor: int) -> str:
    below = total // divisor * divisor
    return f"{below:,} or {below + divisor:,}" if below else f"{divisor:,}"
