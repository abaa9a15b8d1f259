"""The adapter for both Fabric packages. Imports neither of them."""
