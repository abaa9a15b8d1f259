"""The adapter for a plain PyTorch loop."""
