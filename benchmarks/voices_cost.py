"""Measures real ranks on several hosts, where each speaks with the store, and where one voice per host does.

The hosts are namespaces of this machine (`integration_tests.hosts`), so all ranks share its processors. Both ways are
measured in turns by the same processes: the roll call at fit start and the exit of a healthy fit, and the time from
the moment at which one rank ends its epoch with other batches than all others until the last rank has the proof.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from benchmarks.results import Samples, Table, compared, progress
from benchmarks.scale import FLAT, VOICED
from countoff.core import FitPlan, Guard, Settings
from integration_tests.hosts import run_hosts, why_impossible

_WAYS = {FLAT: 0, VOICED: 2}
"""From how many ranks on each host has one voice; 0: never."""
_START, _PROOF, _EXIT = "roll call at fit start", "proof until the last rank", "exit"
_BATCHES = 4
_PROOF_SECONDS = 60.0
_SETTLING_SECONDS = 1.0
"""After so long, the connections stand on which ranks hear of a proof. A fit does not wait for all of them."""

Moments = dict[tuple[str, str], list[tuple[float, float]]]
"""When a rank began something and when it had it, each time; by what it was and who speaks. Ranks share the clock."""


def fits(repeats: int) -> Moments:
    """Runs healthy fits and fits with a fault, both ways in turns; the first round is the warm-up."""
    dist.init_process_group("gloo")
    moments: Moments = {}
    for number in range(repeats + 1):
        for who, voice_ranks in _WAYS.items():
            found = {**healthy(voice_ranks), **faulty(voice_ranks)}
            for what, times in found.items() if number else ():
                moments.setdefault((what, who), []).append(times)
    dist.destroy_process_group()
    return moments


def healthy(voice_ranks: int) -> dict[str, tuple[float, float]]:
    """Returns the moments of a fit's start and exit."""
    guard = _guard(voice_ranks)
    start = _begin(guard)
    guard.train_start(0)
    guard.train_end("exhausted")
    guard.fit_end()
    dist.barrier()
    began = time.monotonic()
    guard.close()
    return {_START: start, _EXIT: (began, time.monotonic())}


def faulty(voice_ranks: int) -> dict[str, tuple[float, float]]:
    """Returns when a rank ended an epoch in which the last rank has a batch less than all others, and had the proof.

    Raises:
        TimeoutError: If it has none after a minute.
    """
    guard = _guard(voice_ranks)
    _begin(guard)
    guard.train_start(0)
    for _ in range(_BATCHES - (dist.get_rank() == dist.get_world_size() - 1)):
        guard.batch()
    time.sleep(_SETTLING_SECONDS)
    dist.barrier()
    began = time.monotonic()
    guard.train_end("exhausted")
    if not guard.state.ended.wait(_PROOF_SECONDS):
        raise TimeoutError("no proof has come")
    proof = began, time.monotonic()
    dist.barrier()
    guard.close()
    return {_PROOF: proof}


def _guard(voice_ranks: int) -> Guard:
    settings = Settings.resolve(voice_ranks=voice_ranks, on_divergence="warn")
    return Guard(settings, rank=dist.get_rank(), world_size=dist.get_world_size())


def _begin(guard: Guard) -> tuple[float, float]:
    dist.barrier()
    began = time.monotonic()
    guard.fit_start(FitPlan(batch_size=32, dp_rank=dist.get_rank()), {"torch": "2"})
    return began, time.monotonic()


def tables(quick: bool) -> Iterator[Table]:
    """Yields a table for each number of ranks and each thing that is measured."""
    if reason := why_impossible():
        yield Table("Voices: real ranks", [{"not measured": reason}])
        return
    for hosts, per_host, repeats in [(2, 2, 2)] if quick else [(4, 8, 7), (8, 8, 7)]:
        yield from _of_ranks(hosts, per_host, repeats)


def _of_ranks(hosts: int, per_host: int, repeats: int) -> Iterator[Table]:
    progress(f"voices: {hosts} hosts of {per_host} ranks")
    with tempfile.TemporaryDirectory() as directory:
        results = run_hosts(
            fits, repeats, hosts=hosts, per_host=per_host, directory=Path(directory), deadline_seconds=600
        )
    by_rank: list[Moments] = [result.value for result in results]
    for what in (_START, _PROOF, _EXIT):
        samples: Samples = {}
        for who in _WAYS:
            rounds = zip(*(moments[what, who] for moments in by_rank), strict=True)
            samples[who] = [max(end for _, end in each) - min(begin for begin, _ in each) for each in rounds]
        title = f"Voices: {what}, {hosts * per_host} real ranks on {hosts} hosts, by who speaks with the store"
        notes = [f"{repeats} times each, in turns, from the first rank's call until the last rank has it."]
        yield compared(title, "ms", samples, against=FLAT, notes=notes)
