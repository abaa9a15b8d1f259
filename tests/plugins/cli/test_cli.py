"""The command line: its help teaches, its errors are one line, and it imports a framework only where it needs one."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from countoff.core.checks import KINDS
from tests.paths import ROOT

HEAVY = {"torch", "numpy", "sklearn", "lightning", "pytorch_lightning"}
CALL = "from countoff.cli.__main__ import main\nmain()"


def run(arguments: Sequence[str], *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `countoff` with these arguments in a fresh interpreter, which prints the imported modules at its end."""
    path = [str(ROOT / "core"), str(ROOT / "plugins")]
    script = f"""
import atexit, sys
sys.path[:0] = {path}
sys.argv = {["countoff", *arguments]}
atexit.register(lambda: print("modules:", *sorted({{name.split(".")[0] for name in sys.modules}})))
{before}
{CALL}
"""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


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
    "arguments", [["--help"], ["demo", "--help"], ["version"], ["--version"], ["explain"], ["explain", "LostRank"]]
)
def test_help_and_version_import_no_framework(arguments: list[str]) -> None:
    finished = run(arguments)
    assert finished.returncode == 0, finished.stderr
    assert "countoff" in finished.stdout
    assert not imported(finished) & HEAVY


def test_the_help_shows_the_line_to_add_and_the_demo() -> None:
    printed = run(["--help"]).stdout
    assert "Trainer(callbacks=[Countoff()])" in printed
    assert "countoff demo --ranks 4" in printed


@pytest.mark.parametrize("name", ["UnevenBatches", "unevenbatches"])
def test_a_kind_of_verdict_is_explained(name: str) -> None:
    """The section of the page is printed, with a message, cause, example and fix, and without links."""
    finished = run(["explain", name])
    assert (finished.returncode, finished.stderr) == (0, "")
    text = finished.stdout.rpartition("\nmodules: ")[0]
    assert text.startswith("UnevenBatches\n\nRanks have different numbers of batches")
    assert "[rank 0] countoff: UnevenBatches: rank 3 ran out of data" in text
    assert all(f"**{part}.**" in text for part in ("Cause", "Example", "Fix"))
    assert "](" not in text
    assert "## " not in text


def test_all_kinds_are_listed() -> None:
    """`countoff explain` alone lists each kind with its meaning, in the order of the code."""
    lines = run(["explain"]).stdout.splitlines()[:-1]
    assert [line.split()[0] for line in lines] == list(KINDS)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("UnevenBatch", "did you mean UnevenBatches?"),
        ("lost-rank", "did you mean LostRank?"),
        ("weather", "countoff explain lists all kinds"),
    ],
)
def test_an_unknown_kind_is_refused_in_one_line(name: str, hint: str) -> None:
    finished = run(["explain", name])
    assert finished.returncode == 2
    assert finished.stderr == f"countoff: there is no verdict '{name}'; {hint}\n"


@pytest.mark.parametrize("ranks", ["1", "0", "-3", "65"])
def test_a_number_of_ranks_out_of_range_is_refused_in_one_line(ranks: str) -> None:
    finished = run(["demo", "--ranks", ranks])
    assert finished.returncode == 2
    assert finished.stderr == f"countoff: --ranks must be a whole number from 2 to 64, got {ranks}\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61"])
def test_seconds_out_of_range_are_refused_in_one_line(seconds: str) -> None:
    finished = run(["demo", "--seconds-before-cut", seconds])
    assert finished.returncode == 2
    assert finished.stderr.startswith("countoff: --seconds-before-cut must be a number above 0 and at most 60, got ")
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("gpu", r"--device must be one of auto, cpu, cuda, got 'gpu'"),
        ("cuda", r"--device cuda needs a GPU for each of 64 ranks, and this machine has \d+: use fewer ranks, or .*"),
    ],
)
def test_a_device_that_cannot_be_is_refused_in_one_line(device: str, reason: str) -> None:
    """Nothing has been started by then, and a device that does not exist does not even cost an import of torch."""
    finished = run(["demo", "--ranks", "64", "--device", device])
    assert finished.returncode == 2
    assert re.fullmatch(f"countoff: {reason}\n", finished.stderr), finished.stderr
    assert finished.stdout.startswith("modules: ")
    assert ("torch" in imported(finished)) == (device == "cuda")


def test_ranks_that_are_not_a_number_are_refused() -> None:
    assert run(["demo", "--ranks", "many"]).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dmeo"], "there is no command 'dmeo'; did you mean demo?"),
        (["chek", "train.toml", "--help"], "there is no command 'chek'; did you mean check?"),
        (["ex"], "there is no command 'ex'; did you mean explain?"),
        (["train"], "there is no command 'train'; countoff --help lists all commands"),
        (["--verison"], "there is no argument --verison; did you mean --version?"),
        (["version", "--hepl"], "there is no argument --hepl; did you mean --help?"),
        (["explain", "--kind", "X"], "there is no argument --kind; see countoff explain --help"),
        (["report", ".", "--opne"], "there is no argument --opne; did you mean --open?"),
        (["top", ".", "--evry", "3"], "there is no argument --evry; did you mean --every?"),
        (["demo", "--rank", "3"], "there is no argument --rank; did you mean --ranks?"),
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
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'core'}{os.pathsep}{ROOT / 'plugins'}", "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    assert called("explain", "LostRank").stdout.startswith("LostRank\n\nA rank raised an exception")
    assert called("--help").stdout.startswith("usage: python -m countoff [-h] [--version] COMMAND ...\n")
    assert called("check", "--help").stdout.startswith("usage: python -m countoff check [-h]")
    refused = called("check")
    see = "(see python -m countoff check --help)"
    assert (refused.returncode, refused.stderr) == (
        2,
        f"countoff: the following arguments are required: CONFIG {see}\n",
    )


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
