"""Several jobs in one launch, one after the other: to begin a launch takes longer than most jobs do."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from integration_tests.harness import RankResult
from integration_tests.output import printed_lines

_HEAD = "--- job "


def in_turn(jobs: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What each job returns, by its name. All of them share the process group that the first one makes.

    Args:
        jobs: By name, a function and its arguments.
    """
    init, found = dist.init_process_group, dict[str, Any]()

    def init_once(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():
            init(*args, **options)

    with mock.patch.object(dist, "init_process_group", init_once):
        for name, (function, *arguments) in jobs.items():
            print(f"{_HEAD}{name}", flush=True)
            found[name] = function(*arguments)
    return found


def said_in_turn(result: RankResult) -> dict[str, list[str]]:
    """What countoff has printed on this rank in each job, by its name."""
    found: dict[str, list[str]] = {}
    for part in re.split(f"^{_HEAD}", result.output, flags=re.MULTILINE)[1:]:
        name, _, output = part.partition("\n")
        found[name] = printed_lines(replace(result, output=output))
    return found
