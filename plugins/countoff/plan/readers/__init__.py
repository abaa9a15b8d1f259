"""One reader for each format of configurations, and ``read_job``, which finds the right one."""

from countoff.plan.fields import ConfigError
from countoff.plan.readers.configuration import FORMATS, read_job

__all__ = ["FORMATS", "ConfigError", "read_job"]
