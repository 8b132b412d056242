"""The squared network: squared parameters, a tape of instructions, and gradients through it."""
