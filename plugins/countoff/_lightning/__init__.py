"""The adapter for both Lightning packages. Imports neither of them."""
