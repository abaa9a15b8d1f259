"""TorchTitan's Python configs, from 0.3.0 on: a function that returns the config of TorchTitan's trainer.

Reading one imports the user's module, and TorchTitan with it. No other format here runs code.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields
from countoff.plan.job import Job
from countoff.plan.readers.torchtitan_toml import check_sequence_length, schedule_of

__all__ = ["load", "read"]


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
    in_tokens = fields.has("training.num_tokens_per_microbatch_per_dp_rank")
    steps = fields.parse_count("steps", "training.steps", 10_000) or 1
    sizes = tuple(_degree(fields, name) for name in ORDERS["torchtitan"].names)
    return Job(
        framework="torchtitan",
        names=ORDERS["torchtitan"].names,
        sizes=sizes,
        data_dims=ORDERS["torchtitan"].data_dims,
        **(_tokens(fields, pipeline=sizes[0]) if in_tokens else _sequences(fields, pipeline=sizes[0])),
        steps=steps,
        expert_parallel=fields.parse_count("expert_parallel", "parallelism.expert_parallel_degree", 1) or 1,
        experts_must_divide=in_tokens,
        data_ends=not fields.flag("dataloader.infinite", True),
        schedule=schedule_of(fields),
        own_checks=(check_sequence_length,),
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _sequences(fields: Fields, *, pipeline: int) -> dict[str, Any]:
    batch_size = fields.parse_count("batch_size", "training.local_batch_size", 8) or 1
    size = fields.parse_count("", "parallelism.pipeline_parallel_microbatch_size", 1) or 1
    count = batch_size // size if pipeline > 1 else 1
    if pipeline > 1 and batch_size % size:
        fields.note(
            "micro-batches",
            f"training.local_batch_size {batch_size} does not divide by parallelism.pipeline_parallel_microbatch_size "
            f"{size}: TorchTitan stops",
            "stops",
        )
    return {
        "batch_size": batch_size,
        "sequence_length": fields.parse_count("sequence_length", "training.seq_len", 2048),
        "global_batch_size": fields.parse_count("global_batch_size", "training.global_batch_size", None, unset=(-1,)),
        "pipeline_microbatches": max(count, 1),
    }


def _tokens(fields: Fields, *, pipeline: int) -> dict[str, Any]:
    # From here on TorchTitan's batch size is that of one pipeline micro-batch, and a batch is several of them.
    count = fields.parse_count("pipeline_microbatches", "parallelism.num_pp_microbatches", 1) if pipeline > 1 else 1
    return {
        "tokens_per_micro_batch": fields.parse_count(
            "tokens_per_micro_batch", "training.num_tokens_per_microbatch_per_dp_rank", None
        ),
        "tokens_per_step": fields.parse_count(
            "tokens_per_step", "training.num_tokens_per_train_step", None, unset=(-1,)
        ),
        "sequence_length": fields.parse_count("sequence_length", "training.max_context_length", None),
        "pipeline_microbatches": count or 1,
        "microbatches_inside": False,
    }


def _degree(fields: Fields, name: str) -> int:
    key = {
        "pp": "pipeline_parallel_degree",
        "dp_replicate": "data_parallel_replicate_degree",
        "dp_shard": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
    }[name]
    inferred = (-1,) if name == "dp_shard" else ()
    return fields.parse_count(name, f"parallelism.{key}", -1 if inferred else 1, unset=inferred) or 1


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
