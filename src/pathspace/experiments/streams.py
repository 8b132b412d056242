"""Texts as streams: segments in the order of the text, with the state that the segment before left.

A text of N segments is cut into B streams of S = N // B segments, which are read beside one another:

    step        1      2    ...    S
    stream 1    0      1    ...   S-1
    stream 2    S     S+1   ...  2S-1

A rest of N - B S segments is left out. Gradients end where a segment begins (truncated backpropagation).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Validation and test cut their texts into so few streams that starting them from zero hardly shows.
STREAMS_AT_A_TIME = 10


def contiguous_order(segments: int, streams: int) -> Tensor:
    """Return the numbers of segments, one step of all streams after the other: int64 of shape (S B,).

    Args:
        segments: N.
        streams: B, at most N.
    """
    each = segments // streams
    return torch.arange(streams * each).reshape(streams, each).t().reshape(-1)
