"""Directions of plain rules, from the gradient that they are given."""
