"""torch's Muon for matrices and its fused AdamW for the rest, in one: what HyTrain's Muon is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """`groups` have parameters of both kinds: the first one of `param_groups` has the matrices, the other the rest."""

    def __init__(self, groups: Iterable[dict[str, Any]], adamw: Mapping[str, Any] = {}, **options: Any) -> None:
        given: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        rest = [parameter for parameter in given if parameter.ndim != 2]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon([parameter for parameter in given if parameter.ndim == 2], **options),
            *([torch.optim.AdamW(rest, fused=True, **adamw)] if rest else []),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
