"""Lingua's YAML files. A field that is not written has the default of lingua's dataclasses; none is the world size.

The comments name the lines of lingua at 437d680e.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from countoff.core.arithmetic.ranks import RankMap
from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_MESH = {
    "dp_replicate": Count("distributed.dp_replicate", 1),  # lingua/distributed.py:61
    "dp_shard": Count("distributed.dp_shard", 1),  # lingua/distributed.py:58
    "tp": Count("distributed.tp_size", 1),  # lingua/distributed.py:64
}
_COUNTS = {
    "batch_size": Count("data.batch_size", 2),  # lingua/data.py:714
    "sequence_length": Count("data.seq_len", 2048),  # lingua/data.py:715
    "gradient_accumulation_steps": Count("grad_acc_steps", 1),  # apps/main/train.py:84
    "steps": Count("steps", 1000),  # apps/main/train.py:90
}
_SCHEDULERS = ("constant", "linear", "inv_sqrt", "cosine", "wsd")


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a lingua YAML describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    return fields.job(
        "lingua",
        "lingua",
        fields.counts(_MESH),
        **fields.counts(_COUNTS),
        refilled_dim="dp_replicate",  # apps/main/train.py:154
        schedule=_schedule(fields),
        chunks=_chunks(fields),
        own_checks=(_check_dp_ranks, _check_chunks),
    )


def _schedule(fields: Fields) -> ConfiguredSchedule:
    """Returns the schedule, which is as long as the run: lingua has no other horizon."""
    curve = fields.choice("optim.scheduler", _SCHEDULERS, "cosine")
    warmup = fields.count("warmup_steps", Count("optim.warmup", 2000, minimum=0)) or 0  # lingua/optim.py:24
    return ConfiguredSchedule(
        0 if curve == "constant" else warmup,
        lowest=fields.number("min_factor", "optim.lr_min_ratio", 0.1) or 0.0,  # lingua/optim.py:25
        divides_by_zero=curve in ("linear", "cosine"),
    )


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
    faults = ranks.faults(computed)
    if faults.sound:
        return
    text = (
        f"lingua's train.py before January 2025 multiplies by dp_replicate where dp_shard is right: {str(faults)[:-1]}"
    )
    remedy = (
        'make it dp_rank * world_mesh["dp_shard"].size() + world_mesh["dp_shard"].get_local_rank(), or use --ignore '
        "dp-rank if your train.py has that already"
    )
    crashes = any(value >= ranks.dp_degree for value in computed)
    yield ConfigIssue("stops" if crashes else "silent", "dp-rank", text, remedy)


def _check_chunks(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields the issue of files above the number of data ranks, which lingua leaves out (lingua/data.py:473)."""
    degree = ranks.dp_degree
    for source, chunks in job.chunks.items():
        if chunks > degree:
            unread = chunks - degree
            text = (
                f"{source} has {chunks} chunks for {degree} data ranks: lingua reads the first {degree}, and {unread} "
                f"({100 * unread / chunks:.3g} % of the files) are never read"
            )
            yield ConfigIssue("silent", "chunks", text, f"make it {degree} chunks")


FORMAT = Format(
    "lingua",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("grad_acc_steps", "dump_dir", "distributed.dp_shard", "distributed.dp_replicate", "distributed.fsdp_type"),
        *("distributed.tp_size", "optim.lr_min_ratio", "optim.warmup", "data.n_views", "data.sources"),
    ),
)
