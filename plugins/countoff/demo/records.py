"""Reads what the ranks of a run have left: which gradients were averaged, what they printed, and where they stopped."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from countoff.core.words import names_of
from countoff.demo.ranks import Run

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_JOB = "countoff/demo/job.py"
# Lightning's loops and callbacks show what it was doing; the layers between them and torch do not.
_LIGHTNING = ("/lightning/pytorch/loops/", "/lightning/pytorch/callbacks/")


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of gradients.

    Attributes:
        number: Its number in the run, from 1.
        positions: Epoch, from 0, and batch, from 1, of each rank whose gradients were averaged.

    >>> print(AllReduce(19, ((0, 19), (0, 19), (1, 1))))
    ranks 0, 1: epoch 0 batch 19 + rank 2: epoch 1 batch 1
    """

    number: int
    positions: tuple[tuple[int, int], ...]

    @property
    def mixed(self) -> bool:
        """Whether the ranks were at different batches."""
        return len(set(self.positions)) > 1

    @property
    def epoch_count(self) -> int:
        """How many different epochs the batches belong to."""
        return len({epoch for epoch, _ in self.positions})

    def __str__(self) -> str:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, position in enumerate(self.positions):
            groups.setdefault(position, []).append(rank)
        return " + ".join(f"{names_of(ranks)}: epoch {epoch} batch {batch}" for (epoch, batch), ranks in groups.items())


def all_reduces(run: Run) -> list[AllReduce]:
    """Returns the all-reduces of a run, in order, from the rank that recorded the most.

    Raises:
        DemoFailed: If two ranks have different records, or a rank did not get its own position back.
    """
    records = [list(_of_rank(run, rank)) for rank in range(run.data.ranks)]
    longest = max(records, key=len)
    if any(record != longest[: len(record)] for record in records):
        raise run.failure("the ranks have different records of which gradients were averaged")
    return longest


def count_so_far(run: Run) -> int:
    """Returns how many all-reduces rank 0 has recorded, without reading them."""
    return run.read(0, "all_reduces").count("\n")


def excerpt(recorded: Sequence[AllReduce]) -> list[AllReduce]:
    """Returns the few to show: the last one before the first mixed one, the first three mixed ones, and the last."""
    mixed = [one for one in recorded if one.mixed]
    if not mixed:
        return list(recorded[-1:])
    before = recorded[max(0, mixed[0].number - 2) : mixed[0].number - 1]
    return [*before, *mixed[:3], *mixed[3:][-1:]]


def printed(run: Run, rank: int) -> str:
    """Returns what countoff printed on this rank, without the rank at the start of each line."""
    prefix = f"[rank {rank}] "
    lines = run.read(rank, "log").splitlines()
    return "\n".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix))


def innermost(stacks: str) -> tuple[str, str]:
    """Returns the training thread's innermost frame, and its innermost frame in a loop or callback of Lightning.

    Args:
        stacks: The output of `faulthandler`, with one or more threads.

    Returns:
        Two frames, such as ``distributed_c10d.py:4627 in barrier``; "" where there is none.
    """
    threads = [block for block in stacks.split("\n\n") if _JOB in block]
    frames = [match.groupdict() for match in _FRAME.finditer(threads[-1])] if threads else []
    of_lightning = [frame for frame in frames if any(part in frame["file"] for part in _LIGHTNING)]
    return _first(frames), _first(of_lightning)


def logged(run: Run) -> dict[str, str]:
    """Returns the last value of each metric that Lightning's CSVLogger wrote."""
    with (run.directory / "log" / "metrics.csv").open(newline="") as file:
        return {name: value for line in csv.DictReader(file) for name, value in line.items() if value}


def _first(frames: list[dict[str, str]]) -> str:
    if not frames:
        return ""
    file = frames[0]["file"].rsplit("/", 1)[-1]
    return f"{file}:{frames[0]['line']} in {frames[0]['name']}"


def _of_rank(run: Run, rank: int) -> Iterator[AllReduce]:
    for number, line in enumerate(run.read(rank, "all_reduces").splitlines(), start=1):
        record = json.loads(line)
        positions = tuple((epoch, batch) for epoch, batch in record["averaged"])
        if positions[rank] != tuple(record["own"]):
            raise run.failure(f"all-reduce {number} returned to rank {rank} a position that it did not send")
        yield AllReduce(number, positions)
