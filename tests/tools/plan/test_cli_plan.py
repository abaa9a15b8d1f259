"""`countoff plan` and `countoff check` at the prompt: what they print, and their errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from countoff.cli import __main__ as cli
from tests.paths import DOCS

QUESTION = """
    [training]
    batch_size = 2
    seq_len = 2048
    warmup_steps = 200
    steps = 1000
    data_parallel_degree = -1
    """
SHORT = """
    [training]
    steps = 100
    [lr_scheduler]
    warmup_steps = 10
    total_steps = 50
    """


class Output(NamedTuple):
    """What a command printed, and its exit code."""

    code: object
    out: str
    err: str


Run = Callable[[Sequence[str]], Output]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def called(arguments: Sequence[str]) -> Output:
        code: object = 0
        try:
            cli.main(list(arguments))
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return Output(code, printed.out, printed.err)

    return called


@pytest.fixture
def question(tmp_path: Path) -> str:
    (tmp_path / "titan.toml").write_text(dedent(QUESTION))
    return str(tmp_path / "titan.toml")


def table(text: str) -> dict[str, list[str]]:
    """The rows of a printed table: name, then one value per world size; two spaces separate columns."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_the_tokens_of_a_torchtitan_step_are_printed(run: Run, question: str) -> None:
    output = run(["plan", question, "--world-size", "4"])
    assert (output.code, output.err) == (0, "")
    assert table(output.out)["tokens per step"] == ["16,384"]
    assert "2 sequences × 2,048 tokens × 4 data ranks × 1 accumulation = 16,384 tokens per step" in output.out


def test_flags_alone_make_a_plan(run: Run) -> None:
    output = run(["plan", "--batch-size", "2", "--seq-len", "2048", "--nodes", "2", "--ranks-per-node", "2"])
    assert table(output.out)["tokens per step"] == ["16,384"]


def test_world_sizes_are_printed_side_by_side(run: Run, question: str) -> None:
    shown = table(run(["plan", question, "--world-size", "8,64", "--world-size", "512"]).out)
    assert shown["ranks"] == ["8", "64", "512"]
    assert shown["data ranks"] == ["8", "64", "512"]
    assert shown["tokens per step"] == ["32,768", "262,144", "2,097,152"]


def test_a_flag_wins_over_the_file_and_is_explained(run: Run, question: str) -> None:
    output = run(["plan", question, "--world-size", "4", "--batch-size", "3", "--tp", "2", "--explain"])
    assert table(output.out)["tokens per step"] == ["12,288"]
    assert "batch_size = 3  (--batch-size: a flag)" in output.out
    assert "sequence_length = 2,048  (training.seq_len: written in the configuration)" in output.out
    assert "pp = 1  (parallelism.pipeline_parallel_degree: not written: the default of torchtitan)" in output.out
    assert "dp_shard = 2  (training.data_parallel_degree: what the other dims leave over)" in output.out
    assert "data ranks = dp_replicate 1 × dp_shard 2 = 2" in output.out


def test_a_dataset_gives_epochs_repeats_and_totals(run: Run) -> None:
    flags = ["--batch-size", "2", "--accumulation", "4", "--dataset-size", "1001", "--epochs", "3"]
    shown = table(run(["plan", *flags, "--world-size", "4"]).out)
    assert shown["batches per epoch and data rank"] == ["126"]
    assert shown["steps"] == ["96"]
    assert shown["read twice"] == ["3"]
    assert shown["samples of the run"] == ["3,012"]
    dropped = table(run(["plan", *flags, "--world-size", "4", "--drop-last"]).out)
    assert dropped["dropped"] == ["1"]


def test_json_has_every_number_under_its_name(run: Run, question: str) -> None:
    output = run(["plan", question, "--world-size", "4", "--tp", "2", "--json"])
    plan = json.loads(output.out)
    assert plan["dims"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert (plan["world_size"], plan["dp_degree"]) == (4, 2)
    assert (plan["batch_size"], plan["global_batch_size"], plan["tokens_per_step"]) == (2, 4, 8192)
    assert (plan["total_steps"], plan["total_samples"], plan["total_tokens"]) == (1000, 4000, 8_192_000)
    assert plan["batches_per_epoch"] is None
    several = json.loads(run(["plan", question, "--world-size", "4,8", "--json"]).out)
    assert [one["world_size"] for one in several] == [4, 8]


def test_a_resumed_run_is_counted_in_whole_batches(run: Run) -> None:
    flags = ["plan", "--batch-size", "2", "--global-batch-size", "32", "--world-size", "4"]
    assert table(run([*flags, "--resume-samples", "1024"]).out)["batches done per data rank"] == ["128"]


MPT = """
    max_seq_len: 2048
    global_train_batch_size: 256
    max_duration: 2ep
    """


def test_a_run_in_epochs_needs_the_dataset_size(run: Run, tmp_path: Path) -> None:
    """A run in epochs has no totals until the size of the dataset is given."""
    (tmp_path / "mpt.yaml").write_text(dedent(MPT))
    output = run(["plan", str(tmp_path / "mpt.yaml"), "--world-size", "8"])
    assert "samples of the run" not in output.out
    assert (
        "note    length: max_duration is 2 epochs, and nothing says how long one is: give --dataset-size N"
        in output.out
    )
    shown = table(run(["plan", str(tmp_path / "mpt.yaml"), "--world-size", "8", "--dataset-size", "9999"]).out)
    assert (shown["steps"], shown["samples of the run"]) == (["80"], ["20,000"])


def test_a_length_flag_wins_over_the_other_unit(run: Run, question: str, tmp_path: Path) -> None:
    """A flag for steps replaces the file's epochs, and a flag for epochs replaces its steps."""
    flags = ["--world-size", "4", "--dataset-size", "1001"]
    # The file has 1,000 steps, or 2 epochs of 4 steps.
    assert table(run(["plan", question, *flags, "--epochs", "30"]).out)["steps"] == ["3,780"]
    (tmp_path / "mpt.yaml").write_text(dedent(MPT))
    assert table(run(["plan", str(tmp_path / "mpt.yaml"), *flags, "--steps", "700"]).out)["steps"] == ["700"]


@pytest.mark.parametrize(
    ("steps", "note"),
    [
        (100, "3 epochs are 378 steps, and --steps is 100: --steps ends the run, and --epochs has no effect"),
        (500, "3 epochs are 378 steps, and --steps is 500: --epochs ends the run, and --steps has no effect"),
        (378, ""),
    ],
)
def test_of_two_lengths_the_one_that_holds_is_named(run: Run, question: str, steps: int, note: str) -> None:
    """With steps and epochs, the shorter run holds, and a note says which one that is."""
    flags = ["--world-size", "4", "--dataset-size", "1001", "--epochs", "3", "--steps", str(steps)]
    output = run(["plan", question, *flags])
    assert table(output.out)["steps"] == [str(min(steps, 378))]
    assert output.out.splitlines()[-1] == f"note    length: {note}" if note else "length" not in output.out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--drop-last", "--dataset-size", "4"], "gives one of 4 data ranks 1 sample, and a batch of fewer than 2 is"),
        (
            ["--strided", "--dataset-size", "3"],
            "gives one of 4 data ranks 0 samples; use fewer data ranks, or more data",
        ),
    ],
)
def test_a_run_of_no_steps_is_a_fault_with_a_remedy(run: Run, question: str, flags: list[str], why: str) -> None:
    output = run(["plan", question, "--world-size", "4", *flags, "--epochs", "1"])
    assert table(output.out)["steps"] == ["0"]
    assert "silent  length: the run has 0 steps: --dataset-size " in output.out
    assert why in output.out
    assert run(["check", question, "--world-size", "4", *flags, "--epochs", "1"]).code == 1


def test_uneven_shares_show_fewest_and_most_batches(run: Run) -> None:
    """Shares that are not filled up show the fewest and the most batches of a data rank."""
    flags = ["--batch-size", "4", "--dataset-size", "33", "--epochs", "1", "--strided", "--world-size", "4"]
    shown = table(run(["plan", *flags]).out)
    assert shown["batches that data ranks have"] == ["2 to 3"]
    plan = json.loads(run(["plan", *flags, "--json"]).out)
    assert (plan["uneven_batches"], plan["samples_per_epoch"], plan["samples_dropped"]) == ([2, 3], 32, 1)


def test_a_file_that_begins_with_a_byte_order_mark_is_read(run: Run, question: str) -> None:
    Path(question).write_bytes(b"\xef\xbb\xbf" + Path(question).read_bytes())
    assert table(run(["plan", question, "--world-size", "4"]).out)["tokens per step"] == ["16,384"]


def test_a_check_applies_the_steps_flag_to_the_schedule(run: Run, question: str, tmp_path: Path) -> None:
    """The horizon of a schedule follows a flag for the steps, as it does in the framework."""
    # The file's horizon is that of its own 1,000 steps; a run of 500 has one of 500.
    assert run(["check", question, "--world-size", "4", "--steps", "500"]).out.endswith("no fault found\n")
    scheduler = "scheduler: {name: linear_decay_with_warmup, t_warmup: 0.1dur}"
    (tmp_path / "mpt.yaml").write_text(f"global_train_batch_size: 8\nmax_duration: 4800ba\n{scheduler}\n")
    output = run(["check", str(tmp_path / "mpt.yaml"), "--world-size", "4", "--steps", "100"])
    assert output.out.endswith("no fault found\n")


def test_a_fault_is_exit_1_and_a_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(dedent(SHORT))
    output = run(["check", str(tmp_path / "short.toml"), "--world-size", "4"])
    assert output.code == 1
    assert len(output.out.splitlines()) == 1
    assert output.out.startswith(
        "silent  horizon: lr_scheduler.total_steps is 50 and training.steps is 100: from step 52 "
    )


def test_an_ignored_fault_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(dedent(SHORT))
    output = run(["check", str(tmp_path / "short.toml"), "--world-size", "4", "--ignore", "horizon"])
    assert output.code == 0
    assert output.out == f"{tmp_path / 'short.toml'} (torchtitan) on 4 ranks: no fault found\n"


def test_an_unknown_code_is_refused_with_the_nearest(run: Run, question: str) -> None:
    done = run(["check", question, "--world-size", "4", "--ignore", "horizn"])
    assert done.code == 2
    assert "--ignore knows no code 'horizn'; did you mean horizon?; known: dims, " in done.err


PAGE = DOCS / "command-line.md"
FILES = dict(re.findall(r"`(\w+\.\w+)`[^\n]*\n\n```(?:toml|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL))
QUOTED = [
    (command, output)
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for command, output in re.findall(r"^\$ countoff (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize(("command", "output"), QUOTED, ids=[command for command, _ in QUOTED])
def test_the_page_quotes_what_is_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str
) -> None:
    """Each command that docs/command-line.md quotes prints what the page shows, for the files that the page shows."""
    assert set(re.findall(r"\w+\.(?:toml|yaml)", command)) <= set(FILES)
    for name, text in FILES.items():
        (tmp_path / name).write_text(dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert len(QUOTED) == 4
    printed = run(command.split())
    assert [line.rstrip() for line in (printed.out + printed.err).splitlines()] == output.splitlines()


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has a good configuration, one with a fault, and one that cannot be read."""
    (tmp_path / "good.toml").write_text(dedent(QUESTION))
    (tmp_path / "short.toml").write_text(dedent(SHORT))
    (tmp_path / "torn.toml").write_text("[training\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("several")
def test_several_configurations_are_checked_at_once(run: Run) -> None:
    """Each line names its file, and the exit code is that of the worst."""
    output = run(["check", "good.toml", "short.toml", "--world-size", "4"])
    assert (output.code, output.err) == (1, "")
    lines = output.out.splitlines()
    assert lines[0].startswith("good.toml: ") or lines[0] == "good.toml (torchtitan) on 4 ranks: no fault found"
    assert any(line.startswith("short.toml: silent  horizon: ") for line in lines)
    assert run(["check", "good.toml", "good.toml", "--world-size", "4"]).code == 0


@pytest.mark.usefixtures("several")
def test_one_that_cannot_be_read_leaves_the_others_checked(run: Run) -> None:
    output = run(["check", "torn.toml", "short.toml", "--world-size", "4"])
    assert output.code == 2
    assert "short.toml: silent  horizon: " in output.out
    (line,) = output.err.splitlines()
    assert line.startswith("countoff: torn.toml is not valid TOML: ")


@pytest.mark.usefixtures("several")
def test_several_configurations_as_json_are_a_list(run: Run) -> None:
    output = run(["check", "short.toml", "good.toml", "--world-size", "4", "--json"])
    assert [(each["config"], each["fault"]) for each in json.loads(output.out)] == [
        ("short.toml", True),
        ("good.toml", False),
    ]
    assert isinstance(json.loads(run(["check", "torn.toml", "good.toml", "--world-size", "4", "--json"]).out), list)


@pytest.mark.usefixtures("several")
def test_issues_are_annotations_for_github(run: Run) -> None:
    output = run(["check", "short.toml", "--world-size", "4", "--github"])
    assert output.code == 1
    issues = json.loads(run(["check", "short.toml", "--world-size", "4", "--json"]).out)["issues"]
    assert len(issues) == len(output.out.splitlines())
    for line, issue in zip(output.out.splitlines(), issues, strict=True):
        command = "notice" if issue["level"] == "note" else "error"
        text = issue["text"].replace("%", "%25")
        assert line == f"::{command} file=short.toml,title=countoff {issue['code']}::{text}"


@pytest.mark.usefixtures("several")
def test_json_and_annotations_exclude_each_other(run: Run) -> None:
    output = run(["check", "short.toml", "--world-size", "4", "--github", "--json"])
    assert output.code == 2
    assert "--json: not allowed with argument --github" in output.err


@pytest.mark.usefixtures("several")
def test_a_terminal_gets_colours_and_lines_wrapped_at_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    whole = run(["check", "short.toml", "--world-size", "4"]).out
    assert max(map(len, whole.splitlines())) > 60
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = run(["check", "short.toml", "--world-size", "4"]).out
    assert "\x1b[1;31msilent" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert max(map(len, plain.splitlines())) <= 60
    assert plain.split() == whole.split()


def test_a_terminal_that_knows_only_ascii_is_no_error(question: str) -> None:
    for command in (["plan", "--help"], ["plan", question, "--world-size", "4"]):
        done = subprocess.run(
            [sys.executable, "-m", "countoff.cli.__main__", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert done.stderr == ""
    assert "4 ranks: 2 sequences ? 2,048 tokens ? 4 data ranks" in done.stdout


def test_a_sound_config_is_exit_0(run: Run, question: str) -> None:
    output = run(["check", question, "--world-size", "4"])
    assert (output.code, output.out, output.err) == (0, f"{question} (torchtitan) on 4 ranks: no fault found\n", "")


@pytest.mark.parametrize(
    ("text", "flags", "left_out"),
    [
        ("per_device_train_batch_size: 4", [], {"length": "--dataset-size", "schedule": "--dataset-size"}),
        ("per_device_train_batch_size: 4", ["--dataset-size", "1000"], {}),
        ("per_device_train_batch_size: 4\nmax_steps: 100", [], {}),
        (
            "distributed_type: MULTI_GPU",
            ["--steps", "10"],
            {"batch": "--batch-size", "schedule": "a schedule that countoff knows"},
        ),
    ],
)
def test_a_check_says_what_it_has_not_checked(
    run: Run, tmp_path: Path, text: str, flags: list[str], left_out: dict[str, str]
) -> None:
    """It names each flag that would let it, in its last line and as JSON."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    command = ["check", str(path), "--world-size", "4", *flags]
    line = run(command).out.splitlines()[-1]
    assert ("not checked" in line) == bool(left_out)
    assert all(f"without {flag}: " in line for flag in left_out.values())
    found = json.loads(run([*command, "--json"]).out)["unchecked"]
    assert {each["what"]: each["without"] for each in found} == left_out


def test_several_world_sizes_are_checked_and_the_worst_counts(run: Run, question: str) -> None:
    output = run(["check", question, "--world-size", "7,4", "--tp", "2"])
    assert output.code == 1
    assert "7 ranks: stops   dims: " in output.out
    assert f"{question} (torchtitan) on 4 ranks: no fault found" in output.out


def test_a_check_is_json_with_the_same_exit_code(run: Run, question: str, tmp_path: Path) -> None:
    """One object, or a list for several world sizes, as `plan --json` prints them; null where there is no plan."""
    output = run(["check", question, "--world-size", "4", "--json"])
    assert (output.code, output.err) == (0, "")
    checked = json.loads(output.out)
    assert checked.pop("plan") == {
        key: value
        for key, value in json.loads(run(["plan", question, "--world-size", "4", "--json"]).out).items()
        if key not in ("format", "issues")
    }
    assert checked == {
        "format": 1,
        "config": question,
        "framework": "torchtitan",
        "world_size": 4,
        "fault": False,
        "issues": [],
        "unchecked": [],
    }
    (tmp_path / "short.toml").write_text(dedent(SHORT))
    output = run(["check", str(tmp_path / "short.toml"), "--world-size", "4,7", "--tp", "2", "--json"])
    assert (output.code, output.err) == (1, "")
    fitting, other = json.loads(output.out)
    assert [issue["code"] for issue in fitting["issues"]] == ["horizon"]
    assert fitting["issues"][0]["level"] == "silent"
    assert fitting["issues"][0]["text"].startswith("lr_scheduler.total_steps is 50 and training.steps is 100: from")
    assert (fitting["plan"]["dp_degree"], other["plan"]) == (2, None)
    assert [(one["world_size"], one["fault"]) for one in (fitting, other)] == [(4, True), (7, True)]
    assert [issue["code"] for issue in other["issues"]] == ["horizon", "dims"]


def test_an_ignored_issue_is_not_in_the_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(dedent(SHORT))
    output = run(["check", str(tmp_path / "short.toml"), "--world-size", "4", "--ignore", "horizon", "--json"])
    checked = json.loads(output.out)
    assert (output.code, checked["fault"], checked["issues"]) == (0, False, [])


@pytest.mark.parametrize("command", ["plan", "check"])
def test_what_cannot_be_read_is_one_line_and_no_json(run: Run, command: str) -> None:
    output = run([command, "gone.toml", "--world-size", "4", "--json"])
    assert output == (2, "", "countoff: gone.toml does not exist\n")


def test_the_ranks_of_accelerates_file_need_no_flag(run: Run, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 4\n")
    assert table(run(["plan", str(tmp_path / "acc.yaml"), "--batch-size", "8"]).out)["samples per step"] == ["32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "--world-size must be a whole number of at least 1, got 0"),
        (["--world-size", "-4"], "--world-size must be a whole number of at least 1, got -4"),
        (["--world-size", "4,,8"], "--world-size must be a whole number of at least 1, got nothing"),
        (["--world-size", "2.5"], "--world-size must be a whole number of at least 1, got 2.5"),
        (["--world-size", "4", "--batch-size", "3e-4"], "--batch-size must be a whole number of at least 1, got 3e-4"),
        (["--world-size", "4", "--seq-len", "many"], "--seq-len must be a whole number of at least 1, got many"),
        (["--world-size", "4", "--steps", "0"], "--steps must be a whole number of at least 1, got 0"),
        (["--world-size", "4", "--tp", "0"], "--tp must be a whole number of at least 1, or -1 for what is left over"),
        (["--world-size", "4", "--tp", "3"], "multiply to 3, which does not divide world_size 4"),
        (["--world-size", "4", "--dp-shard", "-1", "--dp-replicate", "-1"], "only one size may be -1"),
        (["--world-size", "4", "--dp-shard", "3"], "= 3, but world_size is 4"),
        (["--nodes", "2"], "--nodes needs --ranks-per-node"),
        (["--ranks-per-node", "2"], "--ranks-per-node needs --nodes"),
        (["--nodes", "2", "--ranks-per-node", "2", "--world-size", "4"], "not both"),
        ([], "titan.toml does not say; give --world-size N"),
        (["--world-size", "4", "--global-batch-size", "10"], "--global-batch-size 10 is no multiple of"),
        (["--world-size", "4", "--resume-samples", "1001"], "resume after 1000 or 1008"),
        (["--word-size", "4"], "there is no argument --word-size; did you mean --world-size?"),
        (["--world-size=4", "--batchsize=4"], "there is no argument --batchsize; did you mean --batch-size?"),
        (["--world-size", "4", "--q"], "there is no argument --q; see countoff plan --help"),
        (["--world-size"], "argument --world-size: expected one argument"),
        (["--world-size", "4", "--epochs", "3"], "--epochs needs --dataset-size N: nothing else says how long"),
        (["--world-size", "4", "--drop-last"], "--drop-last needs --dataset-size N"),
        (["--world-size", "4", "--strided"], "--strided needs --dataset-size N"),
    ],
)
def test_bad_flags_are_refused_in_one_line(run: Run, question: str, arguments: list[str], message: str) -> None:
    output = run(["plan", question, *arguments])
    assert (output.code, output.out) == (2, "")
    assert message in output.err
    assert output.err.startswith("countoff: ")
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["plan", "check"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.toml", None, "gone.toml does not exist"),
        ("empty.yaml", b"", "empty.yaml is empty"),
        ("binary.toml", b"\x89PNG\r\n\x1a\n\x00\xff", "binary.toml cannot be read: it is not text"),
        (
            "lingua.yaml",
            b"grad_acc_steps: 1\ndata: {batch_size: 3e-4}",
            "data.batch_size must be a whole number of at least 1, got 3e-4",
        ),
        (
            "titan.toml",
            b"[training]\nbatch_size = -1",
            "training.batch_size must be a whole number of at least 1, got -1",
        ),
        ("what.yaml", b"colour: blue", "give --framework"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    run: Run, tmp_path: Path, command: str, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    output = run([command, str(tmp_path / name), "--world-size", "4"])
    assert (output.code, output.out) == (2, "")
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_a_wrong_framework_is_refused(run: Run, question: str) -> None:
    output = run(["plan", question, "--world-size", "4", "--framework", "torchtitn"])
    assert output.code == 2
    assert output.err.startswith("countoff: unknown framework 'torchtitn'; did you mean torchtitan?; known: ")
    assert len(output.err.splitlines()) == 1


def test_a_dim_that_the_framework_lacks_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lingua.yaml").write_text("grad_acc_steps: 1\n")
    output = run(["plan", str(tmp_path / "lingua.yaml"), "--world-size", "4", "--pp", "2"])
    assert (output.code, output.err) == (
        2,
        "countoff: --pp: lingua has no such dim; it has dp_replicate, dp_shard, tp\n",
    )


@pytest.mark.parametrize("command", [[], ["plan"], ["check"], ["demo"]])
def test_every_help_teaches_by_example(run: Run, command: list[str]) -> None:
    output = run([*command, "--help"])
    assert output.code == 0
    assert f"    countoff {' '.join(command)}" in output.out


def test_no_command_at_all_shows_the_help(run: Run) -> None:
    assert "countoff plan" in run([]).out


def test_a_closed_pipe_is_no_error(question: str) -> None:
    script = "from countoff.cli.__main__ import main; main()"
    command = [sys.executable, "-c", script, "plan", question, "--world-size", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["check", "--help"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print('modules:', *sorted(sys.modules)))\n"
        "from countoff.cli.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {
        "torch",
        "rich",
        "yaml",
        "countoff.core.guard",
        "countoff.core.arithmetic.plan",
        "importlib.metadata",
    }


def test_a_plan_and_a_check_import_no_framework(question: str) -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print('modules:', *sorted(sys.modules)))\n"
        "from countoff.cli.__main__ import main; main()"
    )
    for command in ("plan", "check"):
        arguments = [sys.executable, "-c", script, command, question, "--world-size", "4"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
        assert not set(done.stdout.splitlines()[-1].split()) & {"torch", "numpy", "lightning", "composer", "accelerate"}


def test_a_huge_file_is_refused_before_it_is_read(run: Run, tmp_path: Path) -> None:
    """A sparse file of a terabyte, which nobody could read, takes no longer than one of 50 MB."""
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert run(["check", str(path), "--world-size", "4"]) == (
        2,
        "",
        f"countoff: {path} has more than 200,000 characters\n",
    )
