"""`countoff report`: a trace as a page, or as text where what draws the page is not installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Collection
from pathlib import Path

from countoff.core.words import plain
from countoff.report.document import document
from countoff.report.model import Trace
from countoff.report.reader import read
from countoff.report.text import print_facts, print_worst

_EXTRA = "pip install 'countoff[report]'"
_DRAWN_WITH = {"bokeh", "jinja2", "markupsafe", "numpy"}
_PERFETTO = {"perfetto", "google"}
_PAGE = b'<meta name="generator" content="countoff report">'
"""By which a page of this command is known; page.html has it near its beginning."""


def report(chosen: argparse.Namespace) -> int:
    """Writes the page, or the file for Perfetto, and prints what happened; or prints all as text, or as JSON.

    Returns:
        The exit code: 1 if what was asked for by `-o`, `--open` or `--perfetto` needs a package that is not installed.

    Raises:
        ValueError: If there is no trace, or a file cannot be written or is not to be replaced.
    """
    trace = read(chosen.directories)
    if not trace.runs:
        where = ", ".join(map(plain, chosen.directories))
        if trace.problems:
            raise ValueError(f"no trace in {where} can be read: {'; '.join(trace.problems[:3])}")
        raise ValueError(
            f'there is no trace in {where}: expected files like rank-00000.jsonl, which a job with trace_dir="…" writes'
        )
    if chosen.output:
        _page_of(chosen)  # refused before anything else is written
    code = 0
    if chosen.perfetto:
        code = _write_perfetto(trace, chosen)
    if not code and (_wants_page(chosen) or not (chosen.perfetto or chosen.json)):
        code = _write_page(trace, chosen)
    if chosen.json:
        print(json.dumps(document(trace), indent=2))
    return code


def _wants_page(chosen: argparse.Namespace) -> bool:
    return bool(chosen.output or chosen.open)


def _write_perfetto(trace: Trace, chosen: argparse.Namespace) -> int:
    """Writes the file for Perfetto; returns the exit code: 1 if that package is not installed."""
    try:
        from countoff.report.perfetto import write_perfetto
    except ModuleNotFoundError as error:
        if not _is_one_of(error, _PERFETTO):
            raise
        print(f"countoff: --perfetto needs Perfetto's package: {_EXTRA}", file=sys.stderr)
        return 1
    write_perfetto(trace, chosen.perfetto)
    if not chosen.json:
        if not _wants_page(chosen):
            print_worst(trace)
        print(f"wrote {plain(chosen.perfetto)}; open it at https://ui.perfetto.dev")
    return 0


def _write_page(trace: Trace, chosen: argparse.Namespace) -> int:
    """Writes the page, or prints the same as text where what draws it is not installed; returns the exit code."""
    try:
        from countoff.report.page import render
    except ModuleNotFoundError as error:
        if not _is_one_of(error, _DRAWN_WITH):
            raise
        if not chosen.json:
            print_facts(trace)
        print(f"countoff: to see this as a page in a browser: {_EXTRA}", file=sys.stderr)
        return int(_wants_page(chosen))
    path = _page_of(chosen)
    try:
        path.write_text(render(trace), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{plain(str(path))} cannot be written: {error.strerror}") from None
    if not chosen.json:
        print_worst(trace)
        print(f"wrote {plain(str(path))}")
    if chosen.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _is_one_of(error: ModuleNotFoundError, packages: Collection[str]) -> bool:
    return str(error.name).partition(".")[0] in packages


def _page_of(chosen: argparse.Namespace) -> Path:
    """Returns where the page goes: where `-o` says, or else here, named after the first directory.

    Raises:
        ValueError: If something else than a page of this command is there, and `--force` is not given.
    """
    path = Path(chosen.output or f"{Path(chosen.directories[0]).resolve().name or 'report'}.html")
    # What has a name from `-o` may also be a pipe or a device, to which the page is written.
    kept = path.is_file() if chosen.output else os.path.lexists(path)
    if kept and not chosen.force and not _is_page(path):
        other = "name another file" if chosen.output else "name another file with -o"
        raise ValueError(
            f"{plain(str(path))} is there and is no page of countoff report: {other}, or replace it with --force"
        )
    return path


def _is_page(path: Path) -> bool:
    if not path.is_file():  # a pipe, which would make the reader wait, or a directory
        return False
    try:
        with path.open("rb") as file:
            return _PAGE in file.read(1024)
    except OSError:
        return False
