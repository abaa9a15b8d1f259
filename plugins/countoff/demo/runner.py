"""Runs the whole demo: data, fork server, four parts, summary. Leaves no process, and no file but part 2's trace."""

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
from typing import Literal, NoReturn

from countoff.demo.data import Data, write
from countoff.demo.devices import device_here
from countoff.demo.forkserver import JobSpec
from countoff.demo.launcher import DemoFailed, ForkServer, Run, fork_server
from countoff.demo.parts import fixed, stopped, with_countoff, without_countoff
from countoff.demo.show import Show
from countoff.demo.traces import show_trace, trace_directory

_NEEDED = {"torch": "torch", "lightning": "lightning", "sklearn": "scikit-learn"}
_IMPORT_SECONDS = 240.0
_PART_SECONDS = 60.0


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
    chosen = device_here(device, ranks)
    began = time.monotonic()
    show = Show()
    with (
        _interruptible(),
        trace_directory(trace_dir) as trace,
        tempfile.TemporaryDirectory(prefix="countoff-demo-") as temporary,
    ):
        directory = Path(temporary)
        with fork_server(directory) as server:
            data = _prepare(server, directory, ranks, show, chosen)
            lines = _four_parts(server, data, directory, trace, show, seconds_before_cut, chosen)
        show.part(f"Summary, after {time.monotonic() - began:.0f} s", "\n".join(lines))
        show_trace(trace, data.short_rank, show)


def _require() -> None:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"the demo needs {' and '.join(missing)}: pip install 'countoff[demo]'")


def _prepare(server: ForkServer, directory: Path, ranks: int, show: Show, device: Literal["cpu", "cuda"]) -> Data:
    data_directory = directory / "data"
    data_directory.mkdir()
    began = time.monotonic()
    with show.status("importing torch and Lightning once for all ranks; writing the digits to shards") as change:
        data = write(data_directory, ranks)  # while the fork server imports
        while not server.poll(0.2):
            seconds = time.monotonic() - began
            if seconds > _IMPORT_SECONDS:
                raise DemoFailed(f"torch and Lightning could not be imported within {_IMPORT_SECONDS:g} s")
            change(f"importing torch and Lightning once for all ranks: {seconds:.0f} s")
        server.receive()
    where = ", each on a GPU of its own" if device == "cuda" else ""
    show.paragraph(
        f"{data.shards} shards of {data.shard_size} digits each, {ranks} ranks on this machine{where}, "
        f"{data.batch_size} samples per batch and rank. Ready after {time.monotonic() - began:.0f} s."
    )
    return data


def _four_parts(
    server: ForkServer,
    data: Data,
    directory: Path,
    trace: Path,
    show: Show,
    seconds_before_cut: float,
    device: Literal["cpu", "cuda"],
) -> list[str]:
    short = data.short_rank

    def start(
        name: str, *, even: bool = False, with_countoff: bool = True, stops: bool = False, trace_dir: Path | None = None
    ) -> Run:
        deadline = _PART_SECONDS + seconds_before_cut
        return server.start(JobSpec(data, directory / name, even, with_countoff, deadline, stops, device, trace_dir))

    show.part(
        "1. The job without countoff",
        f"Each rank reads whole shards: rank {short} has {data.batches(short)} batches per epoch, every other rank has "
        f"{data.batches(0)}. Each rank sends its epoch and batch along with its gradients, so the demo can show which "
        "batches were averaged together.",
    )
    drifted = without_countoff(start("without", with_countoff=False), show, seconds_before_cut)
    show.part(
        "2. The same job with callbacks=[Countoff(trace_dir=…)]",
        "Nothing else is changed. The trace is for the report at the end; the verdict is the same without it.",
    )
    named = with_countoff(start("with", trace_dir=trace), show)
    show.part(
        "3. The fixed job, with callbacks=[Countoff()]",
        f"Every rank reads all shards and keeps 1 of {data.ranks} samples. An incomplete last round is dropped.",
    )
    mended = start("fixed", even=True)
    trained = fixed(mended, show)
    show.part(
        '4. The job of part 1, with callbacks=[Countoff(uneven_train="stop")]',
        "The data is uneven again. Every epoch ends on all ranks with the shortest one.",
    )
    finished = stopped(start("stopped", stops=True), show, mended)
    return [
        f"without countoff:    {drifted}.",
        f"with countoff:       {named}.",
        f"fixed:               {trained}.",
        f'uneven_train="stop": {finished}.',
    ]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM end the demo by an exception, as Ctrl-C does, so that everything is cleaned up."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
