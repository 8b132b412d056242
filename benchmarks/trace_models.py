"""What remains of the symmetry in models as they are in use, and what tracing them costs.

The models have the sizes and the operations of those that they are named after, written out here without weights (on
the meta device). Every one is traced in a process of its own: CPU time of one thread, and how far memory rises. A
weight has a free scale if a unit class stands at either of its ends.

    python benchmarks/trace_models.py
    python benchmarks/trace_models.py --cases gpt2 llama-1b
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import pathspace as ps
from trace_cost import peak, print_each


def heads(x: Tensor, size: int) -> Tensor:
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    made = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return made.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP: of GPT-2, OPT and ViT."""

    def __init__(
        self, width: int, size: int, activation: Callable[[Tensor], Tensor], *, causal: bool
    ) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.size, self.causal, self.activation = size, causal, activation

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t, self.size) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(attention(q, k, v, self.causal))
        return x + self.down(self.activation(self.up(self.between(x))))


class Decoder(nn.Module):
    """GPT-2 and OPT, with tied embeddings."""

    def __init__(self, layers: int, width: int, words: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, 64, activation, causal=True) for _ in range(layers))
        self.after = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.after(x), self.words.weight)


class ViT(nn.Module):
    """Patches, a class token, blocks without a mask."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.places = (nn.Parameter(torch.zeros(1, n, width)) for n in (1, 197))
        self.blocks = nn.ModuleList(Block(width, 64, functional.gelu, causal=False) for _ in range(layers))
        self.after, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x)[:, 0])


class RMSNorm(nn.Module):
    """As Llama writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embeddings, grouped heads, SwiGLU."""

    def __init__(self, width: int, size: int, groups: int, inner: int) -> None:
        super().__init__()
        self.before, self.between, self.size = RMSNorm(width), RMSNorm(width), size
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (heads(f(h), self.size) for f in (self.q, self.k, self.v))
        x = x + self.o(attention(rotated(q), rotated(k), v, causal=True))
        h = self.between(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Llama 3."""

    def __init__(self, layers: int, width: int, size: int, groups: int, inner: int, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width, size, groups, inner) for _ in range(layers))
        self.after = RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.Sequential(nn.Embedding(10_000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 10_000))


def wide_mlp() -> nn.Module:
    layers = [part for _ in range(4) for part in (nn.Linear(16384, 16384), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def words(steps: int = 16) -> Tensor:
    return torch.zeros(2, steps, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt2": (lambda: Decoder(12, 768, 50257, functional.gelu), words),
    "opt-125m": (lambda: Decoder(12, 768, 50272, functional.relu), words),
    "vit-b16": (lambda: ViT(12, 768), lambda: torch.zeros(2, 3, 224, 224)),
    "encoder-6": (encoder, words),
    "mlp-1b": (wide_mlp, lambda: torch.zeros(2, 16384)),
    "llama-1b": (lambda: Llama(16, 2048, 64, 8, 8192, 128256), words),
}


def measure(name: str) -> dict[str, object]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    build, example = MODELS[name]
    with torch.device("meta"):
        model = build()
    before, start = peak(), time.process_time()
    network = ps.trace(model, example())
    seconds = time.process_time() - start
    risen, free = peak() - before, 0  # before the counting, which takes memory, too
    for key, edges in network.edges.items():
        free += int(((edges.target != 0) | (edges.source != 0)).expand(network.parameters[key].shape).sum())
    size = sum(p.numel() for p in model.parameters())
    return {
        "model": name,
        "parameters": size,
        "free": round(free / size, 3),
        "classes": network.num_classes,
        "cuts": len(network.cuts),
        "seconds": round(seconds, 1),
        "megabytes": round(risen),
    }


if __name__ == "__main__":
    print_each(MODELS, measure, __file__, __doc__)
