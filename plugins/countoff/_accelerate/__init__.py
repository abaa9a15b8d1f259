"""The adapter for Accelerate: its objects, read and observed."""
