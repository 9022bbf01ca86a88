"""torch's optimizers, which HyTrain equals in every bit: fused where torch has that, whatever a trainer asks for."""

from __future__ import annotations

from typing import Any

import torch


class Fused(torch.optim.Optimizer):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called for all groups, those of the constructor, too."""
        super().add_param_group({**param_group, "fused": True, "foreach": None})


class AdamW(Fused, torch.optim.AdamW):
    pass


class Adam(Fused, torch.optim.Adam):
    pass


class SGD(torch.optim.SGD):
    pass
