"""What a program that trains in a loop of its own is told at its end: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.paths import SOURCE_PATH

PROGRAM = """
import types
from countoff._run.process_group import hook
from countoff.core.session.threads import first_fit
rank, world_size = {ranks}
torch_distributed = types.SimpleNamespace(
    init_process_group=lambda: None, get_rank=lambda: rank, get_world_size=lambda: world_size
)
hook(torch_distributed)
torch_distributed.init_process_group()
import torch
def step():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
{body}
"""
SAID = (
    "countoff: the ranks' batches were not compared: this program trains in a loop of its own. To compare them, make "
)
PLAIN = (
    "countoff = Countoff(model=model, optimizer=optimizer) after init_process_group, and iterate "
    "countoff.train(loader): from countoff.torch import Countoff."
)
PREPARED = (
    "countoff = Countoff(accelerator) after prepare(), and iterate countoff.train(loader): "
    "from countoff.accelerate import Countoff."
)
FABRIC = (
    "countoff = Countoff(fabric, optimizer=optimizer) after fabric.setup(), and iterate countoff.train(loader): "
    "from countoff.fabric import Countoff."
)
FAILS = "step()\nimport sys\nsys.excepthook = lambda *_: None\nraise ValueError"


def last_lines(body: str, ranks: tuple[int, int]) -> list[str]:
    """What of countoff's the program prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    environment["PYTHONPATH"] = SOURCE_PATH
    program = PROGRAM.format(ranks=ranks, body=body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (body == FAILS), done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("countoff")]


@pytest.mark.parametrize(
    ("body", "way"),
    [
        ("step()", PLAIN),
        ("import accelerate; step()", PLAIN),
        ("import accelerate; accelerate.Accelerator(cpu=True); step()", PREPARED),
        ("import lightning.fabric; step()", FABRIC),
        ("import lightning_fabric; step()", FABRIC),
    ],
)
def test_the_line_says_what_to_add_by_the_packages_that_the_program_uses(body: str, way: str) -> None:
    package = body.partition(";")[0].removeprefix("import ").partition(".")[0]
    if package != "step()" and find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    assert last_lines(body, (0, 2)) == [SAID + way]


@pytest.mark.parametrize(
    ("body", "ranks"),
    [("pass", (0, 2)), ("step()", (1, 2)), ("step()", (0, 1)), ("step(); first_fit.begin()", (0, 2)), (FAILS, (0, 2))],
    ids=["nothing trains", "rank 1", "one rank", "a fit has begun", "it fails"],
)
def test_any_other_program_hears_nothing(body: str, ranks: tuple[int, int]) -> None:
    assert last_lines(body, ranks) == []
