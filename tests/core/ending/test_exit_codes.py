"""Exit codes that the user has chosen, in processes of Python's own."""

import subprocess
import sys

import pytest

from countoff.core import Settings
from countoff.core.ending.exit_codes import code_of
from countoff.core.verdict import Verdict

USELESS = Verdict("UnevenBatches", "rank 1 ran out of data.")


def exit_code_of(script: str, codes: str = "{'useless': 86}") -> tuple[int, str, str]:
    begin = f"""
import atexit
from countoff.core import Settings
from countoff.core.ending.exit_codes import VERDICT, choose_codes
from countoff.core.verdict import Verdict, error_for
atexit.register(print, "atexit has run")
verdict = Verdict("UnevenBatches", "rank 1 ran out of data.")
choose_codes(Settings(exit_codes={codes}))
"""
    run = subprocess.run(
        [sys.executable, "-c", begin + script], capture_output=True, text=True, timeout=60, check=False
    )
    return run.returncode, run.stdout, run.stderr


def test_an_uncaught_verdict_ends_the_process_with_its_code() -> None:
    """The traceback is printed as ever, and the interpreter ends in the usual order."""
    code, out, error = exit_code_of("raise error_for(verdict)")
    assert (code, out) == (86, "atexit has run\n")
    assert error.endswith("UnevenBatches: rank 1 ran out of data.\n")
    assert error.count("Traceback") == 1


def test_so_does_an_error_of_a_collective_that_it_has_broken() -> None:
    code, *_ = exit_code_of("error = RuntimeError('peer'); vars(error)[VERDICT] = verdict; raise error")
    assert code == 86


def test_so_does_what_was_raised_from_it() -> None:
    code, *_ = exit_code_of("raise ValueError('training failed') from error_for(verdict)")
    assert code == 86
    assert exit_code_of("error = ValueError('a circle'); error.__cause__ = error; raise error")[0] == 1


def test_the_verdict_that_ends_the_process_decides() -> None:
    """Not one before it, which the program has survived, however many these were."""
    script = """
lost = Verdict("LostRank", "rank 1 is gone.", (1,), subject="died", gone=True)
for number in range(2000):
    choose_codes(Settings(exit_codes={"useless": 86, "may_help": 87}))
assert lost.restart == "may_help", lost.restart
raise error_for(lost)
"""
    assert exit_code_of(script)[0] == 87


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise ValueError('mine')", 1),
        ("try:\n    raise error_for(verdict)\nexcept RuntimeError:\n    raise ValueError('mine') from None", 1),
        ("raise SystemExit(5)", 5),
        ("try:\n    raise error_for(verdict)\nexcept RuntimeError:\n    pass", 0),
    ],
)
def test_what_is_not_the_verdicts_ends_as_without(script: str, code: int) -> None:
    assert exit_code_of(script)[:2] == (code, "atexit has run\n")


def test_another_restart_and_no_choice_change_nothing() -> None:
    assert exit_code_of("raise error_for(verdict)", "{'may_help': 87}")[0] == 1
    assert exit_code_of("import sys; assert sys.excepthook is sys.__excepthook__", "{}")[0] == 0


def test_the_code_of_a_process_that_cannot_raise() -> None:
    assert code_of(USELESS, Settings(exit_codes={"useless": 86})) == 86
    assert code_of(USELESS, Settings(exit_codes={"may_help": 85})) == code_of(None, Settings()) == 87
