"""The incident: what a verdict leaves, and what never is in it."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from countoff.core import Verdict
from countoff.core.trace import incident
from tests.fake_store import FakeStore

VERDICT = Verdict("LostRank", "rank 2 is gone.", (2,), gone=True, world_size=4)
IN_LOADER = {"state": "loader", "frames": ["torch/utils/data/dataloader.py:7 in next", "train.py:3 in main"]}
IN_COLLECTIVE = {"state": "collective", "frames": ["train.py:9 in step"]}


def write(directory: Path, verdict: Verdict = VERDICT, **more: Any) -> Path:
    given: dict[str, Any] = {"rank": 0, "rows": {}, "found": {}} | more
    incident.write(str(directory), verdict, **given)
    return directory / "incident.json"


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    rows = {rank: {"rank": rank, "batches": 7, "steps": 3, "side": 1, "known": 2.0, "failure": ""} for rank in (1, 0)}
    text = write(tmp_path, rows=rows, found={0: IN_LOADER}).read_text()
    assert os.listdir(tmp_path) == ["incident.json"]
    written = json.loads(text)
    assert (written["kind"], written["world_size"], written["format"]) == ("LostRank", 4, 1)
    assert written["counted"] == [{"rank": rank, "batches": 7, "steps": 3} for rank in (0, 1)]
    assert written["stacks"] == [{"ranks": [0], **IN_LOADER}]
    assert written["environment"]["NCCL_DEBUG"] == "INFO"
    assert written["written_by"] == {"rank": 0, "host": socket.gethostname()}
    assert "secret" not in text


def test_without_all_rows_those_of_the_table_are_kept(tmp_path: Path) -> None:
    verdict = Verdict("LostRank", "rank 2 is gone.", rows=({"rank": 3, "batches": 5},), world_size=4)
    assert json.loads(write(tmp_path, verdict).read_text())["counted"] == [{"rank": 3, "batches": 5}]


def test_equal_stacks_are_written_once() -> None:
    found = dict.fromkeys((0, 1, 2, 5), IN_COLLECTIVE) | {3: IN_LOADER, 4: {"state": "code", "frames": []}}
    assert incident.grouped(found) == [
        {"ranks": [3], "state": "loader", "frames": ("torch/utils/data/dataloader.py:7 in next", "train.py:3 in main")},
        {"ranks": [4], "state": "code", "frames": ()},
        {"ranks": [0, 1, 2, 5], "state": "collective", "frames": ("train.py:9 in step",)},
    ]


def test_stacks_from_the_store_are_escaped(tmp_path: Path) -> None:
    found = {0: {"state": "\x1b[31m", "frames": ["\x1b[2J", 7]}}
    assert "\x1b" not in write(tmp_path, found=found).read_text()


def test_ranks_without_a_trace_have_told_nothing() -> None:
    store = FakeStore()
    told = incident.post_stack(store, 1, threading.get_ident())
    assert incident.read_stacks(store, [0, 1, 2]) == {1: told}
    assert incident.read_stacks(store, []) == {}


def test_ranks_without_a_trace_do_not_hold_up_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = FakeStore(), 0
    has = store.has

    def slow(*keys: str) -> bool:
        nonlocal asked
        asked += 1
        time.sleep(0.01)
        return has(*keys)

    monkeypatch.setattr(store, "has", slow)
    told = incident.post_stack(store, 0, threading.get_ident())
    began = time.monotonic()
    assert incident.read_stacks(store, range(4096)) == {0: told}
    assert time.monotonic() - began < 2
    assert asked < 50


def test_a_stack_fits_into_the_store() -> None:
    def deep(depth: int) -> dict[str, Any]:
        return deep(depth - 1) if depth else incident.stack_record(threading.get_ident())

    record = deep(100)
    assert record["frames"][0].endswith("in stack_record") or "deep" in record["frames"][0]
    assert len(json.dumps(record)) <= 1024
    assert len(record["frames"]) > 5


def test_rank_0_writes_for_all_that_share_its_directory(tmp_path: Path) -> None:
    uneven = Verdict("UnevenBatches", "rank 1 ran out of data.", (1,))
    assert not incident.is_others(str(tmp_path), 3, 0, uneven)
    file = tmp_path / "rank-00000.jsonl"
    file.touch()
    assert incident.is_others(str(tmp_path), 3, 0, uneven)
    assert not incident.is_others(str(tmp_path), 0, 0, uneven)
    assert not incident.is_others(str(tmp_path), 3, 0, Verdict("LostRank", "rank 0 is gone.", (0,), gone=True))
    earlier = time.time() - 1e6
    os.utime(file, (earlier, earlier))
    assert not incident.is_others(str(tmp_path), 3, 0, uneven)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", True),
        ("TORCHELASTIC_RUN_ID", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("NCCL_SOCKET_IFNAME", True),
        ("COUNTOFF_TRACE_DIR", True),
        ("COUNTOFF", True),
        ("HF_TOKEN", False),
        ("PATH", False),
        ("MY_NCCL_DEBUG", False),
        ("TORCH_API_KEY", False),
        ("NCCL_password", False),
        ("TORCH_HUB_AUTH", False),
        ("TORCHELASTIC_PASSWD", False),
        ("NCCL_SHM_PASS", False),
        ("TORCH_DB_PWD", False),
        ("TORCH_CREDS", False),
        ("PYTORCH_COOKIES", False),
        ("TORCH_WEBHOOK", False),
        ("COUNTOFF_WEBHOOK", False),
        ("COUNTOFF_SERVICE_HOST", False),
        ("COUNTOFF_ON_DIVERGENCE", True),
    ],
)
def test_which_variables_are_kept(name: str, kept: bool) -> None:
    assert (name in incident.environment({name: "x"})) is kept


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("https://__token__:abc@pypi.example/simple", False),
        ("eth0, http://user@host:1/x", False),
        ("https://download.pytorch.org/whl", True),
        ("https://user:a/b@example.org", False),
        ("tcp://node0:29500", True),
    ],
)
def test_an_address_with_a_user_is_not_kept(value: str, kept: bool) -> None:
    assert ("PYTORCH_INDEX_URL" in incident.environment({"PYTORCH_INDEX_URL": value})) is kept


def test_only_the_user_can_read_an_incident(tmp_path: Path) -> None:
    for _ in range(2):  # an earlier one is replaced
        assert write(tmp_path).stat().st_mode & 0o777 == 0o600


def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Another user may have put one where a file is about to be written."""
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".incident.json.0.tmp").symlink_to(other)
    write(tmp_path)
    assert other.read_text() == "mine"


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    before = path.read_text()

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(incident.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, Verdict("UnevenBatches", "another."))
    assert path.read_text() == before
    assert not list(tmp_path.glob(".*"))
