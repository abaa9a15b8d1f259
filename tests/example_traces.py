"""Writes traces of jobs that never ran, as their ranks would have written them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_750_000_000.0
"""When these jobs begin, in seconds since the epoch."""

BLOCKED = ["distributed_c10d.py:2500 in all_reduce", "train.py:41 in step"]
"""The stack of a rank that waits in a collective."""

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "\"><b>'quoted'</b>&amp;",
    "$$\\href{javascript:alert(1)}{x}$$",
    "\x1b[31mred\r\n\x00\u202ereversed\ud800",
    "{{ 7 * 7 }} {% raw %} ${x} @{begin}{safe}",
]


class RankWriter:
    """Writes the trace of one rank, with a clock of its own that the test sets.

    Args:
        directory: Where to.
        rank: The rank.
        world: Ranks of the job.
        ahead: Seconds by which the host's clock is ahead of rank 0's.
        begin: Further keys of the first line; None: no first line.
    """

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        world: int = 1,
        *,
        ahead: float = 0.0,
        begin: Mapping[str, Any] | None = {},
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank-{rank:05}.jsonl"
        self.lines: list[str] = []
        self.time, self.ahead = BEGAN, ahead
        self.batches = self.steps = 0
        self.loader = 0.0
        if begin is not None:
            first = {
                "v": 1,
                "rank": rank,
                "world": world,
                "host": "node0",
                "pid": 1000 + rank,
                "framework": "Lightning",
            }
            self.line(
                "begin", **{**first, "run": {}, "versions": {"torch": "2.7.0"}, "settings": {}, "plan": {}, **begin}
            )
        if ahead:
            self.line("clock", ahead=ahead, error=0.0004)

    def line(self, kind: str, **values: Any) -> None:
        """Adds one line at the present time."""
        record = {"k": kind, "t": round(self.time + self.ahead, 3), **values}
        self.lines.append(json.dumps(record, separators=(",", ":")))

    def open(self, span: str, **values: Any) -> None:
        self.batches, self.loader = 0, 0.0
        self.line("open", span=span, **values)

    def tick(self, seconds: float, batches: int, *, steps: int = 0, loader: float = 0.0, **values: Any) -> None:
        """Lets time pass, then adds a tick."""
        self.time += seconds
        self.batches, self.steps, self.loader = self.batches + batches, self.steps + steps, self.loader + loader
        self.line("tick", b=self.batches, s=self.steps, l=round(self.loader, 3), **values)

    def close(self, span: str, why: str = "exhausted", **values: Any) -> None:
        self.line("close", span=span, why=why, b=self.batches, s=self.steps, l=round(self.loader, 3), **values)

    def save(self, *, torn: int = 0) -> Path:
        """Appends all lines to the file, without the last `torn` bytes."""
        text = "\n".join(self.lines) + "\n" if self.lines else ""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text[: len(text) - torn])
        self.lines.clear()
        return self.path


def verdict(kind: str = "UnevenBatches", ranks: Sequence[int] = (2,), **values: Any) -> dict[str, Any]:
    """A verdict as a trace has it."""
    return {
        "kind": kind,
        "sentence": "rank 2 ran out of data in train epoch 0 after 90 batches; all other ranks have more.",
        "restart": "useless",
        "ranks": list(ranks),
        "standing": "out of step",
        "world_size": 8,
        "hosts": {},
        "rows": [
            {"rank": "2", "where": "train epoch 0", "batches": 90, "steps": 90, "state": "between batches", "ranks": 1},
            {
                "rank": "0, 1, 3–7",
                "where": "train epoch 0",
                "batches": 91,
                "steps": 90,
                "state": "collective",
                "ranks": 7,
            },
        ],
        "why": "Its shard of the data is shorter.",
        "remedy": "Cut the data evenly.\nStop together.",
        "time": BEGAN + 60,
        **values,
    }


def healthy(
    directory: Path,
    *,
    ranks: int = 4,
    epochs: int = 3,
    ticks: int = 12,
    seconds: float = 5.0,
    loader: Mapping[int, float] = {},
    evaluations: bool = True,
    hosts: int = 1,
    begin: Mapping[str, Any] = {},
) -> list[RankWriter]:
    """A job whose ranks agree.

    Args:
        directory: Where to write.
        ranks: Ranks of the job.
        epochs: Train epochs.
        ticks: Ticks of each epoch, with ten batches and steps each.
        seconds: Seconds from one tick to the next.
        loader: Share of the time that a rank waits for its loader, by rank; 0.02 otherwise.
        evaluations: Whether there is an evaluation at the end of each epoch.
        hosts: Hosts over which the ranks are spread.
        begin: Further keys of each first line.
    """
    return list(_healthy(directory, ranks, epochs, ticks, seconds, loader, evaluations, hosts, begin))


def _healthy(
    directory: Path,
    ranks: int,
    epochs: int,
    ticks: int,
    seconds: float,
    loader: Mapping[int, float],
    evaluations: bool,
    hosts: int,
    begin: Mapping[str, Any],
) -> Iterator[RankWriter]:
    for rank in range(ranks):
        host = f"node{rank * hosts // ranks}"
        writer = RankWriter(directory, rank, ranks, begin={"host": host, **begin})
        for epoch in range(epochs):
            span = f"train epoch {epoch}"
            writer.open(span)
            for index in range(ticks):
                rate = round(0.1 * (1 - (epoch * ticks + index) / (epochs * ticks)), 6)
                writer.tick(seconds, 10, steps=10, loader=seconds * loader.get(rank, 0.02), lr=[rate])
            if evaluations:
                writer.open("evaluation after epoch", eval=True)
                for _ in range(max(1, ticks // 6)):
                    writer.tick(seconds, 5)
                writer.close("evaluation after epoch")
                writer.batches = ticks * 10
                writer.loader = ticks * seconds * loader.get(rank, 0.02)
            writer.close(span, unused=0)
        if rank == 0:
            total = float(epochs * ticks * 10)
            writer.line("totals", true={"steps": total}, reported={"steps": total}, horizon=int(total))
        writer.line("end", how="finished")
        writer.save()
        yield writer


def uneven(directory: Path, *, ranks: int = 8, short: int = 2) -> None:
    """A job that a verdict ends, because one rank has fewer batches."""
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"host": f"node{rank // 4}"})
        writer.open("train epoch 0")
        for _ in range(9):
            writer.tick(5, 10, steps=10, loader=0.1, lr=[0.1])
        if rank == short:
            writer.close("train epoch 0")
        else:
            writer.tick(5, 1, loader=0.1)
            writer.line(
                "pause",
                s=9.0,
                **{"in": "collective"},
                at=["distributed_c10d.py:2500 in all_reduce", "train.py:41 in step"],
            )
            writer.time += 9
        state = "code" if rank == short else "collective"
        frames = (
            ["train.py:60 in main"]
            if rank == short
            else ["distributed_c10d.py:2500 in all_reduce", "train.py:41 in step"]
        )
        writer.line("stacks", state=state, frames=frames)
        writer.line("verdict", verdict=verdict(ranks=[short], world_size=ranks))
        writer.line("end", how="verdict")
        writer.save()


def stalled(directory: Path, *, ranks: int = 4, stuck: int = 3) -> None:
    """A job in which the others wait for one rank, until somebody kills it."""
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks)
        writer.open("train epoch 0")
        for _ in range(12):
            writer.tick(5, 10, steps=10, loader=0.1, lr=[0.1])
        where, frames = ("code", ["data.py:9 in __getitem__"]) if rank == stuck else ("collective", BLOCKED)
        writer.line("pause", s=60, **{"in": where}, at=frames)
        writer.time += 60
        if rank == 0:
            sentence = f"no rank has made progress for 60 s; rank {stuck} is in its code."
            others = ", ".join(str(other) for other in range(ranks) if other != stuck)
            why = f"rank {stuck} is at data.py:9 in __getitem__; ranks {others} are at train.py:41 in step."
            found = verdict("Stalled", [stuck], sentence=sentence, world_size=ranks, rows=[], why=why, remedy="")
            writer.line("warning", verdict=found)
        writer.line("stacks", state=where, frames=frames)
        writer.save()


def killed(directory: Path, *, ranks: int = 4, lost: int = 2) -> None:
    """A job that a verdict ends, because one rank was killed."""
    rows = [
        {"rank": rank, "where": "train epoch 0", "batches": 84, "steps": 83, "state": "in batch 84"}
        for rank in range(ranks)
        if rank != lost
    ]
    found = verdict(
        "LostRank",
        [lost],
        sentence=f"rank {lost} is gone (pid {1000 + lost}).",
        standing="lost",
        world_size=ranks,
        rows=rows,
        why="It was killed, or it crashed.",
        remedy="read the end of that rank's own output.",
        time=BEGAN + 43,
    )
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks)
        writer.open("train epoch 0")
        for _ in range(8):
            writer.tick(5, 10, steps=10, loader=0.1, lr=[0.1])
        if rank != lost:
            writer.time += 3
            writer.line("stacks", state="collective", frames=BLOCKED)
            writer.line("verdict", verdict=found)
            writer.line("end", how="verdict")
        writer.save()


def made_even(directory: Path, *, ranks: int = 4, epochs: int = 2) -> None:
    """A job with `uneven_train="stop"`: all ranks end an epoch with rank 3, and the others leave two batches."""
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"settings": {"uneven_train": "stop"}})
        for epoch in range(epochs):
            writer.open(f"train epoch {epoch}")
            for _ in range(6):
                writer.tick(5, 10, steps=10, loader=0.1, lr=[0.1])
            writer.close(f"train epoch {epoch}", unused=0 if rank == ranks - 1 else 2)
        if rank == 0:
            total = float(epochs * 60)
            writer.line("totals", true={"total_steps": total}, reported={"total_steps": total + 2 * epochs})
        writer.line("end", how="finished")
        writer.save()


def different_plans(directory: Path) -> None:
    """A job whose ranks have different batch sizes, and therefore different totals."""
    for rank in range(4):
        size = 4 if rank == 1 else 8
        writer = RankWriter(directory, rank, 4, begin={"plan": {"batch_size": size, "max_epochs": 3}})
        writer.line("totals", true={"total_samples": 300.0 * size}, reported={"total_samples": 2400.0})
        sentence = "batch_size is 4 on rank 1, and 8 on ranks 0, 2, 3."
        writer.line("verdict", verdict=verdict("PlanMismatch", [1], sentence=sentence, rows=[], world_size=4))
        writer.line("end", how="verdict")
        writer.save()


def different_rates(directory: Path, *, ranks: int = 4, odd: int = 3) -> None:
    """A job of which one rank has its own learning rate: a half of that of the others, after the first epoch."""
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks)
        for epoch in range(3):
            rates = [round((0.1 if rank != odd or epoch == 0 else 0.05) * (1 - epoch / 4), 6)]
            writer.open(f"train epoch {epoch}", s=writer.steps, lr=rates)
            for _ in range(6):
                writer.tick(5 + rank / 100, 10, steps=10, loader=0.1, lr=rates)
            writer.close(f"train epoch {epoch}", lr=rates)
        writer.line("end", how="finished")
        writer.save()


def resumed(directory: Path, *, ranks: int = 2, pause: float = 12 * 3_600.0) -> None:
    """A job that was killed after 18 ticks, and goes on from the checkpoint at the end of its first epoch, at step 120.

    Each process begins a fit, then loads the checkpoint, which begins the fit again.

    Args:
        directory: Where to write.
        ranks: Ranks of the job.
        pause: Seconds from the end of the first process to the begin of the second one.
    """
    for rank in range(ranks):
        writer = RankWriter(directory, rank, ranks, begin={"plan": {"position": [0, 0, 0]}})
        _train(writer, 0, 0, 12)
        _train(writer, 1, 120, 6, closed=False)
        writer.save()
        again = RankWriter(directory, rank, ranks, begin=None)
        again.time = writer.time + pause
        first = {"v": 1, "rank": rank, "world": ranks, "host": "node0", "pid": 2000 + rank, "framework": "Lightning"}
        first |= {"run": {}, "versions": {}, "settings": {}}
        again.line("begin", **first, plan={"position": [0, 0, 0]})
        again.line("end", how="finished")
        again.line("begin", g=1, **first, plan={"position": [1, 0, 120]}, before=120)
        for epoch in (1, 2):
            _train(again, epoch, 120, 12, g=1)
        again.line("totals", g=1, true={"total_steps": 360.0}, reported={}, horizon=240)
        again.line("end", g=1, how="finished")
        again.save()


def _train(writer: RankWriter, epoch: int, before: int, ticks: int, *, closed: bool = True, **more: Any) -> None:
    """One epoch of a resumed job, whose learning rate falls to 0 at step 360."""
    writer.open(f"train epoch {epoch}", **more)
    for _ in range(ticks):
        done = writer.steps + 10 + (before if more else 0)
        writer.tick(5, 10, steps=10, lr=[round(0.1 * (1 - done / 360), 6)], **more)
    if closed:
        writer.close(f"train epoch {epoch}", **more)


def slow(directory: Path) -> None:
    """A job on two hosts in which one rank waits for its loader."""
    healthy(directory, ranks=8, hosts=2, loader={2: 0.45})


def many(directory: Path) -> None:
    """A job with more ranks than a page has lanes, one of them slow."""
    healthy(directory, ranks=260, epochs=1, loader={7: 0.5}, hosts=4)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "verdict": uneven,
    "stall": stalled,
    "killed": killed,
    "slow": slow,
    "healthy": healthy,
    "made even": made_even,
    "plans": different_plans,
    "rates": different_rates,
    "resumed": resumed,
    "many": many,
}
"""One job of each kind that the page tells apart."""
