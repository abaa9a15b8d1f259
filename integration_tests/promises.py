"""Fills docs/promises.md: runs tables one after the other, and keeps their figures in docs/promises.json.

    python -m integration_tests.promises
    python -m integration_tests.promises --only pairs killed --frameworks composer

Without `--only`, all tables run, which takes hours. What does not run keeps its last figures. `--only` without a name
writes the page alone. The exit code is 1 where a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.results import quartiles, text_of
from integration_tests import shipped
from integration_tests.harness import ask_no_name_server
from integration_tests.promise_tables import FRAMEWORKS, PARTS, Found, checkouts

DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ("countoff", "torch", "lightning", "mosaicml", "accelerate", "transformers")
Kept = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By part and framework: the figures under `found`, and when and with what they were measured."""


def page(text: str, kept: Kept) -> str:
    """The page with the tables of these figures, each between the comments that name it."""
    for name, write in BLOCKS.items():
        between = f"(<!-- {name} -->\n).*?(<!-- / -->)"
        text, found = re.subn(
            between, lambda block, write=write: f"{block[1]}\n{write(kept)}\n\n{block[2]}", text, flags=re.DOTALL
        )
        if found != 1:
            raise ValueError(f"expected one place for the table {name!r} in the page, found {found}")
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as markdown."""
    first, *rest = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([first, "|" + "---|" * len(head), *rest]) if rows else "It has not run yet."


def promises(kept: Kept) -> str:
    """How often each promise was kept, of how many times."""
    rows: list[list[str]] = []
    for name, part in PARTS.items():
        entries = {framework: entry["found"] for framework, entry in kept.get(name, {}).items()}
        for sentence, times, of in part.claims:
            cells = {framework: _kept_of(found[times], found[of]) for framework, found in entries.items() if found[of]}
            if cells:
                total, tried = (sum(found[key] for found in entries.values()) for key in (times, of))
                every = f"**{total} of {tried}**"
                rows.append([f"{sentence} (`{name}`)", every, *(cells.get(each, "") for each in FRAMEWORKS)])
    return table(["promise", "kept", *FRAMEWORKS], rows)


def _kept_of(kept: int, tried: int) -> str:
    return str(tried) if kept == tried else f"{kept} of {tried}"


def broken(kept: Kept) -> str:
    """Every job in which a promise was not kept."""
    rows = [
        [f"`{name}`", framework, each]
        for name, entries in kept.items()
        for framework, entry in entries.items()
        for each in entry["found"].get("wrong", ())
    ]
    return table(["table", "framework", "not kept"], rows) if rows else "None of them was broken."


def runs(kept: Kept) -> str:
    """When and with what the tables ran."""
    frameworks, tables = dict[tuple[str, str], list[str]](), dict[str, dict[str, None]]()
    for name, entries in kept.items():
        for framework, entry in entries.items():
            frameworks.setdefault((name, entry["date"]), []).append(framework)
            versions = ", ".join(f"{package} {number}" for package, number in entry["versions"].items())
            tables.setdefault(f"{entry['processors']} processors, {versions}", {})[f"`{name}`"] = None
    rows = [[f"`{name}`", f"`{PARTS[name].command}`", date, ", ".join(of)] for (name, date), of in frameworks.items()]
    ran_with = [f"- {', '.join(names)}: {what}." for what, names in tables.items()]
    return "\n".join([table(["table", "command", "ran", "frameworks"], rows), "", *ran_with])


def times(kept: Kept) -> str:
    """The milliseconds from the proof until the last rank knew, in the jobs of the fault table, by number of ranks."""
    found = dict[int, list[float]]()
    for entry in kept.get("faults", {}).values():
        for ranks, milliseconds in entry["found"]["milliseconds"].items():
            found.setdefault(int(ranks), []).extend(milliseconds)
    rows: list[list[object]] = []
    for ranks, milliseconds in sorted(found.items()):
        low, middle, high = quartiles(milliseconds)
        rows.append([ranks, len(milliseconds), f"{middle:.1f}", f"{low:.1f} to {high:.1f}", max(milliseconds)])
    return table(["ranks", "jobs", "median ms", "quartiles", "most"], rows)


def rows_of(kept: Kept, name: str) -> list[Mapping[str, Any]]:
    """The rows of a table that counts nothing."""
    return [row for entry in kept.get(name, {}).values() for row in entry["found"]["rows"]]


def detected(kept: Kept) -> str:
    """The seconds from a fault until every rank knew."""
    rows = [[row["fault"], row["ranks"], text_of(row["seconds"]), row["named"]] for row in rows_of(kept, "detection")]
    return table(["fault", "ranks", "median s", "ranks whose message names the one at fault"], rows)


def costs(kept: Kept) -> str:
    """What countoff costs per batch, compared with what does the same without it."""
    rows = [
        [
            row["what"],
            f"{text_of(row['median'])} {row['unit']} ({text_of(row['low'])} to {text_of(row['high'])})",
            row["against"],
            text_of(row["ratio"]),
            f"{text_of(row['more'])} {row['unit']}",
        ]
        for row in rows_of(kept, "costs")
    ]
    return table(["what", "with countoff: median (quartiles)", "compared with", "ratio", "more"], rows)


BLOCKS: Mapping[str, Callable[[Kept], str]] = {
    "promises": promises,
    "broken": broken,
    "runs": runs,
    "times": times,
    "detection": detected,
    "costs": costs,
}
"""The tables of the page by name."""


def entry_of(found: Found) -> dict[str, Any]:
    """Figures, with what they depend on. Nothing here names the machine."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"date": time.strftime("%Y-%m-%d"), "versions": versions, "processors": os.cpu_count(), "found": found}


def in_order(kept: Kept) -> Kept:
    """The figures in the order of the page."""
    return {
        name: {framework: kept[name][framework] for framework in FRAMEWORKS if framework in kept[name]}
        for name in PARTS
        if name in kept
    }


def main(arguments: Sequence[str] | None = None, directory: Path = DOCS) -> int:
    """Runs the chosen tables, keeps their figures in a directory, and writes the page there."""
    parser = argparse.ArgumentParser("python -m integration_tests.promises", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="which tables (default: all)")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="default: all")
    for project in shipped.PROJECTS:
        parser.add_argument(f"--{project}", type=Path, metavar="CHECKOUT", help="for its examples, in `shipped`")
    given = parser.parse_args(arguments)
    checkouts.update({each: getattr(given, each) for each in shipped.PROJECTS if getattr(given, each) is not None})
    ask_no_name_server()
    figures, written = directory / "promises.json", directory / "promises.md"
    kept: dict[str, dict[str, Any]] = json.loads(figures.read_text()) if figures.exists() else {}
    wrong = False
    for name in given.only:
        part = PARTS[name]
        for framework in (each for each in part.frameworks if each in given.frameworks):
            if find_spec(FRAMEWORKS[framework]) is None:
                continue
            began = time.monotonic()
            found = part.count(part.measure(framework))
            print(f"{name}, {framework}, {time.monotonic() - began:.0f} s: {found}", file=sys.stderr, flush=True)
            wrong |= bool(found.get("wrong"))
            if any(found.values()):
                kept.setdefault(name, {})[framework] = entry_of(found)
            figures.write_text(json.dumps(in_order(kept), indent=1) + "\n")
    written.write_text(page(written.read_text(), in_order(kept)))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
