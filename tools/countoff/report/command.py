"""`countoff report`: a trace as a page, as text, as JSON, or as a file for Perfetto."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from pathlib import Path

from countoff.core.messages import plain
from countoff.report import facts
from countoff.report.model import Trace
from countoff.report.page import render
from countoff.report.reader import read
from countoff.report.text import print_facts, print_worst

_PERFETTO = {"perfetto", "google"}
_PAGE = b'<meta name="generator" content="countoff report">'
"""By which a page of this command is known; page.html has it near its beginning."""


def report(chosen: argparse.Namespace) -> int:
    """Writes the page, or the file for Perfetto, and prints what happened; or prints all as text, or as JSON.

    Returns:
        The exit code: 1 if `--perfetto` needs a package that is not installed.

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
    if chosen.perfetto and (code := _write_perfetto(trace, chosen)):
        return code
    if _wants_page(chosen) or not (chosen.perfetto or _prints_all(chosen)):
        _write_page(trace, chosen)
    if chosen.text:
        print_facts(trace)
    if chosen.json:
        print(json.dumps(facts.document(trace), indent=2))
    return 0


def _prints_all(chosen: argparse.Namespace) -> bool:
    return bool(chosen.text or chosen.json)


def _wants_page(chosen: argparse.Namespace) -> bool:
    return bool(chosen.output or chosen.open)


def _write_perfetto(trace: Trace, chosen: argparse.Namespace) -> int:
    """Writes the file for Perfetto; returns the exit code: 1 if that package is not installed."""
    try:
        from countoff.report.perfetto import write_perfetto
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _PERFETTO:
            raise
        print("countoff: --perfetto needs Perfetto's package: pip install 'countoff[perfetto]'", file=sys.stderr)
        return 1
    write_perfetto(trace, chosen.perfetto)
    if not _prints_all(chosen):
        if not _wants_page(chosen):
            print_worst(trace)
        print(f"wrote {plain(chosen.perfetto)}; open it at https://ui.perfetto.dev")
    return 0


def _write_page(trace: Trace, chosen: argparse.Namespace) -> None:
    path = _page_of(chosen)
    try:
        path.write_text(render(trace), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{plain(str(path))} cannot be written: {error.strerror}") from None
    if not _prints_all(chosen):
        print_worst(trace)
        print(f"wrote {plain(str(path))}")
    if chosen.open:
        webbrowser.open(path.resolve().as_uri())


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
