"""Files of transformers and LLaMA-Factory: real ones, each with a wrong twin, and each rule alone."""

import ast
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from countoff.cli import __main__ as cli
from countoff.plan.checks import check_job
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job, RunPlan
from countoff.plan.readers import ConfigError, llamafactory, read_command, read_job, transformers
from tests.paths import GOLDEN

CONFIGS = GOLDEN / "configs"
HANDBOOK = "huggingface/alignment-handbook/recipes/{}@925acdfe"
LLAMA_FACTORY = "hiyouga/LLaMA-Factory/examples/{}@ff6d4d12"


class Real(NamedTuple):
    """A configuration of a project, its numbers worked out by hand, and what is wrong with its twin."""

    file: str
    source: str
    world_size: int
    dataset_size: int
    samples_per_step: int
    tokens_per_step: int | None
    steps: int | None
    warmup_steps: int | None
    level: str
    fault: str


# The files hold the numbers and the keys of their sources.
REAL = [
    Real(
        "transformers/zephyr_sft.yaml",
        HANDBOOK.format("zephyr-7b-beta/sft/config_full.yaml"),
        *(8, 10_000, 128, None, 79, 8),
        "silent",
        "warm-up: warmup_ratio is 0.1, and lr_scheduler_type constant has no warm-up",
    ),
    Real(
        "transformers/smollm3_sft.yaml",
        HANDBOOK.format("smollm3/sft/sft.yaml"),
        *(8, 10_000, 16, 1_048_576, 3125, 94),
        "silent",
        "warm-up: warmup_steps is 100 and max_steps is 100: the learning rate only rises, to 0.99 of",
    ),
    Real(
        "transformers/constitutional_dpo.json",
        HANDBOOK.format("constitutional-ai/dpo/config_anthropic.yaml"),
        *(8, 10_000, 16, None, 1875, 188),
        "silent",
        "warm-up: warmup_steps is 1,500 and max_steps is 1,000: the learning rate only rises, to 0.666 of",
    ),
    Real(
        "llamafactory/qwen3_full_sft.yaml",
        LLAMA_FACTORY.format("train_full/qwen3_full_sft.yaml"),
        *(8, 1000, 16, None, 189, 19),
        "silent",
        "warm-up: warmup_ratio is 0.1, and lr_scheduler_type constant has no warm-up",
    ),
    Real(
        "llamafactory/qwen3_pretrain.yaml",
        LLAMA_FACTORY.format("train_lora/qwen3_lora_pretrain.yaml"),
        *(8, 1000, 64, 131_072, 48, 5),
        "silent",
        "warm-up: warmup_steps is 50 and max_steps is 40: the learning rate only rises, to 0.78 of",
    ),
    Real(
        "llamafactory/llama3_bridge.yaml",
        LLAMA_FACTORY.format("megatron_bridge/llama3_sft.yaml"),
        *(8, 10_000, 8, None, 1000, 10),
        "silent",
        "horizon: warm-up + num_stable_steps + num_decay_steps is 710 and max_steps is 1,000: the last 290 steps have "
        "a learning rate of 0 and train nothing; set num_stable_steps to 790",
    ),
    Real(
        "llamafactory/qwen3_moe_megatron.yaml",
        LLAMA_FACTORY.format("megatron/qwen3_moe_full.yaml"),
        *(8, 1000, 16, None, 126, 0),
        "stops",
        "dims: the dims do not fit 8 ranks: pp 3 × dp -1 × cp 1 × tp 1",
    ),
]
NAMES = [real.file for real in REAL]


def exit_code(arguments: list[str]) -> object:
    try:
        cli.main(arguments)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("real", REAL, ids=NAMES)
def test_a_real_file_gives_the_numbers_of_its_run(real: Real) -> None:
    job = dataclasses.replace(read_job(str(CONFIGS / real.file)), dataset_size=real.dataset_size)
    plan = RunPlan.of(job, world_size=real.world_size).batches
    assert plan.global_batch_size == real.samples_per_step
    assert plan.tokens_per_step == real.tokens_per_step
    if real.steps is not None:
        assert plan.total_steps == real.steps
    if real.steps is not None and real.warmup_steps is not None:
        assert job.schedule is not None
        assert job.schedule.in_run(real.steps).warmup == real.warmup_steps


@pytest.mark.parametrize("real", REAL, ids=NAMES)
def test_a_real_file_has_no_fault(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--dataset-size", str(real.dataset_size)]):
        world = ["--world-size", str(real.world_size), *extra]
        assert exit_code(["check", str(CONFIGS / real.file), *world]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("real", REAL, ids=NAMES)
def test_its_wrong_twin_has_exactly_one(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    file = CONFIGS / real.file
    twin = file.with_suffix(f".wrong{file.suffix}")
    assert exit_code(["check", str(twin), "--world-size", str(real.world_size)]) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("note")]
    assert len(faults) == 1
    assert faults[0].startswith(f"{real.level:<7} {real.fault}")


def test_each_format_has_three_real_files_with_twins() -> None:
    for name in ("transformers", "llamafactory"):
        files = [path for path in (CONFIGS / name).iterdir() if path.is_file()]
        assert len(files) == 2 * sum(real.file.startswith(f"{name}/") for real in REAL) >= 6


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.[jy]*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_golden_file_is_recognised_as_its_own_format(path: Path) -> None:
    assert read_job(str(path)).framework == path.parent.name


OTHERS = {
    "lingua.yaml": "grad_acc_steps: 1\nsteps: 10\noptim: {warmup: 5}\ndata: {batch_size: 2}",
    "composer.yaml": "max_duration: 1ep\nglobal_train_batch_size: 4\nmax_seq_len: 128",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\nnum_processes: 2\ngradient_accumulation_steps: 4",
    "deepspeed.json": '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}',
    "torchtitan.toml": "[training]\nsteps = 10\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_older_formats_are_still_recognised(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OTHERS[name])
    assert read_job(str(tmp_path / name)).framework == name.partition(".")[0]


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a\nmerge_method: slerp\nmodels: []",
        "model: a\nmicro_batch_size: 2\ncutoff_len: 2048\nmax_steps: 10",
        "train: {train_iters: 10, global_batch_size: 8, micro_batch_size: 1}",
        "optimizer: AdamW\nlr: 1.0e-3\nlr_warmup_steps: -1\nlr_scheduler_type: constant",
    ],
)
def test_a_file_that_only_resembles_a_format_is_refused(tmp_path: Path, text: str) -> None:
    """A merge of models, LLaMA-Factory's second format, Megatron Bridge and others share a few names."""
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is in no format that countoff knows by its fields"):
        read_job(str(tmp_path / "other.yaml"))


def trainer_row(row: dict[str, str]) -> RunPlan:
    job = transformers.read(
        {
            "per_device_train_batch_size": int(row["batch_size"]),
            "gradient_accumulation_steps": int(row["gradient_accumulation_steps"]),
            "dataloader_drop_last": row["drop_last"] == "1",
            "num_train_epochs": float(row["epochs"]),
            "max_steps": int(row["max_steps"]),
            "accelerator_config": ast.literal_eval(row["config"]),
        }
    )
    return RunPlan.of(dataclasses.replace(job, dataset_size=int(row["dataset_size"])), world_size=2)


def test_every_run_of_the_real_trainer_is_planned_as_it_ran() -> None:
    """The steps, the batch and the batches of each epoch are the Trainer's, for every row of its golden table."""
    with (GOLDEN / "transformers_trainer.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 1576
    for row in rows:
        plan = trainer_row(row).batches
        assert plan.global_batch_size == int(row["true_global_batch"]), row
        if int(row["len_dataloader"]):
            assert plan.batches_per_epoch == int(row["len_dataloader"]), row
            assert plan.total_steps == ast.literal_eval(row["trainer_initial_values"])[5], row
        else:
            assert plan.total_steps == 0, row


def issues_of(job: Job, *, world_size: int = 8, dataset_size: int | None = None) -> list[ConfigIssue]:
    return check_job(dataclasses.replace(job, dataset_size=dataset_size), world_size=world_size)


def faults_of(job: Job, **numbers: int) -> list[str]:
    return [issue.line for issue in issues_of(job, **numbers) if issue.is_fault]


def notes_of(job: Job, **numbers: int) -> list[str]:
    return [issue.line for issue in issues_of(job, **numbers) if not issue.is_fault]


def trainer(**arguments: Any) -> Job:
    return transformers.read({"per_device_train_batch_size": 4, **arguments})


def test_max_steps_overrules_epochs() -> None:
    job = trainer(max_steps=50, num_train_epochs=2)
    assert (job.steps, job.epochs) == (50, None)


def test_warmup_steps_overrule_warmup_ratio() -> None:
    job = trainer(max_steps=50, warmup_steps=5, warmup_ratio=0.5)
    assert job.schedule is not None
    assert job.schedule.warmup == 5


def test_warmup_steps_below_one_are_a_fraction_of_the_run() -> None:
    job = trainer(max_steps=50, warmup_steps=0.05)
    assert job.schedule is not None
    assert job.schedule.in_run(50).warmup == 3


def test_a_fraction_of_a_warmup_is_quoted_as_it_is_written() -> None:
    (fault,) = faults_of(trainer(num_train_epochs=2, warmup_ratio=1.0), dataset_size=320)
    assert fault == (
        "silent  warm-up: warmup_ratio 1 gives 20 steps and num_train_epochs 2 gives 20 steps: the learning rate only "
        "rises, to 0.95 of the configured one, and never decays; set warmup_ratio below 1"
    )


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 5), (1.25, 13), (2.0, 20)])
def test_a_fraction_of_an_epoch_is_rounded_up_to_steps(epochs: float, steps: int) -> None:
    job = dataclasses.replace(trainer(num_train_epochs=epochs), dataset_size=320)
    assert RunPlan.of(job, world_size=8).batches.total_steps == steps


def test_pieces_of_a_batch_are_not_multiplied_by_the_ranks() -> None:
    job = trainer(per_device_train_batch_size=16, accelerator_config='{"split_batches": true}')
    plan = RunPlan.of(job, world_size=8)
    assert (plan.batch_size, plan.batches.global_batch_size) == (2, 16)
    (fault,) = faults_of(job, world_size=3)
    assert "per_device_train_batch_size 16 does not divide into 3 data ranks" in fault


def stable(warmup: int, stable_steps: int | None, decay: int) -> Job:
    options = {"num_stable_steps": stable_steps, "num_decay_steps": decay}
    return trainer(
        max_steps=1000,
        warmup_steps=warmup,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={name: value for name, value in options.items() if value is not None},
    )


def test_a_stable_schedule_must_end_with_the_run() -> None:
    assert faults_of(stable(100, 700, 200)) == []
    assert faults_of(stable(100, None, 200)) == []
    (early,) = faults_of(stable(100, 600, 200))
    assert "is 900 and max_steps is 1,000: the last 100 steps have a learning rate of 0" in early
    assert early.endswith("set num_stable_steps to 700")
    (late,) = notes_of(stable(100, 800, 200))
    assert "is 1,100 and the run ends after 1,000 steps: right if the run is meant to end early" in late


def test_a_decay_that_begins_in_the_warmup_is_a_fault() -> None:
    (fault,) = faults_of(stable(200, None, 900))
    assert fault == (
        "silent  horizon: num_decay_steps is 900 and the warm-up has 200 of the 1,000 steps of the run: the decay is "
        "100 steps too long, and begins below the full learning rate; set num_decay_steps to at most 800"
    )


def test_llama_factory_gives_a_third_to_the_stable_part() -> None:
    arguments = {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 1000, "warmup_steps": 100}
    job = llamafactory.read({"finetuning_type": "full", **arguments})
    assert job.schedule is not None
    assert (job.schedule.phases_in(1000), job.schedule.in_run(1000).at) == ((300, 600), 1000)
    assert faults_of(job) == []
    job = llamafactory.read({**arguments, "lr_scheduler_kwargs": {"num_decay_steps": 100}})
    (fault,) = faults_of(job)
    assert "is 500 and max_steps is 1,000: the last 500 steps have a learning rate of 0" in fault


def test_the_tensor_parallel_ranks_of_deepspeeds_file_share_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler takes the place of the Trainer's; a file that is not here, or broken, has neither."""
    monkeypatch.chdir(tmp_path)
    theirs = {"tensor_parallel": {"autotp_size": 4}, "scheduler": {"type": "WarmupLR"}}
    Path("tp.json").write_text(json.dumps(theirs))
    Path("broken.json").write_text("{")
    for given in ("tp.json", theirs):
        job = trainer(deepspeed=given)
        assert (job.rank_map(8).dp_degree, job.schedule) == (2, None)
    for given in ("gone.json", "broken.json"):
        job = trainer(deepspeed=given)
        assert job.rank_map(8).dp_degree == 8
        assert job.schedule is not None


# The sections of LLaVA's scripts/zero3_offload.json that decide a run; LLaMA-Factory #1515 has the same scheduler.
LLAVA = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


@pytest.mark.parametrize("read", ["transformers", "llamafactory", "command"])
def test_a_scheduler_in_deepspeeds_file_that_replaces_a_cosine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """Its right twin has no scheduler in DeepSpeed's file."""
    monkeypatch.chdir(tmp_path)
    arguments = {"per_device_train_batch_size": 1, "num_train_epochs": 4, "warmup_ratio": 0.01}
    arguments |= {"lr_scheduler_type": "cosine", "deepspeed": "offload.json"}
    found: list[list[str]] = []
    for theirs in (LLAVA, {name: value for name, value in LLAVA.items() if name != "scheduler"}):
        Path("offload.json").write_text(json.dumps(theirs))
        if read == "command":
            flags = " ".join(f"--{name} {value}" for name, value in arguments.items())
            job = read_command([f"deepspeed --num_gpus 2 src/train_bash.py {flags}"])
        else:
            Path("run.yaml").write_text(yaml.safe_dump(arguments))
            job = read_job("run.yaml", framework=read)
        found.append(faults_of(job, world_size=2, dataset_size=10_000))
    assert found == [
        [
            "silent  override: lr_scheduler_type is cosine, and the scheduler in offload.json, WarmupLR, takes its "
            "place: the learning rate never decays; leave scheduler out of offload.json, or lr_scheduler_type out of "
            "the arguments"
        ],
        [],
    ]


@pytest.mark.parametrize(
    ("scheduler", "curve", "levels"),
    [
        ("WarmupLR", None, []),  # the Trainer's default is nobody's intention
        ("WarmupLR", "linear", ["silent"]),
        ("WarmupLR", "constant_with_warmup", []),
        ("WarmupDecayLR", "linear", []),
        ("WarmupDecayLR", "cosine", ["note"]),
        ("WarmupCosineLR", "cosine", []),
        ("OneCycle", "cosine", ["note"]),
        ("CosineAnnealingLR", "cosine", []),  # of torch, which DeepSpeed makes as well
    ],
)
def test_a_scheduler_of_deepspeed_with_the_written_curve_is_no_issue(
    scheduler: str, curve: str | None, levels: list[str]
) -> None:
    written = {} if curve is None else {"lr_scheduler_type": curve}
    job = trainer(deepspeed={"scheduler": {"type": scheduler}}, **written)
    assert [issue.level for issue in issues_of(job)] == levels


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_best_model_at_end": True},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"lr_scheduler_type": "warmup_stable_decay"},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1}},
        {"gradient_acumulation_steps": 2},
        {"deepspeed": {"train_micro_batch_size_per_gpu": 2}},
    ],
)
def test_what_the_trainer_refuses_at_its_start_is_left_to_it(arguments: dict[str, object]) -> None:
    assert faults_of(trainer(**arguments)) == []


def test_a_rate_in_exponents_is_a_number_in_json_and_in_a_command(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text('{"per_device_train_batch_size": 4, "learning_rate": 2e-5}')
    command = "torchrun --nproc_per_node 8 sft.py --per_device_train_batch_size 4 --learning_rate 2e-5"
    assert [notes_of(job) for job in (read_job(str(tmp_path / "sft.json")), read_command([command]))] == [[], []]


def test_a_schedule_of_a_run_of_unknown_length_is_planned_for_the_run() -> None:
    schedule = trainer(warmup_ratio=0.1).schedule
    assert schedule is not None
    assert not schedule.own_horizon
    assert schedule.in_run(500).at == 500


def test_a_warmup_that_is_a_fraction_is_explained_in_steps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world-size", "8", "--dataset-size", "10000", "--explain"]
    assert exit_code(["plan", str(CONFIGS / "transformers" / "zephyr_sft.yaml"), *arguments]) == 0
    assert "  warmup_steps = 8  (warmup_ratio: written in the configuration)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["transformers", "llamafactory"])
@pytest.mark.parametrize("text", ["[1, 2]", "per_device_train_batch_size: [4", "a: b: c", "\x00", "- a\n- b: {"])
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_job(str(tmp_path / "broken.yaml"), framework=name)
    assert "\n" not in str(refused.value)


WRONG = ["x", [1], {"a": 1}, -1, 0, 1.5, True, float("nan"), float("inf"), 10**400, "1e999"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("transformers", "per_device_train_batch_size"),
        ("llamafactory", "gradient_accumulation_steps"),
    ],
)
def test_a_batch_that_is_no_number_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, field: str, value: object
) -> None:
    data: dict[str, object] = {field: value}
    for section in reversed(field.split(".")[:-1]):
        data = {section: {field.rpartition(".")[2]: value}}
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(data))
    assert exit_code(["check", str(file), "--world-size", "2", "--framework", name]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert f"{field} must be {'at most' if value == 10**400 else 'a whole number of at least 1'}" in printed.err
