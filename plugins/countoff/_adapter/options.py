"""The options of every adapter. Those of a callback are annotated for configuration tools such as LightningCLI."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NoReturn

from countoff.core import Finding, Settings, SettingsError

__all__ = ["Options", "cannot_make_even", "own_arguments", "with_common_end"]


def own_arguments(made: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments besides options, for the error about an unknown one.

    Args:
        made: The function or class, which takes options as ``**options``.
    """
    parameters = inspect.signature(made).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def cannot_make_even(settings: Settings, framework: str) -> None:
    """Refuses what makes uneven ranks take the same number of batches, for a framework in which nothing does that.

    Args:
        settings: The user's choices.
        framework: Its name.

    Raises:
        SettingsError: If the settings ask for it.
    """
    if settings.keeps_even:
        raise SettingsError(
            f"uneven_train='stop' and uneven_eval='stop' do not work with {framework}: give every rank the same number "
            "of batches"
        )


def with_common_end(settings: Settings) -> Settings:
    """Returns the settings of a guard for a framework that itself ends each pass on all ranks with the shortest one.

    Args:
        settings: The user's choices; ``stop`` is what the framework does.
    """
    return replace(
        settings, uneven_train="raise", uneven_eval="warn" if settings.uneven_eval == "stop" else settings.uneven_eval
    )


class Options:
    """Base class of the callbacks: takes the options, reads those not given from the environment, rejects bad ones.

    Args:
        enabled: Whether countoff does anything; `COUNTOFF=0` turns it off too.
        on_divergence: `raise` ends the job with the verdict, `warn` prints it once and continues training.
        levels: By kind of verdict, whether a finding is an error (`raise`), a warning (`warn`) or nothing (`off`),
                where that is not the default.
        totals: `show` gives the true totals to the framework's progress bars and loggers, which changes nothing that
                trains. `fix` also sets the framework's own length where the true one is proven to be shorter; limits,
                schedules and evaluations follow it. `off` does neither.
        uneven_train: What to do about train loaders of different lengths: `raise` ends the job, `stop` ends each epoch
                on every rank with the shortest one.
        uneven_eval: What to do about evaluations of different lengths: `warn`, `raise`, `allow`, or `stop`, which ends
                each evaluation on every rank with the shortest one. With `off`, evaluations are not compared, so that
                only some ranks may evaluate.
        stall_seconds: Seconds without progress of any rank after which their stacks are reported.
        lost_seconds: Seconds without any answer of a host after which its ranks are lost.
        deadline_seconds: Seconds that the start of a fit waits for the other ranks.
        compare_data: Whether what the ranks read is compared: the first batches of every train epoch, and the datasets.
        weights_every: Optimizer steps between two comparisons of the ranks' weights; 0 for none.
        verdict_file: Path of a JSON file for the verdict that ends the fit, for a scheduler to read.
        trace_dir: Path of a directory for the trace, to which every rank writes what it does.
        notify: Addresses of apprise, such as `slack://…`, that are told of findings.
        on_finding: A function that is called with each finding, on one rank and on a thread of its own.

    Attributes:
        settings: The settings in force.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has an unknown name or a bad value.
    """

    _of_the_fit: ClassVar[tuple[str, ...]] = ()
    """Attributes that a fit sets: left out of copies, in which no fit has begun."""

    def __init__(
        self,
        enabled: bool | None = None,
        on_divergence: Literal["raise", "warn"] | None = None,
        levels: dict[str, Literal["raise", "warn", "off"]] | None = None,
        totals: Literal["show", "fix", "off"] | None = None,
        uneven_train: Literal["raise", "stop"] | None = None,
        uneven_eval: Literal["warn", "raise", "allow", "off", "stop"] | None = None,
        stall_seconds: float | None = None,
        lost_seconds: float | None = None,
        deadline_seconds: float | None = None,
        compare_data: bool | None = None,
        weights_every: int | None = None,
        verdict_file: str | os.PathLike[str] | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        notify: str | list[str] | None = None,
        on_finding: Callable[[Finding], object] | None = None,
        **unknown: NoReturn,  # so that type checkers refuse it, and the settings name it
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")}
        self.settings = Settings.resolve(**given, **unknown)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of a copy: a callback is copied and pickled with its Trainer, at any time."""
        return {name: value for name, value in vars(self).items() if name not in self._of_the_fit}
