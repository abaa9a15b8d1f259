"""What countoff costs per batch, and how soon every rank knows. See README.md beside this file."""
