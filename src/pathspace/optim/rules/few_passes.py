"""Rules of torch that step in fewer passes over their tensors than torch's own code takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from pathspace.rescaling.optimizer_states import Group


class FewPasses(Optimizer):
    """Stands in front of a rule of torch among the bases of a class, and takes its place on the CPU.

    Attributes:
        torch_only: options with which torch's own code takes the step.
    """

    torch_only: tuple[str, ...]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, if there is one."""
        if not all(map(self._is_plain, self.param_groups)):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self._take(group)
        return loss

    def _is_plain(self, group: Group) -> bool:
        """Return whether all that a group asks for is done here, on the CPU."""
        on_cpu = all(p.device.type == "cpu" for p in group["params"])
        return on_cpu and not any(group[name] for name in self.torch_only)

    @abstractmethod
    def _take(self, group: Group) -> None:
        """Take a step of a group."""
