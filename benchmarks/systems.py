"""The systems that are timed, by name. Each builds its optimizer and gives the function of one step.

forward-backward   no update at all: the limit
no-offload         bfloat16 parameters, fp32 masters and moments on the device, torch's fused AdamW
torch              torch's fused AdamW on the parameters themselves (float32, the CPU's plain loop)
hytrain            `hytrain.AdamW`: "hytrain:auto", "hytrain:0.2", "hytrain:policy=balance,threads=7"
the others         see `benchmarks.peers`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.loop import LR, Running, Setting, clip, loss_of


@dataclass(frozen=True)
class System:
    """How to build it; the dtype of its parameters if not the job's; whether it needs CUDA."""

    build: Callable[[nn.Module, Setting], Running]
    dtype: str | None = None
    cuda_only: bool = False


def forward_backward(model: nn.Module, setting: Setting) -> Running:
    """Forward and backward, gradients dropped."""

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad()
        return loss

    return Running(step)


def no_offload(model: nn.Module, setting: Setting) -> Running:
    """Everything on the device, with fp32 masters: what HyTrain is measured against."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        clip(masters, setting)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](parameters), masters)
        optimizer.zero_grad()
        return loss

    return Running(step)


def torch_adamw(model: nn.Module, setting: Setting) -> Running:
    """The loop that HyTrain replaces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        clip(model.parameters(), setting)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Running(step)


def hytrain_adamw(model: nn.Module, setting: Setting) -> Running:
    """The same loop with HyTrain's optimizer; with option "serial", nothing overlaps."""
    import hytrain

    options = parse_options(setting.option)
    if setting.clip:
        options["max_grad_norm"] = setting.clip
    optimizer = hytrain.AdamW(model, lr=LR, run_dir=setting.run_dir, **options)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Running(step, optimizer)


def parse_options(text: str) -> dict[str, Any]:
    """Arguments of hytrain.AdamW: "0.2", "auto" are k's, "serial" is overlap=False, others are named."""
    options: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=")
        if word == "serial":
            options["overlap"] = False
        elif not equals:
            options["k"] = word if word == "auto" else float(word)
        elif name == "threads":
            options[name] = int(value)
        elif name == "k":
            options[name] = value if value == "auto" else float(value)
        else:
            options[name] = value
    return options


SYSTEMS: Final[dict[str, System]] = {
    "forward-backward": System(forward_backward),
    "no-offload": System(no_offload),
    "torch": System(torch_adamw),
    "hytrain": System(hytrain_adamw),
    "torchao-fp32": System(peers.torchao, dtype="float32", cuda_only=True),
    "torchao-bf16": System(peers.torchao, cuda_only=True),
    "deepspeed-zero2": System(peers.deepspeed_zero2, cuda_only=True),
    "deepspeed-twinflow": System(peers.deepspeed_twinflow, cuda_only=True),
    "deepspeed-superoffload": System(peers.deepspeed_superoffload, cuda_only=True),
    "deepspeed-zenflow": System(peers.deepspeed_zenflow, cuda_only=True),
    "fsdp2": System(peers.fsdp2, cuda_only=True),
}
