"""Exact counts of batches, steps, samples and ranks: pure integers, no torch, nothing of the protocol."""
