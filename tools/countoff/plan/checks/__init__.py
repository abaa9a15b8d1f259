"""What is wrong with a run on a number of ranks: mistakes that its configuration shows before the job starts."""

from countoff.plan.checks.all import check_job
from countoff.plan.checks.length import check_length
from countoff.plan.checks.unchecked import Unchecked, unchecked, unchecked_line

__all__ = ["Unchecked", "check_job", "check_length", "unchecked", "unchecked_line"]
