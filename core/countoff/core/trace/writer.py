"""The thread that writes a rank's trace: whatever the file system does, nobody waits for it.

All fits of a process that are under way share one thread and one file. Others put lines into a queue, and this thread
does everything else: it makes the directory, encodes the lines and writes them. If that fails, the trace ends with one
warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from countoff.core.trace.format import file_name, parse_name
from countoff.core.waiting import TimedQueue

Line = Mapping[str, Any]
LOOK_SECONDS = 0.25
"""How often the writer looks at each fit."""
MOST_LINES = 10_000
"""Lines that wait for the file system; more are dropped, and counted."""
MOST_BYTES = 64 << 20
"""A file that is larger is renamed."""
CLOSE_SECONDS = 1.5
"""After so long the process goes on without the rest of its trace."""
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
writers: dict[tuple[int, int, str], Writer] = {}
failed: set[tuple[int, str]] = set()
"""Ranks and directories whose trace has ended early. No later fit of the process tries again: it might wait again."""


class Source(Protocol):
    """A fit, as the writer knows it."""

    def look(self, now: float) -> Sequence[Line]:
        """Returns the lines that are due; called by the writer, about every `LOOK_SECONDS`.

        Args:
            now: The time, by `time.monotonic()`.
        """
        ...


class Writer:
    """Writes the trace of one rank, until the last of its sources leaves.

    Args:
        directory: The directory of the trace; it is made where it does not exist.
        rank: This rank.
        warn: Prints why the trace has ended early; called once, on this thread or on the one that ends it.
    """

    def __init__(self, directory: str, rank: int, warn: Callable[[str], None]) -> None:
        self._directory = directory
        self._rank = rank
        self._warn = warn
        self.queue = TimedQueue[Line | Callable[[], Sequence[Line]] | None]()
        self._sources: list[Source] = []
        self._dropped = 0
        self._over = (rank, directory) in failed
        self.thread = threading.Thread(target=self._run, name="countoff trace", daemon=True)

    def put(self, line: Line | Callable[[], Sequence[Line]]) -> None:
        """Appends a line to the trace, soon; never waits.

        Args:
            line: The line; or a function that returns lines, called on the trace's thread. An exception of it ends the
                trace.
        """
        if self._over:
            return
        if len(self.queue) >= MOST_LINES:
            self._dropped += 1
            return
        self.queue.put(line)

    def flush(self, seconds: float) -> None:
        """Waits until all lines so far are in the file, at most so long."""
        written = threading.Event()

        def written_by_now() -> list[Line]:
            written.set()
            return []

        self.put(written_by_now)
        while not (self._over or seconds <= 0 or written.wait(min(0.05, seconds))):
            seconds -= 0.05

    def _join(self, source: Source) -> None:
        started = bool(self._sources)
        self._sources.append(source)
        if not started and not self._over:
            try:
                self.thread.start()
            except RuntimeError:  # the interpreter is about to end, and starts no thread any more
                self._over = True

    def _end(self) -> None:
        """Writes what waits, and ends the thread; a file system that does not answer in time is left alone."""
        self.queue.put(None)
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_SECONDS)
            if self.thread.is_alive():
                self._fail("the file system does not answer")
        self._over = True

    def _fail(self, why: str) -> None:
        """Warns that the trace ends early, unless that is known."""
        with _lock:
            known = self._over or (self._rank, self._directory) in failed
            self._over = True
            failed.add((self._rank, self._directory))
        if not known:
            self._warn(why)

    # The trace's thread.

    def _run(self) -> None:
        try:
            with contextlib.closing(_File(self._directory, self._rank)) as file:
                while self._turn(file):
                    pass
        except Exception as error:  # whatever goes wrong here, training goes on
            self._fail(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
        self._over = True

    def _turn(self, file: _File) -> bool:
        """Writes what has come, and what the sources have to say; False once the last one has left."""
        items: list[Line | Callable[[], Sequence[Line]] | None] = []
        with contextlib.suppress(queue.Empty):
            items.append(self.queue.get(LOOK_SECONDS))
            while len(items) < MOST_LINES:
                items.append(self.queue.get())
        lines: list[Line] = []
        for item in items:
            if callable(item):
                file.append(lines)  # first: the function may take long, or fail
                lines = list(item())
            elif item is not None:
                lines.append(item)
        now = time.monotonic()
        for source in list(self._sources):
            lines += source.look(now)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            lines.append({"k": "dropped", "t": timestamp(), "lines": dropped})
        if not self._over:
            file.append(lines)
        return not (self._over or None in items)


class _File:
    """A rank's file: appends lines, and begins a new file where one has passed its limit."""

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._path = os.path.join(directory, file_name(rank))
        os.makedirs(directory, exist_ok=True)
        self._open()

    def append(self, lines: Sequence[Line]) -> None:
        """Appends lines.

        Raises:
            OSError: If they cannot be written.
        """
        if not lines:
            return
        if not os.fstat(self._file).st_nlink:
            raise FileNotFoundError(0, "its file was removed")
        text = "".join(f"{json.dumps(line, separators=(',', ':'), default=str)}\n" for line in lines).encode()
        self._bytes += len(text)
        while text:  # a disk that is nearly full takes a part of it
            text = text[os.write(self._file, text) :]
        if self._bytes > MOST_BYTES:
            self._rotate()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o644)
        try:
            _lock_file(self._file)
            self._bytes = os.fstat(self._file).st_size
            if self._bytes and os.pread(self._file, 1, self._bytes - 1) != b"\n":
                os.write(self._file, b"\n")  # the process before was killed in the middle of a line
        except BaseException:  # an interrupt, too: the file must not stay locked
            os.close(self._file)
            raise

    def _rotate(self) -> None:
        names = [parse_name(name) for name in os.listdir(self._directory)]
        number = max((found[1] or 0 for found in names if found is not None and found[0] == self._rank), default=0) + 1
        os.rename(self._path, os.path.join(self._directory, file_name(self._rank, number)))
        full = self._file
        self._open()
        os.close(full)


def _lock_file(file: int) -> None:
    """Keeps other processes from this file, while this one has it open. A process that was forked off has no such lock.

    Raises:
        OSError: If another process has it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems have no locks
        if error.errno in (errno.EAGAIN, errno.EACCES):
            why = "another process writes its trace there; give each job a directory of its own"
            raise OSError(error.errno, why) from None


def timestamp(seconds: float | None = None) -> float:
    """A time as the lines have it, in seconds since the epoch; that of now, by default."""
    return round(time.time() if seconds is None else seconds, 3)


def join(source: Source, directory: str, rank: int, warn: Callable[[str], None]) -> Writer:
    """Returns the writer of this process for a rank's trace, and lets it look at a source from here on.

    Where the trace of that rank has ended early, the writer writes nothing and has no thread.

    Args:
        source: The source.
        directory: The directory of the trace.
        rank: This rank.
        warn: Prints why the trace has ended early.
    """
    key = os.getpid(), rank, directory  # process, because a forked one has no threads; rank, because tests have several
    with _lock:
        writer = writers.get(key)
        if writer is None:
            writer = writers[key] = Writer(directory, rank, warn)
        writer._join(source)
    return writer


def leave(source: Source, writer: Writer) -> None:
    """Lets a writer look at a source no more. With the last source, it waits until the trace is written, 1.5 s at most.

    Args:
        source: The source.
        writer: What `join` has returned.
    """
    with _lock:
        writer._sources.remove(source)
        if writer._sources:
            return
        for key in [key for key, each in writers.items() if each is writer]:
            del writers[key]
    writer._end()
