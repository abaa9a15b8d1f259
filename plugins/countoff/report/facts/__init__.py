"""What follows from a trace: pure functions from a run to values.

They find what is worth a look, and accuse nobody: only a verdict does.
"""

from countoff.report.facts.classes import classes_of
from countoff.report.facts.counts import counts_of, partings_of
from countoff.report.facts.lateness import behind_batches, late_seconds
from countoff.report.facts.paces import hosts_of, paces_of
from countoff.report.facts.plans import plan_differences_of, totals_of
from countoff.report.facts.stacks import stacks_of
from countoff.report.facts.stalls import stall_of
from countoff.report.facts.summary import heading, headline, is_healthy

__all__ = [
    "behind_batches",
    "classes_of",
    "counts_of",
    "heading",
    "headline",
    "hosts_of",
    "is_healthy",
    "late_seconds",
    "paces_of",
    "partings_of",
    "plan_differences_of",
    "stacks_of",
    "stall_of",
    "totals_of",
]
