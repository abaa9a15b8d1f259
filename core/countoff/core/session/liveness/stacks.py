"""Where a thread is: the evidence that tells a rank in its loader from a rank that waits for it.

That thread goes on while another thread looks at it. To follow its frames from Python is not safe: between two
steps it may have left them, and a process has crashed by that. So the interpreter itself writes the stack as text, in
one call that holds the global interpreter lock from the first frame to the last and changes nothing: see `_dump`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import itertools
import os
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from countoff.core import packages

_STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
loaders: list[str] = ["/torch/utils/data/"]
_WAITS = ("/torch/distributed/", "/torch/autograd/graph.py", "/torch/autograd/__init__.py", "/torch/nn/parallel/")
_CALLS = tuple(
    f"/torch/distributed/{name}.py" for name in ("distributed_c10d", "_functional_collectives", "utils", "rendezvous")
)
"""The files of torch.distributed whose functions wait for other ranks themselves, and do little else."""
_PASSES = {
    "/torch/autograd/graph.py": "the backward pass",
    "/torch/autograd/__init__.py": "the backward pass",
    "/torch/nn/parallel/distributed.py": "DistributedDataParallel",
}
"""The files in whose functions a pass of the model waits for other ranks, inside of C code."""
_AROUND_CALLS = ("/torch/distributed/c10d_logger.py", "/torch/_ops.py")
_EVEN_PASS = "/countoff/core/session/threads/even_pass.py"
_EVEN_FETCHES = ("_fetch", "_begin_again")
_EVEN_WAIT = "_wait"
"""What the functions of an even pass do: they ask this rank's loader for a batch, or wait for the other ranks."""
_OWN_FILE = __file__.replace("\\", "/")
_SHOWN_FRAMES = 3
_FRAMES = 64
_FRAME = re.compile(r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")


def register_loader_file(path: str) -> None:
    """Makes a frame of this file mean that the thread is in its loader. For adapters that stand between the two.

    Args:
        path: The adapter module's ``__file__``.
    """
    path = path.replace("\\", "/")
    if path not in loaders:
        loaders.append(path)


@dataclass(frozen=True)
class Place:
    """A sample of the main thread's stack. It has the innermost 100 frames at most.

    Attributes:
        state: `loader`, `collective` or `code`.
        frames: The innermost frames of the user's own code, innermost first, as ``file:line in function``.
        stack: The innermost frames of any code but countoff's own, in the same form. Files of installed packages have
            their directory: ``torch/distributed/distributed_c10d.py:2810 in all_reduce``.
        token: Equal for two samples of a thread that has not moved to another line. A loop of one line, in which each
            call ends on that line again, looks as if it stood still.
        call: The function of torch.distributed that the thread is in, as its caller writes it:
            ``torch.distributed.barrier``; or the pass of the model. Empty where it is in none that waits for other
            ranks itself.
        inside: Where the innermost of `frames` has called a framework around torch: the innermost frames of that, one
            of each file, in the form of `frames`.
        framework: The package of the first of these; empty where there is none.
    """

    state: str
    frames: tuple[str, ...]
    stack: tuple[str, ...] = ()
    token: str = ""
    call: str = ""
    inside: tuple[str, ...] = ()
    framework: str = ""


class _Frame(NamedTuple):
    """A frame of a stack; its file has slashes, on any system."""

    file: str
    line: str
    function: str


def main_thread() -> Place:
    """Samples the main thread, as `thread` does.

    >>> main_thread().state
    'code'
    """
    return thread(threading.main_thread().ident or 0)  # another one in a process that a thread has forked


def thread(ident: int) -> Place:
    """Samples a thread, also one that is blocked in C. Nothing in the process can move meanwhile.

    It takes some tenths of a millisecond; where `_dump` must write the stacks of all threads, about 0.2 ms for each. A
    stack that cannot be had, as in a process without a free file descriptor, is a `Place` without frames.

    Args:
        ident: The thread, by `threading.get_ident()`.
    """
    text = _dump(ident)
    frames = list(itertools.dropwhile(lambda frame: frame.file == _OWN_FILE, _frames_of(text)))
    own = (frame for frame in frames if is_users_file(frame.file))
    shown = tuple(map(_shown, itertools.islice(own, _SHOWN_FRAMES)))
    framework, inside = _inside_of(frames)
    return Place(_state_of(frames), shown, _stack_of(frames), text, _call_of(frames), inside, framework)


def broadcasts_buffers(place: Place) -> bool:
    """Returns whether a thread is where a forward pass of DistributedDataParallel broadcasts the model's buffers.

    >>> broadcasts_buffers(Place("collective", (), ("torch/nn/parallel/distributed.py:2210 in _sync_buffers",)))
    True
    >>> broadcasts_buffers(Place("collective", (), ("train.py:7 in _sync_buffers",)))
    False
    """
    return any(
        frame.startswith("torch/nn/parallel/distributed.py:") and frame.endswith(" in _sync_buffers")
        for frame in place.stack
    )


def _state_of(frames: list[_Frame]) -> str:
    files = [frame.file for frame in frames]
    even = next((frame.function for frame in frames if frame.file.endswith(_EVEN_PASS)), "")
    if any(part in file for part in loaders for file in files) or even in _EVEN_FETCHES:
        return "loader"
    if is_in_collective(files[:4]) or even == _EVEN_WAIT:
        return "collective"
    return "code"


def is_in_collective(files: Sequence[str]) -> bool:
    """Whether one of these files, innermost frames of a stack, is of code that waits for other ranks."""
    return any(part in file.replace("\\", "/") for part in _WAITS for file in files)


def _call_of(frames: list[_Frame]) -> str:
    """What waits for other ranks where a stack ends, as its caller writes it; empty if it ends elsewhere.

    >>> c10d = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    >>> inner, outer = _Frame(c10d, "512", "_store_based_barrier"), _Frame(c10d, "5200", "new_group")
    >>> own = _Frame("/home/me/train.py", "7", "main")
    >>> _call_of([inner, outer, own]), _call_of([own])
    ('torch.distributed.new_group', '')
    >>> _call_of([_Frame("/lib/site-packages/torch/autograd/graph.py", "824", "_engine_run_backward"), own])
    'the backward pass'
    """
    frames = [frame for frame in frames if not frame.file.endswith(_AROUND_CALLS)]
    if not frames or not frames[0].file.endswith(_CALLS):
        return next((name for file, name in _PASSES.items() if frames and frames[0].file.endswith(file)), "")
    *_, outermost = itertools.takewhile(lambda frame: frame.file == frames[0].file, frames)
    module = frames[0].file.rpartition("/torch/")[2].removesuffix(".py").replace("/", ".")
    return f"torch.{module.removesuffix('.distributed_c10d')}.{outermost.function}"


def _inside_of(frames: list[_Frame]) -> tuple[str, tuple[str, ...]]:
    """The framework that the user's innermost line has called, and its innermost frames, as a `Place` has them.

    Of the frames of one file only the innermost is taken: the next file says more than where that one was entered.

    >>> lightning, own = "/lib/site-packages/lightning/pytorch/", _Frame("/home/me/train.py", "7", "main")
    >>> sync, reduce = _Frame(lightning + "ddp.py", "9", "sync"), _Frame(lightning + "ddp.py", "5", "reduce")
    >>> _inside_of([sync, reduce, _Frame(lightning + "result.py", "3", "compute"), own])
    ('lightning', ('ddp.py:9 in sync', 'result.py:3 in compute'))
    >>> _inside_of([own, sync])
    ('', ())
    """
    innermost: dict[str, _Frame] = {}
    for frame in itertools.takewhile(lambda frame: not is_users_file(frame.file), frames):
        if packages.framework_of(frame.file):
            innermost.setdefault(frame.file, frame)
    shown = list(innermost.values())[:_SHOWN_FRAMES]
    return packages.framework_of(shown[0].file) if shown else "", tuple(map(_shown, shown))


def _stack_of(frames: list[_Frame]) -> tuple[str, ...]:
    outside = (number for number, frame in enumerate(frames) if not frame.file.startswith(_STANDARD_LIBRARY))
    first = next(outside, 0)
    if frames and "/countoff/" in frames[first].file:  # what countoff waits in says nothing
        frames = frames[first:]
    others = (frame for frame in frames if "/countoff/" not in frame.file)
    lines = (f"{_short(frame.file)}:{frame.line} in {frame.function}" for frame in others)
    return tuple(itertools.islice(lines, _FRAMES))


def _shown(frame: _Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"


def _direct() -> Callable[[int], None] | None:
    """A function that writes the stack of this thread, and of no other, to a file descriptor, from any thread.

    It is None where Python does not have it: 3.11 and 3.12 export it, with one signature. There it is better than
    `faulthandler`, which in 3.11 looks at the newest thread before that is complete, and crashes if C code begins a
    thread of Python's at that moment, as a callback from another library does.
    """
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        return None
    try:
        # Not as attributes: those are shared with whoever else uses them, and so would be their types.
        write, this_thread = ctypes.pythonapi["_Py_DumpTraceback"], ctypes.pythonapi["PyThreadState_Get"]
    except (AttributeError, ValueError):  # another implementation of Python
        return None
    write.argtypes, write.restype = (ctypes.c_int, ctypes.c_void_p), None
    this_thread.restype = ctypes.c_void_p
    thread = this_thread()
    return lambda file: write(file, thread)


_main_ident = threading.get_ident() if threading.current_thread() is threading.main_thread() else None
write_main = _direct() if _main_ident is not None else None
"""Writes the stack of the main thread, if that has imported this module."""


def _dump(ident: int) -> str:
    """A thread's stack as the interpreter writes it, a line for each frame; empty if it cannot be had.

    Both ways are one call in C that does not release the global interpreter lock, and they make no objects.
    """
    if sys.version_info < (3, 14) and not getattr(sys, "_is_gil_enabled", lambda: True)():
        return ""  # without that lock, only Python 3.14 stops all threads for a dump
    with contextlib.suppress(OSError), _scratch_file() as file:
        name, write = "Stack", write_main if ident == _main_ident else None
        if write is not None:
            write(file.fileno())
        else:
            name = f"0x{ident:016x}"
            faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        return lines_below(name, file.read().decode("ascii", "replace"))
    return ""


def lines_below(name: str, text: str) -> str:
    """The lines of one stack in a dump; empty if it has none of that name.

    A dump has 100 threads at most, the newest first, so it lacks the main thread if there are more.

    Args:
        name: What its heading has: ``Stack``, or a thread's identity in 16 hexadecimal digits.
        text: The dump.
    """
    found = re.search(rf"^(?:Current thread |Thread )?{name} .*\n((?:  .*\n)*)", text, re.MULTILINE)
    return "" if found is None else found[1]


def _scratch_file() -> io.FileIO:
    """A file without a name, in memory where the system has that.

    Raises:
        OSError: If there is none.
    """
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            return io.FileIO(os.memfd_create("countoff stack"), "r+")
    number, path = tempfile.mkstemp(prefix="countoff-stack-")
    os.unlink(path)
    return io.FileIO(number, "r+")


def _frames_of(text: str) -> list[_Frame]:
    r"""The frames of a stack as `_dump` returns it, innermost first.

    >>> _frames_of('  File "/home/me/\\xfcben.py", line 7 in read\n  ...\n')
    [_Frame(file='/home/me/üben.py', line='7', function='read')]
    """
    found = [_FRAME.fullmatch(line) for line in text.splitlines()]
    return [
        _Frame(_unescaped(match["file"] or "???").replace("\\", "/"), match["line"], _unescaped(match["function"]))
        for match in found
        if match is not None
    ]


def _unescaped(text: str) -> str:
    """A name with its characters beyond ASCII, which a dump has as numbers behind a backslash."""
    return _ESCAPED.sub(lambda match: chr(int(match[match.lastindex or 0], 16)), text)


def _short(file: str) -> str:
    """A file as a stack shows it: from its package on where it is installed, otherwise its name.

    >>> _short("/usr/lib/python3/site-packages/torch/nn/modules/module.py"), _short("/home/me/train.py")
    ('torch/nn/modules/module.py', 'train.py')
    """
    return file.rpartition("/site-packages/")[2] if "/site-packages/" in file else file.rpartition("/")[2]


def is_users_file(file: str) -> bool:
    """Whether a file of a stack is the user's own: not Python's, not countoff's, not a framework's."""
    file = file.replace("\\", "/")
    if file.startswith(_STANDARD_LIBRARY) and "/site-packages/" not in file:
        return False
    return not (file.startswith("<frozen") or any(part in file for part in packages.PATHS))
