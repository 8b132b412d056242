"""Passes over a text: ``reference`` defines every quantity in NumPy, ``compiled`` computes the same fast."""
