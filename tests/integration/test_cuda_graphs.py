"""Blocks that are CUDA graphs: they read new weights, their gradients are summed, and no bit differs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import adamw, differing, weights
from small_models import perceptron
from torch import Tensor, nn

import hytrain
from hytrain.errors import UsageError


class Graphed(torch.autograd.Function):
    """Does what a graph's replay does: every backward writes its gradients into the same memory. Named as torch's."""

    @staticmethod
    def forward(ctx: Any, memory: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.memory = memory
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for memory, value in zip(ctx.memory, (gradient.T @ x, gradient.sum(0)), strict=True):
            memory.copy_(value)
        return None, gradient @ weight, *(memory.detach() for memory in ctx.memory)


class Block(nn.Linear):
    """Its gradients are in memory of its own, or in the same memory each time."""

    def __init__(self, replays: bool) -> None:
        super().__init__(24, 24)
        self.replays, self.memory = replays, [torch.zeros(24, 24), torch.zeros(24)]

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory if self.replays else [torch.zeros_like(each) for each in self.memory]
        result: Tensor = Graphed.apply(memory, x, self.weight, self.bias)
        return result


def blocks(replays: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(replays) for _ in range(3)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.sin()).square().mean()


@pytest.mark.spawns
@pytest.mark.parametrize("place", ["device", "host"])
def test_gradients_in_the_same_memory_are_summed(place: Any) -> None:
    """In float32, where the first one would be its own sum."""
    results = []
    for replays in (False, True):
        model = blocks(replays)
        with adamw(model, k=0.5, grad_accumulation=3, accumulate_on=place) as opt:
            for step in range(4):
                for part in range(3):
                    loss_of(model, 3 * step + part).backward()
                opt.step()
                opt.zero_grad()
        results.append(weights(model))
    assert differing(*results) == []


class BehindAGraph(nn.Module):
    """Blocks that can be offloaded, behind a graph that is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Block(True), perceptron(width=24)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.first(x))
        return result


@pytest.mark.spawns
def test_a_graph_that_is_offloaded_is_refused() -> None:
    model = blocks(True)
    with (
        adamw(model, k=0.0, offload_weights=1.0),
        pytest.raises(UsageError, match=r"0.weight is a CUDA graph.*: leave out off"),
    ):
        loss_of(model, 0)
    model = BehindAGraph()
    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        loss_of(model, 0).backward()
        opt.step()
        assert opt.statistics().offloaded_layers


# ---------------------------------------------------------------- on a GPU

WARNS = pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream does not match:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
)
OPTIONS: list[dict[str, Any]] = [
    {"k": 0.0},
    {"k": 1.0},
    {"k": 0.0, "visit": 1.0},
    {"policy": "random"},
    {"k": 0.0, "max_grad_norm": 0.5},
    {"k": 0.4, "grad_accumulation": 3},
]


def wide(dtype: torch.dtype) -> nn.Module:
    """Blocks whose update takes one CPU thread longer than the GPU needs for a step."""
    torch.manual_seed(0)
    ends = [(1024, 4096), (4096, 1024)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*ends[0]), nn.GELU(), nn.Linear(*ends[1])) for _ in range(4))).to(
        "cuda", dtype
    )


def trained(model: nn.Module, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    opt, generator = hytrain.AdamW(model, lr=1e-3, threads=1, **options), torch.Generator("cuda").manual_seed(1)
    try:
        for _ in range(8):
            for _ in range(options.get("grad_accumulation", 1)):
                x = torch.randn(32, 1024, device="cuda", dtype=dtype, generator=generator)
                (model(x) - x.sin()).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        return {name: value.cpu() for name, value in model.state_dict().items()}
    finally:
        opt.close()


@WARNS
@pytest.mark.gpu
@pytest.mark.spawns
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graphed_blocks_have_the_bits_of_eager_ones(options: dict[str, Any], dtype: torch.dtype) -> None:
    graphed = wide(dtype)
    samples = tuple((torch.randn(32, 1024, device="cuda", dtype=dtype, requires_grad=True),) for _ in graphed)
    torch.cuda.make_graphed_callables(tuple(graphed), samples)
    assert differing(trained(wide(dtype), dtype, **options), trained(graphed, dtype, **options)) == []


@WARNS
@pytest.mark.gpu
@pytest.mark.spawns
def test_graphed_blocks_that_are_offloaded_are_refused() -> None:
    graphed = wide(torch.bfloat16)
    samples = tuple((torch.randn(32, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True),) for _ in graphed)
    torch.cuda.make_graphed_callables(tuple(graphed), samples)
    with pytest.raises(UsageError, match="is a CUDA graph"):
        trained(graphed, torch.bfloat16, k=0.0, offload_weights=1.0)


@pytest.mark.gpu
@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("options", [*OPTIONS[:4], {"k": 0.0, "offload_weights": 1.0}], ids=str)
def test_blocks_compiled_to_graphs_have_the_same_bits_whoever_owns_a_layer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("torch._inductor.config"), "compile_threads", 1)
    results = []
    for mode, chosen in (("default", {"k": 1.0}), ("reduce-overhead", options)):
        model = wide(torch.bfloat16)
        for block in model:
            block.compile(mode=mode, dynamic=False)
        results.append(trained(model, torch.bfloat16, **chosen))
    assert differing(*results) == []
