"""Runs the whole demo: data, fork server, four parts, summary. Leaves no process, and no file but part 2's trace."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from countoff.demo.data import Data, write
from countoff.demo.devices import choose_device
from countoff.demo.parts import fixed, stopped, with_countoff, without_countoff
from countoff.demo.ranks import fork_server, started, wait_for_server
from countoff.demo.show import Show
from countoff.demo.traces import show_trace, trace_directory

_NEEDED = {"torch": "torch", "lightning": "lightning", "sklearn": "scikit-learn"}
_PART_SECONDS = 60.0


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C. A `KeyboardInterrupt` proper would do no more than this, and Python might still end by the signal.

    `python -m` does so where one has come out of a text that was executed, as in many an import, though it was caught.
    """


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes Ctrl-C and SIGTERM end the demo by an exception, so that everything is cleaned up.

    From the first Ctrl-C on, further ones are ignored, until the process has ended: they would cut the cleaning up.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise _Interrupted

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell starts what is in the background so
        signal.signal(signal.SIGINT, interrupt)
    before_end = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before_end)
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


@_interruptible()
def run_demo(*, ranks: int, seconds_before_cut: float, device: str = "cpu", trace_dir: str | None = None) -> None:
    """Runs the demo.

    Args:
        ranks: Number of ranks, 2 to 64.
        seconds_before_cut: Seconds without progress after which the hanging job is killed, above 0.
        device: Where the ranks run, as in `choose_device`.
        trace_dir: A directory for the trace of part 2 and its page, new or empty; None: a new temporary one. It stays,
            unless the demo fails.

    Raises:
        DeviceError: If the ranks cannot run there.
        TraceDirError: If the directory has files, or cannot be made.
        ImportError: If a needed package is not installed; the message has the command that installs it.
        DemoFailed: If a part does not go as described.
    """
    _require()
    on_gpu = choose_device(device, ranks) == "cuda"
    began = time.monotonic()
    show = Show()
    with (
        trace_directory(trace_dir) as trace,
        tempfile.TemporaryDirectory(prefix="countoff-demo-") as temporary,
    ):
        directory = Path(temporary)
        with fork_server(directory):
            data = _prepare(directory, ranks, show, on_gpu)
            start = functools.partial(started, data, directory, _PART_SECONDS + seconds_before_cut, on_gpu)
            drifted = without_countoff(start, data, show, seconds_before_cut)
            named = with_countoff(start, show, trace)
            trained, accuracy = fixed(start, data, show)
            finished = stopped(start, data, show, accuracy)
        show.part(
            f"Summary, after {time.monotonic() - began:.0f} s",
            f"without countoff:    {drifted}.\n"
            f"with countoff:       {named}.\n"
            f"fixed:               {trained}.\n"
            f'uneven_train="stop": {finished}.',
        )
        show_trace(trace, data.short_rank, show)


def _require() -> None:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"the demo needs {' and '.join(missing)}: pip install 'countoff[demo]'")


def _prepare(directory: Path, ranks: int, show: Show, on_gpu: bool) -> Data:
    shards = directory / "data"
    shards.mkdir()
    began = time.monotonic()
    with show.waiting("importing torch and Lightning once for all ranks; writing the digits to shards"):
        data = write(shards, ranks)  # while the fork server imports
        wait_for_server()
    where = ", each on a GPU of its own" if on_gpu else ""
    show.print(
        f"{data.shards} shards of {data.shard_size} digits each, {ranks} ranks on this machine{where}, "
        f"{data.batch_size} samples per batch and rank. Ready after {time.monotonic() - began:.0f} s."
    )
    return data
