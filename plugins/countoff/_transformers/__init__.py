"""The adapter for the transformers Trainer: its objects, read and observed."""
