"""Lingua's YAML files. A field that is not written has the default of lingua's dataclasses; none is the world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from countoff.core.ranks import ORDERS, RankMap
from countoff.plan.fields import Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_SCHEDULERS = ("constant", "linear", "inv_sqrt", "cosine", "wsd")
_SECTIONS = (
    *("data", "optim", "model", "distributed", "env", "checkpoint", "profiling", "logging", "eval", "generator"),
    *("harness", "validation", "stool", "launcher"),
)
_KNOWN = {
    "": (
        *("name", "dump_dir", "seed", "grad_acc_steps", "gc_collect_freq", "probe_freq", "steps", "async_eval_gpus"),
        *("ckpt_dir", "metric_log_dir", "global_step", "config", "include"),
    ),
    "data": (
        *("root_dir", "sources", "batch_size", "seq_len", "n_views", "seed", "add_bos", "add_eos", "load_async"),
        *("prefetch_size", "tokenizer", "path"),
    ),
    "optim": (
        *("lr", "weight_decay", "epsilon", "beta1", "beta2", "clip", "scheduler", "warmup", "lr_min_ratio"),
        *("cycle_length", "cosine_theta", "annealing_step", "decay_fraction", "exp_factor"),
    ),
    "distributed": (
        *("dp_shard", "dp_replicate", "tp_size", "selective_activation_checkpointing", "compile", "fsdp_type"),
        *("model_dtype", "float8_recipe", "float8_filter", "matmul_allow_tf32", "detect_anomaly"),
        *("allow_bf16_reduced_precision_reduction", "compile_cache_size_limit", "spawn_method"),
    ),
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a lingua YAML describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    note_unknown_fields(
        fields,
        _KNOWN,
        sections=_SECTIONS,
        data=data,
        consequence="lingua stops on a field that it does not know.",
        level="stops",
    )
    steps = fields.parse_count("steps", "steps", 1000) or 1
    shard = fields.parse_count("dp_shard", "distributed.dp_shard", 1)
    if fields.choice("distributed.fsdp_type", ("no_shard", "full_shard"), "no_shard") == "no_shard" and shard != 1:
        fields.note("mesh", f"distributed.fsdp_type no_shard needs dp_shard 1, not {shard}: lingua stops", "stops")
    sizes = (
        fields.parse_count("dp_replicate", "distributed.dp_replicate", 1) or 1,
        shard or 1,
        fields.parse_count("tp", "distributed.tp_size", 1) or 1,
    )
    return Job(
        framework="lingua",
        names=ORDERS["lingua"].names,
        sizes=sizes,
        data_dims=ORDERS["lingua"].data_dims,
        batch_size=fields.parse_count("batch_size", "data.batch_size", 2),
        sequence_length=fields.parse_count("sequence_length", "data.seq_len", 2048),
        gradient_accumulation_steps=fields.parse_count("gradient_accumulation_steps", "grad_acc_steps", 1),
        steps=steps,
        refilled_dim="dp_replicate",
        learning_rate=fields.number("learning_rate", "optim.lr", 3e-4),
        schedule=_schedule(fields),
        chunks=_chunks(fields),
        own_checks=(_check_dp_ranks, _check_chunks, partial(_note_first_step, _after_the_last_step(fields))),
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _schedule(fields: Fields) -> ConfiguredSchedule:
    """Returns the schedule, which is as long as the run: lingua has no other horizon."""
    curve = fields.choice("optim.scheduler", _SCHEDULERS, "cosine")
    warmup = fields.parse_count("warmup_steps", "optim.warmup", 2000, minimum=0) or 0
    return ConfiguredSchedule(
        0 if curve == "constant" else warmup,
        lowest=fields.number("min_factor", "optim.lr_min_ratio", 0.1) or 0.0,
        divides_by_zero=curve in ("linear", "cosine"),
    )


def _after_the_last_step(fields: Fields) -> str:
    if fields.choice("optim.scheduler", _SCHEDULERS, "cosine") != "cosine":
        return ""
    return "; after its last step the cosine is back at 1.0, which a run that is extended starts with"


def _note_first_step(after: str, job: Job, _: RankMap) -> Iterator[ConfigIssue]:
    """Yields the note that the first step changes no weight.

    Args:
        after: What else the note says.
        job: The run.
    """
    if job.schedule is not None and job.schedule.warmup:
        yield ConfigIssue("note", "first-step", f"the first step of lingua has a learning rate of 0{after}")


def _chunks(fields: Fields) -> dict[str, int]:
    """Returns the number of chunks of every source whose directory is on this machine, by source."""
    root = fields.text("data.root_dir")
    if root is None:
        return {}
    sources = [Path(root) / str(name) for name in fields.section("data.sources")]
    return {path.name: sum(1 for _ in path.glob("*.chunk.*.jsonl")) for path in sources if path.is_dir()}


def _check_dp_ranks(_: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields the issue of lingua's ``replicate * dp_replicate + shard``, where the factor must be dp_shard."""
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    # A mesh without shards has no dim for them, and lingua then multiplies by nothing.
    factor = sizes["dp_replicate"] if sizes["dp_shard"] > 1 else 1
    computed: list[int] = []
    for rank in range(ranks.world_size):
        position = ranks.coordinates(rank)
        computed.append(position["dp_replicate"] * factor + position["dp_shard"])
    verdict = ranks.check_dp_ranks(computed)
    if verdict is None:
        return
    text = (
        f"lingua's train.py multiplies by dp_replicate where dp_shard is right: {verdict.sentence[:-1]}; make it "
        f'dp_rank * world_mesh["dp_shard"].size() + world_mesh["dp_shard"].get_local_rank(), or use --ignore dp-rank '
        f"if your train.py has that already"
    )
    crashes = any(value >= ranks.dp_degree for value in computed)
    yield ConfigIssue("stops" if crashes else "silent", "dp-rank", text)


def _check_chunks(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    degree = ranks.dp_degree
    for source, chunks in job.chunks.items():
        if not chunks:
            yield ConfigIssue("stops", "chunks", f"{source} has no *.chunk.*.jsonl: lingua divides by zero")
        elif chunks > degree:
            unread = chunks - degree
            text = (
                f"{source} has {chunks} chunks for {degree} data ranks: lingua reads the first {degree}, and {unread} "
                f"({100 * unread / chunks:.3g} % of the files) are never read; make it {degree} chunks"
            )
            yield ConfigIssue("silent", "chunks", text)
        elif degree % chunks:
            text = f"{source} has {chunks} chunks, which must divide {degree} data ranks: lingua stops on an assertion"
            yield ConfigIssue("stops", "chunks", text)


FORMAT = Format(
    "lingua",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("grad_acc_steps", "dump_dir", "distributed.dp_shard", "distributed.dp_replicate", "distributed.fsdp_type"),
        *("distributed.tp_size", "optim.lr_min_ratio", "optim.warmup", "data.n_views", "data.sources"),
    ),
)
