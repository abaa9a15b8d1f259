"""Runs the command line in a terminal of its own, as a user at a keyboard would."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType

from tests.paths import SOURCE_ROOTS

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SCRIPT = f"""
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.path[:0] = {list(map(str, SOURCE_ROOTS))}
from countoff.cli.__main__ import main
main()
"""


class Terminal:
    """A terminal in which a command runs, from the start of the block to its end.

    Args:
        arguments: What follows `countoff`.
        lines: The terminal's lines.
        columns: Its columns.
        environment: Variables that differ from this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        lines: int = 24,
        columns: int = 120,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._end, self._inner = os.openpty()
        fcntl.ioctl(self._inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.output = ""
        self.before = termios.tcgetattr(self._inner)
        variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *arguments],
            stdin=self._inner,
            stdout=self._inner,
            stderr=self._inner,
            start_new_session=True,
            env={**variables, "TERM": "xterm-256color", **(environment or {})},
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._end)
        os.close(self._inner)

    @property
    def shown(self) -> str:
        """What was painted, without its colours."""
        return _CONTROL.sub("", self.output)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its settings, and a cursor that can be seen."""
        shown = self.output.rfind("\x1b[?25h") >= self.output.rfind("\x1b[?25l")
        return shown and termios.tcgetattr(self._inner) == self.before

    def read_until(self, text: str, seconds: float = 30.0) -> None:
        """Reads until a text was painted."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            if not self._read(deadline):
                raise AssertionError(f"no {text!r} in:\n{self.output}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """Reads until the command has ended, and returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self._read(time.monotonic() + 0.05)
        while self._read(time.monotonic() + 0.05):
            pass
        return self.process.returncode

    def _read(self, deadline: float) -> bool:
        """Reads what there is, or what comes before the deadline; False if that is nothing."""
        ready, _, _ = select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            self.output += os.read(self._end, 1 << 16).decode()
        return bool(ready)
