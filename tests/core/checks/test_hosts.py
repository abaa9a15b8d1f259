"""What hosts run: the sentences about those that differ, and what a record has room for."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core import software
from countoff.core.checks import hosts
from countoff.core.checks.check import FitStart
from countoff.core.checks.hosts import HostsCheck, judge_hosts, record_of
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, record_text
from countoff.core.settings import Settings
from countoff.core.state import State
from countoff.core.verdict import Verdict
from countoff.core.waiting import until
from tests.other_ranks import KeptRecords
from tests.paths import ROOT

LATER = 1e18
NAMES = [each.name for group in software.VARIABLES.values() for each in group]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


class Job:
    """Ranks of hosts that run the same until one is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, per_host: int = 1) -> None:
        self._patch = monkeypatch
        self._path = tmp_path
        self._per_host = per_host
        self.files = ["train.py", "data.py"]
        self.records: dict[int, dict[str, Any]] = {}

    def rank(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        files: Mapping[str, str] | None = None,
        host: str | None = None,
        **libraries: str,
    ) -> None:
        """Adds a rank."""
        rank = len(self.records)
        contents = dict.fromkeys(self.files, "x = 1\n") if files is None else files
        paths = {name: self._path / str(rank) / name for name in contents}
        for name, path in paths.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(contents[name])
        loaded = {"torch": "2.7.0", "NCCL": "2.27.3", "CUDA": "12.6", **libraries}
        with self._patch.context() as patch:
            patch.setattr(software, "libraries", lambda: loaded)
            patch.setattr(hosts, "gethostname", lambda: host or f"node-{rank // self._per_host}")
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            record = record_of({name: str(path) for name, path in paths.items()}, LATER)
        assert len(record_text(record)) <= RECORD_BYTES
        self.records[rank] = json.loads(json.dumps(record))

    def judged(self) -> list[Verdict]:
        return list(judge_hosts(self.records, self.files))

    def sentence(self) -> str:
        [found] = self.judged()
        return found.sentence


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Job:
    return Job(monkeypatch, tmp_path)


def test_equal_hosts_are_silent(job: Job) -> None:
    for _ in range(3):
        job.rank({"NCCL_ALGO": "Ring"})
    assert job.judged() == []


def test_a_library_of_one_host_is_named(job: Job) -> None:
    for version in ("2.27.3", "2.27.3", "2.26.2", "2.27.3"):
        job.rank(NCCL=version)
    [found] = job.judged()
    assert found.sentence == "node-2 loads NCCL 2.26.2, the other hosts 2.27.3."
    assert (found.kind, found.ranks, found.subject, found.standing) == ("HostsDiffer", (2,), "versions", "out of step")


def test_of_two_hosts_none_is_right(job: Job) -> None:
    job.rank(driver="550.54.15")
    job.rank(driver="550.90.07")
    [found] = job.judged()
    assert found.sentence == "node-0 has the NVIDIA driver 550.54.15, node-1 550.90.07."
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_three_versions_are_named(job: Job) -> None:
    for version in ("1", "2", "3", "3", "3"):
        job.rank(NCCL=version)
    assert job.sentence() == "node-0 loads NCCL 1, node-1 2, the other hosts 3."


def test_what_is_not_loaded_everywhere_is_not_compared(job: Job) -> None:
    """A host that has not loaded a plugin yet has no other one."""
    job.rank(net="libnccl-net.so", cuDNN="9.5.1")
    job.rank()
    job.rank(net="libnccl-net.so")
    assert job.judged() == []


def test_what_follows_from_another_torch_is_not_said(job: Job) -> None:
    job.rank(torch="2.7.0", NCCL="2.26.2", CUDA="12.6")
    job.rank(torch="2.8.0", NCCL="2.27.3", CUDA="12.8")
    assert job.judged() == []


@pytest.mark.parametrize(
    ("odd", "others", "sentence"),
    [
        ({"NCCL_ALGO": "Ring"}, {}, 'NCCL_ALGO is "Ring" on node-2, and is not set on the other hosts.'),
        ({}, {"NCCL_ALGO": "Ring"}, 'NCCL_ALGO is not set on node-2, and is "Ring" on the other hosts.'),
        ({"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}, 'NCCL_PROTO is "LL" on node-2, and is "Simple" on the other'),
        ({"NCCL_ALGO": "a" * 200}, {}, "NCCL_ALGO differs on node-2."),
        (
            {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_NET": "IB", "FI_PROVIDER": "efa"},
            {},
            "NCCL_ALGO, NCCL_PROTO, NCCL_NET and FI_PROVIDER differ on node-2.",
        ),
    ],
)
def test_a_variable_of_one_host_is_named(
    job: Job, odd: Mapping[str, str], others: Mapping[str, str], sentence: str
) -> None:
    for environment in (others, others, odd):
        job.rank(environment)
    [found] = job.judged()
    assert found.sentence.startswith(sentence)
    assert (found.ranks, found.subject) == ((2,), "environment")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"NCCL_IB_DISABLE": "0"}, {}),
        ({"TORCH_NCCL_BLOCKING_WAIT": "True"}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
        ({"NCCL_ALGO": "ring"}, {"NCCL_ALGO": " Ring"}),
        ({"NCCL_ALGO": ""}, {}),
        ({"NCCL_NET_PLUGIN": "/opt/a/libnccl-net.so"}, {"NCCL_NET_PLUGIN": "/opt/b/libnccl-net.so"}),
        ({"OMP_NUM_THREADS": "1"}, {}),  # torchrun sets it where a host has several ranks
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}),
    ],
)
def test_values_that_mean_the_same_or_may_differ_are_silent(
    job: Job, one: Mapping[str, str], other: Mapping[str, str]
) -> None:
    for environment in (one, other, other):
        job.rank(environment)
    assert job.judged() == []


PER_HOST = {
    "NCCL_SOCKET_IFNAME": "eth{}",
    "GLOO_SOCKET_IFNAME": "eth{}",
    "TP_SOCKET_IFNAME": "eth{}",
    "NCCL_IB_HCA": "mlx5_{}",
    "NCCL_IB_GID_INDEX": "{}",
    "NCCL_TOPO_FILE": "/topo{}",
    "NCCL_DEBUG": "INFO{}",
    "NCCL_DEBUG_FILE": "/tmp/nccl.{}",
    "NCCL_HOSTID": "node{}",
    "NCCL_COMM_ID": "node{}:1",
    "NCCL_PSK": "secret{}",
    "NCCL_P2P_DISABLE": "{}",
    "TORCH_DISTRIBUTED_DEBUG": "INFO{}",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/dump{}",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "{}",
    "TORCH_HOME": "/home/{}",
    "TORCH_EXTENSIONS_DIR": "/tmp/{}",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/{}",
    "TORCHELASTIC_ERROR_FILE": "/tmp/{}",
    "TORCHELASTIC_RUN_ID": "{}",
    "TORCH_LOGS": "{}",
    "CUDA_VISIBLE_DEVICES": "{}",
    "CUDA_LAUNCH_BLOCKING": "{}",
    "PYTORCH_CUDA_ALLOC_CONF": "{}",
    "PYTHONHASHSEED": "{}",
    "RANK": "{}",
    "MASTER_ADDR": "{}",
}
"""What hosts and ranks have of their own, or set on one rank on purpose."""


def test_what_each_host_has_of_its_own_is_silent(job: Job) -> None:
    for number in range(3):
        job.rank({name: value.format(number) for name, value in PER_HOST.items()})
    assert job.judged() == []
    assert not PER_HOST.keys() & set(NAMES)


def test_a_file_of_one_host_is_named(job: Job) -> None:
    job.rank()
    job.rank()
    job.rank(files={"train.py": "x = 2\n", "data.py": "x = 1\n"})
    [found] = job.judged()
    assert (found.sentence, found.ranks, found.subject) == ("train.py differs on node-2.", (2,), "code")


def test_files_take_one_line(job: Job) -> None:
    job.files = ["train.py", *(f"pkg/part_{number}.py" for number in range(9))]
    for _ in range(2):
        job.rank()
    job.rank(files=dict.fromkeys(job.files, "x = 2\n"))
    listed = "train.py, pkg/part_0.py, pkg/part_1.py, pkg/part_2.py and 6 other files"
    assert job.sentence() == f"{listed} differ on node-2."


def test_files_that_differ_on_other_hosts_each_are_told_apart(job: Job) -> None:
    job.rank()
    job.rank(files={"train.py": "x = 2\n", "data.py": "x = 1\n"})
    job.rank(files={"train.py": "x = 1\n", "data.py": "x = 2\n"})
    job.rank()
    assert job.sentence() == "train.py differs on node-1; data.py differs on node-2."


def test_files_that_not_every_rank_imports_are_compared_where_they_are(job: Job) -> None:
    """A logger of rank 0 is no difference, and a file that the judging rank does not know has no name."""
    job.rank(files={"train.py": "x = 1\n", "logger.py": "x = 1\n"})
    for number in (1, 1, 2):
        job.rank(files={"train.py": "x = 1\r\n", "worker.py": f"x = {number}\n"})
    job.files = ["train.py", "logger.py"]
    assert job.sentence() == "1 file differs on node-3."


def test_several_differences_are_one_warning(job: Job) -> None:
    job.rank()
    job.rank()
    job.rank({"NCCL_ALGO": "Ring"}, NCCL="2.26.2", files={"train.py": "x = 2\n"})
    [found] = job.judged()
    assert found.sentence == (
        "node-2 loads NCCL 2.26.2, the other hosts 2.27.3. "
        'NCCL_ALGO is "Ring" on node-2, and is not set on the other hosts. '
        "train.py differs on node-2."
    )
    assert found.subject == ""


def test_ranks_of_one_host_are_named_by_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    job = Job(monkeypatch, tmp_path, per_host=4)
    for algorithm in ("Tree", "Ring", "Tree", "Tree"):
        job.rank({"NCCL_ALGO": algorithm})
    assert job.sentence() == 'NCCL_ALGO is "Ring" on rank 1, and is "Tree" on the other ranks.'


def test_all_ranks_of_a_host_are_named_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    job = Job(monkeypatch, tmp_path, per_host=2)
    for rank in range(8):
        job.rank(NCCL="2.26.2" if rank < 4 else "2.27.3")
    assert job.sentence() == "node-0 and node-1 load NCCL 2.26.2, the other hosts 2.27.3."


def test_hosts_of_one_name_are_told_apart_by_ranks(job: Job) -> None:
    for version in ("2.27.3", "2.27.3", "2.26.2"):
        job.rank(NCCL=version, host="localhost")
    assert job.sentence() == "rank 2 loads NCCL 2.26.2, the other ranks 2.27.3."


def test_a_rank_with_other_variables_is_not_compared_in_them(job: Job) -> None:
    """It has another version of countoff."""
    job.rank({"NCCL_ALGO": "Ring"})
    job.rank()
    job.records[1] |= {"list": "other", "variables": "abc"}
    assert job.judged() == []


def test_a_rank_that_tells_nothing_is_left_out(job: Job) -> None:
    job.rank(NCCL="1")
    job.records[1] = {}
    assert job.judged() == []


@pytest.mark.parametrize(
    "wrong",
    [{"variables": "abc"}, {"files": "abc"}, {"libraries": 5}, {"values": {"x": "1"}}, {"values": 7}],
)
def test_a_hostile_record_is_refused(job: Job, wrong: Mapping[str, Any]) -> None:
    job.rank()
    job.rank()
    job.records[1] |= wrong
    with pytest.raises((KeyError, TypeError, ValueError)):
        job.judged()


@given(
    st.dictionaries(st.sampled_from(NAMES), st.text(st.characters(blacklist_characters="\0\ud800"), max_size=40)),
    st.text(max_size=80),
    st.integers(0, 200),
)
def test_a_record_has_room_for_anything(environment: Mapping[str, str], version: str, count: int) -> None:
    """And ranks that have told the same are silent, whatever it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(software, "libraries", lambda: dict.fromkeys(("torch", "NCCL", "driver", "net"), version))
        patch.setattr(software, "content_of", lambda path, began: path.encode())
        for name, value in environment.items():
            patch.setenv(name, value.encode(errors="replace").decode())
        record = record_of({f"file_{number}.py": str(number) for number in range(count)}, LATER)
    assert len(record_text(record)) <= RECORD_BYTES
    assert list(judge_hosts({0: record, 1: json.loads(json.dumps(record))})) == []


def begun(level: str | None = None) -> tuple[KeptRecords, HostsCheck]:
    levels: dict[str, Any] = {"HostsDiffer": level} if level else {}
    others = KeptRecords()
    check = HostsCheck(State(0, 2, Settings(levels=levels), {}))
    check.fit_started(FitStart(FitPlan(), {}), others)
    return others, check


def test_the_record_is_told_once_the_roll_call_is_over() -> None:
    others, check = begun()
    assert others.reported == []
    check.counted_off()
    check.settle()
    [record] = others.reported
    assert record["name"]


def test_nothing_is_read_while_ranks_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading takes more processor time than all else at the start of a fit."""
    read: list[str] = []
    monkeypatch.setattr(software, "own_files", lambda: read.append("files") or {})
    _, check = begun()
    check.settle()
    assert read == []
    check.counted_off()
    check.settle()
    assert read == ["files"]


def test_others_may_still_wait_for_the_answer_that_this_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is read at once; the end of a fit ends that pause."""
    read: list[str] = []
    monkeypatch.setattr(software, "own_files", lambda: read.append("files") or {})
    monkeypatch.setattr(hosts, "PAUSE_SECONDS", 1000)
    others, check = begun()
    check.counted_off()
    assert not until(lambda: bool(read), time.monotonic() + 0.05)
    check.settle()
    assert (read, len(others.reported)) == (["files"], 1)


def test_a_guard_that_closes_within_the_pause_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "own_files", lambda: pytest.fail("was read"))
    monkeypatch.setattr(hosts, "PAUSE_SECONDS", 1000)
    others, check = begun()
    check.counted_off()
    check.closed()
    assert "countoff software" not in [thread.name for thread in threading.enumerate()]
    assert others.reported == []


def test_a_guard_that_closes_before_tells_nothing() -> None:
    others, check = begun()
    check.closed()
    check.settle()
    assert others.reported == []


def test_a_program_that_ends_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end without closing its guard, and no thread is to be left."""
    exits: list[Callable[[], None]] = []
    reading = threading.Event()
    monkeypatch.setattr(hosts, "at_exit", lambda function: exits.append(function) or (lambda: None))

    def read_until_stopped(files: Mapping[str, str], began: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        reading.set()
        assert until(stopped, time.monotonic() + 30)
        return {}

    monkeypatch.setattr(hosts, "record_of", read_until_stopped)
    others, check = begun()
    assert exits == []  # as long as there is no thread
    check.counted_off()
    [end] = exits
    assert reading.wait(30)
    assert "countoff software" in [thread.name for thread in threading.enumerate()]
    end()
    assert "countoff software" not in [thread.name for thread in threading.enumerate()]
    assert others.reported == []


def test_nothing_is_read_where_the_roll_call_has_ended_the_fit() -> None:
    state, others = State(0, 2, Settings(), {}), KeptRecords()
    check = HostsCheck(state)
    check.fit_started(FitStart(FitPlan(), {}), others)
    state.end = Verdict("PlanMismatch", "rank 1 has another plan.")
    check.counted_off()
    check.settle()
    assert others.reported == []


def test_no_further_file_is_read_once_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(software, "content_of", lambda path, began: read.append(path))
    record_of({"train.py": "train.py", "model.py": "model.py"}, LATER, stopped=lambda: bool(read))
    assert read == ["train.py"]


def test_a_level_turns_the_reading_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others do not wait for its record."""
    monkeypatch.setattr(software, "own_files", lambda: pytest.fail("was read"))
    monkeypatch.setattr(software, "libraries", lambda: pytest.fail("was read"))
    others, check = begun("off")
    check.counted_off()
    check.settle()
    assert others.reported == [{}]


def test_the_page_lists_the_variables_and_why() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = [
        f"| {', '.join(f'`{each.name}`' for each in group)} | {why} |\n" for why, group in software.VARIABLES.items()
    ]
    assert "".join(rows) in page
    left_out = page[page.index("Not compared is what a host or a rank may have of its own:") :].partition("\n## ")[0]
    assert not {f"`{name}`" for name in NAMES} & set(re.findall("`[A-Z_]+`", left_out))
