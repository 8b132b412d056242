"""The recurrent CNN of S19: convolutional layers with a recurrent block each, unfolded a few times.

S19: "Path Space for Recurrent Neural Networks with ReLU Activations", 2019 (anonymous submission);
the network goes back to M. Liang and X. Hu, "Recurrent Convolutional Neural Network for Object
Recognition", 2015.

Letters: B batch, C channels, t unfoldings.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pathspace.metrics.checks import check_counts
from pathspace.nn.stacked_rnn import check_probabilities


class RecurrentConvolution(nn.Module):
    """A convolution of the input and one of its own output, unfolded a few times.

        h_0 = relu(BN_0(W u)),  h_t = relu(BN_t(W u + R h_{t-1}))  for t = 1..unfoldings

    All unfoldings share the weights W and R. Each has a BatchNorm of its own, because the
    statistics differ from one to the next.

    In path geometry BatchNorm's running mean is a constant, so the sums before it have the fixed
    scale 1, and the scale of a channel after it sits in its gain and shift. The channels of h_0 to
    h_{t-1} are read by one matrix R, so a channel is one unit class over these unfoldings; those of
    the last one are classes of their own.

    Args:
        channels: C of the input.
        maps: C of the output.
        unfoldings: t, how often the output is fed back.
        kernel: width of both convolutions, odd.

    Raises:
        ValueError: a size is not positive, or the kernel is even.

    Example:
        >>> import torch, pathspace as ps
        >>> ps.nn.RecurrentConvolution(1, 8, unfoldings=2)(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 8, 28, 28])
    """

    def __init__(self, channels: int, maps: int, *, unfoldings: int = 3, kernel: int = 3) -> None:
        super().__init__()
        check_counts(channels=channels, maps=maps, unfoldings=unfoldings, kernel=kernel)
        if kernel % 2 == 0:
            raise ValueError(
                f"kernel is {kernel}: give an odd number, so that sizes stay as they are"
            )
        self.forth = nn.Conv2d(channels, maps, kernel, padding=kernel // 2, bias=False)
        self.back = nn.Conv2d(maps, maps, kernel, padding=kernel // 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(maps) for _ in range(unfoldings + 1))

    def forward(self, u: Tensor) -> Tensor:
        """Map images (B, C, height, width) to maps of the same height and width."""
        entering = self.forth(u)
        h = F.relu(self.norms[0](entering))
        for norm in self.norms[1:]:
            h = F.relu(norm(entering + self.back(h)))
        return h


class RecurrentCNN(nn.Module):
    """A classifier of images made of recurrent convolutions.

    Max-pooling (3 x 3, stride 2) follows the first and the third layer; the largest value of each
    map of the last layer enters a linear classifier. The paper names five layers of 32, 64, 96
    (MNIST) or 96, 128, 160 maps (CIFAR; 196 in another place), three unfoldings and BatchNorm
    (appendix A.3). Kernels, pooling and the place of dropout follow Liang and Hu (2015). The
    paper's dropout of 0.5 stands before its last linear layer alone; here it acts between layers.

    Args:
        channels: of the images: 1 for grey ones.
        classes: how many there are.
        maps: feature maps of every layer.
        layers: recurrent convolutions, one on top of the other.
        unfoldings: see :class:`RecurrentConvolution`.
        dropout: probability of leaving out a value between two layers.

    Raises:
        TypeError: the probability is no number.
        ValueError: a size is not positive, or the probability is out of [0, 1).

    Example:
        >>> import torch, pathspace as ps
        >>> model = ps.nn.RecurrentCNN(1, 10, maps=8, layers=2, unfoldings=2)
        >>> model(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 10])
        >>> network = ps.trace(model, torch.zeros(1, 1, 28, 28))  # a class per map while it is fed back, another after
        >>> network.num_classes
        32
        >>> optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        maps: int = 96,
        layers: int = 5,
        unfoldings: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_counts(
            channels=channels, classes=classes, maps=maps, layers=layers, unfoldings=unfoldings
        )
        check_probabilities(dropout=dropout)
        self.dropout = dropout
        self.layers = nn.ModuleList(
            RecurrentConvolution(maps if layer else channels, maps, unfoldings=unfoldings)
            for layer in range(layers)
        )
        self.readout = nn.Linear(maps, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, height, width) to scores (B, classes)."""
        for number, layer in enumerate(self.layers):
            images = layer(images)
            if number in (0, 2):
                images = F.max_pool2d(images, 3, stride=2, padding=1)
            if self.dropout and number < len(self.layers) - 1:
                images = F.dropout(images, self.dropout, self.training)
        return self.readout(images.amax((2, 3)))
