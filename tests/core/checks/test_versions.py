"""What hosts run: the sentences about those that differ, and what a record has room for."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core import software
from countoff.core.checks import versions
from countoff.core.checks.check import FitStart
from countoff.core.checks.versions import VersionCheck, judge_hosts, judge_versions, record_of
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, record_text
from countoff.core.verdict import Verdict
from tests.other_ranks import KeptRecords

NAMES = [each.name for group in software.VARIABLES.values() for each in group]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_different_versions_are_a_version_mismatch() -> None:
    """The first package by name whose versions differ is named, with the rank that differs."""
    versions: dict[int, dict[str, Any]] = {rank: {"python": "3.12", "torch": "2.7", "zarr": "3"} for rank in range(3)}
    versions[2] |= {"torch": "2.8", "zarr": "2"}
    found = judge_versions(versions)
    assert found is not None
    assert (found.kind, found.ranks) == ("VersionMismatch", (2,))
    assert found.sentence == "torch is 2.8 on rank 2, 2.7 on ranks 0, 1."


def test_a_package_that_one_rank_lacks_is_a_version_mismatch() -> None:
    found = judge_versions({0: {"torch": "2.7", "apex": "1"}, 1: {"torch": "2.7"}, 2: {"torch": "2.7", "apex": "1"}})
    assert found is not None
    assert found.sentence == "apex is unknown on rank 1, 1 on ranks 0, 2."


def test_equal_versions_are_no_mismatch() -> None:
    assert judge_versions({0: {"torch": "2.7"}, 1: {"torch": "2.7"}}) is None
    assert judge_versions({0: {}, 1: {}}) is None


class Job:
    """Ranks of hosts that run the same until one is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_host: int = 1) -> None:
        self._patch = monkeypatch
        self._per_host = per_host
        self.records: dict[int, dict[str, Any]] = {}

    def rank(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        host: str | None = None,
        **libraries: str,
    ) -> None:
        """Adds a rank."""
        rank = len(self.records)
        loaded = {"torch": "2.7.0", "NCCL": "2.27.3", "CUDA": "12.6", **libraries}
        with self._patch.context() as patch:
            patch.setattr(software, "libraries", lambda: loaded)
            patch.setattr(versions, "gethostname", lambda: host or f"node-{rank // self._per_host}")
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            record = record_of()
        assert len(record_text(record)) <= RECORD_BYTES
        self.records[rank] = json.loads(json.dumps(record))

    def judged(self) -> list[Verdict]:
        return list(judge_hosts(self.records))

    def sentence(self) -> str:
        [found] = self.judged()
        return found.sentence


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_equal_hosts_are_silent(job: Job) -> None:
    for _ in range(3):
        job.rank({"NCCL_ALGO": "Ring"})
    assert job.judged() == []


def test_a_library_of_one_host_is_named(job: Job) -> None:
    for version in ("2.27.3", "2.27.3", "2.26.2", "2.27.3"):
        job.rank(NCCL=version)
    [found] = job.judged()
    assert found.sentence == "node-2 loads NCCL 2.26.2, the other hosts 2.27.3."
    assert (found.kind, found.ranks, found.subject) == ("VersionMismatch", (2,), "libraries")
    assert found.standing == "out of step"


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
        (
            {"NCCL_ALGO": "a" * 200},
            {"NCCL_ALGO": "a" * 201},
            'NCCL_ALGO is "aaaaaaaaaaaa… (p4hH)" on node-2, and is "aaaaaaaaaaaa… (dXFI)" on the other hosts.',
        ),
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
    assert (found.ranks, found.subject) == ((2,), "variables")


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


def test_libraries_and_variables_are_a_warning_each(job: Job) -> None:
    job.rank()
    job.rank()
    job.rank({"NCCL_ALGO": "Ring"}, NCCL="2.26.2")
    assert [(found.subject, found.sentence) for found in job.judged()] == [
        ("libraries", "node-2 loads NCCL 2.26.2, the other hosts 2.27.3."),
        ("variables", 'NCCL_ALGO is "Ring" on node-2, and is not set on the other hosts.'),
    ]


def test_ranks_of_one_host_are_named_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, per_host=4)
    for algorithm in ("Tree", "Ring", "Tree", "Tree"):
        job.rank({"NCCL_ALGO": algorithm})
    assert job.sentence() == 'NCCL_ALGO is "Ring" on rank 1, and is "Tree" on the other ranks.'


def test_all_ranks_of_a_host_are_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, per_host=2)
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
    job.records[1] |= {"list": "other", "set": {"999": "x"}}
    assert job.judged() == []


def test_a_rank_that_tells_nothing_is_left_out(job: Job) -> None:
    job.rank(NCCL="1")
    job.records[1] = {}
    assert job.judged() == []


@pytest.mark.parametrize(
    "wrong",
    [{"told": "abc"}, {"libraries": 5}, {"set": {"x": "1"}}, {"set": 7}],
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
)
def test_a_record_has_room_for_anything(environment: Mapping[str, str], version: str) -> None:
    """And ranks that have told the same are silent, whatever it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(software, "libraries", lambda: dict.fromkeys(("torch", "NCCL", "driver", "net"), version))
        for name, value in environment.items():
            patch.setenv(name, value.encode(errors="replace").decode())
        record = record_of()
    assert len(record_text(record)) <= RECORD_BYTES
    assert list(judge_hosts({0: record, 1: json.loads(json.dumps(record))})) == []


@pytest.mark.parametrize("off", [False, True])
def test_the_record_is_told_once_the_roll_call_is_over(off: bool) -> None:
    """Also where nothing is compared here: ranks may have other levels, and wait for the record."""
    others, check = KeptRecords(), VersionCheck(off=off)
    check.fit_started(FitStart(FitPlan(), {}), others)
    assert others.reported == []
    check.counted_off()
    [record] = others.reported
    assert bool(record) == (not off)


def test_a_program_that_has_changed_its_modules_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "libraries", lambda: 1 // 0)
    assert record_of() == {}
