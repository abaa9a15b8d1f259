"""The adapter for Composer."""
