"""Runs programs on two ranks, and reads from their traces what countoff has said, and when."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from countoff.core.messages import count_of
from countoff.report.reader import read
from integration_tests.harness import run_ranks
from integration_tests.reports.cases import Report

RANKS = 2
BATCH_SECONDS = 0.02
"""What a batch takes. The digits alone would be trained on before another thread of the rank has looked at them."""


@dataclass(frozen=True)
class Said:
    """A warning.

    Attributes:
        kind: Its kind.
        sentence: What it says first.
        when: How many batches of a train epoch this run had begun by then.
    """

    kind: str
    sentence: str
    when: str


@dataclass(frozen=True)
class Outcome:
    """What became of a report's wrong and right program.

    Attributes:
        report: The report.
        wrong: What was said of the wrong one, by stage.
        right: The same of the right one.
    """

    report: Report
    wrong: tuple[tuple[Said, ...], ...]
    right: tuple[tuple[Said, ...], ...]

    @property
    def found(self) -> Said | None:
        """What was said first of the wrong one, where it goes wrong."""
        return next(iter(self.wrong[-1]), None)

    @property
    def faults(self) -> list[str]:
        """What is not as it should be, in words."""
        found, due = self.found.kind if self.found else "nothing", self.report.kind or "nothing"
        wrong = [] if found == due else [f"found {found}, expected {due}"]
        early = [said for stage in self.wrong[:-1] for said in stage]
        return [
            *wrong,
            *(f"before it goes wrong: {said.kind}: {said.sentence}" for said in early),
            *(f"right, and yet {said.kind}: {said.sentence}" for stage in self.right for said in stage),
        ]


def run(reports: Sequence[Report], directory: Path) -> list[Outcome]:
    """Runs the wrong and the right program of each report; each stage of all of them in one launch."""
    said: dict[tuple[str, bool], list[tuple[Said, ...]]] = {}
    for stage in range(max(report.stages for report in reports)):
        programs = [(report.program, wrong) for report in reports if stage < report.stages for wrong in (True, False)]
        results = run_ranks(
            train, RANKS, programs, stage, str(directory), directory=directory, deadline_seconds=60 + 10 * len(programs)
        )
        for (program, wrong), begun in zip(programs, results[0].value, strict=True):
            trace = _place(directory, program, wrong) / f"trace-{stage}"
            said.setdefault((program, wrong), []).append(tuple(_said(trace, begun)))
    return [Outcome(each, *(tuple(said[each.program, wrong]) for wrong in (True, False))) for each in reports]


def _place(directory: Path, program: str, wrong: bool) -> Path:
    return directory / f"{program}-{'wrong' if wrong else 'right'}"


def _said(trace: Path, begun: Sequence[float]) -> Iterator[Said]:
    """What a trace has of warnings, in the order of time.

    Args:
        trace: The trace's directory.
        begun: When rank 0 has begun each batch.
    """
    for fit in read([str(trace)]).runs:
        epochs = [span for span in fit.fits[0].spans if not span.is_evaluation]
        for warning in fit.warnings:
            epoch = next(each for each in reversed(epochs) if each.begin <= warning.time)
            batches = sum(epoch.begin <= each <= warning.time for each in begun)
            when = count_of(batches, "batch") if batches else "before the first batch"
            yield Said(warning.kind, warning.sentence, f"{when} of {epoch.name}")


def train(programs: Sequence[tuple[str, bool]], stage: int, folder: str) -> list[list[float]]:
    """Runs one stage of programs on this rank; when each has begun its batches."""
    dist.init_process_group("gloo")
    return [_train(program, wrong, stage, _place(Path(folder), program, wrong)) for program, wrong in programs]


def _train(program: str, wrong: bool, stage: int, place: Path) -> list[float]:
    place.mkdir(exist_ok=True)
    os.environ["COUNTOFF_TRACE_DIR"] = str(place / f"trace-{stage}")
    print(f"--- {place.name}, stage {stage}", flush=True)
    with _batches() as begun:
        importlib.import_module(f"integration_tests.reports.{program}").train(wrong, stage, place)
    dist.barrier()
    return begun


@contextmanager
def _batches() -> Iterator[list[float]]:
    """Notes when the model begins a batch, and lets it take its time."""
    begun = list[float]()

    def note(module: Any, _: Any) -> None:
        if isinstance(module, torch.nn.Linear) and torch.is_grad_enabled():
            begun.append(time.time())
            time.sleep(BATCH_SECONDS)

    hook = register_module_forward_pre_hook(note)
    try:
        yield begun
    finally:
        hook.remove()
