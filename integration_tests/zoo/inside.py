"""What runs in a rank of the zoo: programs, one after the other, and a record of each run."""

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from countoff._adapter.counted_loop import active_loops
from integration_tests import devices
from integration_tests.digits import own_rank
from integration_tests.zoo.registry import MODES, Program, program_named

STDERR: Final = 2
FAILED: Final = 3
"""The exit code of a rank whose program has raised: it ends here, because its peers may wait in a collective."""
_CLOSING_SECONDS: Final = 8.0
"""Rank 0 completes the last roll calls of a fit that an exception has left for at most 5 s."""
_current: list[Any] = []
"""What the program that runs has noted."""


def note(*values: Any) -> None:
    """Records values that must be equal with countoff and without it, for a program that does not return."""
    _current.extend(values)
    if path := os.environ.get("ZOO_NOTES"):
        with open(f"{path}-rank{own_rank()}", "a") as file:
            file.write("".join(f"{each}\n" for value in values for each in digests(value)))


def run_together(family: str, runs: Sequence[tuple[str, str]], records: str, deadline_seconds: float) -> None:
    """Runs programs one after the other in one process group, each from the same seeds, until one of them fails.

    Args:
        family: The family of all of them.
        runs: Names of programs, and the modes with which they run.
        records: The directory for the records of the runs and for what they print on stderr.
        deadline_seconds: After so long a run prints the stacks of all threads, and ends this process.
    """
    devices.join()
    for name, mode in runs:
        dist.barrier()
        record = _run(program_named(family, name), mode, Path(records), deadline_seconds)
        with open(Path(records, f"rank{own_rank()}.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
        if record["error"]:
            os._exit(FAILED)
    dist.barrier()
    dist.destroy_process_group()


def run_alone(family: str, name: str, mode: str, deadline_seconds: float) -> tuple[list[str], dict[str, str]]:
    """Runs one program as the whole of this process; returns the digests of its value and the random states."""
    faulthandler.dump_traceback_later(deadline_seconds, exit=True, file=STDERR)
    devices.join()
    seed()
    value = program_named(family, name).function(dict(MODES[mode]))
    return digests(value), random_states()


def _run(program: Program, mode: str, records: Path, deadline_seconds: float) -> dict[str, Any]:
    said, error, value = records / f"{program.name}-{mode}-rank{own_rank()}.err", "", None
    _current.clear()
    seed()
    began = time.monotonic()
    with _stderr_into(said):
        faulthandler.dump_traceback_later(deadline_seconds, exit=True, file=STDERR)
        try:
            value = program.function(dict(MODES[mode]))
            states = random_states()
            for loop in reversed(active_loops()):  # as the end of a program does
                loop.end()
        except BaseException as raised:
            error, states = f"{type(raised).__name__}: {raised}", {}
        faulthandler.cancel_dump_traceback_later()
        left = _threads_left()
    return {
        "name": program.name,
        "mode": mode,
        "value": digests([*_current, value]),
        "random": states,
        "threads": left,
        "error": error,
        "seconds": time.monotonic() - began,
    }


def _threads_left() -> list[str]:
    """Threads of countoff's that do not end within a moment: a fit that an exception has left closes on one.

    Where there are any, all stacks are printed.
    """
    deadline = time.monotonic() + _CLOSING_SECONDS
    while left := [each.name for each in threading.enumerate() if each.name.startswith("countoff")]:
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(STDERR)
            break
        time.sleep(0.02)
    return left


def seed() -> None:
    """Sets each random generator to a state of this rank's own."""
    number = 100 + own_rank()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def random_states() -> dict[str, str]:
    """The states of the random generators, as hashes."""
    numpy_state: Any = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr([each.tolist() if hasattr(each, "tolist") else each for each in numpy_state]).encode(),
        "random": repr(random.getstate()).encode(),
    }
    return {name: _hash(state) for name, state in states.items()}


def digests(value: Any) -> list[str]:
    """A value as a list of texts: tensors as hashes of their bits, modules as their state, other things as they are."""
    if isinstance(value, torch.nn.Module):
        return digests(list(value.state_dict().values()))
    if isinstance(value, torch.Tensor):
        return [_hash(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())]
    if isinstance(value, Mapping):
        return [each for key in value for each in (str(key), *digests(value[key]))]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in digests(item)]
    return [repr(value)]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """A context in which all that this process prints on stderr goes to a file."""
    before, file = os.dup(STDERR), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, STDERR)
    try:
        yield
    finally:
        os.dup2(before, STDERR)
        os.close(before)
        os.close(file)
