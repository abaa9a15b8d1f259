"""Exact counts of batches, steps, samples and ranks, on plain integers. Needs no torch and knows no verdict."""
