"""`countoff top`: what the ranks of a job are doing, read from its trace while it runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from countoff._terminal import console
from countoff.core import formats
from countoff.core.messages import count_of, listed, plain
from countoff.core.verdict import Verdict
from countoff.report.facts import one_line, verdict_or_none
from countoff.report.live import ENDINGS, STANDS, Row, rows_of
from countoff.report.model import Run
from countoff.report.reader import Reader
from countoff.report.words import duration, moment

_SECONDS, _REST = 2.0, 4
"""From one look to the next; where looks take long, so many times as long as one took."""
_TABLE_SECONDS, _MISSING_SECONDS = 5.0, 10.0
"""So late the verdict's table may come; and so long after the last line, ranks may begin of which there is no trace."""
_RECORDS = 20_000
"""Ticks that are kept: rates need the last few."""
_RED = ("failed", "lost", "silent", "behind", STANDS, ENDINGS["verdict"])
_NARROW, _FEWEST_COLUMNS = 80, 5
"""A terminal with fewer columns shows so many of the table's."""


class Look(NamedTuple):
    """What one look at the trace has shown.

    Attributes:
        heading: Which job it is, or what there is to wait for.
        rows: What its ranks are doing; empty while there is nothing to read.
        verdict: The verdict; None if there is none.
        warnings: Each warning once, the last one at the end.
        problem: The first file that could not be read, and why; empty if there is none.
        farewell: What is left to say when the job has ended; empty while it goes on.
        failed: Whether it has ended with a verdict, or a rank with an exception.
    """

    heading: str
    rows: Sequence[Row] = ()
    verdict: Verdict | None = None
    warnings: Sequence[Verdict] = ()
    problem: str = ""
    farewell: str = ""
    failed: bool = False


def top(chosen: argparse.Namespace) -> int:
    """Shows what ranks are doing until the job ends; once, where nobody sees a terminal or JSON is asked for.

    Returns:
        The exit code: 0; 1 if the job has ended with a verdict or an exception; or 130 after Ctrl-C.

    Raises:
        ValueError: If a directory cannot be read, or has no trace to show once; the message is one line.
    """
    output = console()
    if chosen.json or not output.is_terminal or output.is_dumb_terminal:
        return _once(chosen, output)
    signal.signal(signal.SIGTERM, _end)  # so that the terminal gets its cursor back
    try:
        return _live(chosen.directories, output)
    except KeyboardInterrupt:
        return 130


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _once(chosen: argparse.Namespace, output: Console) -> int:
    reader = Reader(chosen.directories, most_records=_RECORDS)
    look = _look(reader, plain(" ".join(chosen.directories)), time.time())
    if not look.rows:
        raise ValueError(
            f"there is no trace in {plain(' '.join(chosen.directories))}{look.problem and f' ({look.problem})'}"
        )
    if chosen.json:
        print(json.dumps(_as_json(look), indent=2))
    else:
        output.print(_picture(look, output))
        print(look.farewell, end="\n" if look.farewell else "")
    return int(look.failed)


def _live(directories: Sequence[str], output: Console) -> int:
    name = plain(" ".join(directories))
    reader: Reader | None = None
    with Live(Text(f"reading {name}…"), console=output, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            if reader is None and all(map(os.path.lexists, directories)):
                reader = Reader(directories, most_records=_RECORDS)
            look = _look(reader, name, time.time()) if reader else Look(f"waiting for {name}…")
            live.update(_picture(look, output), refresh=True)
            if look.farewell:
                break
            time.sleep(max(_SECONDS, _REST * (time.monotonic() - begin)))
    print(look.farewell)
    return int(look.failed)


def _look(reader: Reader, name: str, now: float) -> Look:
    """Reads what is new.

    Raises:
        ValueError: If a directory cannot be read.
    """
    trace = reader.read()
    problem = next(iter(trace.problems), "")
    if not trace.runs:
        return Look(f"waiting for the first line of a rank in {name}…", problem=problem)
    run = trace.runs[-1]
    goes_on = any(fit.settings.get("on_divergence") == "warn" for fit in run.fits.values())
    farewell = _farewell(run, None if goes_on else trace.verdict, now)
    failed = bool(farewell) and (trace.verdict is not None or "failed" in _endings(run))
    heading = _heading(name, run, len(trace.runs))
    return Look(heading, rows_of(run, now), trace.verdict, run.warnings, problem, farewell, failed)


def _farewell(run: Run, verdict: Verdict | None, now: float) -> str:
    """What is left to say when the job has ended; empty while it goes on."""
    endings = _endings(run)
    ended = endings.total() == len(run.fits) and (not run.missing or now - run.end > _MISSING_SECONDS)
    if verdict is not None:
        return verdict.render() if verdict.rows or ended or now - verdict.time > _TABLE_SECONDS else ""
    if not ended:
        return ""
    said = [f"{count_of(count, 'rank')} {_ended(how, count)}" for how, count in endings.most_common()]
    said += [f"{count_of(len(run.missing), 'rank')} left no trace"] if run.missing else []
    return f"countoff: no verdict: {'; '.join(said)}"


def _endings(run: Run) -> Counter[str]:
    return Counter(fit.ending.how for fit in run.fits.values() if fit.ending is not None)


def _ended(how: str, ranks: int) -> str:
    """How ranks have ended, as the rest of a sentence."""
    said = ENDINGS[how]
    return f"{'was' if ranks == 1 else 'were'} {said}" if said.startswith("ended") else said


def _heading(name: str, run: Run, number: int) -> str:
    framework = next((f"{fit.framework}, " for fit in run.fits.values() if fit.framework), "")
    hosts = f" on {count_of(len(run.hosts), 'host')}" if len(run.hosts) > 1 else ""
    which = f", run {number}" if number > 1 else ""
    return f"{name}: {framework}{count_of(run.world_size, 'rank')}{hosts}{which}, begun {moment(run.begin)} UTC"


def _as_json(look: Look) -> dict[str, Any]:
    """A look as JSON types, with the keys that docs/seeing.md describes."""
    return {
        "format": formats.JSON_OUTPUT,
        "job": look.heading,
        "time": time.time(),
        "world_size": sum(len(row.ranks) for row in look.rows),
        "ended": bool(look.farewell),
        "failed": look.failed,
        "verdict": verdict_or_none(look.verdict),
        "warnings": [each.to_dict() for each in look.warnings],
        "problem": look.problem or None,
        "rows": [row.to_dict() for row in look.rows],
    }


def _picture(look: Look, output: Console) -> Group:
    """A look as a table, and what there is to say around it. No string, in which rich would look for markup."""
    most = _FEWEST_COLUMNS if output.width < _NARROW else 99
    said = [Text(look.heading, style="bold"), Text()]
    below: list[Text] = []
    message = look.verdict or next(reversed(look.warnings), None)
    if message and not look.farewell:
        below = [Text(), Text(one_line(message), style="yellow")]
    if look.problem:
        below.append(Text(f"cannot be read: {look.problem}", style="yellow"))
    return Group(*said, *([_table(look.rows, most)] if look.rows else []), *below)


def _table(rows: Sequence[Row], most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("ranks", "span", "note", "batch", "batches/s", "loader", "age", "host")[:most]:
        is_number = name in ("batch", "batches/s", "loader", "age")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        style = "red" if {row.note, row.span}.intersection(_RED) else "yellow" if row.note else ""
        table.add_row(*map(Text, _cells(row)[:most]), style=style)
    return table


def _cells(row: Row) -> list[str]:
    fewest, most = row.fewest_batches, row.most_batches
    batches = "" if fewest is None else f"{fewest:,}" if fewest == most else f"{fewest:,}–{most:,}"
    return [
        listed(row.ranks),
        row.span,
        _note(row),
        batches,
        "" if row.batches_per_second is None else f"{row.batches_per_second:.3g}",
        "" if row.loader_share is None else f"{row.loader_share:.0%}",
        "" if row.age_seconds is None else duration(round(row.age_seconds)),
        row.hosts[0] if len(row.hosts) == 1 else count_of(len(row.hosts), "host") if row.hosts else "",
    ]


def _note(row: Row) -> str:
    """Why ranks are not with the others, and for how long they have begun no batch."""
    still = [] if row.still_seconds is None else [f"no batch for {duration(round(row.still_seconds))}"]
    return ", ".join(([row.note] if row.note not in ("", STANDS) else []) + still)
