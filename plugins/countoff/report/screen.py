"""A terminal that one command has for itself, and gets back as it was however the command ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.live import Live

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ALL = (*_ENDING, signal.SIGINT, signal.SIGTSTP)


class Screen:
    """The whole terminal, from the start of the block to its end. Keys are read as they are pressed, and not echoed.

    Ctrl-C raises `KeyboardInterrupt`; SIGTERM, SIGHUP and SIGQUIT raise `SystemExit` with 128 and the signal's number.
    Ctrl-Z gives the terminal back until the process goes on.

    Args:
        console: Where to; a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._stop_asked = False

    def __enter__(self) -> Screen:
        with _undisturbed():
            self._awake = os.pipe()
            for end in self._awake:
                os.set_blocking(end, False)
            self._wakeup = signal.set_wakeup_fd(self._awake[1], warn_on_full_buffer=False)
            self._handlers = {each: signal.signal(each, _end) for each in _ENDING}
            self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._ask_to_stop)
            self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with _undisturbed():
            self._give_back()
            for each, handler in self._handlers.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(self._wakeup)
            for end in self._awake:
                os.close(end)

    def show(self, content: ConsoleRenderable) -> None:
        """Shows this in place of what was there; no string, in which rich would look for markup."""
        self._live.update(content, refresh=True)

    def wait(self, seconds: float) -> str:
        """Waits so long, or until a key is pressed.

        Returns:
            The keys that were pressed; empty if none was.
        """
        watched = [self._awake[0], *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._awake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._awake[0], 512)
        if self._stop_asked:
            self._stop()
        if self._keys is None or self._keys not in ready:
            return ""
        pressed = b""
        with contextlib.suppress(OSError):  # the terminal is gone
            pressed = os.read(self._keys, 512)
        if not pressed:
            self._keys = None
        return pressed.decode("utf-8", "replace")

    def _take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._live.start(refresh=True)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.stop()
        if self._before:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, self._before)

    def _ask_to_stop(self, _: int, __: FrameType | None) -> None:
        self._stop_asked = True  # `wait` does it: what is printed at this moment must not be cut in two

    def _stop(self) -> None:
        self._stop_asked = False
        with _undisturbed():
            self._give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._take()


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back that would leave the terminal half taken or half given back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
