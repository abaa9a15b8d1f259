"""TorchTitan's Python configs, from 0.3.0 on: a function that returns the config of TorchTitan's trainer.

Reading one imports the user's module, and TorchTitan with it. No other format here runs code.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from countoff.plan.fields import ConfigError, Count, Fields
from countoff.plan.job import Job
from countoff.plan.readers.torchtitan_toml import schedule_of

__all__ = ["load", "read"]

_MESH = {
    "pp": Count("parallelism.pipeline_parallel_degree", 1),
    "dp_replicate": Count("parallelism.data_parallel_replicate_degree", 1),
    "dp_shard": Count("parallelism.data_parallel_shard_degree", -1, unset=(-1,)),
    "cp": Count("parallelism.context_parallel_degree", 1),
    "tp": Count("parallelism.tensor_parallel_degree", 1),
}
# 0.3.0
_SEQUENCES = {
    "batch_size": Count("training.local_batch_size", 8),
    "sequence_length": Count("training.seq_len", 2048),
    "global_batch_size": Count("training.global_batch_size", unset=(-1,)),
}
# Later: torchtitan/config/configs.py:37, :43 and :51 at b5bcd76c.
_TOKENS = {
    "tokens_per_micro_batch": Count("training.num_tokens_per_microbatch_per_dp_rank"),
    "tokens_per_step": Count("training.num_tokens_per_train_step", unset=(-1,)),
    "sequence_length": Count("training.max_context_length"),
}


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """A context in which modules of the current folder are found too, after all others."""
    known = "" in sys.path
    if not known:
        sys.path.append("")
    try:
        yield
    finally:
        if not known:
            sys.path.remove("")


@_current_folder()
def load(name: str) -> object:
    """Returns what the config function returns.

    Args:
        name: ``module:function``, also of the current folder; the short name of a model is enough for its registry, as
            in ``llama3:llama3_8b``.

    Raises:
        ConfigError: If there is no such module or function, or one of them fails.
    """
    module_name, _, function_name = name.partition(":")
    candidates = [module_name, f"{module_name}.config_registry"]
    if "." not in module_name:
        candidates += [f"torchtitan.{package}.{module_name}.config_registry" for package in ("models", "experiments")]
    found = False
    for candidate in candidates:
        module = _import_if_there(candidate)
        function = getattr(module, function_name, None) if function_name else None
        found = found or module is not None
        if callable(function):
            try:
                return function()
            except Exception as error:
                raise ConfigError(f"{candidate}:{function_name} failed: {_one_line(error)}") from None
    if not found:
        raise ConfigError(f"there is no module {module_name} here; is it installed, TorchTitan too?")
    raise ConfigError(f"{module_name} has no function {function_name!r}: expected module:function")


def _import_if_there(name: str) -> object:
    """Returns a module; None if it, or a package that contains it, does not exist.

    Raises:
        ConfigError: If the module exists and cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name == error.name or name.startswith(f"{error.name}."):
            return None
        raise ConfigError(f"{name} needs {error.name}, which is not installed") from None
    except Exception as error:
        raise ConfigError(f"{name} cannot be imported: {_one_line(error)}") from None


def read(config: Any) -> Job:
    """Returns the run that a config of TorchTitan's ``Trainer`` describes.

    Args:
        config: A ``Trainer.Config``, of 0.3.0 (batches of sequences) or later (batches of tokens).

    Raises:
        ConfigError: If it is not such a config, or a field has a wrong type or is outside its domain.
    """
    for section in ("training", "parallelism"):
        if getattr(config, section, None) is None:
            raise ConfigError(f"a TorchTitan config has a {section} section; {type(config).__name__} has none")
    fields = Fields(config)
    mesh, steps = fields.counts(_MESH), fields.count("steps", Count("training.steps", 10_000))
    in_tokens = fields.has("training.num_tokens_per_microbatch_per_dp_rank")
    return fields.job(
        "torchtitan",
        "torchtitan",
        mesh,
        **(_tokens if in_tokens else _sequences)(fields, has_pipeline=mesh["pp"] != 1),
        steps=steps,
        data_ends=not fields.flag("dataloader.infinite", True),
        schedule=schedule_of(fields),
    )


def _sequences(fields: Fields, *, has_pipeline: bool) -> dict[str, Any]:
    counts = fields.counts(_SEQUENCES)
    size = fields.count("", Count("parallelism.pipeline_parallel_microbatch_size", 1)) or 1
    return {**counts, "pipeline_microbatches": max((counts["batch_size"] or 1) // size, 1) if has_pipeline else 1}


def _tokens(fields: Fields, *, has_pipeline: bool) -> dict[str, Any]:
    # From here on TorchTitan's batch size is that of one pipeline micro-batch, and a batch is several of them.
    count = fields.count("pipeline_microbatches", Count("parallelism.num_pp_microbatches", 1)) if has_pipeline else 1
    return {**fields.counts(_TOKENS), "pipeline_microbatches": count or 1, "microbatches_inside": False}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
