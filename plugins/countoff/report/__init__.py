"""A trace as a page, as text or for Perfetto, and live: `countoff report` and `countoff top`."""
