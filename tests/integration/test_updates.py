"""`updates`: when a step's updates begin. In `step()`, every loop has torch's bits, whatever it does with gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import test_fifty_practices as practices
import torch
from helpers import LR, Reference, adamw, differing, late_weights, same, same_as_torch, seed, train, weights
from small_models import perceptron, square_loss
from torch import Tensor, nn

STEPS = 5

Step = Callable[[nn.Module, Any, int], object]

#: What a loop does in a step, by what HyTrain says of it; "" if its updates may begin in backward.
LOOPS: dict[str, tuple[str, Step]] = {}


def loop(seen: str) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        LOOPS[step.__name__] = seen, step
        return step

    return add


def backward(model: nn.Module, number: int) -> float:
    seed(number)
    loss = square_loss(model, number)
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@loop("")
def plain(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    opt.step()
    opt.zero_grad()
    return loss


@loop("uses gradients")
def clips(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    opt.step()
    opt.zero_grad()
    return norm


@loop("uses gradients")
def logs_norms(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norms = [gradient.norm().item() for gradient in gradients(model)]
    opt.step()
    opt.zero_grad()
    return norms


@loop("uses gradients")
def adds_noise(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    for gradient in gradients(model):
        gradient.add_(torch.randn(gradient.shape))
    opt.step()
    opt.zero_grad()
    return number


@loop("uses weights")
def sums(model: nn.Module, opt: Any, number: int) -> object:
    losses = [backward(model, 3 * number + part) for part in range(3)]
    opt.step()
    opt.zero_grad()
    return losses


@loop("uses weights")
def evaluates(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    with torch.no_grad():
        seen = square_loss(model, 99).item()
    opt.step()
    opt.zero_grad()
    return seen


@loop("uses weights")
def logs_weights(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norms = [parameter.norm().item() for parameter in model.parameters()]
    opt.step()
    opt.zero_grad()
    return norms


@loop("sets hyperparameters")
def sets_the_rate(model: nn.Module, opt: Any, number: int) -> object:
    """At first to what it is."""
    backward(model, number)
    for group in opt.param_groups:
        group["lr"] = LR * (1.0 - 0.1 * number)
    opt.step()
    opt.zero_grad()
    return number


@loop("drops gradients")
def drops_steps(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    if number % 2:
        opt.step()
    opt.zero_grad()
    return loss


@loop("drops gradients")
def drops_a_gradient(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    next(model.parameters()).grad = None
    opt.step()
    opt.zero_grad()
    return loss


@loop("uses gradients")
def keeps_tensors(model: nn.Module, opt: Any, number: int) -> object:
    opt.zero_grad(set_to_none=False)
    loss = backward(model, number)
    opt.step()
    return loss


@loop("sets or keeps gradients")
def steps_twice(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    opt.step()
    opt.step()
    opt.zero_grad()
    return loss


@loop("uses gradients")
def scales(model: nn.Module, opt: Any, number: int) -> object:
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2))
    scaler.scale(square_loss(model, number) * (1e38 if number == 2 else 1.0)).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return scaler.get_scale()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    with late_weights() as gate:
        yield gate


@pytest.mark.parametrize("place", ["device", "host", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_has_the_bits_of_torch(
    name: str, dtype: torch.dtype, place: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is said to begin in step() or learned. Gradients of bfloat16 are added up as by torch."""
    if name == "scales" and dtype is not torch.float32:
        pytest.skip("a GradScaler finds no gradients in the reference, whose masters have them")
    seen, step = LOOPS[name]

    def run(model: nn.Module, opt: Any) -> object:
        found = [step(model, opt, number) for number in range(STEPS)]
        gate.set()
        return found

    for options in ({"updates": "step", "k": 0.0}, {"updates": "step", "k": 1.0}, {"updates": "auto", "k": 0.5}):
        caplog.clear()
        with caplog.at_level("INFO", logger="hytrain.step.timing"):
            same_as_torch(run, lambda: perceptron(dtype=dtype), accumulate_on=place, **options)
        told = f"this loop {seen} before" if seen else "this loop does nothing between backward and step()"
        assert [told in line for line in caplog.messages] == [True] * (options["updates"] == "auto")


@pytest.mark.parametrize("name", [name for name, row in practices.ROWS.items() if row.refusal and not row.options])
def test_what_is_refused_in_backward_is_done_in_step(
    name: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(practices, "adamw", partial(adamw, updates="step"))  # of a second optimizer
    row = practices.ROWS[name]
    model = row.make()
    reference = Reference(model, row.groups_of(model), lr=LR)
    expected = row.run(model, reference), train(model, reference, range(50, 52), square_loss)
    ours = row.make()
    with adamw(ours, row.groups_of(ours), k=0.5, updates="step") as opt:
        try:
            found = row.run(ours, opt), train(ours, opt, range(50, 52), square_loss)
            opt.synchronize()
            assert same(found, expected)
            assert differing(weights(ours), weights(model)) == []
        finally:
            gate.set()
