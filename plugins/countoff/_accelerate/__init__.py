"""The adapter for Hugging Face Accelerate."""
