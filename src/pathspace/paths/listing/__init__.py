"""The network written out, path by path."""
