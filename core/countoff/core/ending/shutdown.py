"""Shutdown: the verdict is printed once, written where torchrun looks for it, and the process ends with it.

A main thread that runs Python code raises. One that is blocked inside a collective cannot, so after 3 s the watchdog
interrupts the collective (`gloo`, `nccl`). Where that does not help, it flushes the streams and calls `os._exit`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TextIO

from countoff.core.alerts.alerts import wait_for_all
from countoff.core.checks.lost import EXITED, LEFT, loss_of, lost_rank, victim
from countoff.core.checks.uneven import EVALUATION
from countoff.core.ending import sigterm, verdict_file
from countoff.core.forgotten import forgotten
from countoff.core.levels import effect
from countoff.core.messages import clip, plain
from countoff.core.protocol.failures import Failure
from countoff.core.session.liveness import stacks
from countoff.core.session.liveness.stacks import is_users_file
from countoff.core.session.state import State
from countoff.core.verdict import DivergenceError, Verdict, error_for, kind_of

_log = logging.getLogger("countoff")
_LOSSES = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket", "aborted")
"""Words of an exception that a rank may get because it lost a peer, or as well in its own loader."""
_OF_COLLECTIVES = re.compile(
    r"\bgloo/[\w/]+\.(?:cc|cpp|h|hpp):\d+|nccl(?:remote|system|internal)error|nccl communicator|"
    r"unhandled (?:system|internal) error|"
    r"remote process exited|collective operation timeout|connection closed by (?:remote )?peer"
)
"""What only an exception of a collective that has lost a peer says: a line of gloo's own code, or an error of NCCL's.
A program that calls a collective in a wrong way is told so by torch, in other words."""
_OF_STORES = ("DistNetworkError", "DistStoreError")
"""Types of exceptions by which torch's store says the same."""
EXIT_CODE = 87
"""Of a process whose main thread cannot be reached; unlike any signal's or Python's own, to be told apart in a log."""
PRINT_SECONDS = 4.0
"""After so long a verdict is printed without its table. Gathering the table takes less than that at worst."""
ENDING_SECONDS = 60.0
"""After so long a process has survived a verdict that it has printed."""
_printed: dict[int, float] = {}
"""When a guard of this process has last printed a verdict, by `time.monotonic()`; the key is its rank."""
told_of_evaluations: set[int] = set()
"""The processes, by pid, that have warned of an uneven evaluation: this one, or the one that it was forked from."""
_REPORTED_BY = "countoff_reported_by"
"""An attribute of an exception: which guard has reported it."""


def print_to_stderr(verdict: Verdict, rank: int, reporter: int | None = None, *, goes_on: bool = False) -> None:
    """Prints a verdict on stderr in one write, so that lines of several ranks do not mix.

    Args:
        verdict: The verdict.
        rank: This rank.
        reporter: The rank that prints it whole, where this one prints only the first line.
        goes_on: Whether the job goes on after it, which it says then.
    """
    text = "\n".join(f"[rank {rank}] {line}" for line in _message(verdict, reporter, goes_on=goes_on).splitlines())
    _write_to_stderr(f"\n{text}\n")


def _message(verdict: Verdict, reporter: int | None, *, goes_on: bool = False) -> str:
    """A verdict whole, or in one line where another rank of this host has printed it."""
    if reporter is None:
        return verdict.render(goes_on=goes_on)
    return f"countoff: {verdict.headline} See the output of rank {reporter}."


def print_warning(state: State, warning: Verdict) -> None:
    """Prints a warning on this rank's stderr, and tells the guard's observer; nothing if the user has turned it off.

    Of uneven evaluations a process prints one warning: a framework may evaluate so by design, in every fit.
    """
    if effect(warning, state.settings.levels) == "off":
        return
    of_evaluation, process = (warning.kind, warning.subject) == ("UnevenBatches", EVALUATION), os.getpid()
    if not (of_evaluation and process in told_of_evaluations):
        print_to_stderr(warning, state.rank, goes_on=True)
        if state.leads:
            state.alerts.warn(warning, _line_of(state))
    if of_evaluation:
        told_of_evaluations.add(process)
    if state.observer is not None:
        state.observer.warned(warning)


def _line_of(state: State) -> Callable[[str], None]:
    return lambda sentence: print_line(state.rank, sentence)


def print_line(rank: int, sentence: str) -> None:
    """Prints one line about this rank on stderr."""
    _write_to_stderr(f"[rank {rank}] countoff: {sentence}\n")


def _write_to_stderr(text: str) -> None:
    # A closed stderr, or a daemon without one, must not hide the verdict from the exit code.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stderr = _own_stderr()
        try:
            stderr.write(text)
        except UnicodeEncodeError:
            stderr.write(text.encode("ascii", "backslashreplace").decode())
        stderr.flush()


def _own_stderr() -> TextIO:
    """This process's stderr, also while torch prints an exception that nobody has caught.

    torch prints it into a buffer first, to put the rank before its lines (`_distributed_excepthook`,
    torch/distributed/distributed_c10d.py:1741 in 2.7). A signal in that moment ends the process, and with it the
    buffer. The interpreter keeps such an exception in `sys.last_value` before it calls that function.
    """
    is_uncaught = getattr(sys, "last_value", None) is not None
    in_buffer = is_uncaught and isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if in_buffer and sys.__stderr__ is not None else sys.stderr


def write_error_file(verdict: Verdict, reporter: int | None = None) -> None:
    """Writes the verdict where torchrun's and accelerate's "Root Cause" is read from.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception`, which
    only a script decorated with `@record` would call. torchrun prints the `py_callstack` of each rank that has failed,
    and names the one with the smallest timestamp as the root cause. It does not print `countoff`, which has the whole
    message on every rank.

    Args:
        verdict: The verdict.
        reporter: The rank that prints it whole, where this one prints only the first line.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    at = int(time.time()) + (reporter is not None)  # the rank with the whole message is to be the root cause
    message = {
        "message": f"countoff {verdict.headline}",
        "extraInfo": {"py_callstack": _message(verdict, reporter), "timestamp": str(at), "countoff": verdict.render()},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def write_verdict_file(verdict: Verdict, state: State) -> None:
    """Writes the verdict where a scheduler is to read it, if the user has said where.

    If that is not possible, one line on stderr says so, and the job ends as it would have.
    """
    path = state.settings.verdict_file
    if path is None:
        return
    problem = verdict_file.write(path, replace(verdict, world_size=state.world_size), state.rank)
    if problem:
        print_line(state.rank, f"the verdict is not in {path!r}: {plain(problem)}")


def exit_now() -> None:
    """Ends the process without waiting for its main thread, once the sinks are told."""
    wait_for_all()
    # On a thread of its own: the main thread may be blocked while it holds a lock of logging or of a stream.
    flushing = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        flushing.start()
        flushing.join(1.0)
    os._exit(EXIT_CODE)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def print_verdict(
    state: State, verdict: Verdict, reporter: int | None = None, claim: Callable[[], bool] | None = None
) -> None:
    """Prints the verdict on this rank and writes it for the launcher; a second call does nothing.

    One rank per host prints it whole, and writes it for a scheduler; the others print one line, if they know that it
    has. In warn mode the first rank alone prints it, and nothing is written for the launcher or for a scheduler. The
    loss of a rank is not printed where another guard of this process has just printed a verdict: the ranks are ending
    with that one. Then the sinks are told, where there are any.

    Args:
        state: This rank's state.
        verdict: The verdict.
        reporter: The rank of this host that has printed it whole, where it is known to have done so; None where this
            rank is to print it whole.
        claim: Takes the user's sinks for this rank, if no other one has; None: the first rank that is left tells.
    """
    settings = state.settings
    ends = settings.on_divergence == "raise"
    if settings.verdict_file is not None and ends:
        again = verdict_file.seen_again(settings.verdict_file, replace(verdict, world_size=state.world_size))
        verdict = replace(verdict, again=again)
    with state.lock:
        if state.printing:
            return
        state.printing, state.end = True, verdict
        if verdict.kind == "LostRank" and _ends_beside(state):
            return
        if ends:
            state.alerts.expect()
    whole = replace(verdict, world_size=state.world_size)
    if state.observer is not None:
        state.observer.concluded(whole, whole=reporter is None)
    if ends:
        _printed[state.rank] = time.monotonic()
        write_error_file(verdict, reporter)
        print_to_stderr(verdict, state.rank, reporter)
        if reporter is None:
            write_verdict_file(verdict, state)  # after the message: a file system may be slow
        claim = claim or (lambda: is_first_left(state, whole))
        state.alerts.tell(whole, for_host=reporter is None, claim=claim, say=_line_of(state))
    elif state.leads:
        print_to_stderr(verdict, state.rank, goes_on=True)
        state.alerts.warn(whole, _line_of(state))
    if verdict.spread_seconds is not None:
        _log.info("known on every rank %.1f ms after it could be proved", verdict.spread_seconds * 1000)


def is_first_left(state: State, verdict: Verdict) -> bool:
    """Whether this is the first of the ranks that a verdict does not name as gone."""
    gone = verdict.ranks if verdict.gone else ()
    return state.rank == next((rank for rank in state.ranks if rank not in gone), None)


def _ends_beside(state: State) -> bool:
    """Returns whether another guard of this process, which runs at the same time, has just printed its verdict."""
    at = _printed.get(state.rank)
    return at is not None and state.began < at and time.monotonic() - at < ENDING_SECONDS


def raise_verdict(state: State) -> None:
    """Waits until the verdict is printed, then raises it; returns in warn mode.

    Only the thread that trains has then received the verdict. Raised in another one, such as a thread that
    prefetches, it ends that thread alone, and the program may wait for it for ever: the watchdog ends it then.

    Raises:
        DivergenceError: Unless `on_divergence` is `warn`.
    """
    trains = threading.get_ident() == state.evidence.trainer
    if trains:
        state.answered.set()
    if state.settings.on_divergence == "warn":
        return
    if not state.ended.wait(PRINT_SECONDS) and state.proposed is not None:
        state.adopt(state.proposed)  # the store does not answer: what this rank has proved is true all the same
    wait_until_printed(state)
    sigterm.wait_if_received()  # the process ends by the signal, not by the exception
    if state.end is not None:
        error = error_for(state.end)
        if trains:  # a thread that prefetches may end by it, and the program wait for that thread for ever
            is_over, thread = forgotten(error), threading.current_thread()
            goes_on = thread.is_alive if thread is not threading.main_thread() else lambda: True
            state.is_caught = lambda: is_over() and goes_on()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


def report_failure(
    state: State,
    error: BaseException,
    where: str,
    *,
    may_be_caught: bool = False,
    slow: bool = False,
    gone: Callable[[], Verdict | None] = lambda: None,
) -> None:
    """Reports this rank's exception to all ranks. One that looks like a lost peer waits for the better cause first.

    An exception that the program may still catch ends nothing here: the others are told of it, and are ended by it as
    soon as they need this rank (`checks.lost`). Only where this rank has lost a peer, and it is known which, that
    becomes the verdict.

    Args:
        state: This rank's state.
        error: The exception.
        where: Its batch and span, in words.
        may_be_caught: Whether the program may still catch it; otherwise it ends this rank.
        slow: Whether the better cause may take seconds to arrive: the store takes long to answer, or the peer was on
            another host.
        gone: Looks for a rank that is gone without a word, and returns its loss. A rank that has left is not the cause
            where another one is gone.
    """
    if vars(error).setdefault(_REPORTED_BY, id(state)) != id(state):
        return  # another guard of this process has reported it
    lost = _lost_peer(error)
    doubtful = lost == "maybe" and not may_be_caught and state.failure is None
    if lost == "yes" or doubtful:
        told = _report_lost_peer(state, error, may_be_caught=may_be_caught, slow=slow, gone=gone, doubtful=doubtful)
        if told:
            return
    failure = state.failure or Failure(in_words(error), clip(_place_of(error), 80), where, time.time())
    if may_be_caught:
        state.fail(failure)
    else:
        state.failure = failure
    state.answered.set()  # not earlier: this rank's row of a table has the failure
    if may_be_caught:
        return
    if state.end is None:
        state.propose(replace(lost_rank(state.rank, failure.event, gone=False), begun=state.begun))
    if state.end is not None or state.proposed is not None:  # else the user wants no verdict of it
        wait_until_printed(state)


def _report_lost_peer(
    state: State,
    error: BaseException,
    *,
    may_be_caught: bool,
    slow: bool,
    gone: Callable[[], Verdict | None],
    doubtful: bool,
) -> bool:
    """Reports that this rank has lost another one.

    Args:
        state: This rank's state.
        error: The exception.
        may_be_caught: As for `report_failure`, and so are the next two.
        slow: Whether the better cause may take seconds to arrive.
        gone: Looks for a rank that is gone without a word.
        doubtful: Whether the exception may be this rank's own as well.

    Returns:
        Whether it is reported: not a doubtful one, where no rank is known to be lost, or another one has raised too.
    """
    words = in_words(error)
    if not doubtful:
        state.answered.set()
        state.collective_failed = True  # the watchdog reports at once a rank that is known to be away
    state.ended.wait(PRINT_SECONDS if slow else 0.5)
    if state.interrupted:
        return True
    if doubtful and state.end is not None and state.end.begun is not None:
        return False
    if state.end is None:
        cause = _lost_by(state, words, gone)
        if cause is None and (may_be_caught or doubtful):
            return not doubtful
        state.propose(cause or victim(state.rank, words))
    state.collective_failed = True
    state.answered.set()
    if state.end is not None or state.proposed is not None:
        wait_until_printed(state)
    if state.end is not None and not isinstance(error, DivergenceError):
        notes = [*getattr(error, "__notes__", ()), f"countoff {state.end.headline}"]
        vars(error)["__notes__"] = notes  # as `add_note` of Python 3.11 does: printed below the traceback
    return True


def _lost_peer(error: BaseException) -> Literal["yes", "maybe", "no"]:
    """Whether an exception comes from the loss of another rank; also one that was raised while that was handled."""
    each, seen = error, list[BaseException]()
    while each is not None and all(each is not known for known in seen):
        if isinstance(each, DivergenceError) or _is_of_lost_peer(each):
            return "yes"
        seen.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "maybe" if _may_be_loss(error) else "no"


def _is_of_lost_peer(error: BaseException) -> bool:
    if _OF_COLLECTIVES.search(_text_of(error).lower()):
        return True
    if not _may_be_loss(error):
        return False
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return type(error).__name__ in _OF_STORES or stacks.is_in_collective(frames[-1:])


def _may_be_loss(error: BaseException) -> bool:
    words = in_words(error).lower()
    return any(sign in words for sign in _LOSSES)


def _lost_by(state: State, words: str, gone: Callable[[], Verdict | None]) -> Verdict | None:
    """The loss of the rank that explains why this one has lost a peer; None where nothing tells which one it is."""
    lost = f"raised {words}, as happens when another rank is lost"
    with state.lock:
        absence = next(iter(state.absences.values()), None)
        exited, left, ended = state.log.exited_alone(), state.left, state.log.ended_first()
    if exited is not None:
        event = f"{exited.in_words} and ended its fit there; rank {state.rank} {lost}"
        return lost_rank(exited.rank, event, subject=EXITED if exited.reason == "exited" else LEFT)
    if absence is not None:
        return loss_of(absence)
    if (loss := gone()) is not None:
        return loss
    if left is not None:
        return lost_rank(left, f"left the job before its fit had ended; rank {state.rank} {lost}", subject=LEFT)
    if ended is not None and _OF_COLLECTIVES.search(words.lower()):
        event = f"has ended its fit, and rank {state.rank} has not: rank {state.rank} {lost}"
        return lost_rank(ended, event, warned_before(state), subject=LEFT)
    return None


def warned_before(state: State) -> str | None:
    """The first warning of the fit that may explain the loss of a rank, in words; None if there is none.

    What no job would be ended for, as a schedule that is too long, does not let a rank fail.
    """
    grave = [notice for notice in state.notices if (kind := kind_of(notice.kind)) is None or kind.ends]
    return f"A warning came before that: {grave[0].sentence}" if grave else None


def in_words(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    return clip(f"{type(error).__name__}: {_in_one_line(_text_of(error))}".removesuffix(": "), 200)


def wait_until_printed(state: State) -> None:
    """Waits for the verdict and its table, but prints what is known without it if the store takes too long.

    Then it waits until the sinks are told of it, where there are any.
    """
    verdict = None if state.printed.wait(PRINT_SECONDS) else state.end or state.proposed
    if verdict is not None:
        print_verdict(state, verdict)
    state.alerts.wait()


def _in_one_line(text: str) -> str:
    r"""A text's first line, with the last line of a traceback that it quotes, as that of a loader's worker.

    >>> _in_one_line("Caught it in a worker.\nOriginal Traceback (most recent call last):\n…\nValueError: torn\n")
    'Caught it in a worker. … ValueError: torn'
    """
    lines = text.strip().splitlines() or [""]
    return f"{lines[0]} … {lines[-1].strip()}" if any("Traceback (most" in line for line in lines[1:]) else lines[0]


def _place_of(error: BaseException) -> str:
    """Where in the user's own code an exception was raised, as ``train.py:41``; empty if nowhere there.

    A loader's worker sends its traceback as text, and that is where it happened.
    """
    told = re.findall(r'^ *File "(.+)", line (\d+)', _text_of(error), re.MULTILINE)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for places in (told, frames):
        own = [(file, line) for file, line in places if is_users_file(file)]
        nearest = [place for place in own if "/site-packages/" not in place[0]] or own
        if nearest:
            return f"{os.path.basename(nearest[-1][0])}:{nearest[-1][1]}"
    return ""


def _text_of(error: BaseException) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in error.args):
        return "(a tensor on a device)"  # to print it would wait for the device, maybe for ever
    try:
        return str(error)
    except Exception:  # a `__str__` of the user's own
        return "(it cannot be put into words)"
