"""The adapter for lingua. Imports nothing of lingua."""
