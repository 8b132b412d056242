"""A forward pass on data, along the traced one: what each node saw."""
