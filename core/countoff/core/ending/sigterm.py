"""SIGTERM, held back for a moment: a rank that its launcher ends can first say which rank the launcher ends it for.

A launcher that finds a dead rank sends SIGTERM to all others, often before they have spoken. By default that signal
ends a process at once, and no code of the process runs. A handler of Python's would be visible to the user
(`signal.getsignal`) and would run only once the main thread is in Python again. So the handler here is a C function
that does nothing, with a flag (SA_RESETHAND) by which the kernel restores the default as it delivers the signal. The
watchdog sees that the default is back, has the guards tell why, and sends the signal to the process again.

- Whoever has a handler of his own, or ignores the signal, keeps that: nothing is changed then. A handler that is set
  later replaces this one, in the kernel too.
- A second SIGTERM ends the process at once, whatever the watchdog does.
- A forked process has the default again.

Linux only. Elsewhere SIGTERM ends a process as ever.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import sys
import threading
import time

from countoff.core.waiting import until

_RESTART, _RESET = 0x10000000, 0x80000000
_MASK_WORDS = 1024 // (8 * ctypes.sizeof(ctypes.c_ulong))
_WAIT_SECONDS = 5.0
_lock = threading.Lock()
_holders = 0


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library, as it is on the machines in `_MACHINES`."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * _MASK_WORDS),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    ]


_MACHINES = ("x86_64", "aarch64")
_TAG = 1 << (signal.SIGRTMAX - 2) if sys.platform == "linux" else 0
"""The signal SIGRTMAX - 1, as the mask of the action. Nobody else sets that, so it tells this module's action from an
other one, also once the kernel has restored the default handler: it leaves the mask and the flags as they are."""


def hold() -> None:
    """Holds back the next SIGTERM, unless this process handles or ignores it; to be followed by one `release`.

    Whoever calls this must look at `received` often, and call `pass_on` then.
    """
    global _holders
    with _lock:
        _holders += 1
        _install()


def release() -> None:
    """Restores the default once all holders have released the signal; one that has come ends the process here."""
    global _holders
    with _lock:
        _holders -= 1
        came = not _holders and _received()
        if not _holders:
            _restore()
    if came:
        pass_on()


def received() -> bool:
    """Whether a SIGTERM has come that is held back."""
    return _holders > 0 and _received()


def pass_on() -> None:
    """Ends this process by the signal that was held back."""
    os.kill(os.getpid(), signal.SIGTERM)


def wait_if_received() -> None:
    """Waits for the end of this process, if it is to end by the signal: the main thread does nothing more by itself.

    What it would do has lost its meaning. The launcher has signalled this rank's loader workers too, for example.
    """
    until(lambda: not received(), time.monotonic() + _WAIT_SECONDS)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C library, where its actions are known to look as `_Action` does."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    if os.getpid() == 1:  # of its container: the kernel ignores the default action, so nothing would end this process
        return None
    return ctypes.CDLL(None, use_errno=True)


def _current(libc: ctypes.CDLL) -> _Action | None:
    action = _Action()
    return action if libc.sigaction(signal.SIGTERM, None, ctypes.byref(action)) == 0 else None


def _is_ours(action: _Action | None) -> bool:
    return action is not None and action.mask[0] == _TAG and action.flags & _RESET == _RESET


def _install() -> None:
    """Sets this module's action, where the signal has the default one."""
    if (libc := _library()) is None:
        return
    old = _current(libc)
    if old is not None and not old.handler and not _is_ours(old):
        action = _Action(ctypes.cast(libc.abs, ctypes.c_void_p).value, flags=_RESTART | _RESET)
        action.mask[0] = _TAG
        libc.sigaction(signal.SIGTERM, ctypes.byref(action), None)


def _restore() -> None:
    """Restores the default, unless somebody else's action has replaced this module's."""
    libc = _library()
    if libc is not None and _is_ours(_current(libc)):
        libc.sigaction(signal.SIGTERM, ctypes.byref(_Action()), None)


def _received() -> bool:
    libc = _library()
    action = None if libc is None else _current(libc)
    return action is not None and _is_ours(action) and not action.handler


def _before_fork() -> None:
    """Lets the child begin with the default: its first moments are too late for that."""
    _lock.acquire()
    if _holders and not _received():
        _restore()


def _in_parent() -> None:
    if _holders:
        _install()
    _lock.release()


def _in_child() -> None:
    global _lock, _holders
    _lock, _holders = threading.Lock(), 0


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
