"""The systems that `benchmarks.step` times: each builds its optimizer and returns the function of one step.

forward-backward   no update at all: the limit
no-offload         bfloat16 parameters, fp32 masters and moments on the device, torch's fused AdamW
torch              torch's fused AdamW on the parameters themselves (float32, the CPU's plain loop)
hytrain            `hytrain.AdamW` at a given k, or "auto"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]
Closer = Callable[[], dict[str, Any]]
LR: Final = 1e-4


def forward_backward(model: nn.Module, **options: Any) -> tuple[Step, Closer]:
    """Forward and backward, gradients dropped."""

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model, batch)
        loss.backward()
        model.zero_grad()
        return loss

    return step, dict


def no_offload(model: nn.Module, **options: Any) -> tuple[Step, Closer]:
    """Everything on the device, with fp32 masters: what HyTrain is measured against."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model, batch)
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad()
        return loss

    return step, dict


def torch_adamw(model: nn.Module, **options: Any) -> tuple[Step, Closer]:
    """The loop that HyTrain replaces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, dict


def hytrain_adamw(model: nn.Module, *, k: float | str, run_dir: str, **options: Any) -> tuple[Step, Closer]:
    """The same loop with HyTrain's optimizer."""
    import hytrain

    optimizer = hytrain.AdamW(model, lr=LR, k=k, run_dir=run_dir)

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def close() -> dict[str, Any]:
        optimizer.synchronize()
        statistics = optimizer.statistics()
        return {"k": round(statistics.k, 4), "stall_ms": round(statistics.stall_s * 1e3, 2), "moved": statistics.moved}

    return step, close


SYSTEMS: Final[dict[str, Callable[..., tuple[Step, Closer]]]] = {
    "forward-backward": forward_backward,
    "no-offload": no_offload,
    "torch": torch_adamw,
    "hytrain": hytrain_adamw,
}


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss
