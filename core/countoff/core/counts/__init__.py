"""Exact counts of batches, steps, samples and ranks, on plain integers. Needs no torch and nothing of the protocol."""
