"""Train ReLU and recurrent networks in a geometry that does not depend on how their weights are scaled."""

__version__ = "0.1.0.dev0"
