"""Compiled loops of the layers; what needs Numba stands here alone, and is imported at its first use."""
