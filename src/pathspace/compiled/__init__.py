"""kappa and a training step by compiled loops, where calls into PyTorch cost more than the arithmetic; needs Numba."""
