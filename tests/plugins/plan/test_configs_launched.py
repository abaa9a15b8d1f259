"""Configurations of Megatron-LM, NeMo and verl with the numbers of real ones, and wrong twins of them."""

import dataclasses
import math
from pathlib import Path

import pytest

from countoff.cli import __main__ as cli
from countoff.plan.checks import check_job, check_length
from countoff.plan.job import Job, JobError, RunPlan
from countoff.plan.readers import ConfigError, read_job
from countoff.plan.schedules import MegatronSchedule
from tests.paths import GOLDEN

CONFIGS = GOLDEN / "configs"
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
    "megatron/mixtral_8x7b.sh": (
        "silent",
        "horizon",
        "the last 180,000 of 500,000 steps have a learning rate of 0 and",
    ),
    "megatron/llama3_8b.sh": ("stops", "warm-up", "--lr-warmup-iters with --train-samples: Megatron-LM stops"),
    "megatron/mamba_800m.sh": (
        "stops",
        "batch",
        "--global-batch-size 48 is no multiple of --micro-batch-size 4 × 8 data",
    ),
    "megatron/gpt3_175b.sh": (
        "stops",
        "batch",
        "--rampup-batch-size with --train-iters: Megatron-LM before April 2026",
    ),
    "nemo/megatron_gpt.yaml": ("stops", "batch", "trainer.accumulate_grad_batches is 2, and must be 1 for a Megatron"),
    "nemo/megatron_gpt_finetuning.yaml": (
        "silent",
        "warm-up",
        "constant_steps is 50,000, and trainer.max_steps is 20,000",
    ),
    "nemo/citrinet_512.yaml": ("silent", "horizon", "model.optim.sched.max_steps is -1: NeMo makes no schedule"),
    "verl/grpo_qwen2_7b.sh": (
        "stops",
        "micro-batches",
        "data ranks 160 samples, which is no multiple of actor_rollout_",
    ),
    "verl/dapo_qwen2_5_7b.sh": (
        "silent",
        "warm-up",
        "lr_warmup_steps is 320 and trainer.total_training_steps is 200: the",
    ),
    "verl/sft_gemma_7b.yaml": (
        "stops",
        "micro-batches",
        "data ranks 18 samples, which is no multiple of data.micro_batch",
    ),
}


def test_every_golden_configuration_has_its_numbers_and_its_fault() -> None:
    found = {
        f"{path.parent.name}/{path.name}"
        for kind in ("megatron", "nemo", "verl")
        for path in (CONFIGS / kind).iterdir()
    }
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


SOUND = {
    "--micro-batch-size": "2",
    "--global-batch-size": "64",
    "--train-iters": "1000",
    "--lr": "1e-4",
    "--min-lr": "1e-5",
    "--lr-decay-style": "cosine",
    "--lr-warmup-iters": "10",
    "--seq-length": "1024",
}


def megatron_faults(path: Path, changes: dict[str, str | None], *, world_size: int = 8) -> list[tuple[str, str, str]]:
    """What is found with some flags changed; None leaves a flag out."""
    flags = {name: value for name, value in {**SOUND, **changes}.items() if value is not None}
    (path / "train.sh").write_text(
        f"torchrun --nproc_per_node {world_size} pretrain_gpt.py "
        + " ".join(f"{name} {value}" for name, value in flags.items())
    )
    issues = check_job(read_job(str(path / "train.sh")), world_size=world_size)
    return [(issue.level, issue.code, issue.text) for issue in issues if issue.code != "data-ranks"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"--lr-decay-iters": "990", "--lr-warmup-iters": None, "--lr-warmup-fraction": "0.01"},
        {"--lr-decay-style": "constant", "--lr-decay-iters": "10", "--lr-warmup-iters": "0"},
        {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "100"},
        {
            "--tensor-model-parallel-size": "2",
            "--pipeline-model-parallel-size": "2",
            "--expert-model-parallel-size": "2",
        },
        {"--train-iters": None, "--train-samples": "64000", "--lr-warmup-iters": None, "--lr-warmup-samples": "640"},
        {
            **{
                "--train-iters": None,
                "--train-samples": "64000",
                "--lr-warmup-iters": None,
                "--lr-decay-samples": "64100",
            },
            "--rampup-batch-size": "16 16 1000",
        },
        {"--global-batch-size": None, "--train-iters": None},
        {
            **{
                "--global-batch-size": None,
                "--train-iters": None,
                "--train-samples": "9999",
                "--lr-warmup-iters": None,
            },
            "--step-batch-size-schedule": '"0:16 1M:32"',
        },
    ],
)
def test_a_sound_megatron_run_has_no_issue(tmp_path: Path, changes: dict[str, str | None]) -> None:
    assert megatron_faults(tmp_path, changes) == []


SAMPLES = {"--train-iters": None, "--train-samples": "64000", "--lr-warmup-iters": None}


@pytest.mark.parametrize(
    ("changes", "level", "code", "text"),
    [
        (
            {"--lr-warmup-iters": "1000"},
            "stops",
            "warm-up",
            "--lr-warmup-iters is 1,000 and --train-iters is 1,000: Megatron",
        ),
        (
            {"--lr-warmup-iters": "600", "--lr-decay-iters": "500"},
            "stops",
            "warm-up",
            "600 and --lr-decay-iters is 500: Meg",
        ),
        (
            {"--lr-warmup-iters": "1200", "--lr-decay-iters": "5000"},
            *(
                "silent",
                "warm-up",
                "--lr-warmup-iters is 1,200 and --train-iters is 1,000: the learning rate only rises, to 0.83",
            ),
        ),
        (
            {"--lr-decay-iters": "400"},
            *(
                "silent",
                "horizon",
                "the last 600 of 1,000 steps have a learning rate of 0.1 of the configured one; set --lr-d",
            ),
        ),
        (
            {"--lr-decay-iters": "900"},
            *(
                "note",
                "horizon",
                "the last 100 of 1,000 steps have a learning rate of 0.1 of the configured one: right if",
            ),
        ),
        (
            {"--lr-decay-iters": "5000"},
            *(
                "note",
                "horizon",
                "the run ends at a learning rate of 0.9156 of the configured one: right if the run is meant",
            ),
        ),
        (
            {**SAMPLES, "--lr-decay-samples": "32000", "--min-lr": None},
            *(
                "silent",
                "horizon",
                "--lr-decay-samples is 32,000 and --train-samples is 64,000: the last 500 of 1,000 steps have",
            ),
        ),
        (
            {"--lr-decay-samples": "64000"},
            "stops",
            "horizon",
            "--lr-decay-samples with --train-iters: Megatron-LM stops",
        ),
        ({"--train-samples": "64000"}, "stops", "length", "--train-iters and --train-samples: Megatron-LM stops"),
        (
            {"--lr-warmup-fraction": "0.1"},
            "stops",
            "warm-up",
            "--lr-warmup-fraction and --lr-warmup-iters: Megatron-LM stops",
        ),
        ({"--min-lr": "1e-3"}, "stops", "horizon", "--min-lr 0.001 is above --lr 0.0001: Megatron-LM stops"),
        ({"--lr-decay-style": "WSD"}, "stops", "horizon", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        (
            {"--global-batch-size": "60"},
            "stops",
            "batch",
            "60 is no multiple of --micro-batch-size 2 × 8 data ranks = 16 samples",
        ),
        ({"--tensor-model-parallel-size": "3"}, "stops", "dims", "the dims do not fit 8 ranks"),
        (
            {"--expert-model-parallel-size": "3"},
            "stops",
            "experts",
            "--expert-model-parallel-size: 3 must divide dp × cp = 8",
        ),
        (
            {"--context-parallel-size": "4", "--seq-length": "1020"},
            *("stops", "sequence-length", "--seq-length 1020 must divide by 2 × --context-parallel-size 4 = 8"),
        ),
        (
            {**SAMPLES, "--rampup-batch-size": "16 20 900"},
            "stops",
            "batch",
            "in increments of 20 and does not reach --global-batch",
        ),
        (
            {**SAMPLES, "--rampup-batch-size": "16 8 900"},
            *(
                "stops",
                "batch",
                "its size 24 is no multiple of --micro-batch-size 2 × 8 data ranks = 16 samples: megatron",
            ),
        ),
        (
            {"--step-batch-size-schedule": '"0:16 1M:64"'},
            "stops",
            "batch",
            "Megatron-LM refuses both together; leave out --glob",
        ),
        (
            {"--global-batch-size": None, "--step-batch-size-schedule": '"0:16 1M:64"'},
            *(
                "silent",
                "horizon",
                "grows to 64 samples, and Megatron-LM counts the decay in batches of 16 (--micro-batch-size",
            ),
        ),
        (
            {**SAMPLES, "--train-samples": "63"},
            "stops",
            "length",
            "--train-samples 63 is less than one global batch of 64",
        ),
        (
            {"--micro_batch_size": "4"},
            "stops",
            "unknown-field",
            "there is no --micro_batch_size; did you mean --micro-batch-size?",
        ),
        (
            {"--tensor-model-paralel-size": "1"},
            "stops",
            "unknown-field",
            "there is no --tensor-model-paralel-size; did you mean --tensor-model-parallel-size? Megatron-LM stops",
        ),
    ],
)
def test_a_fault_of_a_megatron_run_is_found(
    tmp_path: Path, changes: dict[str, str | None], level: str, code: str, text: str
) -> None:
    issues = megatron_faults(tmp_path, changes)
    assert [(level, code)] == [issue[:2] for issue in issues]
    assert text in issues[0][2]


def nemo_faults(path: Path, *changes: tuple[str, str]) -> list[tuple[str, str, str]]:
    text = (CONFIGS / "nemo" / "megatron_gpt.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path / "nemo.yaml").write_text(text)
    job = read_job(str(path / "nemo.yaml"))
    return [(issue.level, issue.code, issue.text) for issue in check_job(job, world_size=job.world_size or 8)]


def test_flags_of_megatron_that_look_like_those_read_are_no_fault(tmp_path: Path) -> None:
    real = ("--eval-global-batch-size", "--eval-micro-batch-size", "--eval-iters", "--decoder-seq-length")
    assert megatron_faults(tmp_path, dict.fromkeys(real, "8")) == []


def test_a_misspelt_override_of_nemo_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "python gpt.py trainer.devices=8 model.micro_batch_size=4 model.global_batchsize=64 model.decoder_seq_length=64"
    )
    issues = [issue for issue in read_job(str(tmp_path / "train.sh")).issues if issue.code == "unknown-field"]
    assert [(issue.level, issue.text) for issue in issues] == [
        (
            "silent",
            "there is no model.global_batchsize; did you mean global_batch_size? In a file NeMo ignores it; as an "
            "override without + Hydra stops on it.",
        )
    ]


STEPS = "constant_steps: 0"


@pytest.mark.parametrize(
    ("changes", "level", "code", "text"),
    [
        (
            [("tensor_model_parallel_size", "tensor_model_paralel_size")],
            "silent",
            "unknown-field",
            "no model.tensor_model_paralel_size; did you mean tensor_model_parallel_size? In a file NeMo ignores it",
        ),
        (
            [("warmup_steps: 500", "warmup_step: 500")],
            "stops",
            "unknown-field",
            "no model.optim.sched.warmup_step; did you mean warmup_steps? NeMo stops on it.",
        ),
        (
            [("warmup_steps: 500", "warmup_steps: 100000")],
            "silent",
            "warm-up",
            "is 100,000 and trainer.max_steps is 100,000: no",
        ),
        (
            [(STEPS, "max_steps: 1000")],
            "silent",
            "horizon",
            "sched.max_steps is 1,000 and trainer.max_steps is 100,000: the last",
        ),
        (
            [(STEPS, "max_steps: 90000")],
            "note",
            "horizon",
            "the last 10,000 of 100,000 steps have a learning rate of 0.1 of the",
        ),
        ([(STEPS, "max_steps: 400000")], "note", "horizon", "the run ends at a learning rate of"),
        (
            [("min_lr: 2e-5", "min_lr: 2e-3")],
            "stops",
            "horizon",
            "min_lr 0.002 is above model.optim.lr 0.0002: NeMo stops",
        ),
        (
            [(STEPS, "warmup_ratio: 0.1")],
            "stops",
            "warm-up",
            "warmup_steps and model.optim.sched.warmup_ratio: NeMo stops",
        ),
        (
            [("devices: 1", "devices: 4")],
            "stops",
            "batch",
            "model.global_batch_size 8 is no multiple of model.micro_batch_size 4",
        ),
        (
            [("rampup_batch_size: null", "rampup_batch_size: [4, 3, 100]")],
            "stops",
            "batch",
            "does not reach model.global_batch",
        ),
    ],
)
def test_a_fault_of_a_nemo_run_is_found(
    tmp_path: Path, changes: list[tuple[str, str]], level: str, code: str, text: str
) -> None:
    issues = nemo_faults(tmp_path, *changes)
    assert [(level, code)] == [issue[:2] for issue in issues]
    assert text in issues[0][2]


@pytest.mark.parametrize(
    "changes",
    [
        [("warmup_steps: 500", "warmup_ratio: 0.1")],
        [(STEPS, "constant_steps: 50000")],
        [(STEPS, "max_steps: 99000")],
        [("devices: 1", "devices: [0, 1]")],
        [("devices: 1", "devices: '2'")],
        [("name: CosineAnnealing", "name: NoamAnnealing")],
    ],
)
def test_a_sound_nemo_run_has_no_issue(tmp_path: Path, changes: list[tuple[str, str]]) -> None:
    assert nemo_faults(tmp_path, *changes) == []


PPO = {
    "data.train_batch_size": "1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "16",
    "trainer.n_gpus_per_node": "8",
    "trainer.total_training_steps": "100",
}


def verl_faults(path: Path, changes: dict[str, str]) -> list[tuple[str, str, str]]:
    fields = " ".join(f"{name}={value}" for name, value in {**PPO, **changes}.items())
    (path / "ppo.sh").write_text(f"python3 -m verl.trainer.main_ppo {fields}")
    job = read_job(str(path / "ppo.sh"))
    issues = check_job(job, world_size=job.world_size or 8)
    return [(issue.level, issue.code, issue.text) for issue in issues if issue.code != "data-ranks"]


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("changes", "level", "code", "text"),
    [
        (
            {f"{ACTOR}.optim.lr_warmup_steps": "400"},
            "silent",
            "warm-up",
            "lr_warmup_steps is 400 and trainer.total_training_st",
        ),
        (
            {f"{ACTOR}.ppo_mini_batch_size": "2048"},
            "stops",
            "batch",
            "2,048 is more than data.train_batch_size 1,024: verl stops",
        ),
        (
            {f"{ACTOR}.ppo_mini_batch_size": "4"},
            "stops",
            "batch",
            "4 leaves no sample for each of 8 data ranks: verl stops",
        ),
        (
            {f"{ACTOR}.ppo_mini_batch_size": "132"},
            *(
                "silent",
                "batch",
                "132 does not divide by 8 data ranks: verl rounds it down to 16 samples on each, 128 in all",
            ),
        ),
        ({f"{ACTOR}.ppo_mini_batch_size": "384"}, "note", "batch", "1,024 is no multiple of"),
        (
            {"data.train_batch_size": "1028"},
            "stops",
            "batch",
            "data.train_batch_size 1,028 does not divide into 8 data ranks × 1 batch each",
        ),
        (
            {"actor_rollout_ref.rollout.tensor_model_parallel_size": "3"},
            "stops",
            "dims",
            "= 8 ranks do not divide by actor_",
        ),
        (
            {f"{ACTOR}.optim.total_training_steps": "400"},
            "note",
            "override",
            "is 400 and has no effect: verl plans the schedule",
        ),
        (
            {"data.train_batch_sizes": "8"},
            "stops",
            "unknown-field",
            "no data.train_batch_sizes; did you mean train_batch_size?",
        ),
        ({"trainer.nnodes": "$NODES"}, "note", "unknown-value", ""),
    ],
)
def test_a_fault_of_a_verl_run_is_found(
    tmp_path: Path, changes: dict[str, str], level: str, code: str, text: str
) -> None:
    issues = verl_faults(tmp_path, changes)
    assert [(level, code)] == [issue[:2] for issue in issues]
    assert text in issues[0][2]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.lr_warmup_steps_ratio": "0.1"},
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": "4"},
        {f"{ACTOR}.use_dynamic_bsz": "True", f"{ACTOR}.ppo_mini_batch_size": "128"},
        {"data.train_batch_size": "0"},
    ],
)
def test_a_sound_verl_run_has_no_issue(tmp_path: Path, changes: dict[str, str]) -> None:
    assert verl_faults(tmp_path, changes) == []


def test_prompts_of_a_dataset_give_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,039 prompts are 9 whole batches of 104, each of 4 samples; every step has two updates in each of two passes."""
    fields = "data.train_batch_size=104 actor_rollout_ref.rollout.n=4 trainer.total_epochs=2 trainer.n_gpus_per_node=8"
    updates = f"{ACTOR}.ppo_mini_batch_size=52 {ACTOR}.ppo_epochs=2"
    (tmp_path / "grpo.sh").write_text(f"python -m verl.trainer.main_ppo {fields} {updates}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path / "grpo.sh"), "--dataset-size", "1039"])
    assert ended.value.code == 0
    rows = dict(
        line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("8 ranks")
    )
    assert (rows["steps"], rows["samples per step"], rows["optimizer updates per step"]) == ("18", "416", "4")


def grpo(path: Path, **changes: str) -> Job:
    """A run of verl whose epochs are its only length, unless changes has another."""
    fields = {
        "data.train_batch_size": "1024",
        "actor_rollout_ref.rollout.n": "5",
        f"{ACTOR}.optim.lr": "1e-6",
        f"{ACTOR}.optim.warmup_style": "cosine",
        "trainer.n_gpus_per_node": "8",
        "trainer.total_epochs": "15",
        **changes,
    }
    written = " ".join(f"{name}={value}" for name, value in fields.items())
    (path / "grpo.sh").write_text(f"python -m verl.trainer.main_ppo {written}")
    return read_job(str(path / "grpo.sh"))


def test_a_verl_schedule_follows_the_steps_of_its_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7,473 prompts are 7 batches of 1,024 in each of 15 epochs."""
    job = grpo(tmp_path, **{f"{ACTOR}.optim.lr_warmup_steps": "200"})
    [fault] = check_job(dataclasses.replace(job, dataset_size=7473), world_size=8)
    assert fault.line.startswith(
        f"silent  warm-up: {ACTOR}.optim.lr_warmup_steps is 200 and trainer.total_epochs 15 gives 105 steps: "
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path / "grpo.sh"), "--curve"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith("how many steps it has is not known: give --steps N, or --dataset-size N\n")


def test_verl_rounds_a_warmup_that_is_a_fraction_down(tmp_path: Path) -> None:
    schedule = grpo(tmp_path, **{f"{ACTOR}.optim.lr_warmup_steps_ratio": "0.1"}).schedule
    assert schedule is not None
    assert schedule.horizon_steps == 0
    planned = schedule.planned_for(107)
    assert (planned.warmup_steps, planned.horizon_steps) == (10, 107)


def test_steps_end_a_run_whose_epochs_have_no_known_length(tmp_path: Path) -> None:
    job = grpo(tmp_path, **{"trainer.total_training_steps": "100"})
    plan = RunPlan.of(job, world_size=8)
    assert plan.batches.total_steps == 100
    assert [issue.text for issue in check_length(plan)] == [
        "trainer.total_epochs is 15 epochs, and nothing says how long one is, so the plan goes to the end of "
        "trainer.total_training_steps 100: give --dataset-size N"
    ]
    known = RunPlan.of(dataclasses.replace(job, dataset_size=2048), world_size=8)
    assert known.batches.total_steps == 30


def test_the_remedy_for_a_batch_of_verl_is_in_prompts(tmp_path: Path) -> None:
    job = grpo(tmp_path, **{"trainer.n_gpus_per_node": "6"})
    expected = (
        r"rollout\.n 5,120 does not divide into 6 data ranks × 1 batch each: 5,120 = 853 × 6 \+ 2; "
        r"data\.train_batch_size 1,020 or 1,026 would$"
    )
    with pytest.raises(JobError, match=expected):
        RunPlan.of(job, world_size=6)
    for prompts in (1020, 1026):
        assert RunPlan.of(dataclasses.replace(job, global_batch_size=5 * prompts), world_size=6).batch_size


def test_one_share_is_not_shares(tmp_path: Path) -> None:
    job = grpo(tmp_path, **{f"{ACTOR}.ulysses_sequence_parallel_size": "8"})
    assert "8 ranks read 1 share: count" in " ".join(issue.text for issue in check_job(job, world_size=8))


def test_a_ramp_of_the_script_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(CONFIGS / "megatron" / "gpt3_175b.sh")])
    assert ended.value.code == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["steps of the ramp"], rows["steps"]) == ("19,802", "515,987")
    assert int(rows["samples of the run"].replace(",", "")) <= 768_000_000


def test_a_ramp_has_more_steps_in_the_same_samples() -> None:
    schedule = MegatronSchedule("linear", warmup=100, decay=1600, units_per_step=64, growth=((16, 10), (32, 5)))
    assert (schedule.warmup_steps, schedule.horizon_steps) == (7, 10 + 5 + 20)
    assert [schedule.factor(step) for step in (0, 5, 7, 35)] == [0.0, 0.8, pytest.approx(1488 / 1500), 0.0]
    assert schedule.factor(16) == pytest.approx((1600 - 160 - 160 - 64) / 1500)


def test_a_run_in_samples_has_fewer_steps_with_a_larger_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", str(CONFIGS / "megatron" / "mamba_800m.sh"), "--global-batch-size", "64"])
    assert "steps                                  1,144,409\n" in capsys.readouterr().out


def test_a_schedule_of_nemo_or_composer_follows_the_steps_of_epochs(tmp_path: Path) -> None:
    (tmp_path / "nemo.yaml").write_text(
        "trainer: {max_epochs: 2, max_steps: -1, devices: 1}\n"
        "model: {train_ds: {batch_size: 4}, optim: {lr: 0.1, sched: {name: CosineAnnealing, warmup_ratio: 0.1}}}\n"
    )
    (tmp_path / "composer.yaml").write_text(
        "max_duration: 2ep\nglobal_train_batch_size: 4\ndevice_train_microbatch_size: 4\n"
        "scheduler: {name: cosine_with_warmup, t_warmup: 0.1dur, alpha_f: 0.0}\noptimizer: {lr: 0.1}\n"
    )
    for name in ("nemo", "composer"):
        job = read_job(str(tmp_path / f"{name}.yaml"), framework=name)
        assert job.schedule is not None
        assert job.schedule.horizon_steps == 0
        steps = RunPlan.of(dataclasses.replace(job, dataset_size=200), world_size=1).batches.total_steps
        assert steps == 100
        planned = job.schedule.planned_for(100)
        assert (planned.warmup_steps, planned.horizon_steps) == (10, 100)


def test_only_a_megatron_model_keeps_the_length_of_its_own_schedule(tmp_path: Path) -> None:
    """NeMo gives any other model the steps of the trainer, if it has them."""
    text = (CONFIGS / "nemo" / "citrinet_512.wrong.yaml").read_text()
    (tmp_path / "asr.yaml").write_text(text.replace("  max_steps: -1\n  num_nodes", "  max_steps: 5000\n  num_nodes"))
    job = read_job(str(tmp_path / "asr.yaml"))
    assert job.schedule is not None
    assert (job.steps, job.schedule.horizon_steps) == (5000, 5000)
    assert check_job(job, world_size=1) == []


def test_another_trainers_file_is_not_taken_for_one_of_nemo_or_verl(tmp_path: Path) -> None:
    """Lightning's own command line has a trainer and a model as well, and is told apart."""
    lightning = (
        "trainer: {devices: 8, num_nodes: 2, max_steps: 100}\nmodel: {class_path: a.Model}\ndata: {batch_size: 4}\n"
    )
    (tmp_path / "lightning.yaml").write_text(lightning)
    with pytest.raises(ConfigError, match="is a configuration of the Lightning CLI"):
        read_job(str(tmp_path / "lightning.yaml"))


def test_a_file_that_may_be_of_two_formats_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("exp_manager: {}\nactor_rollout_ref: {}\n")
    with pytest.raises(ConfigError, match=r"both\.yaml has fields of nemo and verl: give --framework nemo \| verl"):
        read_job(str(tmp_path / "both.yaml"))
    assert read_job(str(tmp_path / "both.yaml"), framework="verl").framework == "verl"


def test_a_reference_to_no_field_leaves_its_number_unknown(tmp_path: Path) -> None:
    text = (CONFIGS / "nemo" / "megatron_gpt.yaml").read_text()
    (tmp_path / "nemo.yaml").write_text(text.replace("encoder_seq_length: 512", "encoder_seq_length: ${data.length}"))
    job = read_job(str(tmp_path / "nemo.yaml"))
    assert (job.sequence_length, job.unknown) == (None, {"sequence_length": "${data.length}"})
    text = "model.encoder_seq_length is ${data.length}, which is known only when the job runs: not read"
    assert [issue.line for issue in job.issues] == [f"note    unknown-value: {text}"]


def test_a_default_does_not_take_the_place_of_an_unknown_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (CONFIGS / "nemo" / "citrinet_512.yaml").read_text()
    (tmp_path / "asr.yaml").write_text(
        text.replace("accumulate_grad_batches: 1", "accumulate_grad_batches: ${batches}")
    )
    for flags, code in (([], 2), (["--accumulation", "4"], 0)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["check", str(tmp_path / "asr.yaml"), *flags])
        assert ended.value.code == code
    error = "trainer.accumulate_grad_batches is ${batches}, which is known only when the job runs: give --accumulation"
    assert capsys.readouterr().err == f"countoff: {error}\n"
