"""Several backwards to one step: the bits of summing in float32 first, whoever owns the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import adamw, differing, llama, perceptron, same_as_torch, same_bits, square_loss, state, weights
from torch import Tensor, nn

import hytrain
from hytrain.errors import UsageError
from hytrain.memory.capacity import GpuMemory
from hytrain.step.sums import DeviceSums, HostSums
from protocol import messages as m

STEPS, MICRO = 12, 3


def micro_batches(model: nn.Module, opt: Any, steps: range, count: int = MICRO) -> None:
    for step in steps:
        for index in range(count):
            (square_loss(model, step * MICRO + index) / MICRO).backward()
        opt.step()
        opt.zero_grad()


def summed_first(dtype: torch.dtype, steps: range = range(STEPS), count: int = MICRO) -> dict[str, Tensor]:
    """Weights after the same steps with one backward each, whose gradients are replaced by the sums."""
    model, sums = perceptron(dtype=dtype), dict[str, Tensor]()
    with adamw(model, k=0.0, overlap=False) as opt:
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: sums[name].to(gradient.dtype))
        twin = perceptron(dtype=dtype)
        for step in steps:
            opt.synchronize()
            with torch.no_grad():
                for copy, parameter in zip(twin.parameters(), model.parameters(), strict=True):
                    copy.copy_(parameter)
            for index in range(count):
                (square_loss(twin, step * MICRO + index) / MICRO).backward()
                for name, parameter in twin.named_parameters():
                    assert parameter.grad is not None
                    sums[name] = parameter.grad.float() if index == 0 else sums[name] + parameter.grad
                    parameter.grad = None
            square_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        return state(opt) | weights(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_summing_first(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = summed_first(dtype)
    choices: list[dict[str, Any]] = [
        {"k": 0.0},
        {"k": 1.0, "accumulate_on": "host"},
        {"policy": "random", "accumulate_on": "host"},
        {"k": 0.5, "overlap": False},
    ]
    for options in choices:
        model = perceptron(dtype=dtype)
        with adamw(model, grad_accumulation=MICRO, **options) as opt:
            micro_batches(model, opt, range(STEPS))
            assert differing(state(opt) | weights(model), expected) == [], options


def test_as_torch_accumulates_in_float32() -> None:
    """And what lies between the first forward and the last backward is measured as that."""

    def run(model: nn.Module, opt: Any) -> None:
        micro_batches(model, opt, range(STEPS))
        if isinstance(opt, hytrain.AdamW):
            assert 0.0 < opt._engine._meter.middle_s < opt.statistics().step_s * STEPS

    same_as_torch(run, grad_accumulation=MICRO, k=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_sync_does_the_same(dtype: torch.dtype) -> None:
    model = perceptron(dtype=dtype)
    with adamw(model, k=0.5) as opt:
        for step in range(STEPS):
            with opt.no_sync():
                for index in range(MICRO - 1):
                    (square_loss(model, step * MICRO + index) / MICRO).backward()
            (square_loss(model, step * MICRO + MICRO - 1) / MICRO).backward()
            opt.step()
            opt.zero_grad()
        assert differing(state(opt) | weights(model), summed_first(dtype)) == []


def test_a_step_that_comes_sooner_updates_with_what_there_is() -> None:
    """The last micro-batches of an epoch are often fewer."""
    model = perceptron()
    with adamw(model, grad_accumulation=MICRO, k=0.5, max_grad_norm=1e3) as opt:
        micro_batches(model, opt, range(4), count=2)
        assert differing(state(opt) | weights(model), summed_first(torch.float32, range(4), count=2)) == []


def test_the_updates_begin_in_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves before it, and everything has left when it returns."""
    model, sent = perceptron(), list[m.Message]()
    with adamw(model, grad_accumulation=2, k=0.0) as opt:
        post = opt._session._link.post

        def listen(to: str, message: m.Message, **conditions: Any) -> None:
            sent.append(message)
            post(to, message, **conditions)

        monkeypatch.setattr(opt._session._link, "post", listen)
        square_loss(model, 0).backward()
        assert sent == [] and all(parameter.grad is None for parameter in model.parameters())
        square_loss(model, 1).backward()
        assert sum(isinstance(message, m.GradReady) for message in sent) == len(opt._session.layers)
        opt.step()


@pytest.mark.parametrize(
    ("place", "free", "kind"),
    [("device", 0, DeviceSums), ("host", None, HostSums), ("auto", None, DeviceSums), ("auto", 0, HostSums)],
)
def test_sums_lie_where_they_were_asked_to(
    place: str, free: int | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where there is room."""
    monkeypatch.setattr(GpuMemory, "free_bytes", lambda self: free)
    model = perceptron()
    with adamw(model, grad_accumulation=2, accumulate_on=place, k=0.5) as opt:
        square_loss(model, 0).backward()
        assert isinstance(opt._session.accumulation._sums, kind)
        opt.step()


@pytest.mark.parametrize("place", ["device", "host"])
def test_zero_grad_drops_what_was_summed(place: str) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        square_loss(model, 99).backward()
        opt.zero_grad()
        for index in range(2):
            square_loss(model, index).backward()
        opt.step()

    same_as_torch(run, grad_accumulation=2, accumulate_on=place, k=0.5)


class Sometimes(nn.Module):
    """Two halves, of which a batch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = perceptron(), perceptron(depth=2)

    def forward(self, x: Tensor, use: str) -> Tensor:
        y: Tensor = x
        for name in use:
            y = getattr(self, name)(y)
        return y


@pytest.mark.parametrize("place", ["device", "host"])
def test_parameters_without_a_gradient_in_some_backwards(place: str) -> None:
    """One that is missing in the last backward is updated by its sum; in all of them, it is left alone."""

    def run(model: nn.Module, opt: Any) -> list[int]:
        for step, pair in enumerate([("a", "b"), ("ab", "a"), ("b", "b"), ("a", "a"), ("ab", "ab")]):
            for index, use in enumerate(pair):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + index))
                model(x, use).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return [int(entry["step"]) for _, entry in sorted(opt.state_dict()["state"].items())]

    same_as_torch(run, Sometimes, grad_accumulation=2, accumulate_on=place, k=0.5)


def test_evaluation_and_schedules_between_backwards() -> None:
    """The learning rate is read in the last backward; a forward without gradients belongs to no step."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(6):
            train_half(model, 2 * step)
            opt.param_groups[0]["lr"] = 1e-2 / (step + 1)
            with torch.no_grad():
                model(input_ids=torch.ones(1, 8, dtype=torch.long))
            train_half(model, 2 * step + 1)
            opt.step()
            opt.zero_grad()

    same_bits(run, llama, {"grad_accumulation": 2, "k": 0.0, "overlap": False}, {"grad_accumulation": 2, "k": 0.4})


def train_half(model: nn.Module, step: int) -> None:
    batch = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step))
    (model(input_ids=batch, labels=batch).loss / 2).backward()


def too_many(model: nn.Module, opt: hytrain.AdamW) -> None:
    for index in range(3):
        square_loss(model, index).backward()
        for parameter in model.parameters():
            parameter.grad = None


def twice_through_a_graph(model: nn.Module, opt: hytrain.AdamW) -> None:
    loss = square_loss(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    loss.backward()


@pytest.mark.parametrize("misuse", [too_many, twice_through_a_graph])
def test_more_backwards_than_announced(misuse: Callable[[nn.Module, hytrain.AdamW], None]) -> None:
    model = perceptron()
    with adamw(model, grad_accumulation=2) as opt:
        with pytest.raises((UsageError, RuntimeError), match="call opt.step|freed|inplace"):
            misuse(model, opt)


def test_a_graph_may_be_used_again_while_gradients_are_summed() -> None:
    """As with torch: two backwards through one graph double its gradient."""

    def run(model: nn.Module, opt: Any) -> None:
        loss = square_loss(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()

    same_as_torch(run, grad_accumulation=2, k=0.5)
