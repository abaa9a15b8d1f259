"""Tests on real ranks with real frameworks."""
