"""What rich's `Live` leaves open: keys as they are pressed, and a terminal that is as before at every end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.live import Live

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_HELD_BACK = (*_ENDING, signal.SIGINT, signal.SIGTSTP)


@contextlib.contextmanager
def whole_terminal(console: Console) -> Iterator[Screen]:
    """Takes the terminal for the block; keys are not echoed there.

    Ctrl-C raises `KeyboardInterrupt`; SIGTERM, SIGHUP and SIGQUIT raise `SystemExit` with 128 and the signal's number.
    Ctrl-Z gives the terminal back until the process goes on.

    Args:
        console: Where to; a terminal.
    """
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    screen = Screen(console, woken)
    handlers = {
        **dict.fromkeys(_ENDING, _end),
        signal.SIGTSTP: screen.ask_to_stop,
        signal.SIGWINCH: lambda *_: None,  # it only wakes `wait`, so that the next picture has the new size
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with _undisturbed():
            screen.take()
        yield screen
    finally:
        with _undisturbed():
            screen.give_back()
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(woken)
            os.close(waker)


class Screen:
    """The terminal, and what it shows.

    Args:
        console: Where to; a terminal.
        woken: What has bytes to read once a signal has come.
    """

    def __init__(self, console: Console, woken: int) -> None:
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._woken = woken
        self._keys = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
        self._before: list[Any] = []
        self._stop_asked = False

    def show(self, content: ConsoleRenderable) -> None:
        """Shows this in place of what was there; no string, in which rich would look for markup."""
        self._live.update(content, refresh=True)

    def wait(self, seconds: float) -> str:
        """Waits so long, or until a key is pressed or the terminal has another size.

        Returns:
            The keys that were pressed; empty if none was, and ``q`` if the terminal is gone.
        """
        ready, _, _ = select.select([self._woken, *self._keys], [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 512)
        if self._stop_asked:
            self._stop()
        if not set(ready) & set(self._keys):
            return ""
        try:
            return os.read(self._keys[0], 512).decode("utf-8", "replace") or "q"
        except OSError:
            return "q"

    def take(self) -> None:
        """Takes the terminal."""
        if self._keys:
            self._before = termios.tcgetattr(self._keys[0])
            tty.setcbreak(self._keys[0])
        self._live.start(refresh=True)

    def give_back(self) -> None:
        """Leaves the terminal as it was."""
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.stop()
        if self._before:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys[0], termios.TCSAFLUSH, self._before)

    def ask_to_stop(self, *_: object) -> None:
        """Lets `wait` stop the process: a picture that is painted at this moment must not be cut in two."""
        self._stop_asked = True

    def _stop(self) -> None:
        self._stop_asked = False
        with _undisturbed():
            self.give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
            self.take()


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back that would leave the terminal half taken or half given back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
