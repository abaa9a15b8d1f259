"""SIGTERM is held back for a moment, in processes of their own: nothing that a user can see changes."""

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how a signal is handled")
HEAD = """
import os, signal, time
from countoff.core.ending import sigterm

def send():
    os.kill(os.getpid(), signal.SIGTERM)

sigterm.hold()
"""


def ended(script: str) -> tuple[int, str]:
    """Runs a script; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_signal_is_held_back_and_passed_on() -> None:
    script = """
        assert not sigterm.received()
        send()
        assert sigterm.received()
        print("spoke", flush=True)
        sigterm.pass_on()
        print("too much")
    """
    assert ended(script) == (-signal.SIGTERM, "spoke\n")


def test_a_second_signal_ends_the_process_at_once() -> None:
    assert ended("send()\nprint('spoke', flush=True)\nsend()\nprint('too much')") == (-signal.SIGTERM, "spoke\n")


def test_a_signal_that_has_come_is_not_lost_where_it_is_released() -> None:
    assert ended("send()\nsigterm.release()\nprint('too much')") == (-signal.SIGTERM, "")


def test_after_the_release_all_is_as_before() -> None:
    script = """
        sigterm.hold()
        sigterm.release()
        sigterm.release()
        caught = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt")), 16)
        assert not caught >> signal.SIGTERM - 1 & 1
        send()
    """
    assert ended(script) == (-signal.SIGTERM, "")


def test_a_blocked_main_thread_does_not_hold_the_signal_up() -> None:
    """It is in C, as in a collective, where no handler of Python's would run."""
    script = """
        import ctypes, threading
        def watch():
            while not sigterm.received():
                time.sleep(0.01)
            print("spoke", flush=True)
            sigterm.pass_on()
        threading.Thread(target=watch, daemon=True).start()
        threading.Timer(0.2, send).start()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # no signal interrupts that
    """
    assert ended(script) == (-signal.SIGTERM, "spoke\n")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_users_own_is_not_touched(when: str) -> None:
    script = """
        sigterm.release()
        before = signal.getsignal(signal.SIGTERM)
        assert before == signal.SIG_DFL
        if {before}:
            signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        sigterm.hold()
        if not {before}:
            assert signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True)) == before
        send()
        assert not sigterm.received()
        sigterm.release()
        send()
    """
    assert ended(script.format(before=when == "before")) == (0, "mine\nmine\n")


def test_the_default_that_a_user_restores_is_no_signal() -> None:
    """As Lightning does after a fit, with what it found before."""
    script = """
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert not sigterm.received()
        sigterm.release()
        print("alive")
    """
    assert ended(script) == (0, "alive\n")


def test_an_ignored_signal_stays_ignored() -> None:
    script = """
        sigterm.release()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sigterm.hold()
        send()
        assert not sigterm.received()
        sigterm.release()
        send()
        print("alive")
    """
    assert ended(script) == (0, "alive\n")


def test_a_forked_process_ends_by_the_first_signal() -> None:
    """A loader's worker, or one of a pool's, has no watchdog; what it gets is not its parent's either."""
    script = """
        for _ in range(20):
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(1)
            os.kill(child, signal.SIGTERM)  # at once
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not sigterm.received()
        print("alive", flush=True)
        send()
        assert sigterm.received()
    """
    code, output = ended(script)
    assert code == 0, output
    assert "alive" in output


def test_a_program_that_is_started_has_the_default() -> None:
    script = """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        assert child.wait() == -signal.SIGTERM
        print("alive")
    """
    assert ended(script) == (0, "alive\n")
