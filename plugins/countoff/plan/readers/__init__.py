"""Reads a configuration of a training framework into a ``Job``, and finds out which format it has."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from countoff.core.words import nearest
from countoff.plan.fields import ConfigError, Fields
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job
from countoff.plan.scripts.launches import Launch, read_launches, with_ranks

__all__ = ["FORMATS", "ConfigError", "read_job"]

# The module that reads the files of each framework.
FORMATS = {
    "torchtitan": "torchtitan_toml",
    "lingua": "lingua",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "composer": "composer",
    "transformers": "transformers",
    "axolotl": "axolotl",
    "llamafactory": "llamafactory",
    "litgpt": "litgpt",
    "megatron": "megatron",
    "nemo": "nemo",
    "verl": "verl",
}
_ENDINGS = {
    "torchtitan": (".toml",),
    "lingua": (".yaml", ".yml"),
    "deepspeed": (".json",),
    "accelerate": (".yaml", ".yml"),
    "composer": (".yaml", ".yml"),
    "transformers": (".yaml", ".yml", ".json"),
    "axolotl": (".yaml", ".yml"),
    "llamafactory": (".yaml", ".yml", ".json"),
    "litgpt": (".yaml", ".yml"),
    "megatron": (),
    "nemo": (".yaml", ".yml"),
    "verl": (".yaml", ".yml"),
}
_MOST_CHARACTERS = 1_000_000
# Launch scripts and files of arguments.
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt")
# The formats that a command line has, and how its arguments are given to their readers.
_LAUNCHED: dict[str, Callable[[Launch], Mapping[str, Any]]] = {
    "megatron": lambda launch: launch.flags,
    "transformers": lambda launch: launch.named_flags,
    "nemo": lambda launch: launch.fields,
    "verl": lambda launch: launch.fields,
}
# Fields that no other program's file is likely to have, unlike `data` or `optim`. The format with the most wins.
_DISTINCTIVE_FIELDS = {
    "accelerate": ("compute_environment", "distributed_type", "parallelism_config"),
    "composer": (
        *("max_duration", "global_train_batch_size", "device_train_batch_size", "device_train_microbatch_size"),
    ),
    "deepspeed": ("train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"),
    "torchtitan": ("training", "parallelism", "lr_scheduler"),
    "megatron": (
        *("--micro-batch-size", "--train-iters", "--train-samples", "--tensor-model-parallel-size"),
        *("--pipeline-model-parallel-size", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples"),
    ),
    "nemo": (
        *("exp_manager", "model.optim.sched", "model.micro_batch_size", "model.global_batch_size"),
        *("model.tensor_model_parallel_size", "trainer.accumulate_grad_batches"),
    ),
    "verl": (
        *("actor_rollout_ref", "algorithm.adv_estimator", "data.train_batch_size", "data.micro_batch_size_per_gpu"),
        *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", "model.partial_pretrain"),
    ),
    "lingua": (
        *("grad_acc_steps", "dump_dir", "distributed.dp_shard", "distributed.dp_replicate", "distributed.fsdp_type"),
        *("distributed.tp_size", "optim.lr_min_ratio", "optim.warmup", "data.n_views", "data.sources"),
    ),
    "transformers": (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "load_best_model_at_end"),
    ),
    "axolotl": (
        *("sequence_len", "sample_packing", "dataset_prepared_path", "saves_per_epoch", "evals_per_epoch"),
        *("pad_to_sequence_len", "val_set_size", "eval_sample_packing", "train_on_inputs"),
    ),
    "llamafactory": ("finetuning_type", "plot_loss", "neat_packing"),
    "litgpt": (
        *("train.lr_warmup_steps", "train.lr_warmup_fraction", "train.max_tokens", "train.max_seq_length"),
        *("train.max_norm", "train.tie_embeddings", "eval.max_new_tokens", "eval.initial_validation"),
        "eval.final_validation",
    ),
}
# A format whose files also have the fields of another one: one field of its own decides.
_EXTENDS = {"llamafactory": "transformers"}


def read_job(name: str, *, framework: str | None = None) -> Job:
    """Returns the run that a configuration describes.

    Args:
        name: A file: TOML (TorchTitan), JSON (DeepSpeed, a Trainer, LLaMA-Factory) or YAML (all others); or a launch
            script or a file of arguments (Megatron-LM, verl, NeMo, a Trainer), which is read and not run; or ``-``, a
            command line on standard input; or ``module:function``, a Python config of TorchTitan, which is imported and
            called.
        framework: The framework of the file, one of ``FORMATS``; None: found by the fields of the file.

    Raises:
        ConfigError: If the configuration cannot be read, or contradicts itself; the message is one line.
    """
    if framework is not None and framework not in FORMATS:
        raise ConfigError(f"unknown framework {framework!r}{nearest(framework, FORMATS)}; known: {', '.join(FORMATS)}")
    if ":" in name and not Path(name).exists():
        from countoff.plan.readers import torchtitan_python

        return _named_in_errors(name, lambda: torchtitan_python.read(torchtitan_python.load(name)))
    if name == "-":
        return _named_in_errors("standard input", lambda: _read_launch(_standard_input(), framework))
    if Path(name).suffix in _SCRIPTS:
        text = _text_of(Path(name))
        return _named_in_errors(name, lambda: _read_launch(text, framework))
    data = _parse_file(Path(name))
    kind = framework or _framework_of(data, name)
    reader = importlib.import_module(f"countoff.plan.readers.{FORMATS[kind]}")
    return _named_in_errors(name, lambda: cast("Job", reader.read(data)))


def _named_in_errors(name: str, read: Callable[[], Job]) -> Job:
    """Returns what ``read`` returns, with a note for each value that is not known; an error names the configuration."""
    try:
        job = read()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    notes = [
        ConfigIssue(
            "note", "unknown-value", f"{job.key(name)} is {text}, which is known only when the job runs: not read"
        )
        for name, text in job.unknown.items()
    ]
    return replace(job, issues=(*job.issues, *notes)) if notes else job


def _standard_input() -> str:
    try:
        return sys.stdin.read(_MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ConfigError("it is not text") from None
    except (AttributeError, OSError, ValueError):  # a closed one, or none at all
        raise ConfigError("it cannot be read") from None


def _read_launch(text: str, framework: str | None) -> Job:
    """Returns the run that a launch script starts.

    Raises:
        ConfigError: If it starts no training of a known framework, or more than one.
    """
    found = [(launch, kind) for launch in read_launches(text) for kind in _launched_kinds(launch, framework)]
    if not found:
        known = " | ".join(kind for kind in _LAUNCHED if kind in FORMATS)
        raise ConfigError(f"it starts no training that countoff knows by its arguments ({known})")
    if len(found) > 1:
        programs = ", ".join(f"{launch.program or kind} in line {launch.line}" for launch, kind in found)
        raise ConfigError(f"it starts more than one training: {programs}; give one of the commands to countoff check -")
    (launch, kind), *_ = found
    reader = importlib.import_module(f"countoff.plan.readers.{FORMATS[kind]}")
    return with_ranks(cast("Job", reader.read(_LAUNCHED[kind](launch))), launch)


def _launched_kinds(launch: Launch, framework: str | None) -> list[str]:
    """Returns the format that a command line has by its arguments; several if they are equally many, or none."""
    if framework is not None:
        return [framework] if framework in _LAUNCHED and _LAUNCHED[framework](launch) else []
    found: dict[str, int] = {}
    for kind, arguments in _LAUNCHED.items():
        if kind in FORMATS:
            fields = Fields(arguments(launch))
            found[kind] = sum(fields.has(field) for field in _DISTINCTIVE_FIELDS[kind])
    most = max(found.values())
    best = [kind for kind, count in found.items() if count == most] if most else []
    if len(best) > 1:
        raise ConfigError(f"it has arguments of {' and '.join(best)}: give --framework {' | '.join(best)}")
    return best


def _parse_file(path: Path) -> Mapping[str, Any]:
    data = _parse_text(path, _text_of(path))
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold named fields, got {type(data).__name__}")
    return cast("Mapping[str, Any]", data)


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {why}") from None
    if text is None:
        raise ConfigError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text


def _parse_text(path: Path, text: str) -> object:
    parsers = {".toml": _toml, ".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in parsers:
        raise ConfigError(f"{path} must end in {', '.join((*parsers, *_SCRIPTS))}, or be module:function")
    try:
        return parsers[path.suffix](text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] if isinstance(error, ValueError) else "it is nested too deeply"
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {why}") from None


def _toml(text: str) -> object:
    # Imported by name: type checkers do not know tomllib for Python 3.10, and tomli is not installed from 3.11 on.
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


def _framework_of(data: Mapping[str, Any], name: str) -> str:
    """Returns the format of a file by its ending and its fields; an unknown one is refused, never guessed."""
    fields = Fields(data)
    found = {
        kind: sum(fields.has(field) for field in _DISTINCTIVE_FIELDS[kind])
        for kind, endings in _ENDINGS.items()
        if name.endswith(endings)
    }
    for kind, base in _EXTENDS.items():
        if found.get(kind):
            found.pop(base, None)
    most = max(found.values())
    best = [kind for kind, count in found.items() if count == most]
    if not most:
        raise ConfigError(
            f"{name} is in no format that countoff knows by its fields; it reads {_known_formats()}. If it is one of "
            f"these: give --framework {' | '.join(FORMATS)}"
        )
    if len(best) > 1:
        raise ConfigError(f"{name} has fields of {' and '.join(best)}: give --framework {' | '.join(best)}")
    return best[0]


def _known_formats() -> str:
    """Returns the endings that are read, each with the formats that have it."""
    kinds: dict[str, list[str]] = {}
    for kind, endings in _ENDINGS.items():
        for ending in endings:
            if ending != ".yml":  # read wherever .yaml is
                kinds.setdefault(ending, []).append(kind)
    kinds[".sh"] = [kind for kind in _LAUNCHED if kind in FORMATS]
    return "; ".join(f"{ending} of {', '.join(names)}" for ending, names in kinds.items())
