"""Placement policies: pure functions from demand and view to a decision in seconds."""
