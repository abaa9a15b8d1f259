"""What a shell completes, asked of real shells with the script that `countoff completion` prints."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from countoff.cli.__main__ import main
from countoff.cli.completion import SHELLS

ASK = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_shtab_countoff
printf '%s\\n' "${COMPREPLY[@]}"
"""
COMMANDS = {"plan", "check", "explain", "report", "top", "run", "demo", "completion", "notify"}


def flags(command: str) -> set[str]:
    """The long flags of a command, by its help."""
    help = subprocess.run(
        [sys.executable, "-m", "countoff", command, "--help"], capture_output=True, text=True, check=True, timeout=30
    )
    options = re.split(r"^(?:options|[a-z ]+):$", help.stdout, flags=re.MULTILINE)[1:]
    return set(re.findall(r"^ +(?:-\w(?: \w+)?, )?(--[\w-]+)", "\n".join(options), re.MULTILINE))


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for bash."""
    main(["completion", "bash"])
    (tmp_path / "countoff.bash").write_text(capsys.readouterr().out)
    return tmp_path / "countoff.bash"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("countoff ch", ["check"]),
        ("countoff explain Uneven", ["UnevenBatches"]),
        ("countoff explain 8", ["87"]),
        ("countoff check --ignore dp", ["dp-rank"]),
        ("countoff check --gi", ["--github"]),
        ("countoff check tra", ["train.toml"]),
        ("countoff report run", ["runs"]),
        ("countoff completion z", ["zsh"]),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, line: str, completed: list[str]) -> None:
    (tmp_path / "train.toml").touch()
    (tmp_path / "runs").mkdir()
    command = ["bash", "-c", ASK, "ask", str(script), *line.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path)
    assert (run.stdout.splitlines(), run.stderr) == (completed, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_all_commands_and_flags(script: Path, tmp_path: Path) -> None:
    def completed(*words: str) -> set[str]:
        command = ["bash", "-c", ASK, "ask", str(script), "countoff", *words]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path)
        return set(run.stdout.split())

    assert completed("") == COMMANDS
    for command in COMMANDS:
        assert completed(command, "--") == flags(command)


def test_zsh_knows_all_commands_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the script itself, where there is no zsh to take it."""
    main(["completion", "zsh"])
    script = capsys.readouterr().out
    if shutil.which("zsh") is not None:
        (tmp_path / "_countoff").write_text(script)
        subprocess.run(["zsh", "-n", tmp_path / "_countoff"], check=True, timeout=30)
    _, _, listed = script.partition("_shtab_countoff_commands() {")
    assert set(re.findall(r"^ {4}(\w+):", listed.partition("\n}")[0], re.MULTILINE)) == COMMANDS
    for command in COMMANDS:
        _, _, block = script.partition(f"_shtab_countoff_{command}_options=(\n")
        assert set(re.findall(r"--[a-z][\w-]+(?=\[|\})", block.partition("\n)")[0])) == flags(command), command


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    assert "UnevenBatches" in capsys.readouterr().out


def test_an_unknown_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "bsh"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "countoff: there is no completion for the shell 'bsh'; did you mean bash?\n"
