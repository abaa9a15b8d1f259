"""An alert as the named values that some trackers show beside a run."""

from __future__ import annotations

from countoff.core.alerts.alert import Alert

__all__ = ["name_of", "values"]


def name_of(alert: Alert) -> str:
    """Under which name an alert stands: a job has one verdict, and one warning of each kind."""
    return "verdict" if alert.ends else f"warning.{alert.verdict.kind}"


def values(alert: Alert) -> dict[str, str]:
    """The alert as values by name, as ``countoff.verdict``; none of them is empty."""
    verdict, name = alert.verdict, f"countoff.{name_of(alert)}"
    if not alert.ends:
        return {name: alert.text}
    named = {
        name: verdict.headline,
        "countoff.why": verdict.why,
        "countoff.remedy": verdict.remedy,
        "countoff.restart": verdict.restart,
    }
    return {key: value for key, value in named.items() if value}
