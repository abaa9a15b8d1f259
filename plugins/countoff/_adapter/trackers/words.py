"""An alert as the named values that some trackers show beside a run."""

from __future__ import annotations

from countoff.core.alerts.alert import Alert

__all__ = ["values"]


def values(alert: Alert) -> dict[str, str]:
    """The alert as values by name, as ``countoff.verdict``; none of them is empty."""
    verdict = alert.verdict
    if not alert.ends:  # a job has one verdict, and one warning of each kind
        return {f"countoff.warning.{verdict.kind}": alert.text}
    named = {
        "countoff.verdict": verdict.headline,
        "countoff.why": verdict.why,
        "countoff.remedy": verdict.remedy,
        "countoff.restart": verdict.restart,
    }
    return {key: value for key, value in named.items() if value}
