"""The data-dependent measure of nodes and edges (D16)."""
