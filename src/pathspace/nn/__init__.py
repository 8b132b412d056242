"""Layers and models that the papers define; ordinary modules.

:func:`pathspace.trace` knows the models; a network is traced before :func:`ddp_normalize`
normalizes it.
"""

from pathspace.nn.caps import Clamp, scale_caps_
from pathspace.nn.ddp_layers import DDPConv1d, DDPConv2d, DDPConv3d, DDPLinear
from pathspace.nn.ddp_normalize import ddp_normalize, fold
from pathspace.nn.ddp_sample import measured_on
from pathspace.nn.language_model import LanguageModel
from pathspace.nn.recurrent_cnn import RecurrentCNN, RecurrentConvolution
from pathspace.nn.rnn import RNN, fast_
from pathspace.nn.stacked_rnn import StackedReLURNN

__all__ = [
    "RNN",
    "Clamp",
    "DDPConv1d",
    "DDPConv2d",
    "DDPConv3d",
    "DDPLinear",
    "LanguageModel",
    "RecurrentCNN",
    "RecurrentConvolution",
    "StackedReLURNN",
    "ddp_normalize",
    "fast_",
    "fold",
    "measured_on",
    "scale_caps_",
]
