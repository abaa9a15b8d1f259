"""The demo from beginning to end: data, agent, three parts, three lines of summary; nothing of it stays behind."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from countoff.demo.agent import Order
from countoff.demo.data import Data, write
from countoff.demo.launcher import Agent, DemoFailed, Run, agent
from countoff.demo.parts import adrift, guarded, mended
from countoff.demo.show import Show

_NEEDED = {"torch": "torch", "lightning": "lightning", "sklearn": "scikit-learn"}
_IMPORT_SECONDS = 240.0
_PART_SECONDS = 60.0


def run_demo(*, ranks: int, seconds_before_cut: float) -> None:
    """Runs the demo.

    Args:
        ranks: Number of ranks, 2 to 64.
        seconds_before_cut: Seconds without progress after which the hanging job is cut off, above 0.

    Raises:
        ImportError: If what it needs is not installed; the message says how to install it.
        DemoFailed: If a part goes otherwise than it says.
    """
    _require()
    began = time.monotonic()
    show = Show()
    with _interruptible(), tempfile.TemporaryDirectory(prefix="countoff-demo-") as place:
        directory = Path(place)
        with agent(directory) as crew:
            data = _prepare(crew, directory, ranks, show)
            lines = _three_parts(crew, data, directory, show, seconds_before_cut)
    show.part(f"Summary, after {time.monotonic() - began:.0f} s", "\n".join(lines))


def _require() -> None:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"the demo needs {' and '.join(missing)}: pip install 'countoff[demo]'")


def _prepare(crew: Agent, directory: Path, ranks: int, show: Show) -> Data:
    place = directory / "data"
    place.mkdir()
    began = time.monotonic()
    with show.working("importing torch and Lightning, once for all ranks; writing the digits as shards") as change:
        data = write(place, ranks)  # while the agent imports
        while not crew.hears(0.2):
            seconds = time.monotonic() - began
            if seconds > _IMPORT_SECONDS:
                raise DemoFailed(f"torch and Lightning could not be imported within {_IMPORT_SECONDS:g} s")
            change(f"importing torch and Lightning, once for all ranks: {seconds:.0f} s")
        crew.receive()
    show.say(
        f"{data.shards} shards of {data.shard_size} digits each for {ranks} ranks on this machine, batches of "
        f"{data.batch_size} per rank; ready after {time.monotonic() - began:.0f} s."
    )
    return data


def _three_parts(crew: Agent, data: Data, directory: Path, show: Show, seconds_before_cut: float) -> list[str]:
    short = data.short_rank

    def begin(name: str, *, even: bool, with_countoff: bool) -> Run:
        order = Order(data, directory / name, even, with_countoff, _PART_SECONDS + seconds_before_cut)
        return crew.begin(order)

    show.part(
        "1. The job without countoff",
        f"Whole shards are dealt out, so rank {short} has {data.batches(short)} batches and the others have "
        f"{data.batches(0)}; each rank sends its epoch and batch along with its gradients, to see what they meet.",
    )
    drifted = adrift(begin("adrift", even=False, with_countoff=False), show, seconds_before_cut)
    show.part("2. The same job with callbacks=[Countoff()]", "Nothing else is changed.")
    named = guarded(begin("guarded", even=False, with_countoff=True), show)
    show.part(
        "3. The job mended, with callbacks=[Countoff()]",
        f"Every rank reads all shards and keeps one sample in {data.ranks}; the last round, if not full, is left out.",
    )
    trained = mended(begin("mended", even=True, with_countoff=True), show)
    return [f"without countoff: {drifted}.", f"with countoff:    {named}.", f"mended:           {trained}."]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGTERM end the demo as Ctrl-C does: by an exception, past all that has to be cleared away."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
