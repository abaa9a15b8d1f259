"""Where the main thread is: the evidence that tells a rank in its loader from a rank that waits for it."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass

_TORCH = ("/torch/", "/lightning/", "/pytorch_lightning/", "/lightning_fabric/", "/countoff/", "/accelerate/")
_COMPOSER = "/site-packages/composer/"  # no shorter: a user's own directory may well be called composer
_STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
_loaders: list[str] = ["/torch/utils/data/"]
_WAITS = ("/torch/distributed/", "/torch/autograd/graph.py", "/torch/autograd/__init__.py", "/torch/nn/parallel/")
_EVEN_PASS = "/countoff/core/runtime/even_pass.py"
_EVEN_FETCHES = ("_fetch", "_begin_again")
_EVEN_WAIT = "_wait"
"""What the functions of an even pass do: they ask this rank's loader for a batch, or wait for the other ranks."""


def register_loader_file(path: str) -> None:
    """Makes a frame of this file mean that the thread is in its loader. For adapters that stand between the two.

    Args:
        path: The adapter module's ``__file__``.
    """
    path = path.replace("\\", "/")
    if path not in _loaders:
        _loaders.append(path)


@dataclass(frozen=True)
class Place:
    """A sample of the main thread's stack.

    Attributes:
        state: `loader`, `collective` or `code`.
        frames: The innermost frames of the user's own code, innermost first, as ``file:line in function``.
        token: Equal for two samples of a thread that has not moved.
    """

    state: str
    frames: tuple[str, ...]
    token: tuple[int, int]


def main_thread() -> Place:
    """Samples the main thread, also one that is blocked in C; takes a millisecond or two.

    >>> main_thread().state
    'code'
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # the documented way
    if frame is None:
        return Place("code", (), (0, 0))
    token = (id(frame), frame.f_lasti)
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # innermost first
    files = [line.filename.replace("\\", "/") for line in summary]
    own = [line for line, file in zip(summary, files, strict=True) if is_users_file(file)]
    even = next((line.name for line, file in zip(summary, files, strict=True) if file.endswith(_EVEN_PASS)), "")
    if any(part in file for part in _loaders for file in files) or even in _EVEN_FETCHES:
        state = "loader"
    elif any(part in file for part in _WAITS for file in files[:4]) or even == _EVEN_WAIT:
        state = "collective"
    else:
        state = "code"
    frames = tuple(f"{line.filename.rsplit('/', 1)[-1]}:{line.lineno} in {line.name}" for line in own[:3])
    return Place(state, frames, token)


def main_stack(most: int = 64) -> tuple[str, ...]:
    """The main thread's whole stack but countoff's own frames, innermost first, as ``file:line in function``.

    Files of installed packages have their directory: ``torch/distributed/distributed_c10d.py:2810 in all_reduce``.

    Args:
        most: Frames at most.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False) if frame else ()
    lines = [(line.filename.replace("\\", "/"), line) for line in summary]
    outside = (number for number, (file, _) in enumerate(lines) if not file.startswith(_STANDARD_LIBRARY))
    first = next(outside, 0)
    if lines and "/countoff/" in lines[first][0]:  # what countoff waits in says nothing
        lines = lines[first:]
    return tuple(f"{_short(file)}:{line.lineno} in {line.name}" for file, line in lines if "/countoff/" not in file)[
        :most
    ]


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
    return not (file.startswith("<frozen") or any(part in file for part in (*_TORCH, _COMPOSER)))
