"""How a thread that has told another one to end waits for that, though it may be blocked in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from countoff.core.session.store.channel import TRY_SECONDS, Channel

__all__ = ["join"]

_JOIN_SECONDS = 1.0
_LOOK_SECONDS = 0.1


def join(thread: threading.Thread, find_channel: Callable[[], Channel | None] | None = None) -> None:
    """Waits for the end of a thread that has been told to end.

    Args:
        thread: The thread.
        find_channel: Returns the thread's channel, through which it can be interrupted; None while it is connecting.
            Without this function the thread has no channel.
    """
    if thread is threading.current_thread() or thread.ident is None:
        return
    if find_channel is not None:
        # Nothing interrupts torch's client while it connects: it may be looking up a name for a log line of its own.
        deadline = time.monotonic() + TRY_SECONDS
        while thread.is_alive() and find_channel() is None and time.monotonic() < deadline:
            thread.join(_LOOK_SECONDS)
    thread.join(_JOIN_SECONDS / 4)
    channel = find_channel() if find_channel is not None else None
    if thread.is_alive() and channel is not None:  # blocked in the store: shutting its socket wakes it
        channel.shut()
        thread.join(_JOIN_SECONDS)
