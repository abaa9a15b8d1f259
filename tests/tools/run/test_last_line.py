"""What a program that trains in a loop of its own is told at its end: each in a process of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.paths import SOURCE_PATH

PROGRAM = """
import ast, os, sys, types
import torch, torch._dynamo  # which an optimizer imports: once, not in each fork
from countoff._run.process_group import hook
from countoff.core.session.threads import first_fit
def step():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
for line in sys.stdin:
    number, body, rank, world_size = ast.literal_eval(line)
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # else the next fork prints it too
        continue
    os.dup2(os.open(str(number), os.O_CREAT | os.O_WRONLY), 2)
    torch_distributed = types.SimpleNamespace(
        init_process_group=lambda: None, get_rank=lambda: rank, get_world_size=lambda: world_size
    )
    hook(torch_distributed)
    torch_distributed.init_process_group()
    exec(body)
    break  # and end as a program does
"""
LastLines = Callable[[tuple[str, int, int]], list[str]]
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
WAYS = [
    ("step()", PLAIN),
    ("import accelerate; step()", PLAIN),
    ("import accelerate; accelerate.Accelerator(cpu=True); step()", PREPARED),
    ("import lightning.fabric; step()", FABRIC),
    pytest.param("import lightning_fabric; step()", FABRIC, marks=pytest.mark.nightly),
]
SILENT = {
    "nothing trains": ("pass", 0, 2),
    "rank 1": ("step()", 1, 2),
    "one rank": ("step()", 0, 1),
    "a fit has begun": ("step(); first_fit.begin()", 0, 2),
    "it fails": ("step()\nsys.excepthook = lambda *_: None\nraise ValueError", 0, 2),
}


@pytest.fixture(scope="module")
def last_lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastLines]:
    """Returns what of countoff's a program prints. Each is a fork of one process: torch is imported once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    environment["PYTHONPATH"] = SOURCE_PATH
    directory = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    numbers = itertools.count()
    with subprocess.Popen(
        command, env=environment, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        requests, exit_codes = forks.stdin, forks.stdout

        def lines(case: tuple[str, int, int]) -> list[str]:
            number = next(numbers)
            print((number, *case), file=requests, flush=True)
            exit_code = exit_codes.readline()
            printed = (directory / str(number)).read_text()
            assert exit_code == f"{int('raise' in case[0])}\n", printed
            return [line for line in printed.splitlines() if line.startswith("countoff")]

        yield lines


@pytest.mark.parametrize(("body", "way"), WAYS)
def test_the_line_says_what_to_add_by_the_packages_that_the_program_uses(
    last_lines: LastLines, body: str, way: str
) -> None:
    package = body.partition(";")[0].removeprefix("import ").partition(".")[0]
    if package != "step()" and find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    assert last_lines((body, 0, 2)) == [SAID + way]


@pytest.mark.parametrize("name", SILENT)
def test_any_other_program_hears_nothing(last_lines: LastLines, name: str) -> None:
    assert last_lines(SILENT[name]) == []
