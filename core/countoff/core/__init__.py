"""The framework-agnostic core: arithmetic, protocol and the guard that adapters call. Importing it imports no torch.

Each name is imported when it is first asked for: the command line's help has no time for a guard. `__version__` is that
of the installed package.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as typing's own, which takes longer to import than all of this
if TYPE_CHECKING:
    from countoff.core.arithmetic.plan import BatchPlan, LoaderFacts
    from countoff.core.arithmetic.ranks import RankMap
    from countoff.core.finding import Finding
    from countoff.core.guard import Guard
    from countoff.core.protocol.records import FitPlan
    from countoff.core.settings import Settings, SettingsError
    from countoff.core.verdict import DivergenceError, Verdict

    __version__: str

__all__ = [
    "BatchPlan",
    "DivergenceError",
    "Finding",
    "FitPlan",
    "Guard",
    "LoaderFacts",
    "RankMap",
    "Settings",
    "SettingsError",
    "Verdict",
]

_HOMES = {
    "BatchPlan": "arithmetic.plan",
    "DivergenceError": "verdict",
    "Finding": "finding",
    "FitPlan": "protocol.records",
    "Guard": "guard",
    "LoaderFacts": "arithmetic.plan",
    "RankMap": "arithmetic.ranks",
    "Settings": "settings",
    "SettingsError": "settings",
    "Verdict": "verdict",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module(f"{__name__}.software").own_version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
