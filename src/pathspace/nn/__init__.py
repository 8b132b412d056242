"""Layers and models that the papers define; ordinary modules, which :func:`pathspace.trace` knows."""

from pathspace.nn.language_model import LanguageModel
from pathspace.nn.stacked_rnn import StackedReLURNN

__all__ = ["LanguageModel", "StackedReLURNN"]
