"""What a rank sees of other processes on its host, on a real child process."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from countoff.core.session.liveness import processes
from countoff.core.session.liveness.processes import Deaths, Process, host_id

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc: without it nothing is seen")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    script = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        yield process
        process.kill()


def seen(child: "subprocess.Popen[bytes]") -> Process:
    return Process(1, child.pid, processes.process_stat(child.pid)[1])


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Lets this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_this_process_is_alive() -> None:
    own = Process.own(3)
    assert (own.rank, own.pid, own.state()) == (3, os.getpid(), "alive")


def test_a_process_is_read_back_from_its_record() -> None:
    own = Process.own(3)
    assert Process.from_json({"rank": 3, "pid": own.pid, "began": own.began}) == own


def test_a_running_child_is_alive(child: "subprocess.Popen[bytes]") -> None:
    assert seen(child).state() == "alive"


def test_a_stopped_child_is_stopped_until_it_continues(child: "subprocess.Popen[bytes]") -> None:
    process = seen(child)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.state() == "stopped"
    child.send_signal(signal.SIGCONT)
    os.waitpid(child.pid, os.WCONTINUED)
    assert process.state() == "alive"


def test_a_killed_child_is_gone_also_as_a_zombie(child: "subprocess.Popen[bytes]") -> None:
    """A killed child is gone before and after its parent has waited for it."""
    process = seen(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert process.state() == "gone"
    child.wait()
    assert process.state() == "gone"


def test_a_later_process_with_the_same_pid_is_another_one(child: "subprocess.Popen[bytes]") -> None:
    process = seen(child)
    assert Process(1, process.pid, process.began - 1).state() == "gone"


def test_a_process_of_unknown_start_counts_as_alive() -> None:
    """A process whose start time could not be read counts as alive."""
    assert Process(1, 2**22 + 1, 0).state() == "alive"


def test_a_name_with_parentheses_and_spaces_is_parsed(tmp_path: Path) -> None:
    """A process name with parentheses and spaces does not hide the state and the start time."""
    odd = tmp_path / ") S 1 (x"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "60"]) as process:
        found = seen(process)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        state = found.state()
        process.kill()
    assert (state, found.began > 0) == ("stopped", True)


def test_two_processes_of_one_host_have_one_host_id() -> None:
    script = "from countoff.core.session.liveness.processes import host_id; print(host_id())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == host_id()


def test_a_host_id_can_be_part_of_a_key() -> None:
    assert 0 < len(host_id()) <= 64
    assert "/" not in host_id()


def test_when_a_process_began_is_known_in_seconds_of_the_epoch() -> None:
    """It can be compared with a file's time, to tell an earlier run's file from this run's."""
    program = "from countoff.core.session.liveness import processes; print(processes.began_at())"
    before = time.time()
    began = float(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert before - 1 < began < time.time() + 1


def test_a_death_wakes_who_waits_for_it(child: "subprocess.Popen[bytes]") -> None:
    """Once: what is gone is no news any more."""
    deaths = Deaths()
    deaths.watch([seen(child)])
    deaths.watch([seen(child)])
    assert not deaths.wait(0.0)
    threading.Timer(0.1, child.kill).start()
    assert deaths.wait(60.0)
    assert seen(child).state() == "gone"
    assert not deaths.wait(0.0)
    deaths.close()


def test_a_wait_for_a_death_can_be_ended(child: "subprocess.Popen[bytes]") -> None:
    deaths = Deaths()
    deaths.watch([seen(child)])
    threading.Timer(0.1, deaths.wake).start()
    assert not deaths.wait(60.0)
    deaths.wake()
    deaths.wake()
    assert not deaths.wait(60.0)
    began = set(os.listdir("/proc/self/fd"))
    deaths.close()
    deaths.wake()
    assert set(os.listdir("/proc/self/fd")) < began


def test_descriptors_that_are_not_there_cost_nothing(child: "subprocess.Popen[bytes]") -> None:
    """A user's code may close all descriptors; then a death is found a little later."""
    deaths = Deaths()
    deaths.watch([seen(child), Process(2, 2**22 + 1, 1)])
    for descriptor in (*deaths.watched, deaths.wakes, deaths.waker):
        os.close(descriptor)
    assert not deaths.wait(0.0)
    assert not deaths.wait(0.01)
    deaths.wake()
    deaths.close()


def test_where_no_descriptor_can_be_opened_a_wait_only_takes_its_time(child: "subprocess.Popen[bytes]") -> None:
    """The watchdog goes on then: it still ends the process after a verdict."""
    process = seen(child)
    with no_free_descriptor():
        deaths = Deaths()
        deaths.watch([process])
        deaths.wake()
        assert not deaths.wait(0.01)
        deaths.close()


def test_a_process_that_cannot_be_looked_at_is_not_gone(child: "subprocess.Popen[bytes]") -> None:
    """A healthy rank is not lost because this process has no descriptor left."""
    process = seen(child)
    with no_free_descriptor():
        assert process.state() == "alive"
        assert Process.own(0).began == 0
    child.kill()
    child.wait()
    assert process.state() == "gone"
