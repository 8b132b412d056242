"""The language model of S19: embedding, a stack of ReLU recurrent layers, decoder.

S19: "Path Space for Recurrent Neural Networks with ReLU Activations", 2019 (anonymous submission).
Letters: B batch, T time, V vocabulary, E embedding, H hidden.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pathspace.metrics.checks import check_counts
from pathspace.nn.stacked_rnn import StackedReLURNN, States, check_probabilities


class RowDropEmbedding(nn.Embedding):
    """An embedding that leaves out whole rows in training: a token is left out everywhere in a call."""

    def __init__(self, rows: int, width: int, *, dropout: float = 0.0) -> None:
        check_probabilities(embedding_dropout=dropout)
        super().__init__(rows, width)
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        """Look up numbers of tokens, of any shape."""
        if not self.dropout:
            return super().forward(input)
        return F.embedding(input, F.dropout1d(self.weight, self.dropout, self.training))


class LanguageModel(nn.Module):
    """Predicts the next token of a stream, in segments, with states that are carried from one to the next.

    The states that are returned are detached: handed to the next call, they make *truncated
    backpropagation*, in which gradients end at the start of a segment. As in the paper, only the
    recurrent stack is meant to be in the geometry. Trace it as a module of its own, and an
    optimizer given all parameters of the model applies the plain rule of its family to the
    embedding and the decoder; or trace the model with those two left outside, which is the same
    network. Without ``outside`` embedding and decoder are in the geometry too, tied or not.

    Args:
        vocabulary: V, number of different tokens.
        embedding: E, width of the embedding.
        hidden: H, units of each recurrent layer.
        layers: recurrent layers. With tied weights the last one has E units instead of H.
        tied: whether the decoder's weights are those of the embedding.
        embedding_dropout: probability with which a token's whole row of the embedding is left out.
        input_dropout: see :class:`StackedReLURNN`, like the following.
        hidden_dropout: between layers.
        output_dropout: after the last layer.
        weight_drop: of the recurrent matrices.

    Raises:
        TypeError: a probability is no number.
        ValueError: a size is not positive, or a probability is not in [0, 1).

    Example:
        >>> import torch, pathspace as ps
        >>> model = ps.nn.LanguageModel(50, embedding=8, hidden=16, layers=2, weight_drop=0.1)
        >>> network = ps.trace(model.rnn, torch.zeros(1, 5, 8))
        >>> optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
        >>> stream, states = torch.randint(50, (3, 11)), None
        >>> for start in (0, 5):
        ...     scores, states = model(stream[:, start : start + 5], states)
        ...     targets = stream[:, start + 1 : start + 6]
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        ...     _ = optimizer.step()
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        embedding: int = 400,
        hidden: int = 1550,
        layers: int = 4,
        tied: bool = True,
        embedding_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        weight_drop: float = 0.0,
    ) -> None:
        super().__init__()
        check_counts(vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
        self.embedding = RowDropEmbedding(vocabulary, embedding, dropout=embedding_dropout)
        self.rnn = StackedReLURNN(
            embedding,
            [hidden] * (layers - 1) + [embedding if tied else hidden],
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
            weight_drop=weight_drop,
        )
        self.decoder = nn.Linear(self.rnn.hidden_sizes[-1], vocabulary)
        # the starts of Merity et al. 2018
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """Score what comes next.

        Args:
            tokens: numbers of tokens, ``[B, T]``.
            states: where the layers start, from the segment before; zero if None.

        Returns:
            Scores of every token after every step, ``[B, T, V]``, and the layers' last states,
            detached.
        """
        x, last = self.rnn(self.embedding(tokens), states)
        return self.decoder(x), tuple(state.detach() for state in last)
