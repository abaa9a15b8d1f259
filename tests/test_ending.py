"""What is left behind: the printed text, the error file that launchers read, the exit code."""

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal

import pytest

from countoff.core import DivergenceError, Settings, Verdict
from countoff.core.protocol.state import State
from countoff.core.runtime import shutdown
from countoff.core.verdict import LostRank

VERDICT = Verdict("LostRank", "rank 2 is gone.", (2,), why="It was killed — or it crashed.")


def state_of(rank: int = 0, policy: Literal["raise", "warn"] = "raise") -> State:
    return State(rank, 4, Settings(on_divergence=policy), {})


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


# Saying it --------------------------------------------------------------------------------------------------------


def test_every_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    shutdown.print_to_stderr(VERDICT, 7)
    said = "\n[rank 7] countoff: LostRank: rank 2 is gone.\n[rank 7]   why: It was killed — or it crashed.\n"
    assert capsys.readouterr().err == said


def test_a_verdict_is_printed_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", writes.append)
    monkeypatch.setattr(sys, "stderr", stream)
    shutdown.print_to_stderr(VERDICT, 0)
    assert len(writes) == 1


def test_a_closed_stderr_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    shutdown.print_to_stderr(VERDICT, 0)


def test_a_process_without_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    shutdown.print_to_stderr(VERDICT, 0)


def test_a_stderr_that_cannot_spell_the_verdict_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    shutdown.print_to_stderr(VERDICT, 0)


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of()
    shutdown.print_verdict(state, VERDICT)
    shutdown.print_verdict(state, Verdict("LostRank", "another."))
    assert capsys.readouterr().err.count("countoff:") == 1
    assert state.end == VERDICT


@pytest.mark.parametrize(("rank", "policy", "said"), [(0, "raise", 1), (3, "raise", 1), (0, "warn", 1), (3, "warn", 0)])
def test_in_warn_mode_rank_0_alone_says_it_and_no_launcher_hears_of_it(
    rank: int, policy: Literal["raise", "warn"], said: int, error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutdown.print_verdict(state_of(rank, policy), VERDICT)
    assert capsys.readouterr().err.count("countoff:") == said
    assert error_file.exists() == (policy == "raise")


# The error file -----------------------------------------------------------------------------------------------------


def test_the_error_file_is_what_torch_s_own_handler_would_have_written(
    error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    shutdown.write_error_file(VERDICT)
    ours = json.loads(error_file.read_text(encoding="utf-8"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torch.json"))
    ErrorHandler().record_exception(ValueError("torn shard"))
    theirs = json.loads((tmp_path / "torch.json").read_text(encoding="utf-8"))
    assert shape(ours) == shape(theirs)


def shape(value: Any) -> Any:
    return {key: shape(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value)


def test_torch_reads_the_verdict_as_the_root_cause(error_file: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    shutdown.write_error_file(VERDICT)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=shutdown.EXIT_CODE, error_file=str(error_file))
    shown = str(ChildFailedError("train.py", {0: failure}))
    assert "countoff: LostRank: rank 2 is gone." in shown.partition("Root Cause")[2]


def test_the_error_file_holds_the_whole_message(error_file: Path) -> None:
    shutdown.write_error_file(VERDICT)
    message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    assert message["extraInfo"]["py_callstack"] == VERDICT.render()


def test_without_a_launcher_no_file_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    shutdown.write_error_file(VERDICT)
    assert list(tmp_path.iterdir()) == []


def test_an_error_file_that_cannot_be_written_hides_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    shutdown.write_error_file(VERDICT)


# Meeting the end ----------------------------------------------------------------------------------------------------


def test_the_end_is_raised_as_the_error_of_its_kind() -> None:
    state = state_of()
    state.adopt(VERDICT)
    state.said.set()
    with pytest.raises(LostRank, match="rank 2 is gone"):
        shutdown.raise_verdict(state)
    assert state.answered.is_set()


def test_in_warn_mode_the_end_is_met_in_passing() -> None:
    state = state_of(policy="warn")
    state.adopt(VERDICT)
    shutdown.raise_verdict(state)
    assert state.answered.is_set()


def failed(error: BaseException) -> State:
    state = state_of(rank=3)
    state.said.set()
    state.ended.set()  # so that nobody waits for the better cause
    shutdown.report_failure(state, error, "in batch 5 of train epoch 0")
    return state


def test_a_rank_that_fails_by_itself_says_with_what_and_where() -> None:
    state = failed(ValueError("torn shard\nand a second line"))
    assert state.proposed is not None
    assert state.proposed.sentence == "rank 3 raised ValueError: torn shard (in batch 5 of train epoch 0)."
    assert (state.proposed.ranks, state.proposed.gone) == ((3,), False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"),
        RuntimeError("NCCL error: remote process exited"),
        ConnectionResetError(104, "Connection reset by peer"),
        DivergenceError(VERDICT),
    ],
)
def test_a_rank_that_fails_because_it_lost_a_peer_blames_itself_of_nothing(error: BaseException) -> None:
    state = failed(error)
    assert state.failure == ""
    assert state.proposed is not None
    assert state.proposed.sentence.endswith("as one does whose peer is gone.")


def test_a_rank_that_fails_after_the_end_changes_nothing() -> None:
    state = state_of()
    state.said.set()
    state.adopt(VERDICT)
    shutdown.report_failure(state, ValueError("torn shard"), "in batch 5")
    assert (state.end, state.proposed) == (VERDICT, None)


# Leaving ----------------------------------------------------------------------------------------------------------


def outcome(script: str) -> tuple[int, str, str]:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    return run.returncode, run.stdout, run.stderr


def test_the_process_ends_at_once_with_its_own_code_and_all_it_has_printed() -> None:
    code, out, error = outcome("""
        import atexit, sys, threading
        from countoff.core.runtime import shutdown
        atexit.register(print, "never")
        sys.stdout.write("said")  # no newline, no flush
        threading.Thread(target=shutdown.exit_now).start()
        threading.Event().wait()
    """)
    assert (code, out, error) == (87, "said", "")


def test_closed_streams_do_not_keep_the_process() -> None:
    code, *_ = outcome("""
        import sys
        from countoff.core.runtime import shutdown
        sys.stdout.close()
        sys.stderr.close()
        shutdown.exit_now(5)
    """)
    assert code == 5


def test_missing_streams_do_not_keep_the_process() -> None:
    code, *_ = outcome("""
        import sys
        from countoff.core.runtime import shutdown
        sys.stdout = sys.stderr = None
        shutdown.exit_now(5)
    """)
    assert code == 5


def test_what_is_done_at_exit_is_done_and_can_be_taken_back() -> None:
    code, out, _ = outcome("""
        from countoff.core.runtime import shutdown
        shutdown.at_exit(lambda: print("kept"))
        shutdown.at_exit(lambda: print("cancelled"))()
    """)
    assert (code, set(out.split())) == (0, {"kept"})
