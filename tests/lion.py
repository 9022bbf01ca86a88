"""Lion in plain torch: its published steps (Chen et al., 2023), one operator each. What HyTrain's is compared with."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """On one device, in the parameters' dtype."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                direction = average * beta1 + gradient * (1 - beta1)
                parameter.add_(direction.sign(), alpha=-lr)
                average.mul_(beta2).add_(gradient, alpha=1 - beta2)
