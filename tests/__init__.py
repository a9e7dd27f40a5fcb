"""Tests: a mirror of the packages, contracts, integration and architecture."""
