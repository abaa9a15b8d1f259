"""Mistakes in a configuration: each is found, at its level and with its numbers, and nothing else is found."""

import json
import math
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from countoff.plan.checks import check_job
from countoff.plan.issues import ConfigIssue, worst_first
from countoff.plan.job import Job
from countoff.plan.readers import read_job, torchtitan_python, torchtitan_toml


def found(path: Path, text: str, *, world_size: int) -> list[ConfigIssue]:
    path.write_text(dedent(text))
    return check_job(read_job(str(path)), world_size=world_size)


def faults(issues: list[ConfigIssue]) -> list[tuple[str, str]]:
    return [(issue.level, issue.code) for issue in issues if issue.is_fault]


TITAN = """
    [training]
    local_batch_size = 2
    global_batch_size = {batch}
    seq_len = {seq_len}
    steps = {steps}
    [lr_scheduler]
    warmup_steps = {warmup}
    {schedule}
    [parallelism]
    tensor_parallel_degree = {tp}
    context_parallel_degree = {cp}
    pipeline_parallel_degree = {pp}
    pipeline_parallel_microbatch_size = {micro}
    """
SOUND = {
    "batch": 64,
    "seq_len": 2048,
    "steps": 100,
    "warmup": 10,
    "schedule": "",
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "micro": 1,
}


def titan(path: Path, *, world_size: int, **changes: object) -> list[ConfigIssue]:
    return found(path / "titan.toml", TITAN.format(**{**SOUND, **changes}), world_size=world_size)


@pytest.mark.parametrize("changes", [{}, {"tp": 2}, {"tp": 2, "cp": 2}, {"pp": 2}, {"batch": -1}, {"warmup": 0}])
def test_a_sound_torchtitan_config_has_no_fault(tmp_path: Path, changes: dict[str, object]) -> None:
    assert faults(titan(tmp_path, world_size=16, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "fault", "text"),
    [
        ({"tp": 8}, 4, ("stops", "dims"), "tp 8"),
        ({"tp": 3}, 16, ("stops", "dims"), "multiply to 3, which does not divide world_size 16"),
        ({"batch": 50}, 16, ("stops", "batch"), "training.global_batch_size 50 is no multiple of"),
        ({"batch": 50}, 16, ("stops", "batch"), "32 or 64 would do"),
        ({"warmup": 100}, 16, ("silent", "warm-up"), "cuts the warm-up to 100 and the learning rate never decays"),
        ({"warmup": 200}, 16, ("silent", "warm-up"), "lr_scheduler.warmup_steps is 200 and training.steps is 100"),
        ({"schedule": "total_steps = 50"}, 16, ("silent", "horizon"), "from step 52 on the learning rate is negative"),
        (
            {"schedule": "total_steps = 50\ndecay_type = 'sqrt'"},
            16,
            ("silent", "horizon"),
            "from step 52 on the learning rate is negative",
        ),
        (
            {"schedule": "total_steps = 50\ndecay_type = 'cosine'\nmin_lr_factor = 0.1"},
            16,
            ("silent", "horizon"),
            "the schedule ends 50 steps early, and the learning rate rises again",
        ),
    ],
)
def test_a_mistake_in_a_torchtitan_config_is_found(
    tmp_path: Path, changes: dict[str, object], world_size: int, fault: tuple[str, str], text: str
) -> None:
    indented = {name: str(value).replace("\n", "\n    ") for name, value in changes.items()}
    issues = titan(tmp_path, world_size=world_size, **indented)
    assert faults(issues) == [fault]
    assert text in issues[0].text
    assert "\n" not in issues[0].line


def test_a_default_is_marked_as_one(tmp_path: Path) -> None:
    """A finding quotes only what the file holds; a framework's default is called one."""
    (issue,) = found(tmp_path / "titan.toml", "[training]\nsteps = 100\n", world_size=8)
    assert issue.text.startswith("lr_scheduler.warmup_steps is 200 by default and training.steps is 100: ")
    short = found(tmp_path / "lingua.yaml", "grad_acc_steps: 1\noptim: {lr: 3.0e-4}\n", world_size=1)
    assert short[0].text.startswith("optim.warmup is 2,000 by default and steps is 1,000 by default: ")


def test_the_worst_mistake_comes_first(tmp_path: Path) -> None:
    issues = titan(tmp_path, world_size=16, batch=50, tp=2, warmup=100)
    assert faults(issues) == [("silent", "warm-up"), ("stops", "batch")]
    assert [issue.level for issue in worst_first(reversed(issues))] == [issue.level for issue in issues]


def test_a_run_that_ends_before_its_schedule_is_a_note(tmp_path: Path) -> None:
    issues = titan(tmp_path, world_size=16, schedule="total_steps = 1000")
    assert faults(issues) == []
    assert "the run ends after 100 steps" in issues[0].text


LINGUA = """
    steps: {steps}
    optim: {{lr: 3.0e-4, warmup: {warmup}}}
    distributed: {{fsdp_type: {fsdp}, dp_shard: {shard}, {replicate} tp_size: 1}}
    data: {{batch_size: 2, seq_len: 128{data}}}
    """


def lingua(path: Path, *, world_size: int, **changes: object) -> list[ConfigIssue]:
    sound = {"steps": 1000, "warmup": 100, "fsdp": "full_shard", "shard": 1, "replicate": "", "data": ""}
    return found(path / "lingua.yaml", LINGUA.format(**{**sound, **changes}), world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 8, 256])
def test_a_sound_lingua_config_has_no_fault(tmp_path: Path, world_size: int) -> None:
    assert faults(lingua(tmp_path, world_size=world_size)) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "fault", "text"),
    [
        ({"warmup": 2000}, 8, ("silent", "warm-up"), "the learning rate only rises, to 0.4995 of the configured one"),
        ({"warmup": 1000}, 8, ("stops", "warm-up"), "lingua divides by zero after the last step"),
        (
            {"replicate": "dp_replicate: 4,"},
            8,
            ("silent", "override"),
            "distributed.dp_replicate 4 does not fit 8 ranks",
        ),
        ({"shard": 3}, 8, ("stops", "dims"), "which does not divide world_size 8"),
        ({"shard": 8}, 16, ("silent", "dp-rank"), "37.5 % of the data is never read"),
        ({"shard": 32}, 64, ("silent", "dp-rank"), "46.9 % of the data is never read"),
        ({"shard": 8}, 24, ("silent", "dp-rank"), "41.7 % of the data is never read"),
        (
            {"shard": 4},
            32,
            ("stops", "dp-rank"),
            "16 of 32 ranks have a dp_rank outside 0 to 31 (rank 16: 32, the largest 59)",
        ),
    ],
)
def test_a_mistake_in_a_lingua_config_is_found(
    tmp_path: Path, changes: dict[str, object], world_size: int, fault: tuple[str, str], text: str
) -> None:
    issues = lingua(tmp_path, world_size=world_size, **changes)
    assert faults(issues) == [fault]
    assert text in issues[0].text


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_linguas_wrong_factor_can_be_right_by_chance(tmp_path: Path, world_size: int) -> None:
    """With one replica, no shards, or as many replicas as shards, the wrong factor has no effect."""
    # One replica, no shards, or as many replicas as shards.
    shard = {4: 2, 8: 8, 16: 4}[world_size]
    assert faults(lingua(tmp_path, world_size=world_size, shard=shard)) == []


@pytest.mark.parametrize(
    ("chunks", "level", "text"),
    [
        (20, "silent", "reads the first 8, and 12 (60 % of the files) are never read"),
        (8, None, ""),
        (4, None, ""),
        (3, None, ""),
        (0, None, ""),
    ],
)
def test_linguas_chunks_must_fit_its_data_ranks(tmp_path: Path, chunks: int, level: str | None, text: str) -> None:
    (tmp_path / "books").mkdir()
    for number in range(chunks):
        (tmp_path / "books" / f"books.chunk.{number:02}.jsonl").touch()
    issues = lingua(tmp_path, world_size=8, data=f", root_dir: {tmp_path}, sources: {{books: 1.0}}")
    assert faults(issues) == ([] if level is None else [(level, "chunks")])
    assert text in issues[0].text


@pytest.mark.parametrize(
    ("given", "fault", "text"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            ("stops", "batch"),
            "64 is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 1 × 8 data ranks = 32",
        ),
        # The batches of all data ranks, where those of one are expected.
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16},
            ("stops", "batch"),
            "= 512: gradient_accumulation_steps is that of one rank, and must not count the batches of all data ranks",
        ),
        # DeepSpeed floors before it compares: 30 // 4 // 8 is 0 batches.
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
            ("stops", "batch"),
            "30 is no multiple of train_micro_batch_size_per_gpu 4 × 8 data ranks = 32 samples: 32 would do",
        ),
        ({"train_batch_size": 63}, ("stops", "batch"), "56 or 64 would"),
        # All ranks counted as data ranks: 8 ranks in tensor-parallel pairs are 4 shares.
        (
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 1,
                "tensor_parallel": {"autotp_size": 2},
            },
            ("stops", "batch"),
            "× 4 data ranks = 32: it would be right if all 8 ranks read their own data",
        ),
    ],
)
def test_a_mistake_in_a_deepspeed_config_is_found(
    tmp_path: Path, given: dict[str, object], fault: tuple[str, str], text: str
) -> None:
    issues = found(tmp_path / "ds.json", json.dumps(given), world_size=8)
    assert faults(issues) == [fault]
    assert text in issues[0].text


DEEPSPEED = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("warmup", "total", "steps", "text"),
    [
        (
            2000,
            1000,
            None,
            "warmup_num_steps is 2,000 and scheduler.params.total_num_steps is 1,000: the learning rate ",
        ),
        (
            1000,
            1000,
            None,
            "no step is left for the decay; set scheduler.params.warmup_num_steps below 1,000",
        ),
        (999, 1000, None, ""),
        (60, 50, 100, "warmup_num_steps is 60 and scheduler.params.total_num_steps is 50: the learning rate rises "),
        (100, 200, 100, "warmup_num_steps is 100 and steps is 100: the learning rate only rises, to 0.99 of the"),
    ],
)
def test_a_deepspeed_warm_up_that_is_too_long_is_found(
    tmp_path: Path, warmup: int, total: int, steps: int | None, text: str
) -> None:
    """A DeepSpeed warm-up that is as long as its schedule, or as the run, is found."""
    params = {"warmup_num_steps": warmup, "total_num_steps": total}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    (tmp_path / "ds.json").write_text(json.dumps({**DEEPSPEED, "scheduler": scheduler}))
    issues = check_job(replace(read_job(str(tmp_path / "ds.json")), steps=steps), world_size=4)
    texts = [issue.text for issue in issues if (issue.level, issue.code) == ("silent", "warm-up")]
    assert len(texts) == bool(text)
    assert not text or text in texts[0]


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (
            200,
            "is 200, and 200 is the number of batches of the run: optimizer steps × 2, the gradient accumulation; the "
            "schedule is stepped once per step, so the run ends at 0.5 of the schedule",
        ),
        (199, "so the run ends at 0.503 of the schedule; set scheduler.params.total_num_steps to 100"),
        (800, "800 is the number of batches that one process alone would need: optimizer steps × 2 × 4; the schedule"),
        (400, "the number of optimizer steps that one process alone would need: those of the run × 4; the schedule"),
        (300, ""),
        (100, ""),
    ],
)
def test_a_horizon_counted_in_another_unit_is_found(tmp_path: Path, total: int, text: str) -> None:
    """A horizon that is a multiple of the run was counted in batches, or over all ranks."""
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": total}}
    (tmp_path / "ds.json").write_text(json.dumps({**DEEPSPEED, "scheduler": scheduler}))
    issues = check_job(replace(read_job(str(tmp_path / "ds.json")), steps=100), world_size=4)
    assert faults(issues) == ([("silent", "horizon")] if text else [])
    assert not text or text in issues[0].text


def test_the_horizon_of_a_run_of_one_step_is_no_fault(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 0, "total_num_steps": 1}}
    (tmp_path / "ds.json").write_text(json.dumps({**DEEPSPEED, "scheduler": scheduler}))
    assert check_job(replace(read_job(str(tmp_path / "ds.json")), steps=1), world_size=4) == []


def test_a_longer_torchtitan_horizon_is_no_fault(tmp_path: Path) -> None:
    """A horizon after the end of a TorchTitan run is a note, also if it is a multiple of the run."""
    # 2 batches per step on 16 data ranks: with twice the steps, the run may be meant to end early.
    issues = titan(tmp_path, world_size=16, schedule="total_steps = 200")
    assert faults(issues) == []
    assert "200 is the number of batches of the run: optimizer steps × 2, the gradient accumulation" in issues[0].text


def test_shares_of_a_dataset_that_differ_by_a_batch_are_found() -> None:
    job = Job(batch_size=4, dataset_size=33, epochs=1, strided=True)
    found = check_job(job, world_size=4)
    assert faults(found) == [("stops", "uneven")]
    assert "33 in turns gives data ranks 2 to 3 batches" in found[0].text
    assert faults(check_job(replace(job, dataset_size=35), world_size=4)) == [("stops", "uneven")]
    assert faults(check_job(replace(job, dataset_size=32), world_size=4)) == []


@pytest.mark.parametrize(("total", "text"), [(50, "the last 50 steps have a learning rate of 0"), (100, "")])
def test_a_deepspeed_schedule_that_ends_too_early_is_found(tmp_path: Path, total: int, text: str) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": total}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "scheduler": scheduler}))
    job = read_job(str(tmp_path / "ds.json"))
    issues = check_job(replace(job, steps=100), world_size=8)
    assert faults(issues) == ([("silent", "horizon")] if text else [])
    assert not text or text in issues[0].text


@pytest.mark.parametrize(
    ("lines", "world_size", "fault", "text"),
    [
        ("num_processes: 8\nnum_machines: 4", 16, ("stops", "world-size"), "num_processes is 8"),
        # The processes of one machine, where those of all machines are expected.
        (
            "num_processes: 6\nnum_machines: 4",
            4,
            ("silent", "machines"),
            "Accelerate starts 1 on each, 4 in all; 6 per machine would be 24",
        ),
        (
            "num_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}",
            8,
            ("stops", "dims"),
            "= 4, but world_size is 8",
        ),
    ],
)
def test_a_mistake_in_an_accelerate_config_is_found(
    tmp_path: Path, lines: str, world_size: int, fault: tuple[str, str], text: str
) -> None:
    (tmp_path / "acc.yaml").write_text(f"compute_environment: LOCAL_MACHINE\n{lines}\n")
    issues = check_job(read_job(str(tmp_path / "acc.yaml")), world_size=world_size)
    assert faults(issues) == [fault]
    assert text in issues[0].text


COMPOSER = """
    max_seq_len: 2048
    global_train_batch_size: {batch}
    device_train_microbatch_size: {micro}
    max_duration: {duration}
    scheduler: {{name: cosine_with_warmup, t_warmup: {warmup}, t_max: {horizon}, alpha_f: 0.1}}
    """


def composer(path: Path, **changes: object) -> list[ConfigIssue]:
    sound = {"batch": 256, "micro": 4, "duration": "1000ba", "warmup": "100ba", "horizon": "1dur"}
    return found(path / "mpt.yaml", COMPOSER.format(**{**sound, **changes}), world_size=8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warmup": "0.1dur"},
        {"duration": "3ep", "warmup": "1ep", "horizon": "3ep"},
        {"duration": "1000000000tok"},
        {"micro": "auto"},
    ],
)
def test_a_sound_composer_config_has_no_issue(tmp_path: Path, changes: dict[str, object]) -> None:
    assert composer(tmp_path, **changes) == []


@pytest.mark.parametrize(
    ("changes", "fault", "text"),
    [
        ({"batch": 250}, ("stops", "batch"), "global_train_batch_size 250 does not divide into 8 data ranks"),
        ({"warmup": "1000ba"}, ("silent", "warm-up"), "the learning rate only rises"),
        ({"duration": "3ep", "warmup": "3ep"}, ("silent", "warm-up"), "t_warmup is 3ep and max_duration is 3ep"),
        ({"duration": "3ep", "horizon": "2ep"}, ("silent", "horizon"), "t_max is 2ep and max_duration is 3ep"),
        ({"horizon": "500ba"}, ("silent", "horizon"), "the schedule ends 500 steps early; the last step has 0.1"),
    ],
)
def test_a_mistake_in_a_composer_config_is_found(
    tmp_path: Path, changes: dict[str, object], fault: tuple[str, str], text: str
) -> None:
    issues = composer(tmp_path, **changes)
    assert faults(issues) == [fault]
    assert text in issues[0].text


@pytest.mark.parametrize(
    ("infinite", "world_size", "is_fault"), [(False, 4, True), (False, 1, False), (True, 4, False)]
)
def test_data_that_ends_at_different_steps_is_found(infinite: bool, world_size: int, is_fault: bool) -> None:
    """Data that each of several data ranks reads once is a fault."""
    config = SimpleNamespace(
        training=SimpleNamespace(steps=100),
        parallelism=SimpleNamespace(),
        lr_scheduler=SimpleNamespace(warmup_steps=10),
        dataloader=SimpleNamespace(infinite=infinite),
    )
    issues = check_job(torchtitan_python.read(config), world_size=world_size)
    assert faults(issues) == ([("stops", "uneven")] if is_fault else [])


@pytest.mark.parametrize("decay_type", ["linear", "sqrt"])
@pytest.mark.parametrize("lowest", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("ratio", [None, 0.1, 0.5, 1.0])
def test_torchtitans_rate_is_negative_from_the_named_step_on(
    decay_type: str, lowest: float, ratio: float | None
) -> None:
    """By the curve of its ``linear_warmup_stable_decay``, which goes on after the horizon."""
    warmup, horizon = 10, 50
    decay = horizon - warmup if ratio is None else min(round(horizon * ratio), horizon - warmup)

    def factor(step: int) -> float:
        progress = (step + 1 - warmup - (horizon - warmup + 1 - decay)) / decay
        curve = 1 - progress if decay_type == "linear" else 1 - math.sqrt(progress)
        return lowest + (1 - lowest) * curve

    first = next(step for step in range(horizon, 500) if factor(step) < -1e-12) + 1  # steps count from 1
    section = {"warmup_steps": warmup, "total_steps": horizon, "decay_type": decay_type, "min_lr_factor": lowest}
    section |= {} if ratio is None else {"decay_ratio": ratio}
    for steps, said in ((first - 1, False), (first, True)):
        job = torchtitan_toml.read({"training": {"steps": steps}, "lr_scheduler": section})
        texts = [issue.text for issue in check_job(job, world_size=1) if issue.code == "horizon"]
        assert any(f"from step {first:,} on the learning rate is negative" in text for text in texts) is said, texts
        assert len(texts) == 1


@pytest.mark.parametrize(("steps", "codes"), [(10_000, []), (5000, []), (2000, ["warm-up"])])
def test_a_run_that_is_made_shorter_by_a_flag_has_no_decay(steps: int, codes: list[str]) -> None:
    """That TorchTitan cuts a decay that the warm-up leaves no room for, as in its #950, is for its own log to say."""
    section = {"warmup_steps": 2000, "decay_ratio": 0.8}
    job = torchtitan_toml.read({"training": {"steps": 10_000}, "lr_scheduler": section})
    assert [issue.code for issue in check_job(replace(job, steps=steps), world_size=8)] == codes
