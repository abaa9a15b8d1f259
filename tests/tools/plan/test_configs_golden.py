"""Every row of the golden tables made with TorchTitan and lingua, through their readers, including learning rates."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from countoff.core.arithmetic.ranks import RankMap, dp_rank_faults
from countoff.plan.checks import check_job
from countoff.plan.job import Job, JobError, RunPlan
from countoff.plan.readers import read_command, read_job, torchtitan_python
from tests.golden_tables import Row, golden


def like(row: Row, rows: list[Row]) -> Row:
    """A row of the same configuration that ran, for the columns that are empty in a refused one."""
    for other in rows:
        if other["config"] == row["config"] and other["source"] == row["source"] and not other["error"]:
            return other
    raise AssertionError(f"no row of {row['config']} ran")


def titan_config(row: Row) -> Any:
    """A TorchTitan config as in its registry, from the columns of the table."""
    replicate, shard = int(row["dp_replicate"]), int(row["dp_shard"])
    main = row["source"] == "torchtitan-main"
    micro = int(row["pp_microbatches"])
    sizes = {"seq_len": int(row["seq_len"]), "local_batch_size": int(row["local_batch"] or 0), "global_batch_size": -1}
    tokens = {
        "num_tokens_per_microbatch_per_dp_rank": int(row["tokens_per_microbatch_per_dp_rank"]),
        "num_tokens_per_train_step": int(row["tokens_per_step"]) if row["config"] == "accum" else -1,
        "max_context_length": int(row["seq_len"]),
    }
    return SimpleNamespace(
        training=SimpleNamespace(steps=int(row["steps"]), **(tokens if main else sizes)),
        parallelism=SimpleNamespace(
            data_parallel_replicate_degree=replicate,
            data_parallel_shard_degree=shard if replicate > 1 else -1,
            context_parallel_degree=int(row["cp"]),
            tensor_parallel_degree=int(row["tp"]),
            pipeline_parallel_degree=int(row["pp"]),
            **({"num_pp_microbatches": micro} if main else {"pipeline_parallel_microbatch_size": 1}),
        ),
        lr_scheduler=SimpleNamespace(
            warmup_steps=int(row["warmup"]),
            total_steps=None,
            decay_ratio=int(row["decay"]) / int(row["steps"]),
            decay_type="cosine" if row["config"].startswith("deepseek") else "linear",
            min_lr_factor=0.1 if row["config"].startswith("deepseek") else 0.0,
        ),
    )


def warmup_and_horizon(job: Job) -> tuple[int, int]:
    assert job.schedule is not None
    assert job.steps is not None
    ending = job.schedule.in_run(job.steps)
    return ending.warmup, ending.at


def assert_mesh(row: Row, ranks: RankMap, names: tuple[str, ...]) -> None:
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    assert {name: sizes[name] for name in names} == {name: int(row[name]) for name in names}, row
    assert ranks.dp_degree == int(row["dp_degree"]), row


@pytest.mark.parametrize(("table", "rows", "refused"), [("torchtitan_030", 29, 2), ("torchtitan_main", 38, 1)])
def test_every_row_of_torchtitan_python_is_reproduced(table: str, rows: int, refused: int) -> None:
    read = golden(table, rows=rows)
    for row in read:
        job = torchtitan_python.read(titan_config(row if not row["error"] else like(row, read)))
        if row["error"]:
            if "expert_parallel_degree" in row["error"]:
                continue  # experts change no count, and TorchTitan refuses them itself
            refused -= 1
            with pytest.raises(JobError):
                RunPlan.of(job, world_size=int(row["world"]))
            continue
        plan = RunPlan.of(job, world_size=int(row["world"]))
        assert_mesh(row, plan.ranks, ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
        assert plan.ranks.dp_rank(plan.ranks.world_size - 1) == int(row["dp_rank_of_last_global_rank"]), row
        assert plan.gradient_accumulation_steps == int(row["grad_accum"]), row
        assert plan.batches.tokens_per_step == int(row["tokens_per_step"]), row
        assert plan.batches.total_tokens == int(row["total_tokens"]), row
        if row["global_batch"]:
            assert plan.batches.global_batch_size == int(row["global_batch"]), row
            tokens = (plan.batch_size or 0) * (job.sequence_length or 0)
            assert tokens == int(row["tokens_per_microbatch_per_dp_rank"]), row
        assert warmup_and_horizon(job) == (int(row["warmup"]), int(row["steps"])), row
    assert not refused


def lingua_yaml(row: Row) -> str:
    last = float(row["lr_factor_last"])
    early = int(row["warmup"]) >= int(row["steps"])
    # The table has no lr_min_ratio; a finished cosine ends within one part in a thousand of it.
    ratio = 0.1 if early else float(f"{last:.1g}")
    return f"""
steps: {int(row["steps"]):_}
grad_acc_steps: {row["grad_accum"]}
optim: {{lr: 1.0e-3, warmup: {row["warmup"]}, lr_min_ratio: {ratio!r}, scheduler: {row["scheduler"]}}}
distributed: {{fsdp_type: full_shard, dp_shard: {row["dp_shard"]}, tp_size: {row["tp"]}}}
data: {{batch_size: {row["local_batch"]}, seq_len: {row["seq_len"]}, n_views: 2}}
"""


def titan_toml(row: Row) -> str:
    return f"""
[training]
local_batch_size = {row["local_batch"]}
seq_len = {row["seq_len"]}
steps = {row["steps"]}
[lr_scheduler]
warmup_steps = {row["warmup"]}
[parallelism]
data_parallel_replicate_degree = {row["dp_replicate"]}
data_parallel_shard_degree = -1
tensor_parallel_degree = {row["tp"]}
context_parallel_degree = {row["cp"]}
pipeline_parallel_degree = {row["pp"]}
"""


def rows_of(source: str, *, rows: int) -> Iterator[tuple[Row, Row]]:
    """The rows of one source, each with one of the same configuration that ran."""
    every = [row for row in golden("lingua_and_toml", rows=88) if row["source"].startswith(source)]
    assert len(every) == rows
    for row in every:
        yield row, like(row, every) if row["error"] else row


def assert_batch(row: Row, plan: RunPlan) -> None:
    assert plan.batch_size == int(row["local_batch"]), row
    assert plan.gradient_accumulation_steps == int(row["grad_accum"]), row
    assert plan.batches.global_batch_size == int(row["global_batch"]), row
    assert plan.batches.tokens_per_step == int(row["tokens_per_step"]), row
    assert plan.batches.total_steps == int(row["steps"]), row
    assert plan.batches.total_tokens == int(row["total_tokens"]), row


def read_text(text: str, path: Path) -> Job:
    path.write_text(text)
    return read_job(str(path))


def test_every_row_of_lingua_is_reproduced(tmp_path: Path) -> None:
    for row, _ in rows_of("lingua", rows=43):
        job = read_text(lingua_yaml(row), tmp_path / "lingua.yaml")
        plan = RunPlan.of(job, world_size=int(row["world"]))
        assert_mesh(row, plan.ranks, ("dp_replicate", "dp_shard", "tp"))
        assert_batch(row, plan)
        assert job.fits(int(row["world"])) == (row["dp_replicate_overridden"] == "False"), row
        warmup, horizon = warmup_and_horizon(job)
        assert horizon == job.steps
        assert float(row["lr_factor_first"]) == 0.0  # as the note says
        if warmup < horizon:
            assert float(row["lr_factor_max"]) == 1.0, row
        else:
            (fault,) = [issue.text for issue in check_job(job, world_size=int(row["world"])) if issue.code == "warm-up"]
            assert f"rises, to {float(row['lr_factor_max']):.4g} of the configured one" in fault, row


def test_every_row_of_torchtitan_toml_is_reproduced(tmp_path: Path) -> None:
    refused = 0
    for row, ran in rows_of("torchtitan-0.2.2-toml", rows=45):
        job = read_text(titan_toml(ran), tmp_path / "titan.toml")
        if row["error"]:
            refused += 1
            with pytest.raises(JobError, match="the dims do not fit"):
                RunPlan.of(job, world_size=int(row["world"]))
            continue
        plan = RunPlan.of(job, world_size=int(row["world"]))
        assert_mesh(row, plan.ranks, ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
        assert_batch(row, plan)
    assert refused == 4


def wrong_formula(ranks: RankMap) -> list[int]:
    """Lingua's dp_rank with the number of replicas as the factor, as in its train.py before the fix."""
    replicas, shards = ranks.sizes[0], ranks.sizes[1]
    positions = [ranks.coordinates(rank) for rank in range(ranks.world_size)]
    return [at["dp_replicate"] * (replicas if shards > 1 else 1) + at["dp_shard"] for at in positions]


def right_formula(ranks: RankMap) -> list[int]:
    positions = [ranks.coordinates(rank) for rank in range(ranks.world_size)]
    return [at["dp_replicate"] * ranks.sizes[1] + at["dp_shard"] for at in positions]


def each_formula() -> Iterator[tuple[Row, RankMap]]:
    for row in golden("lingua_rank_formula", rows=393):
        sizes = {"dp_replicate": int(row["dp_replicate"]), "dp_shard": int(row["dp_shard"]), "tp": int(row["tp"])}
        yield row, RankMap.of("lingua", world_size=int(row["world"]), **sizes)


def test_every_row_of_linguas_wrong_formula_is_judged() -> None:
    """Every fault of lingua's wrong dp_rank formula is counted as the golden table has it."""
    kinds: dict[str, int] = {}
    for row, ranks in each_formula():
        computed = wrong_formula(ranks)
        groups = [ranks.dp_rank(rank) for rank in range(ranks.world_size)]
        faults = dp_rank_faults(computed, dp_degree=ranks.dp_degree, groups=groups)
        assert max(computed) == int(row["buggy_max"]), row
        assert len(set(computed)) == int(row["n_distinct"]), row
        assert len(faults.out_of_range) == int(row["n_out_of_range_ranks"]), row
        assert min(faults.out_of_range.values(), default=None) == (
            int(row["min_buggy_rank_for_crash"]) if row["min_buggy_rank_for_crash"] else None
        ), row
        assert len(faults.missing) == int(row["n_gaps"]), row
        assert len(faults.repeated) == int(row["n_dup_values"]), row
        assert ranks.faults(computed).sound == (row["class_"] == "ok"), row
        kinds[row["class_"]] = kinds.get(row["class_"], 0) + 1
    assert len(kinds) == 3


def test_the_right_formula_has_no_fault_in_any_row() -> None:
    for row, ranks in each_formula():
        assert ranks.faults(right_formula(ranks)).sound, row
        assert ranks.faults([ranks.dp_rank(rank) for rank in range(ranks.world_size)]).sound, row


def test_every_row_of_megatrons_scheduler_is_reproduced() -> None:
    """In iterations and in samples, the real factor is 1 where the warm-up ends and at its lowest from the end on."""
    seen = {"warm-up": 0, "end": 0, "refused": 0}
    for row in golden("megatron_schedules", rows=121):
        batch = int(row["batch"])
        for unit, times in (("iters", 1), ("samples", batch)):
            lengths = {
                f"--train-{unit}": int(row["steps"]) * times,
                f"--lr-warmup-{unit}": int(row["warmup_iters"]) * times,
                f"--lr-decay-{unit}": int(row["decay_iters"]) * times,
            }
            flags = {
                **lengths,
                **{
                    "--global-batch-size": batch,
                    "--micro-batch-size": 1,
                    "--lr": 1e-3,
                    "--lr-decay-style": row["style"],
                },
                "--min-lr": float(row["min_factor"]) * 1e-3,
                "--lr-warmup-init": float(row["init_factor"]) * 1e-3,
            }
            if row["style"] == "WSD":
                flags |= {
                    f"--lr-wsd-decay-{unit}": int(row["wsd_decay_iters"]) * times,
                    "--lr-wsd-decay-style": row["wsd_style"],
                }
            job = read_command([" ".join(f"{name} {value}" for name, value in flags.items())])
            if row["error"]:
                seen["refused"] += 1  # Megatron-LM says so by itself
                assert not [issue for issue in check_job(job, world_size=1) if issue.code == "warm-up"], row
                continue
            assert job.schedule is not None
            ending, step, factor = job.schedule.in_run(int(row["steps"])), int(row["step"]), float(row["factor"])
            if step == ending.warmup < ending.at:
                seen["warm-up"] += 1
                assert math.isclose(factor, 1.0, abs_tol=1e-9), (row, unit)
            elif step > ending.at and job.schedule.own_horizon:
                seen["end"] += 1
                assert math.isclose(factor, ending.rate, abs_tol=1e-9), (row, unit)
    assert seen["refused"] == 4
    assert min(seen.values()) > 3, seen
