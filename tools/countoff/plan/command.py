"""``countoff plan`` and ``countoff check``: from arguments to a ``Job``, and from its plans to text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from countoff._terminal import console
from countoff.core import formats
from countoff.core.arithmetic.ranks import INFERRED, ORDERS
from countoff.core.messages import nearest
from countoff.plan import table
from countoff.plan.checks import Unchecked, check_job, check_length, unchecked, unchecked_line
from countoff.plan.issues import CODES, ConfigIssue, Level, worst_first
from countoff.plan.job import Job, JobError, Origin, RunPlan
from countoff.plan.launches import read_launch
from countoff.plan.readers import read_command, read_job

__all__ = ["check", "plan"]

# Flags that set a number of a Job, by its name there.
_NUMBERS = {
    "batch_size": "batch_size",
    "seq_len": "sequence_length",
    "accumulation": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size",
    "steps": "steps",
    "epochs": "epochs",
    "dataset_size": "dataset_size",
}
_SWITCHES = ("drop_last", "strided")
# The frameworks' names for the dims of the flags.
_DIMS = {
    "dp_replicate": ("dp_replicate", "data_parallel_replicate"),
    "dp_shard": ("dp_shard", "data_parallel_shard", "data_parallel", "data", "dp"),
    "cp": ("cp", "sp"),
    "tp": ("tp", "tensor_parallel", "model"),
    "pp": ("pp", "pipe"),
}
_STYLES: dict[Level, str] = {"silent": "bold red", "stops": "red", "note": "yellow"}


def plan(chosen: argparse.Namespace) -> int:
    """Prints the plan of a run on one or more world sizes.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If there is no plan; the message is one line with the reason.
    """
    _names([] if chosen.config is None else [chosen.config], chosen.command)
    job = _job(chosen)
    plans = [RunPlan.of(job, world_size=world_size) for world_size in _world_sizes(chosen, job)]
    resume_samples = _resume_samples(chosen)
    issues = [worst_first([*job.issues, *check_length(one)]) for one in plans]
    if chosen.json:
        _print_json(
            [
                {"format": formats.JSON_OUTPUT} | table.as_json(one, resume_samples) | table.issues_as_json(found)
                for one, found in zip(plans, issues, strict=True)
            ]
        )
        return 0
    output = console()
    table.print_table(plans, resume_samples, output)
    for one in plans:
        output.print(Text(f"{one.ranks.world_size} ranks: {one.identity}", style="bold"))
    if chosen.explain:
        table.print_origins(plans[0], output)
    for issue in worst_first(issue for found in issues for issue in found):
        output.print(_line(issue))
    return 0


def check(chosen: argparse.Namespace) -> int:
    """Prints what is wrong with configurations, one line per issue, the worst first; as JSON; or for GitHub.

    Returns:
        The exit code: 2 if one of several configurations cannot be read, else 1 if a fault is found, else 0.

    Raises:
        ValueError: If the only configuration cannot be read; the message is one line with the reason.
    """
    _check_codes(chosen.ignore)
    configs = _names(chosen.configs, chosen.command)
    if not configs:
        raise ValueError("give a configuration, or a command after --: countoff check -- torchrun … train.py …")
    checked: list[_Checked] = []
    unreadable: list[str] = []
    for config in configs:
        try:
            checked += _checks(argparse.Namespace(**{**vars(chosen), "config": config}))
        except ValueError as error:
            if len(configs) == 1:
                raise
            reason = " ".join(str(error).split())
            unreadable.append(reason if config in reason else f"{config}: {reason}")
    if chosen.json:
        _print_json([each.as_json() for each in checked], several=len(configs) > 1)
    else:
        sizes = Counter(each.config for each in checked)
        _Printer(several=len(configs) > 1, github=chosen.github).print(checked, sizes)
    for reason in unreadable:
        print(f"countoff: {reason}", file=sys.stderr)
    return 2 if unreadable else int(any(each.fault for each in checked))


@dataclasses.dataclass(frozen=True)
class _Checked:
    """What a check has found in one configuration on one world size."""

    config: str
    job: Job
    world_size: int
    issues: Sequence[ConfigIssue]

    @property
    def fault(self) -> bool:
        return any(issue.is_fault for issue in self.issues)

    @property
    def unchecked(self) -> list[Unchecked]:
        return unchecked(self.job, world_size=self.world_size)

    @property
    def no_fault(self) -> str:
        """The line that says so, and what was not looked at."""
        name = f"{self.config} ({self.job.framework}) on {self.world_size} ranks"
        return f"{name}: no fault found{unchecked_line(self.unchecked)}"

    def as_json(self) -> dict[str, Any]:
        """As JSON types; the plan is None where the run does not fit."""
        try:
            plan = table.as_json(RunPlan.of(self.job, world_size=self.world_size))
        except JobError:
            plan = None
        return {
            "format": formats.JSON_OUTPUT,
            "config": self.config,
            "framework": self.job.framework,
            "world_size": self.world_size,
            "fault": self.fault,
            **table.issues_as_json(self.issues),
            "unchecked": [each._asdict() for each in self.unchecked],
            "plan": plan,
        }


def _checks(chosen: argparse.Namespace) -> list[_Checked]:
    job = _job(chosen)
    return [
        _Checked(
            chosen.config,
            job,
            size,
            [each for each in check_job(job, world_size=size) if each.code not in chosen.ignore],
        )
        for size in _world_sizes(chosen, job)
    ]


class _Printer:
    """Prints what was found, one line per issue: with colours on a terminal, or as GitHub reads it.

    Args:
        several: Whether each line names its configuration.
        github: Whether an issue becomes an annotation of a pull request.
    """

    def __init__(self, *, several: bool, github: bool) -> None:
        self._several = several
        self._github = github
        self._console = console()

    def print(self, checked: Sequence[_Checked], sizes: Mapping[str, int]) -> None:
        """Prints all of it.

        Args:
            checked: What was found.
            sizes: How many world sizes each configuration was checked on.
        """
        for each in checked:
            ranks = f"{each.world_size} ranks: " if sizes[each.config] > 1 else ""
            for issue in each.issues:
                if self._github:
                    print(_annotation(each.config, ranks, issue))
                else:
                    name = f"{each.config}: " if self._several else ""
                    self._console.print(_line(issue, f"{name}{ranks}"))
            if not each.fault:
                print(each.no_fault)


def _line(issue: ConfigIssue, prefix: str = "") -> Text:
    """Returns an issue as it is printed, its level in colour."""
    level = f"{issue.level:<7}"
    return Text.assemble(prefix, (level, _STYLES[issue.level]), issue.line.removeprefix(level))


def _annotation(config: str, ranks: str, issue: ConfigIssue) -> str:
    """Returns the line that GitHub Actions shows at the file, in a pull request.

    Example:
        >>> _annotation("a,b.toml", "", ConfigIssue("note", "warm-up", "50% of the run"))
        '::notice file=a%2Cb.toml,title=countoff warm-up::50%25 of the run'
    """
    file = _escaped(config).replace(":", "%3A").replace(",", "%2C")
    command = "error" if issue.is_fault else "notice"
    return f"::{command} file={file},title=countoff {issue.code}::{_escaped(f'{ranks}{issue.text}')}"


def _escaped(text: str) -> str:
    # https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _print_json(shown: Sequence[dict[str, Any]], *, several: bool = False) -> None:
    """Prints one object, or a list of them for several world sizes or configurations."""
    print(json.dumps(shown[0] if len(shown) == 1 and not several else shown, indent=2))


def _check_codes(codes: Sequence[str]) -> None:
    for code in codes:
        if code not in CODES:
            raise ValueError(f"--ignore knows no code {code!r}{nearest(code, CODES)}; known: {', '.join(CODES)}")


def _names(configs: Sequence[str], command: Sequence[str]) -> Sequence[str]:
    """Returns the names of what is to be read: the configurations, or the program that a command starts.

    Raises:
        ValueError: If both are given.
    """
    if configs and command:
        raise ValueError("give a configuration, or a command after --, not both")
    return [read_launch(command).program or "the command"] if command else configs


def _job(chosen: argparse.Namespace) -> Job:
    """Returns the run of the configuration or the command, or of neither, with the flags applied."""
    if chosen.command:
        job = read_command(chosen.command, framework=chosen.framework)
    elif chosen.config is not None:
        job = read_job(chosen.config, framework=chosen.framework)
    else:
        job = _job_of_flags_alone()
    for flag in ("epochs", *_SWITCHES):
        if getattr(chosen, flag) and chosen.dataset_size is None:
            raise ValueError(f"{_flag(flag)} needs --dataset-size N: nothing else says how long an epoch is")
    origins = dict(job.origins)
    changes: dict[str, object] = {}
    for flag, name in _NUMBERS.items():
        if getattr(chosen, flag) is not None:
            changes[name] = _parse_count(flag, getattr(chosen, flag))
            origins[name] = Origin(_flag(flag))
    for flag in _SWITCHES:
        if getattr(chosen, flag):
            changes[flag] = True
            origins[flag] = Origin(_flag(flag))
    if (chosen.steps is None) != (chosen.epochs is None):
        # A run has one length: a flag for it replaces the file's, also where the file has it in the other unit.
        other = "epochs" if chosen.epochs is None else "steps"
        changes[other] = None
        origins.pop(other, None)
    changes["sizes"] = _sizes(chosen, job, origins)
    batch = changes.get("global_batch_size")
    if isinstance(batch, int) and job.run_samples is not None and job.ramp is None and job.schedule is not None:
        # A run in samples has fewer steps with a larger batch.
        changes.setdefault("steps", max(job.run_samples // batch, 1))
        changes["schedule"] = dataclasses.replace(job.schedule, per_step=batch)
    return dataclasses.replace(job, origins=origins, **changes)  # pyright: ignore[reportArgumentType]


def _job_of_flags_alone() -> Job:
    order = ORDERS["torchtitan"]
    sizes = tuple(INFERRED if name == order.inferred else 1 for name in order.names)
    return Job("", order.names, sizes, order.data_dims)


def _sizes(chosen: argparse.Namespace, job: Job, origins: dict[str, Origin]) -> tuple[int, ...]:
    """Returns the sizes of the dims, flags first, and adds the origins of those that a flag sets."""
    sizes = dict(zip(job.names, job.sizes, strict=True))
    flagged: list[str] = []
    for flag, names in _DIMS.items():
        text = getattr(chosen, flag)
        if text is None:
            continue
        name = next((one for one in names if one in sizes), None)
        if name is None:
            raise ValueError(f"{_flag(flag)}: {job.framework} has no such dim; it has {', '.join(sizes)}")
        sizes[name] = _parse_count(flag, text, may_be_inferred=True)
        origins[name] = Origin(_flag(flag))
        flagged.append(name)
    if any(sizes[name] == INFERRED for name in flagged):
        # Only one dim can be inferred: a flag of -1 replaces the -1 of the file, or of the default.
        sizes = {name: 1 if size == INFERRED and name not in flagged else size for name, size in sizes.items()}
    return tuple(sizes.values())


def _world_sizes(chosen: argparse.Namespace, job: Job) -> list[int]:
    if chosen.world_size:
        if chosen.nodes or chosen.ranks_per_node:
            raise ValueError("give --world-size, or --nodes with --ranks-per-node, not both")
        return [_parse_count("world_size", part) for text in chosen.world_size for part in text.split(",")]
    if chosen.nodes or chosen.ranks_per_node:
        if not chosen.nodes:
            raise ValueError("--ranks-per-node needs --nodes: world size = nodes × ranks per node")
        if not chosen.ranks_per_node:
            raise ValueError("--nodes needs --ranks-per-node: world size = nodes × ranks per node")
        return [_parse_count("nodes", chosen.nodes) * _parse_count("ranks_per_node", chosen.ranks_per_node)]
    if job.world_size is not None:
        return [job.world_size]
    name = "the command" if chosen.command else chosen.config
    not_in_file = f"{name} does not say; " if name else ""
    raise ValueError(f"how many ranks? {not_in_file}give --world-size N, or --nodes N --ranks-per-node N")


def _resume_samples(chosen: argparse.Namespace) -> int | None:
    return None if chosen.resume_samples is None else _parse_count("resume_samples", chosen.resume_samples)


def _parse_count(flag: str, text: str, *, may_be_inferred: bool = False) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1 and not (may_be_inferred and number == INFERRED):
        also = f", or {INFERRED} for what is left over" if may_be_inferred else ""
        raise ValueError(f"{_flag(flag)} must be a whole number of at least 1{also}, got {text or 'nothing'}")
    return number


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
