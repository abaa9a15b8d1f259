"""The scripts in examples/ for schedulers: what they do with each verdict, and with none."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

BATCH_SCRIPT = str(ROOT / "examples" / "train.sbatch")
ENTRY_POINT = str(ROOT / "examples" / "entry.sh")
IN_TORCHRUN = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "digits"}
WRAPPER = ROOT / "examples" / "restart_if_useful.py"


def verdict(restart: str, *leave_out: str, run: str = "digits") -> str:
    content = {"format": 1, "kind": "LostRank", "sentence": "rank 1 is gone.", "restart": restart}
    return json.dumps({**content, "leave_out": leave_out, "run": {"torchelastic_run_id": run}})


def run(command: list[str], directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    programs = f"{directory}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=directory,
        env={"PATH": programs, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def stand_in(directory: Path, name: str, script: str) -> None:
    """A program of that name, which the scripts find first."""
    program = directory / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("written", "code", "environment", "asked"),
    [
        (verdict("may_help"), 1, {}, "scontrol requeue 42"),
        (
            verdict("may_help", "node-1", "node-3"),
            1,
            {},
            "sbatch --exclude=node-1,node-3 train.sbatch, attempts 1, without node-1,node-3",
        ),
        (
            verdict("may_help", "node-1"),
            1,
            {"ATTEMPTS": "2", "LEAVE_OUT": "node-2,node-3"},
            "sbatch --exclude=node-2,node-3,node-1 train.sbatch, attempts 3, without node-2,node-3,node-1",
        ),
        (verdict("may_help", "node-1"), 1, {"ATTEMPTS": "3"}, ""),
        (verdict("may_help"), 1, {"SLURM_RESTART_COUNT": "3"}, ""),
        (verdict("useless"), 1, {}, ""),
        (verdict("unknown"), 1, {}, ""),
        (None, 1, {}, ""),
        ("{", 1, {}, ""),
        (verdict("may_help"), 0, {}, ""),
    ],
)
def test_slurm_starts_again_only_what_a_restart_may_help(
    written: str | None, code: int, environment: dict[str, str], asked: str, tmp_path: Path
) -> None:
    """The batch script requeues the job, or submits it again without the lost hosts, and keeps the exit code."""
    write = "" if written is None else f"echo '{written}' > \"$COUNTOFF_VERDICT_FILE\"\n"
    stand_in(tmp_path, "srun", f'test ! -e "$COUNTOFF_VERDICT_FILE" || exit 9\n{write}exit {code}')
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*" > asked')
    stand_in(tmp_path, "sbatch", 'echo "sbatch $*, attempts $ATTEMPTS, without $LEAVE_OUT" > asked')
    (tmp_path / "verdict-42.json").write_text(verdict("may_help"))  # of an earlier run of the same job
    done = run(["bash", BATCH_SCRIPT], tmp_path, SLURM_JOB_ID="42", **environment)
    assert (done.returncode, done.stderr) == (code, "")
    told = tmp_path / "asked"
    assert (told.read_text().strip() if told.exists() else "") == asked


@pytest.mark.parametrize(
    ("written", "code", "mapped"),
    [
        (verdict("useless"), 1, 93),
        (verdict("useless"), 87, 93),
        (verdict("may_help"), 1, 1),
        (verdict("unknown"), 87, 87),
        (None, 1, 1),
        ("{", 1, 1),
        (verdict("useless"), 0, 0),
    ],
)
def test_the_entry_point_maps_what_is_useless_to_93(
    written: str | None, code: int, mapped: int, tmp_path: Path
) -> None:
    """Any other exit code is that of the program; the verdict of an earlier run is not taken for this one's."""
    path = tmp_path / "verdict.json"
    path.write_text(verdict("useless"))
    write = "" if written is None else f"echo '{written}' > {path}; "
    command = ["sh", ENTRY_POINT, "sh", "-c", f"{write}exit {code}"]
    done = run(command, tmp_path, COUNTOFF_VERDICT_FILE=str(path))
    assert (done.returncode, done.stdout, done.stderr) == (mapped, "", "")


def test_the_entry_point_hands_sigterm_on(tmp_path: Path) -> None:
    """A pod that is deleted may save a checkpoint: the entry point waits until the program has ended."""
    program = "sleep 30 & trap 'kill $!; echo saved; exit 7' TERM; echo begun; wait"
    command = ["sh", ENTRY_POINT, "sh", "-c", program]
    path = str(tmp_path / "verdict.json")
    with subprocess.Popen(
        command, env={**os.environ, "COUNTOFF_VERDICT_FILE": path}, stdout=subprocess.PIPE, text=True
    ) as entry:
        assert entry.stdout is not None
        assert entry.stdout.readline() == "begun\n"
        entry.send_signal(signal.SIGTERM)
        assert entry.stdout.readline() == "saved\n"
        assert entry.wait(30) == 7


@pytest.mark.parametrize(
    ("written", "environment"),
    [
        (None, IN_TORCHRUN),
        ("", IN_TORCHRUN),
        (verdict("may_help"), IN_TORCHRUN),
        (verdict("unknown"), IN_TORCHRUN),
        (verdict("useless", run="yesterday"), IN_TORCHRUN),
        (verdict("useless"), {}),
        (json.dumps({**json.loads(verdict("useless")), "run": {}}), {}),
    ],
)
def test_the_wrapper_becomes_the_program(written: str | None, environment: dict[str, str], tmp_path: Path) -> None:
    """Where a restart is not useless, or the file is of another run, or torchrun is not there, the program runs.

    It has its arguments, and the wrapper's process. The parent would exit with 9.
    """
    if written is not None:
        (tmp_path / "verdict.json").write_text(written)
    program = "import os, sys; print(sys.argv[1:]); sys.exit(7)"
    command = [sys.executable, str(WRAPPER), "-c", program, "--lr", "0.1"]
    parent = ["bash", "-c", 'trap "exit 9" TERM; "$@"; exit $?', "parent", *command]
    done = run(parent, tmp_path, COUNTOFF_VERDICT_FILE="verdict.json", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (7, "['--lr', '0.1']\n", "")


def test_the_wrapper_ends_torchrun_where_a_restart_is_useless(tmp_path: Path) -> None:
    """It says why, and ends its parent, which stands in for torchrun here; that ends the wrapper."""
    (tmp_path / "verdict.json").write_text(verdict("useless"))
    command = [sys.executable, str(WRAPPER), "-c", "print('started')"]
    parent = ["bash", "-c", 'trap "kill \\$!; exit 9" TERM; "$@" & wait', "parent", *command]
    done = run(parent, tmp_path, COUNTOFF_VERDICT_FILE="verdict.json", **IN_TORCHRUN)
    expected = (9, "", "not started again: LostRank: rank 1 is gone.\n")
    assert (done.returncode, done.stdout, done.stderr) == expected
