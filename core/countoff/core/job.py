"""The job that a configuration describes, and what it amounts to at a number of ranks."""

from __future__ import annotations

from countoff.core.configs.job import Job, JobError, Origin, RunPlan

__all__ = ["Job", "JobError", "Origin", "RunPlan"]
