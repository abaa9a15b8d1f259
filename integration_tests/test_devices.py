"""What a rank makes of where its test has placed it."""

import pytest
import torch

from integration_tests import devices


@pytest.fixture
def _second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")


@pytest.mark.usefixtures("_second_of_two")
def test_a_rank_of_a_test_is_on_the_cpu_by_default() -> None:
    """A batch is then not even copied."""
    assert (devices.placement(), devices.own_device()) == ("cpu", torch.device("cpu"))
    batch = (torch.zeros(2), torch.ones(2))
    assert all(found is given for found, given in zip(devices.moved(batch), batch, strict=True))
    assert (devices.framework_uses_cpu(), devices.accelerator()) == (True, "cpu")
    assert devices.lightning() == {"accelerator": "cpu", "devices": 2, "num_nodes": 3}


@pytest.mark.usefixtures("_second_of_two")
def test_a_rank_with_a_gpu_of_its_own_takes_the_one_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VARIABLE, "cuda")
    assert devices.own_device() == torch.device("cuda:1")
    assert devices.BACKENDS[devices.placement()] == "nccl"
    assert not devices.framework_uses_cpu()
    assert devices.lightning() == {"accelerator": "gpu", "devices": 2, "num_nodes": 3}


@pytest.mark.usefixtures("_second_of_two")
def test_ranks_that_share_a_gpu_talk_over_gloo_in_plain_loops_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VARIABLE, "shared")
    assert devices.own_device() == torch.device("cuda:0")
    assert devices.BACKENDS[devices.placement()] == "gloo"
    for of_framework in (devices.framework_uses_cpu, devices.accelerator, devices.lightning):
        with pytest.raises(ValueError, match="a shared one is for plain loops"):
            of_framework()


@pytest.mark.parametrize(("gpus", "hosts", "words"), [(1, 4, "nccl, one GPU"), (4, 1, "nccl")])
def test_ranks_of_nccl_share_a_gpu_where_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, gpus: int, hosts: int, words: str
) -> None:
    """Each is a host of its own then, for NCCL and for the frameworks: else NCCL refuses them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert (devices.hosts_of("cuda", 4), devices.described("cuda", 4)) == (hosts, words)
    told = [devices.environment(rank, hosts).get("NCCL_HOSTID") for rank in range(4)]
    assert len(set(told)) == hosts
    assert (devices.hosts_of("cpu", 4), devices.hosts_of("shared", 4)) == (1, 1)
    assert (devices.described("cpu", 4), devices.described("shared", 4)) == ("gloo", "gloo, one GPU")


def test_the_report_of_a_test_has_the_ranks_and_backends_of_its_jobs(run_ranks, request):
    """That is what the table of `make test-gpu` shows of a test."""
    run_ranks(int, 1)
    assert request.node.user_properties == [("ranks", 1), ("backend", "gloo")]


@pytest.mark.parametrize(
    ("wanted", "count", "gpus", "chosen"),
    [
        ("cpu", 2, 8, "cpu"),
        ("auto", 8, 8, "cuda"),
        ("auto", 8, 7, "cpu"),
        ("auto", 2, 0, "cpu"),
        ("cuda", 4, 4, "cuda"),
        ("cuda", 4, 8, "cuda"),
    ],
)
def test_gpus_are_chosen_where_each_rank_can_have_one(
    wanted: str, count: int, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert devices.choose_device(wanted, count) == chosen


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda", "device cuda needs a GPU for each of 4 ranks, and this machine has 3: use fewer ranks, or device cpu"),
        ("gpu", "device must be one of auto, cpu, cuda, got 'gpu'"),
        ("", "device must be one of auto, cpu, cuda, got ''"),
    ],
)
def test_a_device_that_cannot_be_is_refused(wanted: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(devices.DeviceError, match=message):
        devices.choose_device(wanted, ranks=4)
