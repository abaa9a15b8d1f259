"""Commands: how one is read, and those of Megatron-LM with the numbers of real ones, and wrong twins of them."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from countoff.cli import __main__ as cli
from countoff.plan.checks import check_job
from countoff.plan.job import RunPlan
from countoff.plan.launches import read_launch
from countoff.plan.readers import read_command, read_job
from tests.paths import GOLDEN

CONFIGS = GOLDEN / "configs"
# The ranks and data ranks, the samples per step and micro-batch, the steps, and those of the warm-up and of the decay.
NUMBERS: dict[str, tuple[int, int, int, int, int, tuple[int, int]]] = {
    "megatron/mixtral_8x7b.txt": (64, 16, 256, 1, 500_000, (500, 320_000)),
    "megatron/llama3_8b.txt": (8, 8, 128, 1, 15_258_789, (30_518, 15_228_272)),
    "megatron/mamba_800m.txt": (8, 8, 32, 4, 2_288_818, (1_563, 2_287_256)),
    "megatron/gpt3_175b.txt": (1024, 8, 1536, 1, 515_987, (11_540, 445_988)),
}
# The only fault of each wrong twin.
FAULTS = {
    "megatron/mixtral_8x7b.txt": (
        "silent",
        "horizon",
        "the last 180,000 of 500,000 steps have a learning rate of 0 and",
    ),
    "megatron/llama3_8b.txt": (
        "silent",
        "horizon",
        "--lr-decay-samples is 194,921,874 and --train-samples is 1,953,125,000",
    ),
    "megatron/mamba_800m.txt": (
        "stops",
        "batch",
        "--global-batch-size 48 is no multiple of --micro-batch-size 4 × 8 data",
    ),
    "megatron/gpt3_175b.txt": (
        "stops",
        "batch",
        "--rampup-batch-size with --train-iters: Megatron-LM before April 2026",
    ),
}


def command(name: str) -> str:
    return (CONFIGS / name).read_text()


def test_every_golden_command_has_its_numbers_and_its_fault() -> None:
    found = {f"megatron/{path.name}" for path in (CONFIGS / "megatron").iterdir()}
    assert {name for name in found if ".wrong." not in name} == set(NUMBERS) == set(FAULTS)
    assert {name.replace(".wrong.", ".") for name in found if ".wrong." in name} == set(FAULTS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_real_command_is_read_and_has_no_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world_size, dp_degree, samples, micro_batch, steps, ends = NUMBERS[name]
    job = read_command([command(name)])
    plan = RunPlan.of(job, world_size=world_size)
    assert job.framework == "megatron"
    assert job.world_size == world_size
    assert plan.ranks.dp_degree == dp_degree
    assert plan.batches.global_batch_size == samples
    assert (job.batch_size, job.steps) == (micro_batch, steps)
    assert job.schedule is not None
    ending = job.schedule.in_run(steps)
    assert (ending.warmup, ending.at) == ends, ending
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--", command(name)])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "no fault found" in output
    assert len(output.splitlines()) <= 3


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_twin_has_its_fault_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    level, code, text = FAULTS[name]
    twin = command(name.replace(".txt", ".wrong.txt"))
    job = read_command([twin])
    faults = [issue for issue in check_job(job, world_size=job.world_size or 1) if issue.is_fault]
    assert [(issue.level, issue.code) for issue in faults] == [(level, code)]
    assert text in faults[0].text
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--", twin])
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


def megatron_faults(changes: dict[str, str | None], *, world_size: int = 8) -> list[tuple[str, str, str]]:
    """What is found with some flags changed; None leaves a flag out."""
    flags = {name: value for name, value in {**SOUND, **changes}.items() if value is not None}
    written = " ".join(f"{name} {value}" for name, value in flags.items())
    job = read_command([f"torchrun --nproc_per_node {world_size} pretrain_gpt.py {written}"])
    issues = check_job(job, world_size=world_size)
    return [(issue.level, issue.code, issue.text) for issue in issues]


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
def test_a_sound_megatron_run_has_no_issue(changes: dict[str, str | None]) -> None:
    assert megatron_faults(changes) == []


SAMPLES = {"--train-iters": None, "--train-samples": "64000", "--lr-warmup-iters": None}


@pytest.mark.parametrize(
    ("changes", "level", "code", "text"),
    [
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
                "the run ends before its schedule: right if the run is meant",
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
            {"--global-batch-size": "60"},
            "stops",
            "batch",
            "60 is no multiple of --micro-batch-size 2 × 8 data ranks = 16 samples",
        ),
        ({"--tensor-model-parallel-size": "3"}, "stops", "dims", "the dims do not fit 8 ranks"),
        (
            {**SAMPLES, "--rampup-batch-size": "16 8 900"},
            *(
                "stops",
                "batch",
                "its size 24 is no multiple of --micro-batch-size 2 × 8 data ranks = 16 samples: megatron",
            ),
        ),
        (
            {"--global-batch-size": None, "--step-batch-size-schedule": '"0:16 1M:64"'},
            *(
                "silent",
                "horizon",
                "grows to 64 samples, and Megatron-LM counts the decay in batches of 16 (--micro-batch-size",
            ),
        ),
    ],
)
def test_a_fault_of_a_megatron_run_is_found(changes: dict[str, str | None], level: str, code: str, text: str) -> None:
    issues = megatron_faults(changes)
    assert [(level, code)] == [issue[:2] for issue in issues]
    assert text in issues[0][2]


@pytest.mark.parametrize(
    "changes",
    [
        {"--lr-decay-samples": "64000"},
        {"--train-samples": "64000"},
        {"--lr-warmup-fraction": "0.1"},
        {"--min-lr": "1e-3"},
        {"--lr-decay-style": "WSD"},
        {"--context-parallel-size": "4", "--seq-length": "1020"},
        {**SAMPLES, "--rampup-batch-size": "16 20 900"},
        {"--micro_batch_size": "4"},
    ],
)
def test_what_megatron_refuses_at_its_start_is_left_to_it(changes: dict[str, str | None]) -> None:
    assert megatron_faults(changes) == []


def test_a_ramp_of_the_command_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--", command("megatron/gpt3_175b.txt")])
    assert ended.value.code == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["steps of the ramp"], rows["steps"]) == ("19,802", "515,987")
    assert int(rows["samples of the run"].replace(",", "")) <= 768_000_000


def test_a_run_in_samples_has_fewer_steps_with_a_larger_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--global-batch-size", "64", "--", command("megatron/mamba_800m.txt")])
    assert "steps                                  1,144,409\n" in capsys.readouterr().out


def test_a_schedule_of_composer_follows_the_steps_of_epochs(tmp_path: Path) -> None:
    (tmp_path / "composer.yaml").write_text(
        "max_duration: 2ep\nglobal_train_batch_size: 4\ndevice_train_microbatch_size: 4\n"
        "scheduler: {name: cosine_with_warmup, t_warmup: 0.1dur, alpha_f: 0.0}\noptimizer: {lr: 0.1}\n"
    )
    job = read_job(str(tmp_path / "composer.yaml"))
    assert job.schedule is not None
    steps = RunPlan.of(dataclasses.replace(job, dataset_size=200), world_size=1).batches.total_steps
    assert steps == 100
    ending = job.schedule.in_run(100)
    assert (ending.warmup, ending.at) == (10, 100)


LAUNCHERS = {
    "torchrun --nproc_per_node 8 --nnodes 2 train.py": 16,
    "torchrun --nproc-per-node=8 --nnodes=1:1 train.py": 8,
    "torchrun --nproc_per_node gpu train.py": None,
    "torchrun --nproc_per_node 8 --nnodes 1:4 train.py": None,
    "OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc_per_node 4 -m my.train": 4,
    "accelerate launch --num_processes 16 --num_machines 2 train.py": 16,
    "python -m accelerate.commands.launch --num_processes 4 train.py": 4,
    "deepspeed --num_gpus 8 --num_nodes 2 train.py": 16,
    "srun /opt/bin/torchrun --nproc_per_node 8 train.py": 8,
    "python train.py --nproc_per_node 8": None,
    "": None,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_gives_the_ranks(launcher: str) -> None:
    """Those that a command does not say are not guessed."""
    job = read_command([f"{launcher} --per_device_train_batch_size 4"])
    assert (job.framework, job.batch_size, job.world_size) == ("transformers", 4, LAUNCHERS[launcher])


def test_the_words_of_a_command_and_one_string_are_the_same() -> None:
    command = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size=4 --max_steps 100 --run_name 'a b'"
    assert read_command([command]) == read_command(shlex.split(command))


def test_flags_are_numbers_words_and_switches() -> None:
    """A number below 0 is a value, a short option is none, and the last of equal flags counts."""
    command = "a.py --a 1 --b -1 --c 2e-5 --d True --e --f x y -v 7 --a 3 --g ''"
    flags = {"--a": 3, "--b": -1, "--c": 2e-5, "--d": True, "--e": True, "--f": ["x", "y", 7], "--g": ""}
    assert read_launch([command]).flags == flags


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun train.py --lr 0.1", "the command has flags of no framework that countoff knows: give --framework"),
        ("a.py --micro-batch-size 1 --num_train_epochs 1", "the command has flags of megatron and transformers: give "),
        ("train.py --per_device_train_batch_size x", "train.py: per_device_train_batch_size must be a whole number of"),
        ("train.py 'a", "the command is no command of a shell: no closing quotation"),
    ],
)
def test_a_command_that_is_no_run_is_refused_in_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--world-size", "8", "--", command])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"countoff: {message}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.yaml", "--", "train.py"], "give a configuration, or a command after --, not both"),
        ([], "give a configuration, or a command after --: countoff check -- torchrun … train.py …"),
        (["--", "train.py --num_train_epochs 1"], "how many ranks? the command does not say; give --world-size N"),
    ],
)
def test_a_check_needs_one_thing_to_read(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"countoff: {message}")
