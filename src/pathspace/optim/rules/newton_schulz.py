"""Orthogonalization of matrices by the Newton-Schulz iteration of ``torch.optim.Muon``, those of one shape together.

Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in
neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# those of torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# On a CPU, smaller sides up to this gain by a batch: six of 64 x 64 take a tenth of the time, two of
# 256 x 256 two thirds. Two of 768 x 768 take a fifth more (one thread, AVX-512).
_LARGEST_IN_BATCHES = 256


def orthogonalized_all(matrices: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Orthogonalize matrices, those of one shape in one call; see :func:`orthogonalized`.

    Args:
        matrices: of two dimensions.
        counts: iterations for each of them.

    Returns:
        A matrix for each, of the same type.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device, counts[i]), []).append(i)
    results: dict[int, Tensor] = {}
    for (shape, dtype, device, count), places in alike.items():
        if len(places) > 1 and (device.type != "cpu" or min(shape) <= _LARGEST_IN_BATCHES):
            batch = torch.stack([matrices[i] for i in places])
            results.update(zip(places, orthogonalized(batch, count).to(dtype), strict=True))
        else:
            for i in places:
                results[i] = orthogonalized(matrices[i], count).to(dtype)
    return [results[i] for i in range(len(matrices))]


def orthogonalized(matrices: Tensor, count: int) -> Tensor:
    """Return nearly U V^T of every matrix U S V^T, by the Newton-Schulz iteration of ``torch.optim.Muon``.

    Args:
        matrices: shape ``[n, m]`` or ``[N, n, m]``.
        count: number of iterations.

    Returns:
        In bfloat16, of the same shape.
    """
    a, b, c = _COEFFICIENTS
    # torch has one name for a product of matrices and another for one of batches
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(count):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalization_cost(shape: Sequence[int], count: int) -> int:
    """Return the multiplications of an orthogonalization, and one for its start."""
    small, large = sorted(shape)
    # x x^T, its square, and the product of that and x
    return 1 + count * small * small * (2 * large + small)
