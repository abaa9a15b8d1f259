"""The listener: the thread that receives the log. It blocks in `wait`, so an entry arrives within microseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

from countoff.core.runtime.channel import Channel
from countoff.core.runtime.session import Session, first_line

_FINISHED_POLL_SECONDS = 0.02


class Listener:
    """Receives the entries of the log, over a connection of its own, until the fit has ended.

    Args:
        session: What the guard's threads share.
        concluded: Called once a verdict has been received.
        lost: Called when the store cannot be reached any more.

    Attributes:
        channel: This thread's channel, once it is connected.
        thread: The thread.
    """

    def __init__(self, session: Session, concluded: Callable[[], None], lost: Callable[[Exception], None]) -> None:
        self._session = session
        self._concluded = concluded
        self._lost = lost
        self.channel: Channel | None = None
        self.thread = threading.Thread(target=self._run, name="countoff listener", daemon=True)

    def _run(self) -> None:
        session = self._session
        session.met.wait()
        if session.address is None or session.closing.is_set():
            return
        try:
            self.channel = channel = Channel(*session.address, session.closing.is_set)
        except Exception as error:  # the speaker has a connection, so the store exists
            if session.closing.is_set():
                return  # the guard was closed before this thread had a connection: there is nothing to report
            session.stop_comparing(f"there is no second connection to the job's store: {first_line(error)}")
            return
        try:
            self._receive(channel)
        except Exception as error:  # torch names a lost store by several exceptions
            self._lost(error)

    def _receive(self, channel: Channel) -> None:
        session, state = self._session, self._session.state
        while not session.closing.is_set():
            index = state.log.read
            if state.finished and not channel.has(f"log/{index}"):
                session.closing.wait(_FINISHED_POLL_SECONDS)  # a `wait` here would have to be interrupted to leave
                continue
            state.receive(index, channel.wait(f"log/{index}"))
            if state.end is not None:
                self._concluded()
                return
