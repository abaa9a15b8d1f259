"""What follows from a trace: pure functions from a run to values.

They find what is worth a look, and accuse nobody: only a verdict does.
"""

from countoff.report.facts.classes import classes_of
from countoff.report.facts.counts import counts_of, first_divergences
from countoff.report.facts.paces import hosts_of, paces_of
from countoff.report.facts.plans import plan_differences_of, totals_of
from countoff.report.facts.stacks import stacks_of
from countoff.report.facts.stalls import one_line, stall_of
from countoff.report.facts.summary import heading, headline, is_healthy
from countoff.report.facts.written import document, facts_of, messages_of, verdict_or_none

__all__ = [
    "classes_of",
    "counts_of",
    "document",
    "facts_of",
    "first_divergences",
    "heading",
    "headline",
    "hosts_of",
    "is_healthy",
    "messages_of",
    "one_line",
    "paces_of",
    "plan_differences_of",
    "stacks_of",
    "stall_of",
    "totals_of",
    "verdict_or_none",
]
