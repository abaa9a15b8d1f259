"""Captures what each framework's progress bar draws without countoff and with it, and prints it as markdown.

    python -m integration_tests.bars
    python -m integration_tests.bars --only "the Trainer's bar"

Each job has two ranks and two epochs of 8 batches. A cell has what the bar shows within each epoch or evaluation, as
``n/16``, and what it shows last. Bars that show the same have one row. Rich draws each change at once here.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from integration_tests.bar_jobs import BARS, Drawn, captured
from integration_tests.harness import run_ranks

SITUATIONS = {
    "stream": "a stream without a length",
    "wrong": "a stream whose length is 16",
    "proven": "a sampler, and a length of 16",
    "resumed": "a length of 16, resumed after 3 batches",
    "evaluation": "an evaluation of 3 batches",
}
ENV = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


def cell(drawn: Sequence[Drawn]) -> str:
    """Returns what the bar of each pass has shown, such as ``n/? 8/8, n/8 8/8``; where it starts anew is the next."""
    passes: list[list[Drawn]] = []
    for before, each in itertools.pairwise([(0, None), *drawn]):
        if not passes or each[0] < before[0]:
            passes.append([])
        passes[-1].append(each)
    shown: list[str] = []
    for each in passes:
        within = dict.fromkeys(f"n/{_text(total)}" for done, total in each if 0 < done < each[-1][0])
        shown.append(" ".join([*within, f"{each[-1][0]}/{_text(each[-1][1])}"]))
    return ", ".join(shown)


def _text(total: int | None) -> str:
    return "?" if total is None else str(total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the jobs and prints the table."""
    parser = argparse.ArgumentParser("python -m integration_tests.bars", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BARS, default=list(BARS), help="which bars (default: all)")
    given = parser.parse_args(arguments)
    os.environ["TQDM_MININTERVAL"] = "0"  # tqdm draws each batch; it reads this when the ranks' server imports it
    rows: dict[tuple[str, ...], list[str]] = {}
    for bar in given.only:
        with tempfile.TemporaryDirectory() as directory:
            result, _ = run_ranks(captured, 2, bar, directory=Path(directory), deadline_seconds=180, env=ENV)
        for name, each in result.value.items():
            rows.setdefault((name, *map(cell, each)), []).append(bar)
    print("| | bar | without countoff | with countoff |")
    print("|---|---|---|---|")
    for name, words in SITUATIONS.items():
        for (of, without, counted), bars in rows.items():
            if of == name:
                print(f"| {words} | {'; '.join(bars)} | {without} | {counted} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
