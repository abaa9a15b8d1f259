"""A stall before the fit: what samples of a main thread show, and when rank 0 reports it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from countoff.core.session.liveness import stacks
from countoff.core.session.liveness.stacks import Place
from countoff.core.session.threads import before_fit
from countoff.core.session.threads.before_fit import Gathered, TimeInPlace


def place(line: int, *, call: str = "", inner: int = 1) -> Place:
    """The main thread in a line of the user's, and below that in a line of a library."""
    return Place("code", (f"train.py:{line} in main",), token=f"{line} {inner}", call=call)


def seconds_of(*samples: tuple[Place, int]) -> float:
    """For how long a thread has stood, by samples of its place and of its collectives, one in each second."""
    time_in_place, told = TimeInPlace(), dict[str, Any]()
    for now, (each, issued) in enumerate(samples):
        told = time_in_place.look(each, issued, float(now))
    return told["seconds"]


def test_a_rank_stands_as_long_as_its_own_line_is_the_same() -> None:
    """Libraries that it calls there may move."""
    assert seconds_of((place(7), 0), (place(8), 0), (place(8, inner=2), 1), (place(8, inner=3), 2)) == 2


def test_a_call_lasts_until_anything_has_moved() -> None:
    """The stack of a loop may be the same at each sample: another collective shows that it goes round."""
    waits = place(8, call="torch.distributed.barrier")
    assert seconds_of((place(8), 1), (waits, 1), (waits, 1), (waits, 1)) == 2
    assert seconds_of((waits, 1), (waits, 2), (waits, 3)) == 0
    assert seconds_of((waits, 1), (place(8, call=waits.call, inner=2), 1)) == 0


@pytest.mark.parametrize(
    ("found", "queued", "call"),
    [
        (place(8), frozenset({("0", 7, 9)}), "a collective of NCCL"),
        (place(8), frozenset(), ""),
        (place(8, call="torch.distributed.barrier"), frozenset({("0", 7, 9)}), "torch.distributed.barrier"),
        (replace(place(8), state="loader"), frozenset({("0", 7, 9)}), ""),
    ],
)
def test_a_rank_with_collectives_that_nccl_has_not_completed_waits_for_them(
    found: Place, queued: frozenset[Any], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "main_thread", lambda: found)
    monkeypatch.setattr(before_fit.collectives, "unfinished", lambda: queued)
    assert before_fit.place().call == call


class Job:
    """Four ranks, and what rank 0 makes of what they tell; rank 3 holds the others up."""

    def __init__(self) -> None:
        self.gathered = Gathered(10.0)
        self.now = self.looks = 0

    def look(self, waited: float, **more: Any) -> str:
        """Lets all ranks tell where they are, a second later; returns what is reported."""
        self.now += 1
        self.looks += 1
        waiting = {"call": "torch.distributed.barrier", "at": "train.py:9 in main", "seconds": waited}
        busy = {"call": "", "at": "data.py:4 in load", "seconds": waited + 1}
        records = {rank: {**(waiting if rank < 3 else busy), "looks": self.looks} for rank in range(4)}
        records[3] |= more
        verdict = self.gathered.judge(records, self.now)
        return "" if verdict is None else verdict.sentence


def test_a_stall_is_reported_once() -> None:
    job = Job()
    said = [job.look(waited) for waited in (8, 9, 10, 11, 30, 100)]
    assert [bool(each) for each in said] == [False, False, True, False, False, False]
    assert "rank 3, at data.py:4 in load, for 11 s; ranks 0–2 wait in " in said[2]


def test_a_later_stall_is_reported_if_it_lasts_more_than_twice_as_long() -> None:
    job = Job()
    assert [bool(job.look(waited)) for waited in (9, 10)] == [False, True]
    job.now += 4
    job.gathered.nobody_waits(job.now)  # it has lasted for 14 s
    assert [bool(job.look(waited)) for waited in (9, 10, 27, 28)] == [False, False, False, True]


def test_one_look_at_the_ranks_is_no_proof() -> None:
    """Rank 3 may have told its place after it had let the others go."""
    assert not Job().look(100)


def test_ranks_that_were_let_go_in_between_are_no_stall() -> None:
    """They wait in the next barrier, or told that they wait before rank 3 told where it goes on."""
    job = Job()
    assert [job.look(waited) for waited in (99, 3, 4, 5)] == [""] * 4


def test_a_rank_that_moves_is_where_it_was_while_the_others_waited() -> None:
    job = Job()
    job.look(99, seconds=0.0)
    assert "rank 3, at data.py:4 in load; ranks 0–2" in job.look(100, seconds=0.0, at="train.py:10 in main")


def test_what_a_rank_has_told_once_is_no_news() -> None:
    """An attempt before may have left it in the store, or the rank may have begun its fit."""
    job = Job()
    assert [job.look(waited, looks=7) for waited in (99, 100, 101)] == [""] * 3
    assert "rank 3, at data.py:4 in load" in job.look(102)


def test_a_rank_that_gives_no_sign_of_life_is_named() -> None:
    """Its process is gone, or stopped: it has told nothing for half of the time for which the others have waited."""
    job = Job()
    assert [job.look(waited, looks=7) for waited in range(6)] == [""] * 6
    said = [job.look(waited, looks=7) for waited in (9, 10)]
    assert said == [
        "",
        "rank 3 has given no sign of life for 7 s; ranks 0–2 wait in torch.distributed.barrier at train.py:9.",
    ]


def test_a_rank_that_waited_before_its_process_was_gone_is_not_said_to_wait() -> None:
    job = Job()
    job.look(4, call="torch.distributed.barrier", seconds=20.0, looks=7)
    said = [job.look(waited, call="torch.distributed.barrier", seconds=20.0, looks=7) for waited in range(5, 12)]
    assert [each for each in said if each] == [
        "rank 3 has given no sign of life for 6 s; ranks 0–2 wait in torch.distributed.barrier at train.py:9."
    ]


FIRST_FIT = """
import os
from countoff.core.session.threads import first_fit
called = []
first_fit.call(lambda: called.append("called"))
if child := os.fork():
    os.waitpid(child, 0)
first_fit.begin()
first_fit.begin()
print("parent" if child else "child", first_fit.begun(), *called, flush=True)
"""


def test_the_first_fit_of_a_process_calls_what_waits_for_it() -> None:
    """Once, and not in a forked process, where that would be for a thread that is not there."""
    run = subprocess.run([sys.executable, "-c", FIRST_FIT], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.splitlines() == ["child True", "parent True called"]
