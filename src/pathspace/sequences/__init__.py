"""Generative models of symbol sequences: PCNN, CNN and RNN trained in invariant metrics."""
