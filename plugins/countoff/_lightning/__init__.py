"""The adapter for both Lightning packages and for Fabric. Imports none of them."""
