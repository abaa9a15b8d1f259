"""What a shell completes, asked of real shells with the script that `countoff completion` prints."""

import shutil
import subprocess
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
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, line: str, completed: list[str]) -> None:
    (tmp_path / "train.toml").touch()
    (tmp_path / "runs").mkdir()
    command = ["bash", "-c", ASK, "ask", str(script), *line.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path)
    assert (run.stdout.splitlines(), run.stderr) == (completed, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    assert "UnevenBatches" in capsys.readouterr().out


def test_an_unknown_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "bsh"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "countoff: there is no completion for the shell 'bsh'; did you mean bash?\n"
