"""Node-wise rescaling: another member of the class of weights that compute the same function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_weights
from pathspace.network.network import current_values
from pathspace.rescaling.optimizer_states import MovedStates, Optimizers


@tables_on_the_cpu()
@torch.no_grad()
def rescale_(network: Network, factors: Tensor, optimizer: Optimizers | None = None) -> None:
    """Multiply what goes into each unit class c by s_c and divide what comes out by s_c, in place.

    Every weight u -> v becomes (s_v / s_u) w, with s = 1 at inputs, bias node and outputs. The
    function of the network stays the same, exactly so for powers of two.

    With ``optimizer`` this can be done at any step of training. What an optimizer keeps of
    gradients is then what it would keep had it seen the rescaled network all along: averages of
    gradients are divided by (s_v / s_u), averages of their squares by its square, and so on for the
    rules of ``torch.optim`` except LBFGS and Adafactor. The next steps of the library's invariant
    optimizers are what they would have been without the rescaling, for powers of two bitwise; those
    of plain rules are not, since they depend on the scales. Gradients in ``.grad`` move too.

    Args:
        network: a traced network, whose model's parameters are changed.
        factors: s, one positive finite number per unit class, shape ``[num_classes]``.
        optimizer: the optimizer that trains the network, or all of them in a list.

    Raises:
        ValueError: ``factors`` has another shape, or an element that is not positive and finite;
            the optimizer has no parameter of the network, or keeps something of which it is not
            known how it follows.
        OverflowError: a weight would overflow, or become zero; nothing has been changed then.
        RuntimeError: a parameter of the model was replaced after tracing.
        TypeError: ``network`` is no traced network, ``factors`` are no numbers, or ``optimizer`` is
            none of torch's interface.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> ps.rescaling.rescale_(ps.trace(model, torch.zeros(1, 4)), torch.tensor([2.0, 0.5]))
    """
    expect_weights(network)
    current_values(network)
    states = MovedStates(network, optimizer)
    try:
        factors = torch.as_tensor(factors)
    except (TypeError, RuntimeError):
        raise TypeError(
            f"factors must be a tensor of {network.num_classes} numbers, one per class, got {type(factors).__name__}"
        ) from None
    if factors.shape != (network.num_classes,):
        raise ValueError(
            f"factors has shape {tuple(factors.shape)}, expected ({network.num_classes},): one per class"
        )
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise ValueError("factors must be positive and finite")
    changed: dict[str, Tensor] = {}
    for name, parameter in network.parameters.items():
        new, lost = rescaled(network, name, factors)
        if bool(lost.any()):
            raise OverflowError(
                f"rescaling would overflow or underflow '{name}' in {parameter.dtype}; "
                "use factors nearer to one, or float64"
            )
        changed[name] = new
    replace_(network, changed)
    states.follow(factors.double())


@torch.no_grad()
def replace_(network: Network, changed: Mapping[str, Tensor]) -> None:
    """Write rescaled values into the parameters of a network."""
    network.rescalings["done"] += 1
    for name, new in changed.items():
        network.parameters[name].copy_(new)
    torch.clear_autocast_cache()  # it holds the weights before in half precision


def rescaled(network: Network, name: str, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return a parameter as a rescaling would make it, and which of its weights would overflow or become zero."""
    parameter = network.parameters[name].detach()
    scale = network.edge_factors(name, factors.to(parameter.device, torch.float64))
    new = (parameter.double() * scale).to(parameter.dtype)
    lost = ((new == 0) != (parameter == 0)) | ~torch.isfinite(new)
    return new, lost & torch.isfinite(parameter)


@tables_on_the_cpu()
def random_rescale_(
    network: Network,
    low: float = 1e-3,
    high: float = 1e3,
    powers_of_two: bool = False,
    generator: torch.Generator | None = None,
    optimizer: Optimizers | None = None,
) -> Tensor:
    """Rescale a network by random factors, log-uniform in [low, high]; the function stays the same.

    Args:
        network: a traced network, whose model's parameters are changed.
        low: smallest factor.
        high: largest factor.
        powers_of_two: use whole powers of two only. Then nothing is rounded, and an invariant
            method gives bitwise the same outputs from both members of the class.
        generator: source of the random numbers; torch's default if None.
        optimizer: see :func:`rescale_`.

    Returns:
        The factors, float64, shape ``[num_classes]``.

    Raises:
        ValueError: not 0 < low <= high, or no power of two lies between them.
        OverflowError: see :func:`rescale_`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> ps.rescaling.random_rescale_(ps.trace(model, torch.zeros(1, 4)), 0.5, 2.0).shape
        torch.Size([2])
    """
    expect_weights(network)
    if not 0 < low <= high < float("inf"):
        raise ValueError(f"need 0 < low <= high, got low={low}, high={high}")
    ends = torch.log2(torch.tensor([low, high], dtype=torch.float64))
    device = "cpu" if generator is None else generator.device
    if powers_of_two:
        first = int(torch.ceil(ends[0]))
        last = int(torch.floor(ends[1]))
        if first > last:
            raise ValueError(f"no power of two lies between {low} and {high}")
        exponents = torch.randint(
            first, last + 1, (network.num_classes,), generator=generator, device=device
        ).double()
    else:
        u = torch.rand(network.num_classes, dtype=torch.float64, generator=generator, device=device)
        exponents = float(ends[0]) + float(ends[1] - ends[0]) * u
    factors = torch.exp2(exponents)
    rescale_(network, factors, optimizer)
    return factors
