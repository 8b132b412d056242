"""From a model and an example input to a :class:`pathspace.Network`."""
