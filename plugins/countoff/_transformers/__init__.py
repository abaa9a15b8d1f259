"""The adapter for the transformers Trainer."""
