"""Contracts shared by gateway, engines and stores: manifests, residency, wire names, codecs."""
