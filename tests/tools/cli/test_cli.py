"""The command line: its help teaches, its errors are one line, and it imports a framework only where it needs one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from countoff.core import verdict
from countoff.core.checks import KINDS
from countoff.core.ending.shutdown import EXIT_CODE
from countoff.plan.issues import CODES
from tests.paths import ROOT, SOURCE_PATH, SOURCE_ROOTS

EXTRA = ("rich", "jinja2", "markupsafe", "yaml", "tomli")
"""What the extra `cli` brings, and a plain install does not."""
HEAVY = {"torch", "numpy", "sklearn", "lightning", "pytorch_lightning"}
CALL = "from countoff.cli.__main__ import main\nmain()"


def run(arguments: Sequence[str], *, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `countoff` with these arguments in a fresh interpreter, which prints the imported modules at its end."""
    path = list(map(str, SOURCE_ROOTS))
    script = f"""
import atexit, sys
sys.path[:0] = {path}
sys.argv = {["countoff", *arguments]}
atexit.register(lambda: print("modules:", *sorted({{name.split(".")[0] for name in sys.modules}})))
{before}
{CALL}
"""
    known = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment}
    known = {name: value for name, value in known.items() if value}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=known
    )


def explained(*arguments: str, **environment: str) -> str:
    """What `countoff explain` prints."""
    finished = run(["explain", *arguments], **environment)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout.rpartition("modules: ")[0]


def imported(finished: subprocess.CompletedProcess[str]) -> set[str]:
    return set(finished.stdout.splitlines()[-1].removeprefix("modules: ").split())


def without(*modules: str) -> str:
    """Code with which an interpreter does not find these modules."""
    return f"""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {modules} else find(name, package)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["--version"], ["explain"], ["explain", "LostRank"]]
)
def test_help_and_version_import_no_framework(arguments: list[str]) -> None:
    finished = run(arguments)
    assert finished.returncode == 0, finished.stderr
    assert "countoff" in finished.stdout
    assert not imported(finished) & HEAVY


def test_the_help_shows_the_line_to_add_and_the_demo() -> None:
    printed = run(["--help"]).stdout
    assert "Trainer(callbacks=[Countoff()])" in printed
    assert "countoff demo\n" in printed


def test_the_help_of_plan_says_what_its_exit_code_means() -> None:
    """It is 0 also where a line shows a fault; to fail on that is for `check`."""
    printed = " ".join(run(["plan", "--help"]).stdout.split())
    assert 'Exit code: 0 if there is a plan, also one with a line such as "stops …" below it' in printed
    assert "countoff check counts as a fault, with exit code 1" in printed


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", ["", "plan", "check", "explain", "report", "top", "run", "demo"])
def test_help_has_examples_and_fits_the_terminal(command: str, columns: int) -> None:
    """Examples stay whole, and fit where there are 80 columns; a command or a flag is not cut at its dashes."""
    lines = run([*command.split(), "--help"], COLUMNS=str(columns)).stdout.rpartition("modules: ")[0].splitlines()
    examples = [line for line in lines if re.match(r"    \S", line)]
    assert any(line.startswith(f"    countoff {command}") for line in examples)
    assert max(map(len, examples)) <= 80
    assert max(len(line) for line in lines if line not in examples) <= columns
    assert not [line for line in lines if re.search(r"\w-$", line)]


def test_the_help_has_each_command_on_a_line() -> None:
    lines = run(["--help"], COLUMNS="80").stdout.splitlines()
    start = lines.index("  COMMAND")
    rows = [line.split(maxsplit=1) for line in lines[start + 1 :] if line.startswith("    ")]
    assert [row[0] for row in rows if len(row) == 2] == [
        *("plan", "check", "explain", "report", "top", "run", "demo", "notify")
    ]


@pytest.mark.parametrize("name", ["UnevenBatches", "unevenbatches"])
def test_a_kind_of_verdict_is_explained(name: str) -> None:
    """The section of the page is printed, with a message, cause and fix, and without Markdown."""
    text = explained(name)
    assert text.startswith("UnevenBatches\n\nRanks have different numbers of batches")
    assert "\n  countoff: UnevenBatches: rank 3 ran out of data" in text
    parts = [part for part in re.findall(r"^(\w+)\. ", text, re.MULTILINE) if part[0].isupper()]
    assert parts == ["Cause", "Fix"]
    assert not set("`#*") & set(text)
    assert "](" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_an_explanation_is_wrapped_at_words(width: int) -> None:
    """Nothing is cut off, whatever the width; long lines end at 100 columns."""
    page = (ROOT / "docs" / "verdicts.md").read_text().partition("\n## UnevenBatches\n")[2].partition("\n## ")[0]
    words = re.findall(r"[\w.]+", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", page))
    text = explained("UnevenBatches", COLUMNS=str(width))
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert re.findall(r"[\w.]+", text)[1:] == words


@pytest.mark.parametrize("width", ["80", "200"])
def test_in_a_pipe_no_line_ends_with_spaces(width: str) -> None:
    text = explained("UnevenBatches", "LostRank", COLUMNS=width)
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert text.endswith("\n")


def test_an_explanation_has_colours_only_where_they_are_wanted() -> None:
    assert "\x1b" not in explained("LostRank")
    assert "\x1b[33m" in explained("LostRank", NO_COLOR="", FORCE_COLOR="1", TERM="xterm")


def test_all_names_are_listed() -> None:
    """`countoff explain` alone lists each name with its meaning: kinds, errors, exit codes, codes of `check`."""
    lines = explained().splitlines()
    assert [line.split()[0] for line in lines] == [*KINDS, "DivergenceError", "SettingsError", "87", *CODES]
    assert all(len(line.split()) > 4 for line in lines)


def test_several_names_are_explained_at_once() -> None:
    text = explained("87", "settingserror", "dp-rank")
    assert text.startswith("87\n\ncountoff has ended a process after a verdict")
    assert "\nSettingsError\n\nAn option of countoff" in text
    assert (
        "\ndp-rank\n\nBy lingua's formula for the share that a rank reads, data stays unread. It is a code of countoff"
        in text
    )


def test_every_exception_and_exit_code_is_explained() -> None:
    """Each error that a user sees has its name in the list, or is one of a kind of verdict."""
    errors = {name for name, value in vars(verdict).items() if isinstance(value, type) and issubclass(value, Exception)}
    names = {each["name"] for each in json.loads(explained("--json"))}
    assert errors | {"SettingsError", str(EXIT_CODE)} <= names


def test_explanations_as_json() -> None:
    """One object for one name, a list for several: the name, its meaning in a line, and the text in Markdown."""
    one = json.loads(explained("--json", "LostRank"))
    assert (one["name"], one["meaning"]) == ("LostRank", KINDS["LostRank"].meaning)
    assert one["text"].startswith("A rank raised an exception")
    assert [each["name"] for each in json.loads(explained("--json", "LostRank", "87"))] == ["LostRank", "87"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("UnevenBatch", "did you mean UnevenBatches?"),
        ("lost-rank", "did you mean LostRank?"),
        ("weather", "countoff explain lists all names"),
        ("dprank", "did you mean dp-rank?"),
    ],
)
def test_an_unknown_kind_is_refused_in_one_line(name: str, hint: str) -> None:
    finished = run(["explain", name])
    assert finished.returncode == 2
    assert finished.stderr == f"countoff: nothing is called '{name}'; {hint}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dmeo"], "there is no command 'dmeo'; did you mean demo?"),
        (["chek", "train.toml", "--help"], "there is no command 'chek'; did you mean check?"),
        (["ex"], "there is no command 'ex'; did you mean explain?"),
        (["train"], "there is no command 'train'; countoff --help lists all commands"),
        (["--verison"], "there is no argument --verison; did you mean --version?"),
        (["notify", "--hepl"], "there is no argument --hepl; did you mean --help?"),
        (["explain", "--kind", "X"], "there is no argument --kind; see countoff explain --help"),
        (["report", ".", "--opne"], "there is no argument --opne; did you mean --open?"),
        (["top", ".", "--jsno"], "there is no argument --jsno; did you mean --json?"),
        (["demo", "--trace", "x"], "there is no argument --trace; did you mean --trace-dir?"),
        (["check", "x", "--ignroe=dims"], "there is no argument --ignroe; did you mean --ignore?"),
        (["plan", "--dp", "3"], "there is no argument --dp; did you mean --dp-replicate or --dp-shard?"),
        (["plan", "--cpp", "3"], "there is no argument --cpp; did you mean --cp or --pp?"),
        (["plan", "x.toml", "y.toml"], "there is no argument y.toml; see countoff plan --help"),
    ],
)
def test_a_misspelt_command_or_flag_is_one_line_with_the_nearest(arguments: list[str], line: str) -> None:
    """Several are named only where they are equally near."""
    finished = run(arguments)
    assert (finished.returncode, finished.stderr) == (2, f"countoff: {line}\n")
    assert finished.stdout.startswith("modules: ")


def test_it_runs_as_a_module_and_names_itself_so() -> None:
    """`python -m countoff` is the same command line, where the console script is not on the path."""

    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "countoff", *arguments]
        environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    assert called("explain", "LostRank").stdout.startswith("LostRank\n\nA rank raised an exception")
    assert called("--help").stdout.startswith("usage: python -m countoff [-h] [--version] COMMAND ...\n")
    assert called("check", "--help").stdout.startswith("usage: python -m countoff check [-h]")
    refused = called("check")
    assert (refused.returncode, refused.stderr) == (
        2,
        "countoff: give a configuration, or a command after --: countoff check -- torchrun … train.py …\n",
    )


@pytest.mark.parametrize(
    "arguments",
    ["--help", "check --help", "--version", "explain", "explain LostRank"],
)
def test_a_reader_that_leaves_early_is_no_error(arguments: str) -> None:
    """`countoff … | head` ends without a word, whatever the command."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    command = [sys.executable, "-m", "countoff", *arguments.split()]
    finished = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
    )
    os.close(writing)
    assert finished.stderr == ""
    assert finished.returncode in (0, 1)  # argparse prints a help, and takes no notice


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("lightning",), "lightning"),
        (("sklearn",), "scikit-learn"),
        (("torch", "lightning", "sklearn"), "torch and lightning and scikit-learn"),
    ],
)
def test_a_missing_framework_is_one_line(missing: tuple[str, ...], named: str) -> None:
    """A missing framework is one line with the command that installs it, and nothing heavy is imported."""
    finished = run(["demo"], before=without(*missing))
    assert finished.returncode == 1
    assert finished.stderr == f"countoff: the demo needs {named}: pip install 'countoff[demo]'\n"
    assert not imported(finished) & HEAVY


REFUSED = {
    "plan --batch-size 2 --world-size 4": "plan needs rich: pip install 'countoff[cli]'",
    "check train.toml --world-size 4": "check needs rich: pip install 'countoff[cli]'",
    "report runs/today": "report needs Jinja2: pip install 'countoff[cli]'",
    "top --json runs/today": "top needs rich: pip install 'countoff[cli]'",
    "run --report -- echo started": "run --report needs Jinja2: pip install 'countoff[cli]'",
    "notify": "COUNTOFF_NOTIFY has no address: export COUNTOFF_NOTIFY='slack://… mailto://…'",
}
"""What commands say where the extra `cli` is not installed."""
PRINTED = {
    "--help": "usage: countoff [-h]",
    "plan --help": "usage: countoff plan",
    "--version": "countoff ",
    "explain": "PlanMismatch          ranks start with different",
    "explain LostRank": "LostRank\n\nA rank raised an exception",
    "explain --json 87": '{\n  "format": 1',
    "run --dry-run -- torchrun train.py": "would run: torchrun train.py",
    "run -- echo started": "started\n",
}
"""What works without it."""


def run_without_extra(arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `countoff` where no module of the extra can be imported."""
    blocked = f"sys.modules.update(dict.fromkeys({EXTRA}))\n"
    return run(arguments.split(), before=blocked + before, COUNTOFF_NOTIFY="")


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_command_without_its_extra_says_in_one_line_what_to_install(arguments: str) -> None:
    """With the exit code of a call that is refused: 1 would be a fault that was found, or a job that failed."""
    finished = run_without_extra(arguments)
    assert (finished.returncode, finished.stderr) == (2, f"countoff: {REFUSED[arguments]}\n")
    assert finished.stdout.startswith("modules: ")
    assert not imported(finished) & HEAVY


@pytest.mark.parametrize("arguments", PRINTED)
def test_what_a_training_machine_needs_works_without_the_extra(arguments: str) -> None:
    finished = run_without_extra(arguments)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(PRINTED[arguments])
    assert "Traceback" not in finished.stderr
    assert not imported(finished) & HEAVY


def test_the_demo_without_rich_is_one_line() -> None:
    finished = run_without_extra("demo", without("rich", "torch"))
    assert finished.returncode == 1
    assert finished.stderr == "countoff: the demo needs rich and torch: pip install 'countoff[demo]'\n"


def test_every_command_is_tried_without_the_extra() -> None:
    tried = {arguments.split()[0] for arguments in (*REFUSED, *PRINTED, "demo") if not arguments.startswith("-")}
    listed = re.findall(r"^    (\w+) ", run(["--help"]).stdout.partition("\n  COMMAND\n")[2], re.MULTILINE)
    assert tried == set(listed)
