"""Shutdown: the printed text, the error file that launchers read, the exit code."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core import DivergenceError, Settings, Verdict
from countoff.core.ending import shutdown
from countoff.core.session.state import State
from countoff.core.verdict import LostRank

VERDICT = Verdict("LostRank", "rank 2 is gone.", (2,), why="It was killed — or it crashed.")


def state_of(rank: int = 0, policy: Literal["raise", "warn"] = "raise") -> State:
    return State(rank, 4, Settings(on_divergence=policy), {})


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_every_line_names_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    shutdown.print_to_stderr(VERDICT, 7)
    assert capsys.readouterr().err.splitlines() == [
        "",
        "[rank 7] countoff: LostRank: rank 2 is gone.",
        "[rank 7]   why: It was killed — or it crashed.",
        "[rank 7]   more: countoff explain LostRank",
    ]


@pytest.mark.parametrize(
    ("prints", "said"),
    [
        (lambda: shutdown.print_warning(state_of(), VERDICT), True),
        (lambda: shutdown.print_verdict(state_of(policy="warn"), VERDICT), True),
        (lambda: shutdown.print_verdict(state_of(), VERDICT), False),
    ],
    ids=["warning", "verdict in warn mode", "verdict"],
)
def test_what_does_not_end_the_job_says_so_below_its_first_line(
    capsys: pytest.CaptureFixture[str], prints: Callable[[], None], said: bool
) -> None:
    prints()
    _, head, second, *_ = capsys.readouterr().err.splitlines()
    assert head == "[rank 0] countoff: LostRank: rank 2 is gone."
    assert (second == "[rank 0]   This is a warning: the job is not ended.") == said


def test_a_reminder_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shutdown.print_warning(state_of(), Verdict("LateRank", "rank 2 has not counted off (waiting)."))
    assert capsys.readouterr().err == "\n[rank 0] countoff: LateRank: rank 2 has not counted off (waiting).\n"


def test_a_verdict_is_printed_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", writes.append)
    monkeypatch.setattr(sys, "stderr", stream)
    shutdown.print_to_stderr(VERDICT, 0)
    assert len(writes) == 1


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    shutdown.print_to_stderr(VERDICT, 0)


def test_a_process_without_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    shutdown.print_to_stderr(VERDICT, 0)


def test_a_stderr_of_another_encoding_gets_the_verdict_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stderr that cannot encode a character of the verdict gets its number."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii"))
    shutdown.print_to_stderr(Verdict("LostRank", "ranks 8–15 are gone."), 0)
    assert written.getvalue().decode("ascii").strip() == r"[rank 0] countoff: LostRank: ranks 8\u201315 are gone."


def test_torchs_buffer_for_an_exception_does_not_hold_a_verdict_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal that ends the process in that moment would lose it."""
    seen: list[str] = []
    error = RuntimeError("torn")

    def print_both(*_: object) -> None:
        print("RuntimeError: torn", file=sys.stderr)
        shutdown.print_to_stderr(VERDICT, 7)
        seen.append(capfd.readouterr().err)

    monkeypatch.setattr(sys, "excepthook", print_both)
    monkeypatch.setattr(sys, "last_value", error, raising=False)  # as the interpreter does
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sys.excepthook(RuntimeError, error, None)
    finally:
        dist.destroy_process_group()
    assert seen[0].splitlines()[1] == "[rank 7] countoff: LostRank: rank 2 is gone."
    assert capfd.readouterr().err == "[rank0]: RuntimeError: torn\n"


def test_a_verdict_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    state = state_of()
    shutdown.print_verdict(state, VERDICT)
    shutdown.print_verdict(state, Verdict("LostRank", "another."))
    assert capsys.readouterr().err.count("countoff:") == 1
    assert state.end == VERDICT


def test_one_rank_of_a_host_prints_the_whole_verdict(error_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another rank prints one line that names it. The error file of every rank has the whole verdict."""
    verdict = replace(VERDICT, why="It was killed.")
    shutdown.print_verdict(state_of(3), verdict, 2)
    assert capsys.readouterr().err.strip() == f"[rank 3] countoff: {verdict.headline} See the output of rank 2."
    assert "It was killed." in error_file.read_text(encoding="utf-8")
    shutdown.print_verdict(state_of(2), verdict)
    assert "It was killed." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "policy", "printed"), [(0, "raise", 1), (3, "raise", 1), (0, "warn", 1), (3, "warn", 0)]
)
def test_in_warn_mode_rank_0_alone_prints(
    rank: int, policy: Literal["raise", "warn"], printed: int, error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In warn mode rank 0 alone prints the verdict, and no error file is written for the launcher."""
    shutdown.print_verdict(state_of(rank, policy), VERDICT)
    assert capsys.readouterr().err.count("countoff:") == printed
    assert error_file.exists() == (policy == "raise")


def with_file(state: State, path: Path) -> State:
    state.settings = replace(state.settings, verdict_file=str(path))
    return state


@pytest.mark.parametrize(
    ("rank", "policy", "reporter", "writes"),
    [(0, "raise", None, True), (3, "raise", None, True), (3, "raise", 2, False), (0, "warn", None, False)],
)
def test_the_verdict_that_ends_the_job_is_in_the_users_file(
    rank: int,
    policy: Literal["raise", "warn"],
    reporter: int | None,
    writes: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank that prints the whole message writes the file; in warn mode, where the job goes on, none does."""
    path = tmp_path / "verdict.json"
    shutdown.print_verdict(with_file(state_of(rank, policy), path), VERDICT, reporter)
    assert "rank 2 is gone" in capsys.readouterr().err
    assert path.exists() == writes
    if writes:
        written = json.loads(path.read_text(encoding="utf-8"))
        assert (written["kind"], written["restart"], written["world_size"]) == ("LostRank", "unknown", 4)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the directory, the message is printed all the same, and one line says why there is no file."""
    path = tmp_path / "missing" / "verdict.json"
    shutdown.print_verdict(with_file(state_of(1), path), VERDICT)
    printed = capsys.readouterr().err
    assert "[rank 1] countoff: LostRank: rank 2 is gone." in printed
    assert printed.splitlines()[-1] == f"[rank 1] countoff: the verdict is not in '{path}': No such file or directory"


def test_the_consequence_of_another_verdict_is_in_no_file(tmp_path: Path) -> None:
    """Of two guards of one process, the one that loses its ranks by the other's verdict does not replace the file."""
    path = tmp_path / "verdict.json"
    first, second = with_file(state_of(), path), with_file(state_of(), path)
    shutdown.print_verdict(first, Verdict("PlanMismatch", "their lengths differ."))
    shutdown.print_verdict(second, VERDICT)
    assert json.loads(path.read_text(encoding="utf-8"))["kind"] == "PlanMismatch"


def test_how_soon_every_rank_knew_is_logged_and_not_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The logger `countoff` has the milliseconds at level INFO; the message for the user has not."""
    caplog.set_level("INFO", logger="countoff")
    shutdown.print_verdict(state_of(), replace(VERDICT, spread_seconds=0.00123))
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert said == ["known on every rank 1.2 ms after it could be proved"]
    assert "known on every rank" not in capsys.readouterr().err


def test_error_file_has_the_format_of_torch(error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error file has the same keys and types as the one that torch's own handler writes."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    shutdown.write_error_file(VERDICT)
    ours = json.loads(error_file.read_text(encoding="utf-8"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torch.json"))
    ErrorHandler().record_exception(ValueError("torn shard"))
    theirs = json.loads((tmp_path / "torch.json").read_text(encoding="utf-8"))
    assert ours["message"]["extraInfo"].pop("countoff") == VERDICT.render()
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


def test_torch_shows_the_whole_message_once(error_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has printed it is the root cause, also where others have ended before it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures: dict[int, Any] = {}
    for rank in (2, 1, 0):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        shutdown.write_error_file(VERDICT, None if rank == 1 else 1)
        failures[rank] = ProcessFailure(
            local_rank=rank, pid=rank, exitcode=1, error_file=str(tmp_path / f"{rank}.json")
        )
    others, _, root = str(ChildFailedError("train.py", failures)).partition("Root Cause")
    assert VERDICT.render().splitlines()[-1] in root
    assert "rank      : 1 " in root
    assert others.count("countoff: LostRank: rank 2 is gone. See the output of rank 1.") == 2
    assert VERDICT.render().splitlines()[-1] not in others


def test_without_a_launcher_no_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    shutdown.write_error_file(VERDICT)
    assert list(tmp_path.iterdir()) == []


def test_an_error_file_in_no_directory_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error file that cannot be written raises nothing."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    shutdown.write_error_file(VERDICT)


def test_raise_verdict_raises_the_error_of_its_kind() -> None:
    state = state_of()
    state.adopt(VERDICT)
    state.printed.set()
    with pytest.raises(LostRank, match="rank 2 is gone"):
        shutdown.raise_verdict(state)
    assert state.answered.is_set()


def test_raise_verdict_returns_in_warn_mode() -> None:
    state = state_of(policy="warn")
    state.adopt(VERDICT)
    shutdown.raise_verdict(state)
    assert state.answered.is_set()


def failed(error: BaseException) -> State:
    state = state_of(rank=3)
    state.printed.set()
    state.ended.set()  # so that no wait for the better cause begins
    shutdown.report_failure(state, error, "in batch 5 of train epoch 0")
    return state


def test_an_own_failure_reports_what_and_where() -> None:
    """A rank that fails by itself reports its exception's first line, and the batch and span."""
    state = failed(ValueError("torn shard\nand a second line"))
    assert state.proposed is not None
    assert state.proposed.sentence == "rank 3 raised ValueError: torn shard (in batch 5 of train epoch 0)."
    assert (state.proposed.ranks, state.proposed.gone) == ((3,), False)


def test_the_text_of_a_tensor_on_a_device_is_not_asked_for() -> None:
    """To print such a tensor waits for its device, here the one that needs no hardware."""
    state = failed(ValueError(torch.ones(2, device="meta")))
    assert state.failure is not None
    assert state.failure.words == "ValueError: (a tensor on a device)"


def test_an_own_failure_reports_the_line_of_the_users_code() -> None:
    """The innermost line that is the user's own is named: not Python's, and not that of an installed package."""
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    line = raised.traceback[0].lineno + 1
    state = failed(raised.value)
    assert state.proposed is not None
    assert f" at test_shutdown.py:{line} (in batch 5 of train epoch 0)." in state.proposed.sentence


def test_a_failure_in_a_loaders_worker_reports_the_workers_line() -> None:
    """torch sends the traceback of a worker as text; its innermost line of the user's own is where it happened."""
    text = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/train.py", line 41, in __getitem__
    raise ValueError("shard 3 is torn")
ValueError: shard 3 is torn
"""
    state = failed(ValueError(text))
    assert state.proposed is not None
    assert state.proposed.sentence.endswith("ValueError: shard 3 is torn at train.py:41 (in batch 5 of train epoch 0).")


def in_a_collective(error: Exception) -> Exception:
    """The exception, raised by a function of torch.distributed."""
    code = compile("def wait(error): raise error", "/env/site-packages/torch/distributed/distributed_c10d.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with contextlib.suppress(type(error)):
        names["wait"](error)
    return error


def while_handling(first: Exception, error: Exception) -> Exception:
    """The exception, raised while another one was handled."""
    with contextlib.suppress(type(error)):
        try:
            raise first
        except type(first):
            raise error  # noqa: B904
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Cannot use ReduceOp.AVG with Gloo"),
        in_a_collective(RuntimeError("Cannot use ReduceOp.AVG with Gloo")),
        ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
        ConnectionResetError(104, "Connection reset by peer"),
        RuntimeError("DataLoader timed out after 5 seconds"),
    ],
)
def test_the_name_of_a_backend_or_a_lost_connection_is_no_lost_peer(error: BaseException) -> None:
    """The program calls a collective in a wrong way, or its loader has lost a server."""
    state = failed(error)
    assert state.failure is not None
    assert state.proposed is not None
    assert state.proposed.sentence.startswith(f"rank 3 raised {type(error).__name__}: ")
    assert state.proposed.ranks == (3,)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        torch.distributed.DistNetworkError("The client socket has timed out after 300000ms"),
        DivergenceError(VERDICT),
        in_a_collective(RuntimeError("Timed out")),
        while_handling(RuntimeError("Connection closed by peer"), KeyError("loss")),
    ],
)
def test_a_lost_peer_is_no_failure_of_this_rank(error: BaseException) -> None:
    """A rank whose exception looks like a lost peer reports no failure of its own."""
    state = failed(error)
    assert state.failure is None
    assert state.proposed is not None
    assert state.proposed.sentence.startswith("rank 3 is a victim: it raised ")
    assert state.proposed.ranks == ()


def test_a_rank_that_fails_after_the_end_changes_nothing() -> None:
    state = state_of()
    state.printed.set()
    state.adopt(VERDICT)
    shutdown.report_failure(state, ValueError("torn shard"), "in batch 5")
    assert (state.end, state.proposed) == (VERDICT, None)


def outcome(script: str) -> tuple[int, str, str]:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    return run.returncode, run.stdout, run.stderr


def test_exit_now_flushes_and_ends_the_process() -> None:
    """`exit_now` flushes stdout and ends the process with exit code 87, without the functions of `atexit`."""
    code, out, error = outcome("""
        import atexit, sys, threading
        from countoff.core.ending import shutdown
        atexit.register(print, "never")
        sys.stdout.write("said")  # no newline, no flush
        threading.Thread(target=shutdown.exit_now).start()
        threading.Event().wait()
    """)
    assert (code, out, error) == (87, "said", "")


def test_closed_streams_do_not_stop_the_exit() -> None:
    code, *_ = outcome("""
        import sys
        from countoff.core.ending import shutdown
        sys.stdout.close()
        sys.stderr.close()
        shutdown.exit_now()
    """)
    assert code == 87


def test_missing_streams_do_not_stop_the_exit() -> None:
    code, *_ = outcome("""
        import sys
        from countoff.core.ending import shutdown
        sys.stdout = sys.stderr = None
        shutdown.exit_now()
    """)
    assert code == 87


def test_an_exception_is_reported_by_one_guard() -> None:
    """An exception that leaves the loops of two guards of a process is reported by the first that it reaches."""
    error = ValueError("torn shard")
    first, second = state_of(), state_of()
    for state in (first, second, first):
        state.printed.set()
        shutdown.report_failure(state, error, "in batch 5")
    assert first.proposed is not None
    assert (second.proposed, second.failure) == (None, None)


def test_the_loss_of_a_rank_beside_another_verdict_is_not_printed(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two guards of one process, which ends with the verdict of one, the other does not print its consequence."""
    first, second = state_of(), state_of()
    shutdown.print_verdict(first, Verdict("PlanMismatch", "their lengths differ."))
    shutdown.print_verdict(second, VERDICT)
    later = state_of()
    assert capsys.readouterr().err.count("countoff:") == 1
    assert "PlanMismatch" in error_file.read_text(encoding="utf-8")
    assert second.end == VERDICT
    shutdown.print_verdict(later, VERDICT)  # begun after the process has survived
    assert "LostRank" in capsys.readouterr().err


def test_a_verdict_with_a_cause_of_its_own_is_printed_beside_another(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = state_of(), state_of()
    shutdown.print_verdict(first, VERDICT)
    shutdown.print_verdict(second, Verdict("UnevenBatches", "rank 1 ran out of data."))
    assert capsys.readouterr().err.count("countoff:") == 2


def test_a_victim_has_a_remedy_of_its_own() -> None:
    """Its output has nothing on the cause, so nobody should begin with it."""
    state = state_of(rank=1)
    state.printed.set()
    state.ended.set()
    shutdown.report_failure(state, RuntimeError("Connection closed by peer"), "in batch 5")
    assert state.proposed is not None
    assert state.proposed.subject == "victim"
    assert "on another rank" in state.proposed.remedy


def test_a_victim_names_the_rank_that_has_left() -> None:
    """A rank that lost its peer names the rank that has closed its guard in the middle of the fit."""
    state = state_of(rank=3)
    state.receive({"type": "goodbye", "rank": 2})
    state.receive({"type": "goodbye", "rank": 1})
    state.printed.set()
    state.ended.set()
    shutdown.report_failure(state, ConnectionResetError(104, "Connection reset by peer"), "in batch 5")
    assert state.proposed is not None
    assert state.proposed.sentence.startswith("rank 2 left the job before its fit had ended; rank 3 raised Connection")
    assert state.proposed.ranks == (2,)
    assert state.proposed.restart == "unknown"  # it was not lost: it has ended by itself


def test_an_uneven_evaluation_is_warned_of_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A framework may evaluate so by design, in every fit; whoever watches a guard is told each time."""
    monkeypatch.setattr(shutdown, "told_of_evaluations", set())
    told: list[Verdict] = []
    for batches in (2, 3):
        state = state_of()
        state.observer = SimpleNamespace(warned=told.append)  # pyright: ignore[reportAttributeAccessIssue]
        sentence = f"rank 1 ran out of data after {batches} batches of evaluation; rank 0 has batch {batches + 1}."
        shutdown.print_warning(state, Verdict("UnevenBatches", sentence, subject="evaluation"))
        shutdown.print_warning(state, Verdict("WrongLength", "there are 8.", subject="evaluation"))
    printed = capsys.readouterr().err
    assert printed.count("UnevenBatches") == 1
    assert printed.count("WrongLength") == 2
    assert [each.kind for each in told].count("UnevenBatches") == 2
