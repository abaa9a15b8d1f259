"""The verdict's file: its content, when it is removed, and that it is written as a whole or not at all."""

import errno
import json
import os
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from countoff.core import FitPlan, Guard, Settings, SettingsError, Verdict
from countoff.core.ending import verdict_file
from countoff.core.session.liveness import processes

VERDICT = Verdict("UnevenBatches", "rank 1 ran out of data — after 4 batches.", (1,), time=1700000000.0, world_size=2)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verdict.json"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def clear(path: Path, rank: int = 0, part: tuple[int, ...] = ()) -> None:
    verdict_file.clear(Settings(verdict_file=str(path)), rank, part)


def date(path: Path, seconds: float) -> None:
    """Lets a file be of so many seconds after this process began."""
    at = processes.began_at() + seconds
    os.utime(path, (at, at))


def leave_from_an_earlier_run(path: Path) -> None:
    """Leaves the file of a run that ended an hour before this process began."""
    verdict_file.write(str(path), VERDICT, 0)
    date(path, -3600)


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_the_content_is_the_verdict_its_versions_and_its_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads the format, the verdict, the versions and what the launcher and the scheduler call the run."""
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    assert verdict_file.write(str(path), VERDICT, 0) == ""
    written = read(path)
    assert written.pop("format") == 1
    versions = written.pop("versions")
    assert {"countoff", "python"} <= versions.keys() <= {"countoff", "python", "torch"}
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert written.pop("run") == {"torchelastic_run_id": "digits", "slurm_job_id": "4242"}
    assert written == VERDICT.to_dict()
    assert path.read_text(encoding="utf-8").isascii()


def test_torch_is_named_only_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch" not in verdict_file.document(VERDICT)["versions"]
    assert "torch" not in sys.modules


def test_racing_writers_leave_one_whole_file(path: Path) -> None:
    """Whoever reads while ranks write and replace the file sees a whole verdict, and nothing else is left."""
    done = threading.Event()
    seen: list[dict[str, Any]] = []

    def look() -> None:
        while not done.is_set():
            if path.exists():
                seen.append(read(path))

    reader = threading.Thread(target=look)
    reader.start()
    writers = [threading.Thread(target=verdict_file.write, args=(str(path), VERDICT, rank)) for rank in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert files(path.parent) == ["verdict.json"]
    assert all(content == read(path) for content in seen)


def test_a_full_disk_leaves_what_was_there(path: Path) -> None:
    """A file that cannot be written to its end is no file: the former one stays, and no part of the new one."""
    assert verdict_file.write(str(path), VERDICT, 0) == ""
    before = path.read_text(encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        problem = verdict_file.write(str(path), Verdict("LostRank", "rank 2 is gone."), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert problem == "File too large"
    assert files(path.parent) == ["verdict.json"]
    assert path.read_text(encoding="utf-8") == before


def test_a_directory_that_is_gone_is_a_reason(path: Path) -> None:
    path.parent.rmdir()
    assert verdict_file.write(str(path), VERDICT, 0) == "No such file or directory"


def test_a_file_system_that_does_not_answer_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a verdict ends, whatever its network file system does."""
    answered, done = threading.Event(), threading.Event()

    def replace(*_: object) -> None:
        answered.wait()
        done.set()

    monkeypatch.setattr(verdict_file.os, "replace", replace)
    monkeypatch.setattr(verdict_file, "WRITE_SECONDS", 0.05)
    began = time.monotonic()
    assert verdict_file.write(str(path), VERDICT, 0).startswith("the file system has not answered")
    assert time.monotonic() - began < 10
    assert not path.exists()
    answered.set()
    assert done.wait(10)


def test_the_verdict_of_an_earlier_run_is_removed(path: Path) -> None:
    """What a rank that was killed while it wrote has left is removed too."""
    leave_from_an_earlier_run(path)
    (path.parent / ".verdict.json.countoff-3.tmp").write_text('{"for')
    clear(path, rank=3)
    assert files(path.parent) == []
    clear(path)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_one_rank_of_a_host_removes_it(path: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and srun each say in their own way which rank is the first of its host."""
    leave_from_an_earlier_run(path)
    monkeypatch.setenv(variable, "1")
    clear(path, rank=1)
    assert path.exists()
    monkeypatch.setenv(variable, "0")
    clear(path)
    assert not path.exists()


def test_a_late_rank_does_not_remove_the_verdict_of_its_own_run(path: Path) -> None:
    """Where no launcher says which rank is its host's first, each one clears; the others may have ended by then."""
    verdict_file.write(str(path), VERDICT, 0)
    date(path, 60)
    clear(path, rank=1)
    assert read(path)["kind"] == "UnevenBatches"


def test_the_verdict_of_an_earlier_fit_of_this_process_is_removed(path: Path) -> None:
    """A program that catches a verdict may begin another fit."""
    clear(path)
    verdict_file.write(str(path), VERDICT, 0)
    date(path, 60)
    clear(path)
    assert not path.exists()


@pytest.mark.parametrize("fits_before", [False, True])
@pytest.mark.parametrize("seconds", [0.5, 60])
def test_a_part_leaves_the_verdict_of_another_part(
    seconds: float, fits_before: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials train beside each other: the next fit of one does not remove what ranks of another have just found.

    That may be soon: a rank that is forked from a process with all imports fits within a second.
    """
    if fits_before:
        clear(path, part=(0, 1))
    verdict_file.write(str(path), replace(VERDICT, ranks=(3,), part=(2, 3)), 2)
    date(path, seconds)
    clear(path, part=(0, 1))
    assert read(path)["part"] == [2, 3]
    monkeypatch.setenv("LOCAL_RANK", "3")
    clear(path, rank=3, part=(2, 3))
    assert not path.exists()


@pytest.mark.parametrize("part", [(), (2, 3)])
def test_a_fit_of_the_whole_job_removes_the_verdict_of_any_ranks(part: tuple[int, ...], path: Path) -> None:
    clear(path)
    verdict_file.write(str(path), replace(VERDICT, part=part), 0)
    date(path, 60)
    clear(path)
    assert not path.exists()


def test_a_part_leaves_the_verdict_of_the_whole_job(path: Path) -> None:
    """It is about ranks that are not in this part."""
    clear(path, part=(0, 1))
    verdict_file.write(str(path), VERDICT, 0)
    date(path, 60)
    clear(path, part=(0, 1))
    assert path.exists()


@pytest.mark.parametrize("call", ["stat", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_another_host_has_just_removed_is_nothing(
    call: str, code: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system, a file that goes away during a call is a stale handle."""
    leave_from_an_earlier_run(path)
    original = getattr(os, call)

    def fail(at: Any, *arguments: Any, **options: Any) -> Any:
        if at == str(path):
            raise OSError(code, os.strerror(code), at)
        return original(at, *arguments, **options)

    monkeypatch.setattr(verdict_file.os, call, fail)
    clear(path)


@pytest.mark.parametrize(
    "content",
    ["accuracy,0.9\n", "[]", "{}", '{"kind": "LostRank", "sentence": ""}', "\xff", "[" * 100_000, "x" * (1 << 20 | 1)],
    ids=["text", "list", "object", "others", "not UTF-8", "deep", "long"],
)
def test_what_countoff_has_not_written_is_refused(content: str, path: Path) -> None:
    """Every rank refuses at the start to overwrite something else, in one line, and leaves it as it is."""
    path.write_text(content, encoding="latin-1")
    with pytest.raises(SettingsError) as refused:
        clear(path)
    line = f"verdict_file='{path}' exists, and countoff has not written it: remove it, or choose another path"
    assert str(refused.value) == line
    assert path.read_text(encoding="latin-1") == content


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_refused_unopened(kind: str, path: Path) -> None:
    """To open a pipe would wait for its other end."""
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(SettingsError, match="countoff has not written it"):
        clear(path)


def test_an_empty_file_is_nothing(path: Path) -> None:
    """What `mktemp` makes is accepted, and stays empty until there is a verdict."""
    path.touch()
    clear(path)
    assert path.read_text(encoding="utf-8") == ""


def test_a_missing_directory_is_refused_at_the_start(path: Path) -> None:
    """A clear error before the first batch is better than no file in the end."""
    guard = Guard(Settings(verdict_file=str(path / "verdict.json")), rank=0, world_size=1)
    with pytest.raises(SettingsError, match=r"is in no directory of rank 0's host: make '.*/verdict\.json' first"):
        guard.fit_start(FitPlan())


def test_a_directory_that_may_not_be_written_is_refused_at_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_file.os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(SettingsError, match="rank 0 may not write in"):
        clear(path)


def test_without_a_path_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verdict_file.clear(Settings(), 0)
    assert files(tmp_path) == []


ROWS = ({"rank": 0, "where": "train epoch 0", "batches": 412}, {"rank": 1, "where": "train epoch 0", "batches": 411})
LOST = Verdict("LostRank", "rank 3 is gone (pid 17).", (3,), rows=ROWS, gone=True, world_size=4)


def leave_an_attempt(path: Path, verdict: Verdict) -> None:
    """Leaves the verdict of the attempt before, and begins this one."""
    verdict_file.write(str(path), verdict, 0)
    date(path, -3600)
    clear(path)


def test_what_comes_again_at_the_same_batch_is_said(path: Path) -> None:
    """A pid may be another one. A restart is then useless, whatever the kind, and no host is to be left out."""
    leave_an_attempt(path, LOST)
    again = verdict_file.seen_again(str(path), replace(LOST, sentence="rank 3 is gone (pid 99)."))
    assert again == "batch 412 of train epoch 0, rank 3"
    known = replace(LOST, again=again)
    assert (LOST.restart, known.restart, known.to_dict()["again"]) == ("may_help", "useless", again)
    assert f"  again: the same happened in the attempt before ({again}): a restart has not helped." in known.render()


def test_a_host_that_has_lost_its_rank_twice_is_still_to_be_left_out(path: Path) -> None:
    """Another host may do better. If another host has lost the rank too, it is not the host."""
    on_host = replace(LOST, hosts={3: "node-1"}, sentence="rank 3 on node-1 is gone (pid 17).")
    leave_an_attempt(path, on_host)
    assert verdict_file.seen_again(str(path), on_host) == ""
    moved = replace(on_host, hosts={3: "node-2"}, sentence="rank 3 on node-2 is gone (pid 5).")
    assert verdict_file.seen_again(str(path), moved) == "batch 412 of train epoch 0, rank 3"


def test_the_file_of_another_job_is_no_attempt_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "monday")
    leave_an_attempt(path, LOST)
    assert verdict_file.seen_again(str(path), LOST)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tuesday")
    assert verdict_file.seen_again(str(path), LOST) == ""


@pytest.mark.parametrize(
    "now",
    [
        replace(LOST, ranks=(2,)),
        replace(LOST, rows=({**ROWS[0], "batches": 413},)),
        replace(LOST, rows=({**ROWS[0], "where": "train epoch 1"},)),
        replace(LOST, rows=()),
        replace(LOST, ranks=()),
        replace(LOST, world_size=8),
        replace(LOST, kind="UnevenBatches"),
        replace(LOST, sentence="rank 3 was stopped by SIGTERM."),
        replace(LOST, rows=({**ROWS[0], "where": "no span", "batches": 0},)),
    ],
    ids=[
        "other rank",
        "other batch",
        "other epoch",
        "no table",
        "no rank",
        "other size",
        "other kind",
        "other event",
        "no batch",
    ],
)
def test_what_comes_otherwise_is_not_again(path: Path, now: Verdict) -> None:
    leave_an_attempt(path, LOST)
    assert verdict_file.seen_again(str(path), now) == ""


def test_a_damaged_table_of_the_attempt_before_says_nothing(path: Path) -> None:
    for rows in ("none", [3], [{"where": 1, "batches": "x"}], None):
        verdict_file.write(str(path), LOST, 0)
        path.write_text(json.dumps({**read(path), "rows": rows}))
        date(path, -3600)
        clear(path)
        assert verdict_file.seen_again(str(path), LOST) == ""


def test_the_second_fit_of_this_process_has_no_attempt_before(path: Path) -> None:
    """The attempt before has ended in its first fit, or in another one."""
    leave_an_attempt(path, LOST)
    verdict_file.write(str(path), LOST, 0)
    clear(path)
    assert verdict_file.seen_again(str(path), LOST) == ""
