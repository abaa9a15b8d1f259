"""Runs a function of a benchmark on real ranks."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from integration_tests.devices import Placement
from integration_tests.harness import run_ranks


def on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    device: Placement = "cpu",
) -> list[Any]:
    """Runs the function on real ranks and returns its results, by rank.

    Raises:
        RanksFailed: If a rank's exit code is not 0.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(
            function, world_size, *arguments, directory=Path(directory), env=env, deadline_seconds=600, device=device
        )
    return [result.value for result in results]
