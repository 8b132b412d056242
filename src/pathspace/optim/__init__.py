"""Optimizers that do not see how the weights of a network are scaled."""

from pathspace.optim.path_sgd import PathSGD

__all__ = ["PathSGD"]
