"""The framework-agnostic core: arithmetic, protocol and the guard that adapters call. Importing it imports no torch."""

from countoff.core.guard import Guard
from countoff.core.plan import BatchPlan, LoaderFacts
from countoff.core.settings import Settings, SettingsError
from countoff.core.verdict import DivergenceError, Verdict

__all__ = ["BatchPlan", "DivergenceError", "Guard", "LoaderFacts", "Settings", "SettingsError", "Verdict"]
