"""How plans look: a table of world sizes side by side, JSON, and where each number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from countoff.core.configs.issues import ConfigIssue
from countoff.core.configs.job import RunPlan

__all__ = ["Wishes", "as_json", "explain", "table"]


_RAMP_STEPS = "steps of the ramp"
_RAMP_SAMPLES = "samples of the ramp"
_BEHIND = "batches behind each data rank"
_SAMPLES = "samples of the run"
_TOKENS = "tokens of the run"
_JSON = {
    _RAMP_STEPS: "ramp_steps",
    _RAMP_SAMPLES: "ramp_samples",
    _BEHIND: "resumed_batches",
    _SAMPLES: "total_samples",
    _TOKENS: "total_tokens",
}


class Wishes(NamedTuple):
    """What else was asked for.

    Attributes:
        rates: A learning rate, and the global batch size for which it was tuned.
        ramp: The first global batch, by how much it grows, and over how many samples.
        seen: Samples that the run has already seen.
    """

    rates: tuple[float, int] | None
    ramp: tuple[int, int, int] | None
    seen: int | None


def rows(plan: RunPlan, wishes: Wishes) -> dict[str, object]:
    """Returns the numbers of a plan that are known, under the names that a person reads.

    Raises:
        ValueError: If the ramp or the position to resume at does not fit the plan.
    """
    job, batches = plan.job, plan.batches
    dims = [f"{name} {size}" for name, size in zip(plan.ranks.names, plan.ranks.sizes, strict=True) if size > 1]
    in_tokens = job.tokens_per_micro_batch is not None
    found: dict[str, object] = {
        "mesh": " × ".join(dims) or "one rank",
        "data ranks": plan.ranks.dp_degree,
        "samples per data rank and batch": plan.batch_size,
        "tokens per data rank and micro-batch": job.tokens_per_micro_batch,
        "tokens per sample": None if in_tokens else job.sequence_length,
        "pipeline micro-batches": _pipeline(plan),
        "batches per step": plan.gradient_accumulation_steps,
        "samples per step": None if in_tokens else batches.global_batch_size,
        "tokens per step": batches.tokens_per_step,
        "batches per epoch and data rank": batches.batches_per_epoch,
        "batches that data ranks have": _range(batches.uneven_batches),
        "steps per epoch": batches.steps_per_epoch,
        "samples per epoch and data rank": _range(batches.samples_per_rank),
        "samples per epoch": batches.samples_per_epoch,
        "different samples among them": batches.samples_unique,
        "read twice": batches.samples_repeated or None,
        "dropped": batches.samples_dropped or None,
        "steps": batches.total_steps,
        _SAMPLES: None if in_tokens else batches.total_samples,
        _TOKENS: batches.total_tokens,
        **_learning_rates(plan, wishes),
        **_changes(plan, wishes),
    }
    return {name: value for name, value in found.items() if value is not None}


def table(plans: Sequence[RunPlan], wishes: Wishes) -> None:
    """Prints plans side by side."""
    from rich.console import Console
    from rich.table import Table

    shown = [rows(plan, wishes) for plan in plans]
    grid = Table("ranks", *[f"{plan.ranks.world_size:,}" for plan in plans], box=None, pad_edge=False)
    for column in grid.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for one in shown for name in one):
        grid.add_row(name, *[_text(one.get(name)) for one in shown])
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as drawn:
        console.print(grid)
    print(drawn.get(), end="")


def as_json(plan: RunPlan, wishes: Wishes, issues: Sequence[ConfigIssue]) -> dict[str, Any]:
    """Returns a plan as JSON types, null where a number is not known."""
    job, batches = plan.job, plan.batches
    in_tokens = job.tokens_per_micro_batch is not None
    found: dict[str, Any] = {
        "framework": job.framework or None,
        "world_size": plan.ranks.world_size,
        "dims": dict(zip(plan.ranks.names, plan.ranks.sizes, strict=True)),
        "data_dims": list(plan.ranks.data_dims),
        "dp_degree": plan.ranks.dp_degree,
        "batch_size": plan.batch_size,
        "tokens_per_micro_batch": job.tokens_per_micro_batch,
        "sequence_length": job.sequence_length,
        "pipeline_microbatches": job.pipeline_microbatches,
        "pipeline_microbatches_inside_batch": job.microbatches_inside,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch_size": None if in_tokens else batches.global_batch_size,
        "tokens_per_step": batches.tokens_per_step,
        "batches_per_epoch": batches.batches_per_epoch,
        "steps_per_epoch": batches.steps_per_epoch,
        "uneven_batches": batches.uneven_batches,
        "samples_per_rank": batches.samples_per_rank,
        "samples_per_epoch": batches.samples_per_epoch,
        "samples_unique": batches.samples_unique,
        "samples_repeated": batches.samples_repeated,
        "samples_dropped": batches.samples_dropped,
        "tokens_per_epoch": batches.tokens_per_epoch,
        "total_steps": batches.total_steps,
        "total_samples": None if in_tokens else batches.total_samples,
        "total_tokens": batches.total_tokens,
        "identity": plan.identity,
        "findings": [{"level": one.level, "code": one.code, "text": one.text} for one in issues],
    }
    scaled = _learning_rates(plan, wishes)
    if scaled:
        found["learning_rate_linear"], found["learning_rate_square_root"] = scaled.values()
    changes = _changes(plan, wishes)
    found |= {_JSON[name]: value for name, value in changes.items()}
    return found


def explain(plan: RunPlan) -> None:
    """Prints where each number comes from."""
    job = plan.job
    print("\nwhere each number comes from:")
    sizes = dict(zip(plan.ranks.names, plan.ranks.sizes, strict=True))
    for name, origin in job.origins.items():
        value = sizes.get(name, getattr(job, name, None))
        if value is None and job.schedule is not None:
            value = getattr(job.schedule, name, None)
        if origin.given:
            how = "a flag" if origin.key.startswith("--") else "written in the configuration"
        else:
            how = f"not written: the default of {job.framework}"
            how = "what the other dims leave over" if name in sizes and _inferred(plan, name) else how
        print(f"  {name} = {'unset' if value is None else _text(value)}  ({origin.key}: {how})")
    print(f"  data ranks = {_product(plan)} = {plan.ranks.dp_degree}")
    print(f"  {plan.identity}")


def _inferred(plan: RunPlan, name: str) -> bool:
    job = plan.job
    written = dict(zip(job.names, job.sizes, strict=True))[name]
    return written == -1 or (name == job.refilled_dim and not job.fits(plan.ranks.world_size))


def _product(plan: RunPlan) -> str:
    sizes = zip(plan.ranks.names, plan.ranks.sizes, strict=True)
    return " × ".join(f"{name} {size}" for name, size in sizes if name in plan.ranks.data_dims)


def _pipeline(plan: RunPlan) -> str | None:
    count = plan.job.pipeline_microbatches
    if count == 1:
        return None
    return f"{count} {'inside a batch' if plan.job.microbatches_inside else 'make a batch'}"


def _range(fewest_and_most: tuple[int, int] | None) -> str | int | None:
    if fewest_and_most is None:
        return None
    fewest, most = fewest_and_most
    return fewest if fewest == most else f"{fewest:,} to {most:,}"


def _learning_rates(plan: RunPlan, wishes: Wishes) -> dict[str, object]:
    if wishes.rates is None or plan.batches.global_batch_size is None or plan.job.tokens_per_micro_batch is not None:
        return {}
    rate, tuned = wishes.rates
    linear = plan.batches.scaled_learning_rate(rate, tuned_batch_size=tuned, rule="linear")
    root = plan.batches.scaled_learning_rate(rate, tuned_batch_size=tuned, rule="square root")
    return {"learning rate, linear (SGD)": linear, "learning rate, square root (Adam)": root}


def _changes(plan: RunPlan, wishes: Wishes) -> dict[str, object]:
    """The steps of a ramp, and where each data rank goes on, in whole batches or not at all."""
    found: dict[str, object] = {}
    batches = plan.batches
    if wishes.ramp is not None:
        start, increment, samples = wishes.ramp
        pieces = batches.ramp_up(start=start, increment=increment, samples=samples)
        below = [(size, steps) for size, steps in pieces if size != batches.global_batch_size]
        found[_RAMP_STEPS] = sum(steps for _, steps in below)
        found[_RAMP_SAMPLES] = sum(size * steps for size, steps in below)
        if batches.total_steps is not None:
            whole_run = sum(size * steps for size, steps in pieces)
            found[_SAMPLES] = whole_run
            found[_TOKENS] = None if plan.job.sequence_length is None else whole_run * plan.job.sequence_length
    if wishes.seen is not None:
        found[_BEHIND] = batches.resumed_batches(wishes.seen)
    return found


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
