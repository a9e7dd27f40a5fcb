"""Simulated replicas and load generators."""
