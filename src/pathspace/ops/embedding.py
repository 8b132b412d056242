"""Rows of a table of weights that inputs name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.graph.capture import Step
from pathspace.ops.family import Family
from pathspace.ops.listing import Listing


class Embedding(Family):
    """Rows of a table: a linear map of one-hot inputs."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether rows of a table of weights are named by inputs."""
        if step.name == "embedding":
            return listing.is_weight(step.args[0]) and listing.is_data(step.args[1])
        if step.name != "index" or not listing.is_weight(step.args[0]):
            return False
        return (
            len(step.args[1]) == 1 and listing.is_data(step.args[1][0]) and step.args[0].dim() == 2
        )

    def listed(self, step: Step, listing: Listing) -> None:
        """Write an edge from each word at each place to each feature there."""
        table, tokens = step.args[:2]
        tokens = tokens if isinstance(tokens, Tensor) else tokens[0]
        weights = listing.weights[id(table)]
        words, width = table.shape
        sources = listing.new_nodes(torch.Size([tokens.numel(), words]))
        nodes = listing.new_nodes(step.result.shape)
        listing.inputs.append(sources.flatten())
        listing.input_values.append(functional.one_hot(tokens.flatten(), words).flatten().double())
        shape = (tokens.numel(), words, width)
        columns = (
            sources[:, :, None],
            nodes.reshape(-1, 1, width),
            weights.numbers,
            weights.factors,
        )
        listing.add_edges(*(t.expand(shape) for t in columns))
        listing.bind_nodes(step.result, nodes)
