"""Any configuration is either read or refused in one line."""

import contextlib
import dataclasses
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.plan.checks import check_job
from countoff.plan.job import Job, JobError, RunPlan
from countoff.plan.readers import (
    accelerate,
    composer,
    deepspeed,
    lingua,
    llamafactory,
    megatron,
    torchtitan_toml,
    transformers,
)

FIELDS: dict[ModuleType, str] = {
    lingua: """steps grad_acc_steps optim.lr optim.warmup optim.scheduler optim.lr_min_ratio optim.cycle_length
        optim.decay_fraction distributed.dp_replicate distributed.dp_shard distributed.tp_size distributed.fsdp_type
        data.batch_size data.seq_len data.sources data.root_dir""",
    composer: """max_duration global_train_batch_size device_train_microbatch_size scheduler.name scheduler.t_warmup
        scheduler.t_max scheduler.alpha_f optimizer.lr max_seq_len train_loader.drop_last tp_config
        fsdp_config.data_parallel_shard_degree tp_config.tensor_parallel_degree""",
    torchtitan_toml: """training.batch_size training.local_batch_size training.global_batch_size training.seq_len
        training.steps training.data_parallel_degree lr_scheduler.warmup_steps lr_scheduler.total_steps
        lr_scheduler.decay_ratio lr_scheduler.decay_type parallelism.tensor_parallel_degree
        parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_microbatch_size
        experimental.pipeline_parallel_microbatches""",
    deepspeed: """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps scheduler.type
        scheduler.params.warmup_num_steps scheduler.params.total_num_steps optimizer.params.lr
        tensor_parallel.autotp_size""",
    accelerate: """num_processes num_machines gradient_accumulation_steps deepspeed_config.gradient_accumulation_steps
        parallelism_config.parallelism_config_tp_size parallelism_config.parallelism_config_dp_shard_size""",
    transformers: """per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps warmup_ratio
        warmup_steps learning_rate lr_scheduler_type lr_scheduler_kwargs lr_scheduler_kwargs.num_cycles
        lr_scheduler_kwargs.num_decay_steps lr_scheduler_kwargs.num_stable_steps lr_scheduler_kwargs.min_lr
        lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.power lr_scheduler_kwargs.timescale
        accelerator_config accelerator_config.split_batches dataloader_drop_last deepspeed deepspeed.train_batch_size
        deepspeed.scheduler deepspeed.scheduler.type packing max_length""",
    llamafactory: """stage finetuning_type cutoff_len packing neat_packing streaming per_device_train_batch_size
        max_steps num_train_epochs warmup_ratio lr_scheduler_type lr_scheduler_kwargs.num_decay_steps deepspeed
        deepspeed.scheduler.type tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size""",
    megatron: """--micro-batch-size --global-batch-size --rampup-batch-size --step-batch-size-schedule --train-iters
        --train-samples --lr --min-lr --lr-decay-style --lr-decay-iters --lr-decay-samples --lr-warmup-iters
        --lr-warmup-samples --lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-iters --lr-wsd-decay-samples
        --lr-wsd-decay-style --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --seq-length""",
}
numbers = st.sampled_from([1, 2, 3, 4, 8, 64, 100])
MESSAGES = [
    "auto",
    "3e-4",
    "x",
    "${a}",
    "${steps}",
    "1ep",
    "100ba",
    "0.5dur",
    "1000tok",
    "cosine",
    "wsd",
    "constant",
    "linear",
    "inv_sqrt",
    "sqrt",
    "cosine_with_warmup",
    "WarmupDecayLR",
    "WSD",
    "0:16 1K:32",
    "???",
    "full_shard",
    "no_shard",
    "warmup_stable_decay",
    "inverse_sqrt",
    "polynomial",
    "cosine_with_min_lr",
    "pt",
    "{}",
    '{"num_cycles": 2}',
]
odd = (
    st.sampled_from([0, -1, 0.5, 1.5, 10**12, 10**400, float("inf"), float("nan"), True, None, "", *MESSAGES])
    | st.builds(list[int])
    | st.lists(st.sampled_from([0, 1, 8, 10**15, "8", None, 1.5]), min_size=3, max_size=3)
    | st.builds(dict[str, int])
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The fields in their sections; a field in the place of a section stays there."""
    data: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place: Any = data
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[name] = value
    return data


@pytest.mark.parametrize("reader", FIELDS, ids=lambda reader: reader.__name__.rpartition(".")[2])
@settings(max_examples=200)
@given(st.data())
def test_odd_values_are_read_or_refused_in_one_line(reader: ModuleType, data: st.DataObject) -> None:
    names = st.sampled_from(FIELDS[reader].split())
    config = nested(data.draw(st.dictionaries(names, numbers | odd, min_size=1)))
    job: Job | None = None
    error = ""
    try:
        job = reader.read(config)
    except ValueError as refused:
        error = str(refused)
    assert "\n" not in error
    if job is None:
        return
    for world_size in (1, 6, 8):
        for dataset_size in (None, 1000):
            sized = dataclasses.replace(job, dataset_size=dataset_size)
            assert all("\n" not in issue.line for issue in check_job(sized, world_size=world_size))
        with contextlib.suppress(JobError):
            assert RunPlan.of(job, world_size=world_size).identity
