"""What a type checker sees from a user's side: options by name and by value."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import USER_PROGRAM

pytest.importorskip("pyright", reason="of the environments of the tests, those with `dev` have the type checkers")

PROGRAM = """\
import countoff.core
from countoff.accelerate import Countoff as AccelerateCountoff
from countoff.fabric import Countoff as FabricCountoff
from countoff.torch import Countoff

Countoff(stall_seconds=60, uneven_train="stop", levels={"Stalled": "raise"}, verdict_file=None)
Countoff(stall_second=60)  # expected: stall_second
Countoff(uneven_train="halt")  # expected: uneven_train
Countoff(levels={"Stalled": "loud"})  # expected: levels
Countoff(train=[1])  # expected: train
AccelerateCountoff(None, weights_every="64")  # expected: weights_every
FabricCountoff(None, epoch=1)  # expected: epoch
for batch in Countoff().train([1], epochs=2):  # expected: epochs
    pass
version: str = countoff.core.__version__
number: int = countoff.core.__version__  # expected: str
"""


def test_a_misspelt_option_and_a_wrong_value_are_errors_of_the_type_checker(tmp_path: Path) -> None:
    """Each is found in its line and names the option; right options are none."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    found = {each["range"]["start"]["line"]: each["message"] for each in json.loads(run.stdout)["generalDiagnostics"]}
    expected = {
        number: match[1]
        for number, line in enumerate(PROGRAM.splitlines())
        if (match := re.search(r"expected: (\w+)", line))
    }
    assert found.keys() == expected.keys(), found
    for number, name in expected.items():
        assert name in found[number]


@pytest.mark.nightly  # it reads all of torch and of the frameworks
def test_mypy_accepts_a_users_program_in_its_strict_mode(tmp_path: Path) -> None:
    """Nothing that a user calls has a type that is not known. For pyright, that is in `test_page_examples.py`."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(USER_PROGRAM)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
