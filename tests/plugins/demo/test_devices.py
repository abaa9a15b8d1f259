"""Where the ranks of a command run: what its `--device` chooses."""

import pytest
import torch

from countoff.demo.devices import DeviceError, choose_device


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "chosen"),
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
    wanted: str, ranks: int, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(wanted, ranks) == chosen


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
    with pytest.raises(DeviceError, match=message):
        choose_device(wanted, ranks=4)


def test_gpus_are_counted_only_where_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count() -> int:
        counted.append(4)
        return 4

    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert choose_device("cpu", 4) == "cpu"
    with pytest.raises(DeviceError, match="got 'tpu'"):
        choose_device("tpu", 4)
    assert counted == []
    assert choose_device("auto", 4) == "cuda"
    assert counted == [4]
