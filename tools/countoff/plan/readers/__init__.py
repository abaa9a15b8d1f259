"""One reader for each format of configurations, and ``read_job`` and ``read_command``, which find the right one."""

from countoff.plan.fields import ConfigError
from countoff.plan.readers.configuration import FORMATS, read_command, read_job

__all__ = ["FORMATS", "ConfigError", "read_command", "read_job"]
