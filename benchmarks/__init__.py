"""Measures what countoff costs per batch, and how soon every rank knows of a fault. See README.md beside this file."""
