"""Configurations of Megatron-LM, NeMo and verl with the numbers of real ones, and what is wrong with wrong twins of them."""

import math
from pathlib import Path

import pytest

from countoff.core.cli import __main__ as cli
from countoff.core.configs import FORMATS, ConfigError, read_job
from countoff.core.configs.checks import check_job
from countoff.core.configs.job import RunPlan

CONFIGS = Path(__file__).parent / "golden" / "configs"
# The ranks and data ranks, the samples per step and micro-batch, the steps, and the factor of the last step.
NUMBERS: dict[str, tuple[int, int, int, int | None, int | None, float | None]] = {
    "megatron/mixtral_8x7b.sh": (64, 16, 256, 1, 500_000, 0.1),
    "megatron/llama3_8b.sh": (8, 8, 128, 1, 15_258_789, 1 / 15),
    "megatron/mamba_800m.sh": (8, 8, 32, 4, 2_288_818, 0.1),
    "megatron/gpt3_175b.sh": (1024, 8, 1536, 1, 515_987, 0.1),
    "nemo/megatron_gpt.yaml": (1, 1, 8, 4, 100_000, 0.1),
    "nemo/megatron_gpt_finetuning.yaml": (1, 1, 128, 4, 20_000, 0.0),
    "nemo/citrinet_512.yaml": (1, 1, 32, 32, None, None),
    "verl/grpo_qwen2_7b.sh": (8, 8, 5120, 40, None, None),
    "verl/dapo_qwen2_5_7b.sh": (64, 16, 8192, None, 200, 1.0),
    "verl/sft_gemma_7b.yaml": (8, 8, 256, 4, None, None),
}
# The only fault of each wrong twin.
FAULTS = {
    "megatron/mixtral_8x7b.sh": ("silent", "horizon", "the last 180,000 of 500,000 steps have a learning rate of 0 and"),
    "megatron/llama3_8b.sh": ("stops", "warm-up", "--lr-warmup-iters with --train-samples: Megatron-LM stops"),
    "megatron/mamba_800m.sh": ("stops", "batch", "--global-batch-size 48 is no multiple of --micro-batch-size 4 × 8 data"),
    "megatron/gpt3_175b.sh": ("stops", "batch", "--rampup-batch-size with --train-iters: Megatron-LM before April 2026"),
    "nemo/megatron_gpt.yaml": ("stops", "batch", "trainer.accumulate_grad_batches is 2, and must be 1 for a Megatron"),
    "nemo/megatron_gpt_finetuning.yaml": ("silent", "warm-up", "constant_steps is 50,000, and trainer.max_steps is 20,000"),
    "nemo/citrinet_512.yaml": ("silent", "horizon", "model.optim.sched.max_steps is -1: NeMo makes no schedule"),
    "verl/grpo_qwen2_7b.sh": ("stops", "micro-batches", "data ranks 160 samples, which is no multiple of actor_rollout_"),
    "verl/dapo_qwen2_5_7b.sh": ("silent", "warm-up", "lr_warmup_steps is 320 and trainer.total_training_steps is 200: the"),
    "verl/sft_gemma_7b.yaml": ("stops", "micro-batches", "data ranks 18 samples, which is no multiple of data.micro_batch"),
}


def test_every_golden_configuration_has_its_numbers_and_its_fault() -> None:
    found = {f"{path.parent.name}/{path.name}" for kind in ("megatron", "nemo", "verl") for path in (CONFIGS / kind).iterdir()}
    assert {name for name in found if ".wrong." not in name} == set(NUMBERS) == set(FAULTS)
    assert {name.replace(".wrong.", ".") for name in found if ".wrong." in name} == set(FAULTS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_real_configuration_is_read_and_has_no_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world_size, dp_degree, samples, micro_batch, steps, last = NUMBERS[name]
    job = read_job(str(CONFIGS / name))
    plan = RunPlan.of(job, world_size=world_size)
    assert job.framework == name.partition("/")[0]
    assert job.world_size == world_size
    assert plan.ranks.dp_degree == dp_degree
    assert plan.batches.global_batch_size == samples
    assert micro_batch in (job.batch_size, job.micro_batch_size)
    assert job.steps == steps
    if last is not None:
        assert job.schedule is not None
        assert math.isclose(job.schedule.planned_for(steps or 1).factor((steps or 1) - 1), last, abs_tol=1e-4)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", str(CONFIGS / name)])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "no fault found" in output
    assert len(output.splitlines()) <= 3


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_twin_has_its_fault_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    level, code, text = FAULTS[name]
    stem, _, ending = name.rpartition(".")
    path = str(CONFIGS / f"{stem}.wrong.{ending}")
    job = read_job(path)
    faults = [issue for issue in check_job(job, world_size=job.world_size or 1) if issue.is_fault]
    assert [(issue.level, issue.code) for issue in faults] == [(level, code)]
    assert text in faults[0].text
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", path])
    assert ended.value.code == 1
    assert faults[0].line in capsys.readouterr().out
