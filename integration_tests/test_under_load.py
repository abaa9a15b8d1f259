"""The command under load: it runs beside busy processes, which end with it, and a failure is not lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, pathlib, sys
parent = os.getppid()
children = [int(each) for each in pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
beside = [str(each) for each in children if each != os.getpid()]
with open("load", "a") as file:
    print(*beside, file=file)
again = pathlib.Path("ran").exists()
pathlib.Path("ran").touch()
if again:
    print("FAILED tests/test_x.py::test_y - it is slow")
if again:
    sys.exit(1)
"""


def under_load(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts the command under load, below a directory."""
    command = [sys.executable, "-m", "integration_tests.under_load", "--busy", "2", *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "TMPDIR": str(directory),
    }
    return subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def lives(pid: str) -> bool:
    return Path("/proc", pid).exists()


def test_the_load_lasts_as_long_as_the_command(tmp_path):
    """Each run has two busy processes of its own; the second run fails, and so does the whole."""
    ran = under_load(tmp_path, "--runs", "2", "--", sys.executable, "-c", SCRIPT)
    out, err = ran.communicate(timeout=120)
    loads = [line.split() for line in (tmp_path / "load").read_text().splitlines()]
    assert [len(load) for load in loads] == [2, 2], err
    assert not any(lives(pid) for load in loads for pid in load)
    assert ran.returncode == 1
    first, second = out.splitlines()[2:]
    assert first.startswith("| 1 | 0 | ")
    assert second.startswith("| 2 | 1 | ")
    assert "| tests/test_x.py::test_y |" in second
    assert "FAILED" in Path(second.split(" | ")[-1].removesuffix(" |")).read_text()


def test_no_load_is_left_where_the_script_is_killed(tmp_path):
    ran = under_load(tmp_path, "--", sys.executable, "-c", f"{SCRIPT}\nwhile os.getppid() == parent: pass")
    patience = time.monotonic() + 60
    while not (tmp_path / "load").exists() or not (tmp_path / "load").read_text().endswith("\n"):
        assert time.monotonic() < patience
        time.sleep(0.05)
    ran.send_signal(signal.SIGKILL)
    ran.communicate(timeout=90)
    while any(map(lives, (tmp_path / "load").read_text().split())):
        assert time.monotonic() < patience + 60
        time.sleep(0.05)
