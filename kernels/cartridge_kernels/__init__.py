"""Tensor operations on Cartridge keys and values."""
