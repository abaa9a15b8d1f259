"""A trace as a page, as text or for Perfetto, and live: `countoff report` and `countoff top`."""

import countoff.core.checks  # noqa: F401  # the kinds of the verdicts that are shown
