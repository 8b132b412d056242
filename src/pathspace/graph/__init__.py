"""A forward pass as one pure graph of ATen operations."""
