"""A character GPT: pre-norm blocks of rotary attention and a gated or squared-ReLU MLP.

Letters: B batch, T time, W width, H heads, D = W / H dimensions of a head, F hidden units of an
MLP.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count

Gate = Literal["swiglu", "squared-relu"]
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        turns = _turns(x.shape[1], query.shape[-1] // 2, x)
        h = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True
        )
        return self.out(h.transpose(1, 2).flatten(-2))


def _turns(steps: int, pairs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D / 2) of the angles by which each pair of dimensions is turned at each step."""
    speeds = ROTARY_BASE ** -(torch.arange(pairs, dtype=torch.float32, device=like.device) / pairs)
    angles = torch.arange(steps, dtype=torch.float32, device=like.device).unsqueeze(1) * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of dimensions (d, d + D / 2) of x, (B, H, T, D)."""
    (cosines, sines), (a, b) = turns, x.chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1)


class MLP(nn.Module):
    """silu(g) u (SwiGLU), or relu(u)^2, between two linear maps."""

    def __init__(self, width: int, hidden: int, gate: Gate) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False) if gate == "swiglu" else None
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        up = self.up(x)
        hidden = up.relu().square() if self.gate is None else functional.silu(self.gate(x)) * up
        return self.down(hidden)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, gate: Gate) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.before_mlp, self.mlp = nn.RMSNorm(width), MLP(width, hidden, gate)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A GPT with RMSNorm, rotary embeddings and no biases, which answers at every step.

    Args:
        input_size: How many symbols there are.
        output_size: K, scores at a step.
        hidden: W, numbers that stand for a symbol; a multiple of twice the heads.
        layers: Blocks, one on top of the other.
        heads: H, of every attention.
        gate: The MLP: `"swiglu"` with 8 W / 3 hidden units, or `"squared-relu"` with 4 W; as many
            weights.
        output: Every step is read.

    Raises:
        ConfigurationError: The width does not part into heads of an even number of dimensions.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        hidden: Count = 128,
        layers: Count = 4,
        heads: Count = 4,
        gate: Gate = "swiglu",
        output: Literal["every"] = "every",
    ) -> None:
        del output
        super().__init__()
        if hidden % (2 * heads):
            raise ConfigurationError(
                f"The option 'hidden' of the model 'transformer' is {hidden}: with {heads} heads, whose dimensions are "
                f"turned in pairs, give a multiple of {2 * heads}."
            )
        units = 4 * hidden if gate == "squared-relu" else 8 * round(hidden / 3)
        self.embedding = nn.Embedding(input_size, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, units, gate) for _ in range(layers))
        self.norm, self.readout = nn.RMSNorm(hidden), nn.Linear(hidden, output_size, bias=False)
        self._shorten_branches()

    @torch.no_grad()
    def _shorten_branches(self) -> None:
        """Divide what every branch adds to the stream by the root of their number, as GPT-2 does."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.div_(math.sqrt(2 * len(self.blocks)))

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (B, T) to scores (B, T, K) of what follows each."""
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))
