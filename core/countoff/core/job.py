"""A training run as a configuration describes it, and its numbers on a number of ranks."""

from __future__ import annotations

from countoff.core.configs.job import Job, JobError, Origin, RunPlan

__all__ = ["Job", "JobError", "Origin", "RunPlan"]
