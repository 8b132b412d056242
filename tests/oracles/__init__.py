"""Brute force in float64: what the library computes, done again the slow and obvious way."""
