"""Several backwards to one step: the bits of summing in float32 first, whoever owns the layers."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from budgets import budgeted
from helpers import adamw, differing, same_as_torch, state, weights
from small_models import language_loss, llama, perceptron, square_loss
from torch import Tensor, nn

import hytrain
from hytrain.errors import UsageError
from hytrain.memory.clock import Stream
from hytrain.memory.transfer import Transfer
from hytrain.model.trained import TrainedLayer

STEPS, MICRO = 12, 3


def micro_batches(model: nn.Module, opt: Any, fewer_in_step: int | None = None) -> None:
    """The last micro-batches of an epoch are often fewer."""
    for step in range(STEPS):
        for index in range(MICRO - (step == fewer_in_step)):
            (square_loss(model, step * MICRO + index) / MICRO).backward()
        opt.step()
        opt.zero_grad()


@functools.cache
def summed_first(dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights after the same steps with one backward each, whose gradients are replaced by the sums."""
    model, sums = perceptron(dtype=dtype), dict[str, Tensor]()
    with adamw(model, k=0.0, overlap=False) as opt:
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: sums[name].to(gradient.dtype))
        for step in range(STEPS):
            opt.synchronize()
            twin = perceptron(dtype=dtype)
            twin.load_state_dict(weights(model))
            for index in range(MICRO):
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
def test_the_bits_of_summing_first(dtype: torch.dtype) -> None:
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
            micro_batches(model, opt)
            assert differing(state(opt) | weights(model), expected) == [], options


def test_as_torch_accumulates_in_float32() -> None:
    """And what lies between the first forward and the last backward is measured as that."""

    def run(model: nn.Module, opt: Any) -> None:
        micro_batches(model, opt, fewer_in_step=3)
        if isinstance(opt, hytrain.AdamW):
            assert 0.0 < opt._engine._meter.middle_s < opt.statistics().step_s * STEPS

    same_as_torch(run, grad_accumulation=MICRO, k=0.5, max_grad_norm=1e3)


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


def test_the_updates_begin_in_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves before it, and everything has left when it returns. A third is refused."""
    model, sent = perceptron(), list[Any]()
    with adamw(model, updates="backward", grad_accumulation=2, k=0.0) as opt:
        post = opt._session._link.post

        def listen(to: str, message: Any, **conditions: Any) -> None:
            sent.append(message)
            post(to, message, **conditions)

        monkeypatch.setattr(opt._session._link, "post", listen)
        square_loss(model, 0).backward()
        assert sent == []
        square_loss(model, 1).backward()
        assert sum(isinstance(message, functools.partial) for message in sent) == len(opt._session.layers)
        with pytest.raises(UsageError, match=r"Call opt\.step\(\) after each backward"):
            square_loss(model, 2).backward()


@pytest.mark.parametrize("place", ["device", "host"])
def test_zero_grad_drops_what_was_summed(place: str) -> None:
    """The next step is a graph's two backwards, which double its gradient."""

    def run(model: nn.Module, opt: Any) -> None:
        square_loss(model, 99).backward()
        opt.zero_grad()
        loss = square_loss(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()

    same_as_torch(run, grad_accumulation=2, accumulate_on=place, k=0.5)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["", "clips"])
def test_sums_in_host_memory_come_back_layer_by_layer(
    options: dict[str, Any], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where groups name parameters in another order, and where every second layer stays on the device.

    No more than two layers' gradients are on their way out.
    """
    model, happened = perceptron(depth=8), list[str]()
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (2, 1)]
    with (
        budgeted() as budget,
        adamw(model, groups, updates="step", grad_accumulation=2, accumulate_on="host", k=0.0, **options) as opt,
    ):
        layers, send = opt._session.layers, opt._engine._trip.send

        def told(layer: TrainedLayer, stream: Stream) -> Transfer | None:
            copy = send(layer, stream)
            if layer.lid % every:
                return None
            assert copy is not None
            happened.append(f"{layer.lid} leaves")
            return replace(copy, done=Mock(synchronize=lambda: happened.append(f"{layer.lid} has left")))

        monkeypatch.setattr(opt._engine._trip, "send", told)
        for index in range(2):
            square_loss(model, index).backward()
        budget.begin()
        before = budget.used
        opt.step()
        assert budget.peak - before < 2 * max(sum(weights.nbytes for weights in layer.weights) for layer in layers)
    hosted = range(0, 8, every)
    later = [what for before, lid in pairwise(hosted) for what in (f"{lid} leaves", f"{before} has left")]
    assert happened == ["0 leaves", *later]


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
            (language_loss(model, 2 * step) / 2).backward()
            opt.param_groups[0]["lr"] = 1e-2 / (step + 1)
            with torch.no_grad():
                language_loss(model, 99)
            (language_loss(model, 2 * step + 1) / 2).backward()
            opt.step()
            opt.zero_grad()

    same_as_torch(run, llama, grad_accumulation=2, k=0.4)


def test_a_loop_that_begins_to_accumulate_has_its_sums_where_all_have_room() -> None:
    """So far, those of the GPU's layers had room on the device, beside the planes of the others."""
    asked = list[tuple[torch.dtype, bool]]()

    def run(model: nn.Module, opt: Any) -> None:
        if ours := isinstance(opt, hytrain.AdamW):
            choose = opt._accumulation._choose

            def note(dtype: torch.dtype, beside_planes: bool) -> Any:
                asked.append((dtype, beside_planes))
                return choose(dtype, beside_planes)

            opt._accumulation._choose = note
        for number in range(8):
            for part in range(1 if number < 5 else 3):
                with opt.no_sync() if ours and number >= 5 and part < 2 else nullcontext():
                    square_loss(model, 3 * number + part).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()

    same_as_torch(run, functools.partial(perceptron, dtype=torch.float32), k=0.5)
    assert asked == [(torch.float32, True), (torch.float32, False)]
