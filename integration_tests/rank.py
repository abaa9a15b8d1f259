"""One rank: what runs in a process of the forkserver before, around and after the function under test.

A multiprocessing child is not an ordinary program: it skips atexit and exits through os._exit. For some tests the exit
matters (a daemon thread that is still in a store's `wait` aborts some interpreters). There a rank ends as a script
does: uncaught exceptions go through sys.excepthook, then the interpreter is finalised. Finalising costs 0.7 s of a core
for each rank, because it touches all memory that the rank shares with the forkserver. The other tests do without it.

A rank may live on a host of the test's own (`integration_tests.hosts`): in its namespaces for the network, the host's
name, processes and mounts. Only a child of the process that enters a pid namespace is in it. So the process that the
forkserver has made enters, forks the rank, and ends as the rank does.
"""

import atexit
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from integration_tests.constants import put_those_of_the_environment

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
_parent: Connection
_one_message_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Host:
    """A host of a test: its name, and the process, as seen from here, whose namespaces it consists of."""

    name: str
    pid: int


@dataclass(frozen=True)
class Job:
    """What one rank is to do, and with what around it."""

    call: bytes  # a pickled (function, args): read in the rank, so that a failing import is the rank's own failure
    environment: Mapping[str, str]
    directory: Path
    output: Path
    finalise: bool
    host: Host | None


def tell(name: str) -> None:
    """Let the test, which may stand in `watch.wait_for(rank, name)`, know that this rank has come this far."""
    _send("told", name)


def main(job: Job, parent: Connection) -> NoReturn:
    """Run the job in this process, then end it as the interpreter ends a script."""
    global _parent
    _parent = parent
    _lead_a_group_that_ends_with_its_parent()
    if job.host is not None:
        _move_to(job.host)
    _redirect(job.output)
    os.environ.update(job.environment)
    put_those_of_the_environment()
    os.chdir(job.directory)
    code = 0
    try:
        function, args = pickle.loads(job.call)
        _send("value", function(*args))
    except SystemExit as ending:
        code = _exit_code(ending)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if job.finalise:
        # All that ends a script: joins threads, runs atexit, flushes, finalises, runs C++ destructors, exits.
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  (the first of these, and the next)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _redirect(path: Path) -> None:
    """Send all that this process prints to a file, and on SIGUSR1 the stacks of its threads."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    faulthandler.enable()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what it goes back to when the fault handler is finalised
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  (never replaced here)


def enter_namespaces(namespaces: int, kinds: int) -> None:
    """Move this thread into other namespaces. For the pid namespace, only its children are then there.

    Args:
        namespaces: A descriptor: a pidfd, for those of its process; or one namespace.
        kinds: Flags CLONE_NEW*: which of them.

    Raises:
        OSError: If that is not permitted, or there is no such process any more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespaces, kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _move_to(host: Host) -> None:
    """Return in a child of this process, which is on the host. This process itself ends when and as the child does."""
    process = os.pidfd_open(host.pid)
    enter_namespaces(process, CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWPID | _CLONE_NEWNS)
    os.close(process)
    child = os.fork()
    if child == 0:
        _lead_a_group_that_ends_with_its_parent()
        return
    _send("pid", child)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def end_with_parent() -> None:
    """Have the kernel kill this process, even a stopped one, once the process that has started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _lead_a_group_that_ends_with_its_parent() -> None:
    """Make a group of this rank and its data loader's workers, which dies with the forkserver, as that with pytest."""
    os.setsid()
    end_with_parent()


def _send(kind: str, content: Any) -> None:
    with _one_message_at_a_time:
        _parent.send((kind, content))


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1
