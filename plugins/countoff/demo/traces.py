"""The trace that the demo leaves: where it is, its page, and what that shows."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from countoff.demo.ranks import DemoFailed
from countoff.demo.show import Show
from countoff.report import facts
from countoff.report.page import render
from countoff.report.reader import read

_PAGE = "report.html"


class TraceDirError(ValueError):
    """The directory for the trace cannot be used."""


@contextlib.contextmanager
def trace_directory(wanted: str | None) -> Iterator[Path]:
    """Yields an empty directory for a trace. It stays; after an exception, it does not if it was made here.

    Args:
        wanted: The directory; None: a new one among the temporary files.

    Raises:
        TraceDirError: If the directory has files, or cannot be made.
    """
    if wanted is None:
        directory, is_new = Path(tempfile.mkdtemp(prefix="countoff-trace-")), True
    else:
        directory = Path(wanted).absolute()
        is_new = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            has_files = any(directory.iterdir())
        except OSError as error:
            raise TraceDirError(f"trace-dir: {wanted} cannot be used: {error.strerror}") from None
        if has_files:
            raise TraceDirError(f"trace-dir: {wanted} is not empty: give a new directory")
    try:
        yield directory
    except BaseException:
        if is_new:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def show_trace(directory: Path, short_rank: int, show: Show) -> None:
    """Draws the trace, and tells the user where it is and what it shows.

    Args:
        directory: Where the trace is. The page goes there too.
        short_rank: The rank that the verdict in the trace must name.
        show: Where the user reads it.

    Raises:
        DemoFailed: If the trace has no such verdict, or the page cannot be written.
    """
    trace = read([str(directory)])
    if trace.verdict is None or short_rank not in trace.verdict.named:
        raise DemoFailed(f"the trace in {directory} was expected to have the verdict that names rank {short_rank}")
    partings = [parting for run in trace.runs for parting in facts.partings_of(run)]
    numbers = " ≠ ".join(str(number) for number, _ in partings[0].groups) if partings else ""
    noun = "fetched batches" if partings and partings[0].fetched else "batches"
    parting = f"the line where the counts begin to differ ({numbers} {noun})" if partings else "where each rank ended"
    shows = f"The page shows a lane for each rank, rank {short_rank} first; {parting}; and the verdict."
    page = directory / _PAGE
    try:
        page.write_text(render(trace), encoding="utf-8")
    except OSError as error:
        raise DemoFailed(f"{page} cannot be written: {error.strerror}") from None
    show.part("The trace of part 2, drawn as a page: open it in a browser", shows)
    show.print(str(page), soft_wrap=True)
