"""One rank's even pass, whose state is moved by hand: errors, ends, and what a run resumes from."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.credits import Credits
from countoff.core.session.liveness import stacks
from countoff.core.session.state import State
from countoff.core.session.threads import even_pass
from countoff.core.session.threads.even_pass import EvenPass
from countoff.core.verdict import UnevenBatches, Verdict


class Pass:
    """An even pass of rank 0 of 2, with its state and its credits."""

    def __init__(
        self,
        batches: Iterator[Any],
        lookahead: int = 4,
        *,
        ahead_of_loop: bool = True,
        proven: int | None = None,
        **more: Any,
    ) -> None:
        self.state = State(0, 2, Settings(uneven_train="stop"), {})
        self.state.printed.set()
        self.span = SpanCounters("train epoch 0")
        self.state.spans.append(self.span)
        self.credits = Credits(0, lookahead, ahead=ahead_of_loop)
        if proven is not None:
            self.credits = Credits.known(0, proven)
        self.state.begin_credits(self.span, self.credits)
        self.even = EvenPass(self.state, self.span, self.credits, batches, **more)

    def receive(self, **entry: Any) -> None:
        self.state.receive({"opened": 0, **entry})

    def grant(self, *blocks: int) -> None:
        for block in blocks:
            self.receive(type="grant", block=block, size=2)


def failing() -> Iterator[int]:
    yield from range(3)
    raise ValueError("torn shard")


def test_an_error_is_raised_where_the_loop_comes_to_its_batch():
    """The batches before a bad one are given first, though the loader has failed already."""
    this = Pass(failing())
    assert not this.even.is_ready()
    assert this.credits.ready == 3
    this.grant(0, 1)
    assert [next(this.even), next(this.even)] == [0, 1]
    this.receive(type="stop", at=3)
    assert next(this.even) == 2
    with pytest.raises(StopIteration):
        next(this.even)
    failed = Pass(failing())
    failed.grant(0)
    assert not failed.even.is_ready()
    failed.grant(0, 1)
    assert [next(failed.even), next(failed.even)] == [0, 1]
    failed.credits.granted = 3
    assert next(failed.even) == 2
    with pytest.raises(ValueError, match="torn shard"):
        next(failed.even)


def test_a_pass_goes_on_with_another_iterator_after_an_error():
    """The program has caught it and has begun its loader again: the other ranks hear of nothing but more batches."""
    this = Pass(failing())
    this.grant(0, 1)
    this.credits.granted = 3
    assert [next(this.even) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="torn shard"):
        next(this.even)
    this.even.go_on_with(iter("ab"))
    this.credits.granted = 5
    assert [next(this.even) for _ in range(2)] == ["a", "b"]
    this.receive(type="stop", at=5)
    with pytest.raises(StopIteration):
        next(this.even)
    assert (this.credits.ready, this.credits.own_end, this.span.unused) == (5, 5, UnusedBatches(0, exact=True))


def test_a_verdict_ends_the_wait():
    """A rank that waits for another one raises the verdict as soon as it is known."""
    this = Pass(iter(range(9)))
    verdict = Verdict("UnevenBatches", "rank 1 stopped after 0 batches.", (1,))
    threading.Timer(0.05, this.state.adopt, [verdict]).start()
    with pytest.raises(UnevenBatches):
        next(this.even)


def test_who_asks_for_a_batch_after_the_verdict_has_asked_for_it() -> None:
    """The table of the verdict then counts this rank among those that went on, not among those not so far."""
    this = Pass(iter(range(9)))
    this.even.is_ready()
    this.grant(0)
    assert next(this.even) == 0
    this.span.started = 1
    this.state.adopt(Verdict("UnevenBatches", "rank 1 stopped after 1 batch.", (1,)))
    with pytest.raises(UnevenBatches):
        next(this.even)
    assert this.span.requested == 2


def test_a_loader_that_ends_with_the_others_is_let_run_to_its_end():
    """What stands behind a generator's last `yield` is run, as in any loop; what is left is counted."""
    ran: list[str] = []

    def batches() -> Iterator[int]:
        yield from range(2)
        ran.append("to the end")

    this = Pass(batches(), lookahead=2)
    assert not this.even.is_ready()
    this.receive(type="stop", at=2)
    assert list(this.even) == [0, 1]
    assert ran == ["to the end"]
    assert (this.span.unused and this.span.unused.batches, this.span.unused and this.span.unused.exact) == (0, True)
    longer = Pass(iter(range(9)))
    longer.receive(type="stop", at=2)
    assert list(longer.even) == [0, 1]
    assert longer.span.unused is not None
    assert longer.span.unused.batches >= 1
    assert not longer.span.unused.exact


def test_a_pass_goes_on_alone_once_its_span_is_closed():
    """An iterator that outlives its span waits for nobody."""
    this = Pass(iter(range(9)))
    this.grant(0)
    this.even.is_ready()
    this.grant(0)
    assert next(this.even) == 0
    this.state.close_span("stopped")
    assert list(this.even) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_state_to_resume_from_is_that_of_the_loop():
    """It counts the batches that the loop has got, not those that were fetched ahead."""
    fetched: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(9):
            fetched.append(number)
            yield number

    this = Pass(batches(), snapshot=lambda: len(fetched))
    assert this.even.resumable is not None
    assert not this.even.is_ready()
    this.grant(0, 1, 2)
    for number in range(3):
        assert next(this.even) == number
        assert this.even.resumable.state == number + 1
    assert len(fetched) == 6
    assert not this.even.resumable.over


def test_a_pass_goes_on_alone_once_the_guard_is_closed() -> None:
    """Nobody hears of the other ranks any more, so nothing may wait for them."""
    this = Pass(iter(range(5)))
    threading.Timer(0.05, this.state.end_credits).start()
    assert list(this.even) == [0, 1, 2, 3, 4]


class Watched:
    """A thread that calls a function once the main thread is seen to be in a state, or after ten seconds."""

    def __init__(self, state: str, then: Callable[[], object]) -> None:
        self.seen: set[str] = set()
        self._state = state
        self._then = then
        threading.Thread(target=self._watch).start()

    def _watch(self) -> None:
        patience = time.monotonic() + 10
        while self._state not in self.seen and time.monotonic() < patience:
            self.seen.add(stacks.main_thread().state)
        self._then()


def test_a_loader_with_less_than_its_proven_batches_waits_for_nobody() -> None:
    """The sync points show it: where lengths are proven, ranks tell one another nothing else."""
    this = Pass(iter(range(2)), proven=3)
    assert list(this.even) == [0, 1]
    assert this.state.outbox.empty()


def test_nothing_is_fetched_before_the_loop_asks_for_it() -> None:
    """A loader that does not fetch ahead by itself is asked where its loop asks."""
    fetched: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(9):
            fetched.append(number)
            yield number

    this = Pass(batches(), ahead_of_loop=False)
    assert fetched == []
    for number in range(3):
        assert not this.even.is_ready()
        assert fetched == list(range(number + 1))
        this.receive(type="grant", block=number, size=1)
        assert next(this.even) == number
        assert fetched == list(range(number + 1))


def test_a_wait_for_batches_is_in_the_loader() -> None:
    """A loader that waits in the standard library has no line of the user's. It does not wait for the other ranks."""
    batches: queue.Queue[int] = queue.Queue()
    this = Pass(iter(batches.get, 0), lookahead=1)
    watched = Watched("loader", lambda: batches.put(1))
    assert not this.even.is_ready()
    assert "loader" in watched.seen


def test_a_wait_for_other_ranks_is_as_a_collective() -> None:
    """So a report of a stall names the rank in whose loader the others wait, and not these."""
    this = Pass(iter(range(9)))
    watched = Watched("collective", lambda: this.receive(type="stop", at=1))
    assert next(this.even) == 0
    assert "collective" in watched.seen


def test_a_wait_reads_the_log_where_no_reader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may connect late, or not at all; one look at the log is asked for at a time."""
    monkeypatch.setattr(even_pass, "WAIT_SECONDS", 0.01)
    asked: list[int] = []

    def read_log() -> None:
        asked.append(len(asked))
        this.state.outbox.put(None)  # the writer is busy: it is asked once

    this = Pass(iter(range(9)), read_log=read_log)
    assert not this.even.is_ready()
    while not this.state.outbox.empty():  # the writer has given the credit that is due
        this.state.outbox.get()
    threading.Timer(0.2, lambda: this.receive(type="stop", at=1)).start()
    assert list(this.even) == [0]
    assert asked == [0]


class Interrupted(Exception):
    """What the handler of a signal raises."""


def test_a_signal_that_another_thread_gets_ends_a_wait() -> None:
    """Python handles it in the main thread, which nothing wakes then: a wait without a time-out would never end."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    this, given_up = Pass(iter(range(9))), threading.Event()

    def give_up() -> None:
        given_up.set()
        this.receive(type="stop", at=0)

    patience = threading.Timer(20, give_up)
    patience.start()
    earlier = signal.signal(signal.SIGUSR2, interrupt)
    try:
        Watched("collective", lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR2))
        with pytest.raises(Interrupted):
            next(this.even)
        assert not given_up.is_set()
    finally:
        patience.cancel()
        signal.signal(signal.SIGUSR2, earlier)
