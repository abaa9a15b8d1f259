"""Measures what the credits of even passes request from the job's store with many ranks, on a real TCPStore.

See `simulated` for what is simulated. All ranks have loaders of one length that nobody has proven. Blocks keep their
first size here. In a job, they grow to at most eight times that size, so that a look-ahead of 4 becomes one of 32,
which is measured too. How far they grow where the store answers at once is computed, by the credits of one rank without
a store. What a pass leaves in the store is looked up there once all ranks have ended it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.results import Table, progress
from benchmarks.scale import Simulation
from benchmarks.simulated import PREFIX
from countoff.core import constants
from countoff.core.protocol.actions import AddOne
from countoff.core.protocol.credits import Credits
from countoff.core.session.store.channel import Channel

SIZES = 64, 256, 1024, 4096
_GROWN_SIZES = 16, 64, 256, 1024, 4096, 12_500, 100_000
_BATCHES_MS = 1, 5, 20, 100, 500
_GOAL = 1 / 20
"""The share of a batch's time for which the store's host may be busy with credits."""
_LOOKAHEADS = 4, 16, 32
_BATCHES = 32  # that are counted: whole blocks, with each look-ahead
_GRANTS, _END, _CLOSING = "batches", "common end", "span's end"


@dataclass(frozen=True)
class EvenEpoch:
    """One pass of all simulated ranks.

    Attributes:
        number: Number of the epoch.
        lookahead: Batches that each rank fetches ahead.
    """

    number: int
    lookahead: int

    def name(self, what: str) -> str:
        """Returns the name under which a simulation counts what this epoch costs."""
        return f"{self.number}: {what}"


EPOCHS = [EvenEpoch(number, lookahead) for number, lookahead in enumerate(_LOOKAHEADS)]


def measure(world_size: int) -> tuple[Simulation, list[int]]:
    """Runs all epochs; returns the simulation and, for each epoch, how many keys and entries it has left.

    Raises:
        RuntimeError: If a simulated rank has a verdict.
    """
    left: list[int] = []
    with Simulation(world_size) as simulation:
        simulation.call("register")
        simulation.count_off()
        simulation.sync_point("fit", "_pass", "fit_start", "the fit")
        for epoch in EPOCHS:
            progress(f"credits: {world_size} ranks, look-ahead {epoch.lookahead}")
            run(simulation, epoch)
            left.append(len(left_by_credits(simulation)))
        verdicts = [verdict for of_group, _ in simulation.call("verdicts") for verdict in of_group]
    if verdicts:
        raise RuntimeError(f"healthy simulated ranks have a verdict: {verdicts[0]}")
    return simulation, left


def run(simulation: Simulation, epoch: EvenEpoch) -> None:
    """Runs one epoch. Its loaders end when the batches that are counted are over and the look-ahead is full."""
    warm_up = epoch.lookahead  # the look-ahead is filled, which is not measured
    until = warm_up + _BATCHES
    simulation.sync_point_of_one("train start", "train_start", epoch.number)
    simulation.call("begin_even", epoch.lookahead, until + epoch.lookahead)
    train(simulation, epoch.name("warm-up"), warm_up)
    train(simulation, epoch.name(_GRANTS), until)
    train(simulation, epoch.name(_END), until + epoch.lookahead + 1)
    simulation.sync_point(epoch.name(_CLOSING), "train_end", "exhausted")


def train(simulation: Simulation, name: str, until: int) -> None:
    """All ranks take so many batches, or come to the pass's end; counts what that costs under a name."""
    with simulation.counting(name) as cost:
        done = False
        while not done:
            answers = simulation.call("train", until)
            length = max(length for (_, length), _ in answers)
            heard = simulation.call("receive_until", length)
            forgotten = simulation.call("forget_until", length)
            done = all(ended for (ended, _), _ in answers)
            cost.ranks_seconds += sum(seconds for _, seconds in (*answers, *heard, *forgotten))


def left_by_credits(simulation: Simulation) -> list[str]:
    """Returns the keys in the store that the credits of passes have left, and their entries in the log."""
    channel = Channel("127.0.0.1", simulation.port, PREFIX)
    keys = {key.removeprefix(PREFIX) for of_group, _ in simulation.call("credit_keys") for key in of_group}
    [(_, length), *_] = [answer for answer, _ in simulation.call("train", 0)]
    entries = [key for key in (f"log/{index}" for index in range(length)) if channel.has(key)]
    return [
        *(key for key in sorted(keys) if channel.has(key)),
        *(key for key in entries if channel.get(key)["type"] in ("grant", "ends", "stop")),
    ]


def tables(quick: bool, sizes: Sequence[int] = ()) -> Iterator[Table]:
    """Yields how far blocks grow, the costs of a batch, and those of the end of a pass."""
    yield growth(_GROWN_SIZES)
    sizes = sizes or (SIZES[:2] if quick else SIZES)
    measured = {size: measure(size) for size in sizes}
    yield batches({size: simulation for size, (simulation, _) in measured.items()})
    yield ends(measured)


def grown(ranks: int, batch_seconds: float) -> Credits:
    """Returns the credits of a long pass whose batches take so long, with the default look-ahead and a prompt store."""
    credits = Credits(0, constants.LOOKAHEAD, ranks=ranks)
    for now in (batch * batch_seconds for batch in range(100)):
        for credit in credits.fetched(now):
            credits.receive(cast(AddOne, credit).entry)
    return credits


def growth(sizes: Sequence[int]) -> Table:
    """Returns the batches of a block, and for which share of the time of a batch the store's host is busy."""
    rows: list[dict[str, Any]] = []
    for ranks in sizes:
        first, largest = (grown(ranks, seconds) for seconds in (1e9, 0.0))
        row: dict[str, Any] = {"ranks": ranks, "no growth from, ms": first.host_seconds / _GOAL / first.size * 1e3}
        row |= {"a twentieth from, ms": largest.host_seconds / _GOAL / largest.size * 1e3}
        row |= {"training waits below, ms": largest.host_seconds / largest.size * 1e3}
        for milliseconds in _BATCHES_MS:
            credits = grown(ranks, milliseconds / 1e3)
            share = credits.host_seconds / credits.size / milliseconds * 1e3
            row[f"{milliseconds} ms"] = f"{credits.size}: {share:.2g}" if share < 1 else f"{credits.size}: waits"
        rows.append(row)
    return Table(
        f"Credits: how far blocks grow, with a look-ahead of {constants.LOOKAHEAD} (computed)",
        rows,
        [
            "By the time of a batch: the batches of a block, and the share of that time in which the store's host is "
            "busy. Where it would be all of it or more, training waits for the host."
        ],
    )


def batches(simulations: dict[int, Simulation]) -> Table:
    rows: list[dict[str, Any]] = []
    for epoch in EPOCHS:
        for size, simulation in simulations.items():
            cost = simulation.costs[epoch.name(_GRANTS)]
            row: dict[str, Any] = {"lookahead": epoch.lookahead, "batches of a block": epoch.lookahead // 2}
            row |= {"ranks": size, "operations per rank and batch": cost.total(0) / size / _BATCHES}
            row |= {"bytes per rank and batch": (cost.total(1) + cost.total(2)) / size / _BATCHES}
            row |= {"host's CPU ms per batch": cost.host_seconds / _BATCHES * 1e3}
            row |= {"host's µs per operation": cost.host_seconds / cost.total(0) * 1e6}
            rows.append(row | {"a rank's CPU µs per batch": cost.ranks_seconds / size / _BATCHES * 1e6})
    return Table(
        "Credits: what a batch of an even pass costs",
        rows,
        [
            f"Over {_BATCHES} batches, all ranks together. A job cannot train faster than one batch in the host's CPU "
            "time for a batch."
        ],
    )


def ends(measured: dict[int, tuple[Simulation, list[int]]]) -> Table:
    rows: list[dict[str, Any]] = []
    for place, epoch in enumerate(EPOCHS):
        for size, (simulation, left) in measured.items():
            end, closing = (simulation.costs[epoch.name(what)] for what in (_END, _CLOSING))
            row: dict[str, Any] = {"lookahead": epoch.lookahead, "ranks": size}
            row |= {"common end, operations per rank": end.total(0) / size, "host's CPU ms": end.host_seconds * 1e3}
            row |= {"sync point and roll call, operations per rank": closing.total(0) / size}
            rows.append(row | {"keys and entries left": left[place]})
    return Table("Credits: what the end of an even pass costs, and leaves in the store", rows)
