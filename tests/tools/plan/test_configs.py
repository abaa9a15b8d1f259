"""Each format is read into the same run, by its own names, and what cannot be read is refused in one line."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from countoff.plan.job import Job, RunPlan
from countoff.plan.readers import ConfigError, read_job


class ConfigDirectory:
    """A directory in which tests write configurations and read them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str, text: str, framework: str | None = None) -> Job:
        file = self.path / name
        file.write_text(dedent(text))
        return read_job(str(file), framework=framework)


@pytest.fixture
def configs(tmp_path: Path) -> ConfigDirectory:
    return ConfigDirectory(tmp_path)


ERAS = {
    "September 2024 and before": """
        [training]
        batch_size = 2
        seq_len = 2048
        warmup_steps = 5
        steps = 100
        data_parallel_degree = -1
        tensor_parallel_degree = 2
        [experimental]
        pipeline_parallel_degree = 2
        pipeline_parallel_microbatches = 2
        """,
    "end of 2024": """
        [training]
        batch_size = 2
        seq_len = 2048
        warmup_steps = 5
        steps = 100
        data_parallel_replicate_degree = 1
        data_parallel_shard_degree = -1
        tensor_parallel_degree = 2
        [experimental]
        pipeline_parallel_degree = 2
        """,
    "2025": """
        [training]
        local_batch_size = 2
        global_batch_size = -1
        seq_len = 2048
        steps = 100
        [lr_scheduler]
        warmup_steps = 5
        lr_min = 0.0
        [parallelism]
        data_parallel_shard_degree = -1
        tensor_parallel_degree = 2
        pipeline_parallel_degree = 2
        pipeline_parallel_microbatch_size = 1
        """,
}


@pytest.mark.parametrize("era", ERAS)
def test_torchtitans_toml_of_every_era_is_the_same_run(configs: ConfigDirectory, era: str) -> None:
    job = configs.read("titan.toml", ERAS[era])
    plan = RunPlan.of(job, world_size=16)
    assert plan.ranks.sizes == (2, 1, 4, 1, 2)
    assert plan.batches.tokens_per_step == 2 * 2048 * 4
    assert job.schedule is not None
    assert (job.schedule.warmup, job.schedule.horizon) == (5, None)
    assert job.pipeline_microbatches == 2
    assert job.issues == ()


def test_missing_torchtitan_fields_have_their_defaults(configs: ConfigDirectory) -> None:
    job = configs.read("titan.toml", "[training]\n")
    assert (job.batch_size, job.sequence_length, job.steps) == (8, 2048, 10_000)
    assert not job.origins["batch_size"].given
    assert RunPlan.of(job, world_size=8).batches.tokens_per_step == 8 * 2048 * 8


def test_a_number_keeps_the_name_of_its_field(configs: ConfigDirectory) -> None:
    job = configs.read("titan.toml", "[training]\nbatch_size = 3\n")
    assert job.key("batch_size") == "training.batch_size"
    assert job.origins["batch_size"].given


def test_two_names_of_one_number_that_disagree_are_refused(configs: ConfigDirectory) -> None:
    with pytest.raises(ConfigError, match=r"training\.local_batch_size is 2 and training\.batch_size is 4: keep one"):
        configs.read("titan.toml", "[training]\nlocal_batch_size = 2\nbatch_size = 4\n")


LINGUA = """
    steps: 60_000
    grad_acc_steps: 2
    optim: {lr: 3.0e-4, warmup: 5000, lr_min_ratio: 1.0e-6}
    distributed: {fsdp_type: full_shard, dp_shard: 8, dp_replicate: 2, tp_size: 1}
    data: {batch_size: 4, seq_len: 4096, n_views: 2, sources: {books: 1.0}}
    """


def test_linguas_views_of_a_batch_do_not_multiply_its_tokens(configs: ConfigDirectory) -> None:
    plan = RunPlan.of(configs.read("lingua.yaml", LINGUA), world_size=16)
    assert plan.batches.tokens_per_step == 4 * 4096 * 2 * 16
    assert plan.batches.total_steps == 60_000


def test_an_exponent_without_dot_is_a_number(configs: ConfigDirectory) -> None:
    """PyYAML reads 1e-6 as text, and OmegaConf, with which lingua and Composer read it, as a number."""
    schedule = configs.read("lingua.yaml", LINGUA.replace("1.0e-6", "1e-6")).schedule
    assert schedule is not None
    assert schedule.lowest == 1e-6


def test_an_exponent_without_dot_is_not_a_count(configs: ConfigDirectory) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size must be a whole number of at least 1, got 3e-4"):
        configs.read("lingua.yaml", LINGUA.replace("batch_size: 4", "batch_size: 3e-4"))


def test_linguas_chunks_are_counted_if_the_data_is_here(configs: ConfigDirectory) -> None:
    for source, chunks in (("books", 3), ("code", 2)):
        (configs.path / source).mkdir()
        for number in range(chunks):
            (configs.path / source / f"{source}.chunk.{number:02}.jsonl").touch()
    sources = f"root_dir: {configs.path}, sources: {{books: 1.0, code: 1.0, gone: 1.0}}"
    job = configs.read("lingua.yaml", LINGUA.replace("sources: {books: 1.0}", sources))
    assert job.chunks == {"books": 3, "code": 2}


@pytest.mark.parametrize(
    ("given", "batch", "accumulation"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 2),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, 4),
        ({"train_batch_size": 64}, 8, 1),
        ({"train_micro_batch_size_per_gpu": 8}, 8, 1),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            2,
            1,
        ),
    ],
)
def test_any_two_deepspeed_batch_numbers_give_the_third(
    configs: ConfigDirectory, given: dict[str, object], batch: int, accumulation: int
) -> None:
    plan = RunPlan.of(configs.read("ds.json", json.dumps(given)), world_size=8)
    assert (plan.batch_size, plan.gradient_accumulation_steps) == (batch, accumulation)
    assert plan.batches.global_batch_size == batch * accumulation * 8


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "OneCycleLR", "WarmupCosineLR"])
def test_a_scheduler_that_deepspeed_can_make_is_no_issue(configs: ConfigDirectory, kind: str) -> None:
    text = '{"train_batch_size": 4, "scheduler": {"type": "%s", "params": {"last_batch_iteration": -1}}}'
    assert configs.read("ds.json", text % kind).issues == ()


def test_deepspeeds_tensor_parallel_ranks_share_their_data(configs: ConfigDirectory) -> None:
    text = json.dumps({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}})
    plan = RunPlan.of(configs.read("ds.json", text), world_size=8)
    assert (plan.ranks.dp_degree, plan.batches.global_batch_size) == (2, 4)


def test_accelerates_processes_are_the_world_size(configs: ConfigDirectory) -> None:
    job = configs.read("acc.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 16\nnum_machines: 2\n")
    assert job.world_size == 16
    assert job.batch_size is None
    assert job.rank_map(16).dp_degree == 16


def test_accelerates_parallelism_config_is_a_mesh(configs: ConfigDirectory) -> None:
    text = """
        compute_environment: LOCAL_MACHINE
        num_processes: 16
        gradient_accumulation_steps: 4
        parallelism_config:
          parallelism_config_dp_replicate_size: 2
          parallelism_config_dp_shard_size: 4
          parallelism_config_tp_size: 2
        """
    job = configs.read("acc.yaml", text)
    assert job.rank_map(16).dp_degree == 8
    assert job.gradient_accumulation_steps == 4
    assert job.issues == ()


COMPOSER = """
    variables: {max_seq_len: 2048}
    max_seq_len: ${variables.max_seq_len}
    global_train_batch_size: 256
    device_train_microbatch_size: 4
    max_duration: 4800ba
    scheduler: {name: cosine_with_warmup, t_warmup: 100ba, alpha_f: 0.1}
    optimizer: {name: decoupled_adamw, lr: 6.0e-4}
    train_loader: {name: text, dataset: {max_seq_len: "${max_seq_len}"}, drop_last: true}
    """


def test_composers_global_batch_is_shared_by_the_data_ranks(configs: ConfigDirectory) -> None:
    job = configs.read("mpt.yaml", COMPOSER)
    plan = RunPlan.of(job, world_size=8)
    assert (plan.batch_size, plan.batches.global_batch_size) == (32, 256)
    assert plan.batches.tokens_per_step == 256 * 2048
    assert (job.steps, job.drop_last) == (4800, True)
    assert job.schedule is not None
    assert (job.schedule.warmup, job.schedule.in_run(4800).at) == (100, 4800)


@pytest.mark.parametrize(
    ("duration", "steps", "epochs"),
    [("1ep", None, 1), ("1000sp", 4, None), ("1_000_000tok", 2, None), ("1e4ba", 10_000, None), (3, None, 3)],
)
def test_composers_durations_are_read_in_their_unit(
    configs: ConfigDirectory, duration: str | int, steps: int | None, epochs: int | None
) -> None:
    job = configs.read("mpt.yaml", COMPOSER.replace("4800ba", str(duration)))
    assert (job.steps, job.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("max_duration: 3 weeks", r"max_duration must be a time with a unit, such as 4800ba"),
        ("max_duration: 1.5ba", r"max_duration must be a whole number in its unit, got 1\.5"),
        ("max_seq_len: ${nowhere.to.be}", r"\$\{nowhere\.to\.be\} refers to a field that is not in the file"),
        ("max_seq_len: ${max_seq_len}", r"refer to each other in a circle"),
    ],
)
def test_a_contradictory_composer_file_is_refused(configs: ConfigDirectory, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.read("mpt.yaml", wrong, "composer")


PYTHON = """
    from types import SimpleNamespace as N

    def small():
        return N(
            training=N(local_batch_size=8, global_batch_size=64, seq_len=2048, steps=10),
            parallelism=N(data_parallel_shard_degree=-1, pipeline_parallel_degree=1),
            lr_scheduler=N(warmup_steps=2, total_steps=None, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0),
        )

    def broken():
        raise RuntimeError("no such\\nmodel")

    def other():
        return N(batch_size=4)
    """


@pytest.fixture
def titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_titan.py").write_text(dedent(PYTHON))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_titan", raising=False)
    return "my_titan"


def test_torchtitans_python_config_is_called(titan: str) -> None:
    plan = RunPlan.of(read_job(f"{titan}:small"), world_size=4)
    assert (plan.gradient_accumulation_steps, plan.batches.tokens_per_step) == (2, 131_072)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (":nothing", "my_titan has no function 'nothing': expected module:function"),
        (":", "my_titan has no function ''"),
        (":broken", "my_titan:broken failed: RuntimeError: no such model"),
        (":other", "a TorchTitan config has a training section; SimpleNamespace has none"),
    ],
)
def test_a_bad_python_config_is_refused_in_one_line(titan: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_job(titan + function)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_of_the_current_folder_is_found(titan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nearby_titan.py").write_text(f"from {titan.partition(':')[0]} import small\n")
    monkeypatch.chdir(tmp_path / "mine")
    before = list(sys.path)
    assert read_job("nearby_titan:small") == read_job(f"{titan}:small")
    assert sys.path == before


def test_a_missing_module_is_named(titan: str) -> None:
    with pytest.raises(ConfigError, match="there is no module no_such_titan here"):
        read_job("no_such_titan:small")


def test_a_module_with_a_missing_import_names_it(titan: str, tmp_path: Path) -> None:
    (tmp_path / "needy_titan.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match="needy_titan needs no_such_package_at_all, which is not installed"):
        read_job("needy_titan:small")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.toml", b"", "is empty"),
        ("spaces.yaml", b" \n\n", "is empty"),
        ("binary.yaml", bytes(range(256)), "cannot be read: it is not text"),
        ("list.yaml", b"- 1\n- 2\n", "must hold named fields, got list"),
        ("bad.yaml", b"a: [1, 2\nb: }", "is not valid YAML: line 2, column 2: expected ',' or ']', but got ':'"),
        (
            "colons.yaml",
            b"this: is: not: [yaml",
            "is not valid YAML: line 1, column 9: mapping values are not allowed here",
        ),
        ("bell.yaml", b"a: 1\nb: \a", "is not valid YAML: line 2: a character that YAML does not allow: '\\x07'"),
        ("bad.toml", b"[training\nsteps = 1", "is not valid TOML: "),
        ("bad.json", b"{'a': 1}", "is not valid JSON: "),
        ("deep.json", b"[" * 100_000, "is nested too deeply"),
        ("python.yaml", b"a: !!python/object/apply:os.system ['true']", "is not valid YAML: "),
        ("train.py", b"import torch", "is a program, which is not read: give its configuration, or the command that "),
        ("train.sh", b"torchrun a.py", "starts the training, after --: countoff check -- torchrun --nproc_per_node 8"),
        (
            "config.ini",
            b"a = 1",
            "must end in .toml, .json, .yaml, .yml, or be module:function, or a command after --",
        ),
        (
            "who.yaml",
            b"colour: blue",
            "is in no format that countoff knows by its fields: give --framework lingua | accelerate | composer | ",
        ),
        ("titan.yaml", b"training: {steps: 5}", "is in no format that countoff knows by its fields"),
        ("half.toml", b"[training]\nsteps = 1.5", "training.steps must be a whole number of at least 1, got 1.5"),
        (
            "minus.toml",
            b"[training]\nbatch_size = -2",
            "training.batch_size must be a whole number of at least 1, got -2",
        ),
        ("zero.toml", b"[training]\nseq_len = 0", "training.seq_len must be a whole number of at least 1, got 0"),
        ("true.toml", b"[training]\nsteps = true", "training.steps must be a whole number of at least 1, got True"),
        ("endless.yaml", b"max_duration: 1e999ep", "max_duration is too large: 1e999ep"),
        ("scalar.toml", b"training = 3", "training must be a section with fields, got 3"),
        ("curve.toml", b"[training]\n[lr_scheduler]\ndecay_type = 'line'", "one of linear, sqrt, cosine, got 'line'"),
        ("tp.toml", b"[parallelism]\ntensor_parallel_degree = -1", "tensor_parallel_degree must be a whole number"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_job(str(tmp_path / name))
    assert message in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml does not exist"):
        read_job(str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"is not a file"):
        read_job(str(tmp_path))


def test_an_unknown_framework_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown framework 'lingva'; did you mean lingua"):
        read_job(str(tmp_path / "x.yaml"), framework="lingva")


@pytest.mark.parametrize("name", ["train_micro_batch_size_per_gpus", "gradient_acumulation_steps"])
def test_a_misspelt_count_that_deepspeed_ignores_is_an_issue(configs: ConfigDirectory, name: str) -> None:
    """Any other name that countoff does not know is DeepSpeed's business."""
    (issue,) = configs.read("ds.json", json.dumps({"train_batch_size": 4, name: 2, "steps_per_print": 5})).issues
    assert (issue.level, issue.code) == ("silent", "unknown-field")
    assert f"there is no {name}; did you mean " in issue.text
