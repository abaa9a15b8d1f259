"""What several adapters share. Imports no framework but torch."""
