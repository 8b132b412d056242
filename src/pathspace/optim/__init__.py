"""Optimizers that do not see how the weights of a network are scaled."""

from pathspace.optim.ddp_adam import DDPAdam
from pathspace.optim.ddp_sgd import DDPSGD
from pathspace.optim.g_adam import GAdam
from pathspace.optim.g_sgd import GSGD
from pathspace.optim.invariant import Invariant
from pathspace.optim.param_groups import ParamGroups, param_groups
from pathspace.optim.path_adam import PathAdam
from pathspace.optim.path_gradient_adam import PathGradientAdam
from pathspace.optim.path_muon import PathMuon
from pathspace.optim.path_rmsprop import PathRMSprop
from pathspace.optim.path_sgd import PathSGD
from pathspace.optim.path_soap import PathSOAP
from pathspace.optim.quasi_diagonal import QuasiDiagonal

__all__ = [
    "DDPSGD",
    "GSGD",
    "DDPAdam",
    "GAdam",
    "Invariant",
    "ParamGroups",
    "PathAdam",
    "PathGradientAdam",
    "PathMuon",
    "PathRMSprop",
    "PathSGD",
    "PathSOAP",
    "QuasiDiagonal",
    "param_groups",
]
