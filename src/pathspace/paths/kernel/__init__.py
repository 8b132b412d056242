"""Sums over paths in the squared network: the path norm and kappa."""
