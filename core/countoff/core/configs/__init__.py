"""Configurations of training frameworks, read into one ``Job``: which file, in which format."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from countoff.core.configs._fields import ConfigError, nearest
from countoff.core.configs.job import Job

__all__ = ["FORMATS", "ConfigError", "read_job"]

# Which module reads which framework's files.
FORMATS = {
    "torchtitan": "torchtitan_toml",
    "lingua": "lingua",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "composer": "composer",
}
# Fields that one format has at its top level and the others have not; the first that fits wins.
_SIGNS = {
    "accelerate": ("compute_environment", "distributed_type", "num_processes", "parallelism_config"),
    "composer": ("max_duration", "global_train_batch_size", "train_loader", "device_train_microbatch_size"),
    "deepspeed": ("train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"),
    "torchtitan": ("training", "parallelism", "lr_scheduler"),
    "lingua": ("grad_acc_steps", "distributed", "optim", "data", "dump_dir"),
}


def read_job(name: str, *, framework: str | None = None) -> Job:
    """Returns the run that a configuration describes.

    Args:
        name: A file: TOML (TorchTitan), JSON (DeepSpeed) or YAML (lingua, Accelerate, Composer); or
            ``module:function``, a Python config of TorchTitan's, which is imported and called.
        framework: Whose format it is, one of ``FORMATS``; None: by the fields that it has.

    Raises:
        ConfigError: If it cannot be read, or makes no sense; the message is one line.
    """
    if framework is not None and framework not in FORMATS:
        raise ConfigError(f"unknown framework {framework!r}{nearest(framework, FORMATS)}; known: {', '.join(FORMATS)}")
    if ":" in name and not Path(name).exists():
        from countoff.core.configs import torchtitan_python

        return _made(lambda: torchtitan_python.read(torchtitan_python.load(name)), name)
    data = _parsed(Path(name))
    kind = framework or _guessed(data, name)
    reader = importlib.import_module(f"countoff.core.configs.{FORMATS[kind]}")
    return _made(lambda: cast("Job", reader.read(data)), name)


def _made(read: Callable[[], Job], name: str) -> Job:
    try:
        return read()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {why}") from None
    if text is None:
        raise ConfigError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    data = _parse(path, text)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold named fields, got {type(data).__name__}")
    return cast("Mapping[str, Any]", data)


def _parse(path: Path, text: str) -> object:
    parsers = {".toml": _toml, ".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in parsers:
        raise ConfigError(f"{path} must end in {', '.join(parsers)}, or be module:function")
    try:
        return parsers[path.suffix](text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] if isinstance(error, ValueError) else "it is nested too deeply"
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {why}") from None


def _toml(text: str) -> object:
    # Named by text: a type checker for Python 3.10 knows no tomllib, and one for 3.11 has no tomli.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return parser.loads(text)


def _yaml(text: str) -> object:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _guessed(data: Mapping[str, Any], name: str) -> str:
    found = {kind: sum(sign in data for sign in signs) for kind, signs in _SIGNS.items()}
    best = max(found, key=found.__getitem__)
    if not found[best]:
        known = " | ".join(FORMATS)
        raise ConfigError(f"{name} has no field by which its format can be told: give --framework {known}")
    return best
