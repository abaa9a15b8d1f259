"""Reads the traces of a job, whatever is in them."""

from countoff.report.reader.files import Reader, read

__all__ = ["Reader", "read"]
