"""What is called when a program ends."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, sys
from countoff.core.at_exit import at_exit, exception_at_exit

def work():
    at_exit(lambda: print("kept", repr(exception_at_exit())))
    at_exit(lambda: print("cancelled"))()
    if sys.argv[2] != "ends":
        raise {"raises": ValueError("torn"), "leaves": SystemExit(0)}[sys.argv[2]]

if __name__ == "__main__":
    if sys.argv[1] == "script":
        work()
    else:
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
        process.start()
        process.join()
"""


@pytest.mark.parametrize("place", ["script", "fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("way", "error"), [("ends", "None"), ("raises", "ValueError('torn')"), ("leaves", "None")])
def test_a_function_is_called_unless_cancelled(place: str, way: str, error: str, tmp_path: Path) -> None:
    """It is called in a script and in a child of multiprocessing; only in the child is an exception still there."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", place, way]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    first, *rest = run.stdout.splitlines()
    assert first == f"kept {'None' if place == 'script' else error}", run.stderr
    assert rest in ([], ["kept None"])  # a spawned child ends as a script does, too
