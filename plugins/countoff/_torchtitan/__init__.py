"""The adapter for TorchTitan. Imports nothing of TorchTitan."""
