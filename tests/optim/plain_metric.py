"""The metric D of the optimizers in kappa's geometry, one obvious line after the other, with brute-force kappa."""

import copy

import torch

import pathspace as ps
from cases import oracle, trace


class PlainMetric:
    """D = (kappa + damping m r^2) / c, fresh for the first ``refresh_every`` steps and then every so many, with r =
    (weight in the balanced network) / (weight) at the first step.

    m = mean of kappa / r^2, now or at the first step, and c = m or 1, or for "network" one mean
    over all parameters. With a power p other than 1, D = (D of p = 1)^p (r^2)^(1 - p). In the frame
    "weights" r = 1.
    """

    def __init__(self, case, model, options):
        self.case, self.model = case, model
        self.options = {
            "refresh_every": 10,
            "second_term": False,
            "damping": 0.0 if options.get("normalization") == "none" else 0.1,
            "normalization": "refreshed",
            "power": 1.0,
            "frame": "balanced",
        } | options
        self.steps = 0
        self.values = self.gauge = self.means = None

    def advance(self):
        """D for the next step, parameter name -> tensor."""
        every = self.options["refresh_every"]
        if self.steps < every or self.steps % every == 0:
            with torch.enable_grad():
                self.refresh()
        self.steps += 1
        return self.values

    def balancing(self):
        """Elementwise ratio of the balanced network's weights to these."""
        if self.options["frame"] == "weights":
            return {name: torch.ones_like(p) for name, p in self.model.named_parameters()}
        balanced = copy.deepcopy(self.model)
        ps.rescaling.balance_(trace(self.case, balanced))
        return {
            name: torch.nan_to_num(balanced.get_parameter(name) / p, nan=1.0).detach()
            for name, p in self.model.named_parameters()
        }

    def refresh(self):
        known = oracle(self.case, self.model)
        kappa = known.kappa() if self.options["second_term"] else known.kappa1()
        kind = self.options["normalization"]
        if self.gauge is None:
            self.gauge = self.balancing()
        seen = {name: value / self.gauge[name] ** 2 for name, value in kappa.items()}
        if self.means is None or kind in ("refreshed", "network"):
            self.means = {name: value.mean() for name, value in seen.items()}
        normalizers = dict.fromkeys(kappa, 1.0) if kind == "none" else self.means
        if kind == "network":
            normalizers = dict.fromkeys(
                kappa, torch.cat([value.flatten() for value in seen.values()]).mean()
            )
        damping = self.options["damping"]
        power = self.options["power"]
        self.values = {}
        for name, value in kappa.items():
            damped = (value + damping * self.means[name] * self.gauge[name] ** 2) / normalizers[
                name
            ]
            self.values[name] = damped**power * self.gauge[name] ** (2 * (1 - power))
