"""The options of every adapter that is a callback: one list, annotated for configuration tools such as LightningCLI."""

from __future__ import annotations

from typing import Literal

from countoff.core import Settings


class Options:
    """Base of the callbacks: takes the options, finds those not given in the environment, refuses bad ones.

    Args:
        enabled: Whether to do anything at all; `COUNTOFF=0` turns it off too.
        on_divergence: `raise` ends the job with the verdict, `warn` says it once and trains on.
        totals: `log` logs the true totals, `fix` also sets the framework's own where the truth is proven to be shorter.
        uneven_eval: What evaluations of different lengths are: `warn`, `raise` or `allow`.
        eval_ranks: The ranks that evaluate, if not all of them do; evaluations are not compared then.
        stall_seconds: Seconds without progress of any rank after which their stacks are reported.
        grace_seconds: Seconds that a main thread blocked in a collective has before its process is ended.
        deadline_seconds: Seconds that the start of a fit waits for the other ranks to count off.
        tick_batches: Batches between two comparisons of steps and learning rates within an epoch.
        fingerprint_batches: Batches at the beginning of every train epoch of which the data is compared; 0 for none.

    Attributes:
        settings: What holds.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """

    def __init__(
        self,
        enabled: bool | None = None,
        on_divergence: Literal["raise", "warn"] | None = None,
        totals: Literal["log", "fix"] | None = None,
        uneven_eval: Literal["warn", "raise", "allow"] | None = None,
        eval_ranks: list[int] | None = None,
        stall_seconds: float | None = None,
        grace_seconds: float | None = None,
        deadline_seconds: float | None = None,
        tick_batches: int | None = None,
        fingerprint_batches: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.settings = Settings.resolve(**given)
