"""How much later a program starts with `countoff run` or `python -m countoff.run` in front of it."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.results import WALL_TIME, Table, compared, in_turns
from countoff._run.environment import with_hooks
from tests.paths import SOURCE_PATH

PYTHON = [sys.executable]
RUN = [*PYTHON, "-c", "from countoff.cli.start import main; main()", "run", "--"]
"""As the console script `countoff` begins."""
PRINTS, IMPORTS = "print(1)", "import torch"


def tables(quick: bool) -> Iterator[Table]:
    """Yields the times from the start of a process to its end, in turns."""
    repeats = 5 if quick else 40
    plain = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    module, peer = ["-m", "timeit", "-n1", "-r1", PRINTS], "`python`"
    short = {
        peer: started([*PYTHON, *module], plain),
        "`python -m countoff.run`": started([*PYTHON, "-m", "countoff.run", *module], plain),
        "`countoff run -- python`": started([*RUN, *PYTHON, *module], plain),
    }
    yield compared(
        f"The module `timeit`, which prints one number, {WALL_TIME}", "ms", in_turns(short, repeats, 1), against=peer
    )
    without = "without"
    long = {
        without: started([*PYTHON, "-c", IMPORTS], plain),
        "with the hooks": started([*PYTHON, "-c", IMPORTS], with_hooks(plain)),
        "`countoff run`": started([*RUN, *PYTHON, "-c", IMPORTS], plain),
    }
    title = f"A program that imports torch, {WALL_TIME}"
    yield compared(title, "ms", in_turns(long, repeats // 2, 1), against=without)


def started(command: Sequence[str], environment: Mapping[str, str]) -> timeit.Timer:
    """Times a process from its start to its end."""

    def call() -> None:
        subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=120
        )

    return timeit.Timer(call)
