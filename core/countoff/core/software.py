"""What this process runs: libraries that compute or talk, and variables that change how they do it.

All of it is read, and nothing of it is run: no module is imported, and CUDA is not initialised.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["VARIABLES", "Variable", "libraries", "meaning", "own_version", "processors", "text_of"]


class Variable(NamedTuple):
    """A variable of the environment that ranks must have alike.

    Attributes:
        name: Its name.
        default: What it stands for where it is not set; empty where that is no certain value.
        own_default: Whether launchers set it where the user has not: then nothing is known where it is not set.
    """

    name: str
    default: str = ""
    own_default: bool = False


VARIABLES: dict[str, tuple[Variable, ...]] = {
    "how NCCL carries out a collective: all ranks of one must do it alike": (
        Variable("NCCL_ALGO"),
        Variable("NCCL_PROTO"),
        Variable("NCCL_BUFFSIZE"),
        Variable("NCCL_LL_BUFFSIZE"),
        Variable("NCCL_LL128_BUFFSIZE"),
        Variable("NCCL_NTHREADS"),
        Variable("NCCL_LL128_NTHREADS"),
        Variable("NCCL_THREAD_THRESHOLDS"),
        Variable("NCCL_MIN_NCHANNELS"),
        Variable("NCCL_MAX_NCHANNELS"),
        Variable("NCCL_MIN_CTAS"),
        Variable("NCCL_MAX_CTAS"),
        Variable("NCCL_MIN_P2P_NCHANNELS"),
        Variable("NCCL_MAX_P2P_NCHANNELS"),
        Variable("NCCL_NCHANNELS_PER_NET_PEER"),
        Variable("NCCL_P2P_NET_CHUNKSIZE", "131072"),
        Variable("NCCL_COLLNET_ENABLE"),
        Variable("NCCL_NVLS_ENABLE"),
        Variable("NCCL_MNNVL_ENABLE"),
        Variable("NCCL_RUNTIME_CONNECT", "1"),
        Variable("NCCL_TUNER_PLUGIN"),
    ),
    "by what ranks talk: both ends of a connection must use the same": (
        Variable("NCCL_NET"),
        Variable("NCCL_NET_PLUGIN"),
        Variable("NCCL_IB_DISABLE", "0"),
        Variable("NCCL_IB_QPS_PER_CONNECTION", "1"),
        Variable("NCCL_IB_SPLIT_DATA_ON_QPS"),
        Variable("NCCL_SOCKET_FAMILY"),
        Variable("NCCL_OOB_NET_ENABLE", "0"),
        Variable("FI_PROVIDER"),
        Variable("GLOO_DEVICE_TRANSPORT"),
        Variable("TORCH_GLOO_LAZY_INIT", "0"),
    ),
    "when a rank launches its work, and how it waits and fails: a rank that does it alone holds up the others": (
        Variable("TORCH_NCCL_BLOCKING_WAIT", "0"),
        Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        Variable("TORCH_NCCL_USE_COMM_NONBLOCKING"),
        Variable("TORCH_NCCL_RANKS_PER_ROOT"),
        Variable("NCCL_COMM_BLOCKING"),
        Variable("NCCL_LAUNCH_MODE"),
        Variable("CUDA_DEVICE_MAX_CONNECTIONS"),
    ),
    "how numbers are computed: the same batch gives other numbers": (
        Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0"),
        Variable("NVIDIA_TF32_OVERRIDE"),
        Variable("CUBLAS_WORKSPACE_CONFIG"),
        Variable("CUBLASLT_WORKSPACE_SIZE"),
        Variable("TORCH_BLAS_PREFER_CUBLASLT"),
        Variable("TORCH_BLAS_PREFER_HIPBLASLT"),
        Variable("TORCH_LINALG_PREFER_CUSOLVER"),
        Variable("TORCH_CUDNN_V8_API_DISABLED"),
        Variable("TORCH_CUDNN_USE_HEURISTIC_MODE_B"),
        Variable("TORCH_COMPILE_DISABLE", "0"),
        Variable("TORCHDYNAMO_DISABLE", "0"),
        Variable("TORCHINDUCTOR_MAX_AUTOTUNE", "0"),
        Variable("ATEN_CPU_CAPABILITY"),
        Variable("MKL_CBWR"),
        Variable("ONEDNN_DEFAULT_FPMATH_MODE"),
        Variable("DNNL_DEFAULT_FPMATH_MODE"),
    ),
    "threads that compute, between hosts with as many CPUs and ranks: sums in another order, and another speed": (
        Variable("OMP_NUM_THREADS", own_default=True),
        Variable("MKL_NUM_THREADS", own_default=True),
    ),
}
"""The variables that are compared, by the reason why; docs/how-it-works.md says what is left out."""
_WORDS = {
    "true": "1",
    "yes": "1",
    "on": "1",
    "y": "1",
    "t": "1",
    "false": "0",
    "no": "0",
    "off": "0",
    "n": "0",
    "f": "0",
}
_PLUGIN = re.compile(r"/(libnccl-(net|tuner)[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE)
_DRIVER = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b\d+\.\d+(\.\d+)*\b")
_MOST_MAPS = 1 << 24


def own_version() -> str:
    """Returns the version of the installed countoff; "unknown" where it is run from its sources."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer to import than most of the core

    try:
        return version("countoff")
    except PackageNotFoundError:
        return "unknown"


def libraries() -> dict[str, str]:
    """Returns the versions of what this process has loaded to compute and to talk, by name, as far as they are known.

    The driver and cuDNN are told where CUDA is in use already.

    Example:
        >>> sorted(set(libraries()) - {"torch", "NCCL", "CUDA", "ROCm", "cuDNN", "driver", "net", "tuner"})
        []
    """
    found: dict[str, str] = {}
    torch = sys.modules.get("torch")  # not imported for this
    if torch is not None:
        with contextlib.suppress(Exception):  # read through names that torch does not promise
            found |= _of_torch(torch)
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
        names = _PLUGIN.findall(maps.read(_MOST_MAPS).decode(errors="replace"))
        for kind in ("net", "tuner"):
            if loaded := sorted({name for name, each in names if each == kind}):
                found[kind] = " and ".join(loaded)
    return found


def text_of(variable: Variable) -> str | None:
    """Returns the value of a variable; empty where it is not set, None where nothing is known of it.

    A path is a host's own, so a value with one is not known.
    """
    value = os.environ.get(variable.name, "").strip()
    return None if "/" in value or (not value and variable.own_default) else value


def meaning(variable: Variable, text: str) -> str:
    """Returns what a value stands for: two values with one meaning are the same.

    >>> flag = Variable("NCCL_IB_DISABLE", "0")
    >>> meaning(flag, "") == meaning(flag, "False") == meaning(flag, "0")
    True
    """
    value = (text or variable.default).lower()
    return _WORDS.get(value, value)


def processors() -> str:
    """The number of CPUs and of ranks of this host, on which numbers of threads may depend; as text."""
    return f"{os.cpu_count()}/{os.environ.get('LOCAL_WORLD_SIZE', '')}"


def _of_torch(torch: Any) -> dict[str, str]:
    asked: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.__version__,
        "CUDA": lambda: torch.version.cuda,
        "ROCm": lambda: torch.version.hip,
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    }
    if torch.cuda.is_initialized():
        # `torch.backends.cudnn.version()` raises once, where it finds a wrong one: that belongs to the user.
        asked["cuDNN"] = lambda: _version_of_cudnn(torch._C._cudnn.getRuntimeVersion())
        asked["driver"] = _driver
    found: dict[str, str] = {}
    for name, ask in asked.items():
        with contextlib.suppress(Exception):  # this build of torch does not have it
            if value := ask():
                found[name] = str(value)
    return found


def _version_of_cudnn(number: int) -> str:
    """A version as cuDNN writes it in one number: 90501 or, up to cuDNN 8, 8902.

    >>> _version_of_cudnn(90501), _version_of_cudnn(8902)
    ('9.5.1', '8.9.2')
    """
    large = 10_000 if number >= 90_000 else 1_000
    return f"{number // large}.{number % large // 100}.{number % 100}"


def _driver() -> str:
    for path in _DRIVER:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if (version := _VERSION.search(file.readline(1024))) is not None:
                return version[0]
    return ""
