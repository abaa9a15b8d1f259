"""How it ends: the verdict is printed once, left where torchrun looks for it, and the process ends with it.

A main thread in Python raises. One that is blocked inside a gloo collective hears nothing, so after
`grace_seconds` the watchdog cuts the collective off (`interrupt`); where that does not help, it flushes and calls
`os._exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable

from countoff.core.protocol.state import State
from countoff.core.verdict import DivergenceError, Verdict, clip, describe_mark, error_for, lost_rank

_VICTIMS = ("connection closed", "connection reset", "broken pipe", "timed out", "gloo", "nccl", "socket", "aborted")
"""What an exception says that a rank gets because it lost a peer."""
PRINT_SECONDS = 4.0
"""After so long a verdict is said without its table: longer than gathering the table takes at worst."""
EXIT_CODE = 87  # unlike any signal's or Python's own, so that a scheduler's log tells it apart


def print_to_stderr(verdict: Verdict, rank: int) -> None:
    """Prints a verdict on stderr in one write, so that lines of several ranks do not mix."""
    text = "\n".join(f"[rank {rank}] {line}" for line in verdict.render().splitlines())
    # A stderr that is closed, or that a daemon has none of, must not hide the verdict from the exit code.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def write_error_file(verdict: Verdict) -> None:
    """Writes the verdict where torchrun's and accelerate's "Root Cause" is read from.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception`, which
    only a script decorated with `@record` would call.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {
        "message": f"countoff {verdict.headline}",
        "extraInfo": {"py_callstack": verdict.render(), "timestamp": str(int(time.time()))},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def exit_now(code: int = EXIT_CODE) -> None:
    """Ends the process without waiting for its main thread."""
    # On a thread of its own: the main thread may be blocked with a lock of logging or of a stream in its hands.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def print_verdict(state: State, verdict: Verdict) -> None:
    """Prints the verdict here, in warn mode on rank 0 only, and leaves it for the launcher. The second time nothing."""
    with state.lock:
        if state.printed:
            return
        state.printed, state.end = True, verdict
    if state.settings.on_divergence == "raise":
        write_error_file(verdict)
    if state.settings.on_divergence == "raise" or state.rank == 0:
        print_to_stderr(verdict, state.rank)


def raise_verdict(state: State) -> None:
    """Meets the end on the training thread: raises it, once it has been printed with its table; warns in passing.

    Raises:
        DivergenceError: Unless `on_divergence` is `warn`.
    """
    state.answered.set()
    if state.settings.on_divergence == "warn":
        return
    if not state.ended.wait(PRINT_SECONDS) and state.proposed is not None:
        state.adopt(state.proposed)  # the store does not answer: what this rank has proved is true all the same
    wait_until_printed(state)
    if state.end is not None:
        raise error_for(state.end)


def report_failure(state: State, error: BaseException, where: str, *, slow: bool = False) -> None:
    """Makes this rank's exception known to all; one that looks like a lost peer waits for the better cause first.

    Args:
        state: This rank's state.
        error: The exception that is about to end this rank.
        where: Its batch and span, in words.
        slow: Whether the store takes long to answer: the better cause may then take seconds to be heard.
    """
    words = clip(f"{type(error).__name__}: {_in_one_line(_text_of(error))}".removesuffix(": "), 200)
    victim = isinstance(error, DivergenceError) or any(sign in words.lower() for sign in _VICTIMS)
    if not victim:
        state.failure = f"raised {words} ({where})"
    state.answered.set()
    if victim:
        state.ended.wait(PRINT_SECONDS if slow else 0.5)
    if state.end is None:
        lost = f"raised {words}, as one does whose peer is gone"
        with state.lock:
            left = state.ledger.leaver() if victim else None
        if left is None:
            state.propose(lost_rank(state.rank, state.failure or lost, gone=False))
        else:
            state.propose(
                lost_rank(left.rank, f"{describe_mark(left)} and ended its fit there; rank {state.rank} {lost}")
            )
    wait_until_printed(state)
    if victim and state.end is not None and not isinstance(error, DivergenceError):
        notes = [*getattr(error, "__notes__", ()), f"countoff {state.end.headline}"]
        vars(error)["__notes__"] = notes  # as `add_note` of Python 3.11 does: printed below the traceback


def wait_until_printed(state: State) -> None:
    """Waits for the verdict and its table, but says what is known without it if the store takes too long."""
    if state.said.wait(PRINT_SECONDS):
        return
    verdict = state.end or state.proposed
    if verdict is not None:
        print_verdict(state, verdict)


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Calls `function` before the interpreter ends, also in a child of multiprocessing, which skips `atexit`.

    Args:
        function: Called once or twice; never in a process that was forked off this one.

    Returns:
        Takes it back.
    """
    own = os.getpid()

    def call() -> None:
        if os.getpid() == own:
            function()

    atexit.register(call)
    finalizer = multiprocessing.util.Finalize(None, call, exitpriority=100)

    def cancel() -> None:
        atexit.unregister(call)
        finalizer.cancel()

    return cancel


def _in_one_line(text: str) -> str:
    r"""A text's first line; with the last one of a traceback quoted in it, as a loader's worker sends it along.

    >>> _in_one_line("Caught it in a worker.\nOriginal Traceback (most recent call last):\n…\nValueError: torn\n")
    'Caught it in a worker. … ValueError: torn'
    """
    lines = text.strip().splitlines() or [""]
    return f"{lines[0]} … {lines[-1].strip()}" if any("Traceback (most" in line for line in lines[1:]) else lines[0]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a `__str__` of the user's own
        return "(it cannot be put into words)"
