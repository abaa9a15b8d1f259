"""What is read of this process, and what is left alone."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from countoff.core import software


def fake_torch(*, in_use: bool) -> Any:
    return SimpleNamespace(
        __version__="2.7.0",
        version=SimpleNamespace(cuda="12.6", hip=None),
        cuda=SimpleNamespace(is_initialized=lambda: in_use, nccl=SimpleNamespace(version=lambda: (2, 26, 2))),
        _C=SimpleNamespace(_cudnn=SimpleNamespace(getRuntimeVersion=lambda: 90501)),
    )


@pytest.mark.parametrize("in_use", [False, True])
def test_cudnn_is_asked_for_only_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(in_use=in_use))
    found = software.libraries()
    found.pop("driver", None)
    more = {"cuDNN": "9.5.1"} if in_use else {}
    assert found == {"torch": "2.7.0", "CUDA": "12.6", "NCCL": "2.26.2", **more}


def test_a_torch_without_nccl_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without = fake_torch(in_use=False)
    del without.cuda.nccl
    monkeypatch.setitem(sys.modules, "torch", without)
    assert software.libraries() == {"torch": "2.7.0", "CUDA": "12.6"}
