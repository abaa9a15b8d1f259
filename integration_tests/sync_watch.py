"""Makes torch raise where countoff's own code on the training thread reads from a GPU, and nowhere else.

Reading a value, a copy to the host and the synchronisation of a stream raise. `torch.cuda.synchronize`, the wait for an
event, and allocations do not: torch's sync debug mode does not see them.

torch's sync debug mode is one value for the whole process. A profile function sets it to "error" while the training
thread runs code of countoff, and to what it was before while it runs anybody else's. Another thread that waits for the
GPU at that moment would raise too; the threads of these jobs do not.
"""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

import countoff

ERROR: Final = 2
_ROOTS: Final = tuple(path + os.sep for path in countoff.__path__)  # of a checkout, or of an installed wheel
_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_SITE: Final = sysconfig.get_path("purelib") + os.sep
_STDLIB: Final = (sysconfig.get_path("stdlib") + os.sep, "<frozen ", "<string>")
_OF_TENSORS: Final = tuple(_TORCH + each for each in ("_tensor.py", "_tensor_str.py", "cuda" + os.sep))


class SyncWatch:
    """A profile function for one thread. It keeps the sync debug mode of the code that the thread runs.

    It looks at frames, and keeps no count of calls, so a generator that is left early or an exception cannot lead it
    astray. C functions are as whoever calls them: `next()` of a loader in Python is the loader's code.

    Args:
        set_mode: Sets the sync debug mode.
        otherwise: The mode of code that is not countoff's.
        roots: The folders of countoff's code, each with a slash at its end.

    Attributes:
        entered: How often the thread has come from other code to countoff's.
    """

    def __init__(self, set_mode: Callable[[int], object], otherwise: int, roots: Sequence[str] = _ROOTS) -> None:
        self.entered = 0
        self._set_mode = set_mode
        self._otherwise = otherwise
        self._roots = tuple(roots)
        self._mode = otherwise
        self._owners: dict[CodeType, bool | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python where the thread enters and leaves a function."""
        del argument
        if event == "call":
            self._run(frame)
        elif event == "return":
            self._run(frame.f_back)

    def _run(self, frame: FrameType | None) -> None:
        mode = ERROR if self._is_countoff(frame) else self._otherwise
        if mode != self._mode:
            self._mode = mode
            self.entered += mode == ERROR
            self._set_mode(mode)

    def _is_countoff(self, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            if code not in self._owners:
                self._owners[code] = _owner(code.co_filename, self._roots)
            if (owner := self._owners[code]) is not None:
                return owner
            frame = frame.f_back
        return False


def _owner(file: str, roots: tuple[str, ...]) -> bool | None:
    """Whether a file is countoff's; None if its code is as whoever calls it: `contextlib`, the `repr` of a tensor."""
    if file.startswith(roots):
        return True
    of_its_caller = file.startswith(_OF_TENSORS) or (file.startswith(_STDLIB) and not file.startswith(_SITE))
    return None if of_its_caller else False


@contextlib.contextmanager
def watching(set_mode: Callable[[int], object], mode: int, roots: Sequence[str] = _ROOTS) -> Iterator[SyncWatch]:
    """A context in which the calling thread is watched.

    Args:
        set_mode: Sets the sync debug mode.
        mode: The one in force.
        roots: The folders of countoff's code, each with a slash at its end.
    """
    watch = SyncWatch(set_mode, mode, roots)
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield watch
    finally:
        sys.setprofile(before)
        set_mode(mode)


def watched(job: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Runs a job of one rank whose GPU countoff must not wait for.

    On a CPU, where nothing can wait for a GPU, the modes are set nowhere.

    Returns:
        What the job returns, and how often the thread came from other code to countoff's.
    """
    if torch.cuda.is_available():
        torch.cuda.init()
        set_mode, mode = torch._C._cuda_set_sync_debug_mode, torch._C._cuda_get_sync_debug_mode()
    else:
        set_mode, mode = [].append, 0
    with watching(set_mode, mode) as watch:
        value = job(*arguments)
    return value, watch.entered
