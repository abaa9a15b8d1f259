"""How plans are printed: a table with one column per world size, JSON, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from countoff._terminal import ENDLESS
from countoff.core.arithmetic.ranks import INFERRED
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import RunPlan
from countoff.plan.ramp import ramped_steps

__all__ = ["as_json", "issues_as_json", "print_origins", "print_table"]

_RAMP_STEPS = "steps of the ramp"
_RAMP_SAMPLES = "samples of the ramp"
_RESUMED = "batches done per data rank"
_SAMPLES = "samples of the run"
_TOKENS = "tokens of the run"
_Column = tuple[str, Mapping[str, object]]
"""The header of a column, and its numbers by the name of their row."""
# The names of rows in JSON.
_JSON = {
    _RAMP_STEPS: "ramp_steps",
    _RAMP_SAMPLES: "ramp_samples",
    _RESUMED: "resumed_batches",
    _SAMPLES: "total_samples",
    _TOKENS: "total_tokens",
}


def _rows(plan: RunPlan, resume_samples: int | None) -> dict[str, object]:
    """Returns the numbers of a plan that are known, by the name of their row in the table.

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
        **_batch_changes(plan, resume_samples),
    }
    return {name: value for name, value in found.items() if value is not None}


def print_table(plans: Sequence[RunPlan], resume_samples: int | None, console: Console) -> None:
    """Prints plans side by side, one column per world size; below one another those for which it is too narrow.

    Args:
        plans: The plans.
        resume_samples: Samples that the run has already seen, over all data ranks; None: it does not resume.
        console: Where.
    """
    grids: list[Table] = []
    columns: list[_Column] = []
    for plan in plans:
        column = f"{plan.ranks.world_size:,}", _rows(plan, resume_samples)
        wider = _grid([*columns, column])
        if columns and console.measure(wider).maximum < console.measure(wider, options=_endless(console)).maximum:
            grids.append(_grid(columns))
            columns = []
        columns.append(column)
    for place, grid in enumerate([*grids, _grid(columns)]):
        if place:
            console.print()
        console.print(grid)


def _endless(console: Console) -> ConsoleOptions:
    return console.options.update(max_width=ENDLESS)


def _grid(columns: Sequence[_Column]) -> Table:
    """Returns a table of these columns, without the rows that none of them has."""
    grid = Table("ranks", *[name for name, _ in columns], box=None, pad_edge=False, header_style="bold")
    for column in grid.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for name in dict.fromkeys(name for _, rows in columns for name in rows):
        grid.add_row(name, *[_text(rows.get(name)) for _, rows in columns])
    return grid


def as_json(plan: RunPlan, resume_samples: int | None = None) -> dict[str, Any]:
    """Returns a plan as JSON types; None where a number is not known. For `resume_samples`, see `print_table`."""
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
    }
    found |= {_JSON[name]: value for name, value in _batch_changes(plan, resume_samples).items()}
    return found


def issues_as_json(issues: Sequence[ConfigIssue]) -> dict[str, Any]:
    """Returns issues as JSON types, under their key."""
    return {"issues": [{"level": issue.level, "code": issue.code, "text": issue.text} for issue in issues]}


def print_origins(plan: RunPlan, console: Console) -> None:
    """Prints where each number comes from."""
    job = plan.job
    console.print(Text("\nwhere each number comes from:", style="bold"))
    sizes = dict(zip(plan.ranks.names, plan.ranks.sizes, strict=True))
    steps, of_schedule = plan.batches.total_steps, dict[str, object]()
    if job.schedule is not None and steps:
        ending, lowest = job.schedule.in_run(steps), job.schedule.lowest
        of_schedule = {"warmup_steps": ending.warmup, "horizon_steps": ending.at, "min_factor": lowest}
    for name, origin in job.origins.items():
        value = sizes.get(name, getattr(job, name, None))
        value = of_schedule.get(name) if value is None else value
        if origin.given:
            source = "a flag" if origin.key.startswith("--") else "written in the configuration"
        elif name in sizes and _is_inferred(plan, name):
            source = "what the other dims leave over"
        else:
            source = f"not written: the default of {job.framework}"
        shown = "unset" if value is None else _text(value)
        console.print(Text.assemble(f"  {name} = {shown}  ", (f"({origin.key}: {source})", "dim")))
    console.print(Text(f"  data ranks = {_product_of_data_dims(plan)} = {plan.ranks.dp_degree}"))
    console.print(Text(f"  {plan.identity}"))


def _is_inferred(plan: RunPlan, name: str) -> bool:
    job = plan.job
    configured = dict(zip(job.names, job.sizes, strict=True))[name]
    return configured == INFERRED or (name == job.refilled_dim and not job.fits(plan.ranks.world_size))


def _product_of_data_dims(plan: RunPlan) -> str:
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


def _batch_changes(plan: RunPlan, resume_samples: int | None) -> dict[str, object]:
    """Returns the steps of a ramp, and the whole batches after which each data rank resumes.

    Raises:
        ValueError: If the ramp or the position to resume at does not fit the plan.
    """
    found: dict[str, object] = {}
    batches = plan.batches
    if plan.job.ramp is not None:
        start, increment, samples = plan.job.ramp
        pieces = ramped_steps(batches, start=start, increment=increment, samples=samples)
        below = [(size, steps) for size, steps in pieces if size != batches.global_batch_size]
        found[_RAMP_STEPS] = sum(steps for _, steps in below)
        found[_RAMP_SAMPLES] = sum(size * steps for size, steps in below)
        if batches.total_steps is not None:
            whole_run = sum(size * steps for size, steps in pieces)
            found[_SAMPLES] = whole_run
            found[_TOKENS] = None if plan.job.sequence_length is None else whole_run * plan.job.sequence_length
    if resume_samples is not None:
        found[_RESUMED] = batches.resumed_batches(resume_samples)
    return found


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
