"""`TimedQueue`: a wait that ends in time, wherever its thread is held up."""

import queue
import threading
import time

import pytest

from countoff.core.waiting import TimedQueue


def test_a_get_ends_although_its_time_is_over_before_it_waits():
    """With `queue.SimpleQueue` one get of some thousands blocks for ever, before Python 3.13."""

    def look(times):
        for _ in range(times):
            fresh = TimedQueue()
            with pytest.raises(queue.Empty):
                fresh.get(3e-7)

    thread = threading.Thread(target=look, args=(50_000,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_items_come_in_order_from_several_threads():
    """Each thread's items come in its order, none is lost, and none wakes the reader in vain."""
    items, found = TimedQueue(), []
    writers = [threading.Thread(target=lambda n=n: [items.put((n, i)) for i in range(2_000)]) for n in range(3)]
    for each in writers:
        each.start()
    while len(found) < 6_000:
        found.append(items.get(60))
    assert [[i for n, i in found if n == writer] for writer in range(3)] == [[*range(2_000)]] * 3
    assert len(items) == 0
    for each in writers:
        each.join()


def test_a_get_waits_as_long_as_it_is_told():
    """An item that comes meanwhile ends the wait; without one, `queue.Empty` comes no earlier."""
    items, began = TimedQueue(), time.monotonic()
    with pytest.raises(queue.Empty):
        items.get(0.05)
    assert time.monotonic() - began >= 0.05
    threading.Timer(0.02, items.put, ["late"]).start()
    assert items.get(60) == "late"
    with pytest.raises(queue.Empty):
        items.get()
