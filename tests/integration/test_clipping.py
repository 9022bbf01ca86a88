"""Clipping by the global norm, and steps with gradients that are not finite: as clip-then-step, bit for bit."""

from __future__ import annotations

import copy
import functools
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import adamw, differing, records, state, train, wait_for_coordinator, weights
from small_models import Poisoned, perceptron, square_loss
from torch import Tensor, nn
from variants import every_second

import hytrain
from hytrain.errors import NonFiniteGradients
from hytrain.memory.planes import ArenaPlanes
from protocol.handles import layout

STEPS = 48
#: of the steps; the norm that this share of them exceeds is found in an unclipped run
SHARES = (0.0, 0.05, 0.5, 1.0)
#: step -> the parameter whose gradient is not finite there, and how
POISON = {7: (0, math.inf), 18: (5, math.nan), 19: (2, -math.inf), 30: (7, math.nan)}


def make(dtype: torch.dtype, poison: dict[int, tuple[int, float]]) -> Poisoned:
    return Poisoned(perceptron(dtype=dtype), poison)


def train_poisoned(model: Poisoned, opt: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        model.step = step
        train(model, opt, [step], square_loss)


def banks(opt: hytrain.AdamW) -> set[int]:
    """The banks that hold the layers of the CPU now."""
    planes = [layer.planes for layer in opt._session.layers]
    return {bank for known in planes if isinstance(known, ArenaPlanes) for bank in known.banks}


@dataclass
class Run:
    """Final weights and state, every step's norm, how many steps were skipped; which banks held, and the modes."""

    result: dict[str, Tensor]
    norms: list[float]
    skipped: int
    banks: set[int] = field(default_factory=set)
    modes: set[str] = field(default_factory=set)


def run(dtype: torch.dtype, max_norm: float | None, **options: Any) -> Run:
    model, norms, seen = make(dtype, POISON), [], set()
    with adamw(model, max_grad_norm=max_norm, on_nonfinite="skip", **options) as opt:
        for step in range(STEPS):
            train_poisoned(model, opt, step)
            assert opt.grad_norm is not None
            norms.append(float(opt.grad_norm))
            seen |= banks(opt)
            wait_for_coordinator(opt)
        done = Run(state(opt) | weights(model), norms, opt.skipped_steps, seen)
    done.modes = {record["mode"] for record in records(opt, STEPS)}
    return done


@functools.cache
def norms_without_clipping(dtype: torch.dtype) -> list[float]:
    """The finite ones, the largest first."""
    norms = run(dtype, None, k=0.0, overlap=False).norms
    return sorted((norm for norm in norms if math.isfinite(norm)), reverse=True)


@every_second(dtype=[torch.float32, torch.bfloat16], share=SHARES)
def test_every_way_gives_the_bits_of_clip_then_step(share: float, dtype: torch.dtype) -> None:
    """Ahead of the verdict, behind it, and with mode and owners changing at random."""
    ordered = norms_without_clipping(dtype)
    max_norm = ordered[0] * 2 if share == 0 else ordered[round(share * len(ordered)) - 1] * (1 - 1e-4)
    expected = run(dtype, max_norm, k=0.0, overlap=False)
    found = expected.norms
    assert expected.skipped == len(POISON) == sum(not math.isfinite(norm) for norm in found)
    clipped = sum(norm > max_norm for norm in found if math.isfinite(norm)) / len(found)
    assert (clipped > 0) is (share > 0) and (clipped > 0.9) is (share == 1.0)
    speculate, defer = {"k": 0.0, "speculate": True}, {"k": 0.0, "speculate": False}
    for options in (speculate, defer, {"policy": "random"}, *([{"k": 1.0}] if share == 0.5 else [])):
        other = run(dtype, max_norm, **options)
        assert differing(other.result, expected.result) == [], options
        assert [n for n in other.norms if math.isfinite(n)] == [n for n in found if math.isfinite(n)]
        assert other.skipped == len(POISON)
        if options is speculate:
            assert other.banks == ({0, 1} if share < 1.0 else {0}) and other.modes == {"speculate"}
        if options is defer:
            assert other.banks == {0} and other.modes == {"defer"}
        if "policy" in options:
            assert other.modes == {"speculate", "defer"}


class Wide(nn.Module):
    """No block repeats, so its parameters are divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 500), nn.Linear(500, 32)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.up(x).tanh()))


@pytest.mark.parametrize(("pieces", "limit"), [(1, 0.2), (8, 0.8)], ids=["whole parameters", "parameters in pieces"])
def test_fp32_is_clipped_as_by_torch(pieces: int, limit: float) -> None:
    """The norm and the bits of clip_grad_norm_ and torch.optim.AdamW(fused=True); some steps are clipped."""

    ours, clipped = perceptron() if pieces == 1 else Wide(), 0
    theirs = copy.deepcopy(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with adamw(ours, max_grad_norm=limit, k=0.5, speculate=True) as opt:
        assert max(len(known.places) for known in opt._engine._parameters) == pieces
        for step in range(50):
            train(ours, opt, [step], square_loss)
            square_loss(theirs, step).backward()
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
            reference.step()
            reference.zero_grad()
            assert opt.grad_norm is not None and torch.equal(opt.grad_norm, norm)
            clipped += bool(norm > limit)
            assert not any(layer.whole for layer in opt._engine._layers), "memory of gradients"
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == [] and 10 < clipped < 40


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.03, "clip": "per_layer"}], ids=str)
def test_a_skipped_step_leaves_every_bit_and_every_count(options: dict[str, Any]) -> None:
    model = make(torch.bfloat16, {3: (1, math.nan)})
    with adamw(model, on_nonfinite="skip", k=0.5, **options) as opt:
        train_poisoned(model, opt, 0, 1, 2)
        before = state(opt) | weights(model)
        train_poisoned(model, opt, 3)
        assert differing(state(opt) | weights(model), before) == []
        assert opt.skipped_steps == 1
        train_poisoned(model, opt, 4)
        assert differing(state(opt) | weights(model), before) != []


def test_a_nonfinite_gradient_raises_once_and_training_can_go_on() -> None:
    model = make(torch.float32, {1: (0, math.inf), 3: (2, math.nan), 5: (0, math.inf)})
    with adamw(model, on_nonfinite="raise", k=0.0) as opt:
        train_poisoned(model, opt, 0)
        opt.synchronize()
        before = weights(model)
        train_poisoned(model, opt, 1)
        with pytest.raises(NonFiniteGradients, match="a gradient of step 1 was not finite"):
            opt.synchronize()
        opt.synchronize()
        assert differing(weights(model), before) == []
        train_poisoned(model, opt, 2, 3)
        with pytest.raises(NonFiniteGradients, match="a gradient of step 3 was not finite"):
            square_loss(model, 4).backward()
        assert all(parameter.grad is None for parameter in model.parameters()), "the next would be added to it"
        train_poisoned(model, opt, 5)
        with pytest.raises(NonFiniteGradients, match="a gradient of step 4 was not finite"):
            opt.close()


def test_whatever_reads_and_writes_finds_the_bank_that_holds(tmp_path: Path) -> None:
    """Saving, loading and writing from outside, after steps that were not clipped: weights lie in the second bank."""
    results = []
    for options in ({"overlap": False}, {"speculate": True}):
        model = perceptron(dtype=torch.bfloat16)
        with adamw(model, max_grad_norm=100.0, k=0.0, **options) as opt:
            train(model, opt, range(3), square_loss)
            opt.save(tmp_path)
            opt.synchronize()
            assert banks(opt) == {int("speculate" in options)}
            saved = state(opt) | weights(model)
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
            opt.import_weights()
            train(model, opt, [3], square_loss)
            opt.load(tmp_path)
            assert [
                name for name in differing(state(opt), {n: saved[n] for n in state(opt)}) if "remainder" not in name
            ] == []
            train(model, opt, range(4, 6), square_loss)
            results.append(saved | {f"then {name}": tensor for name, tensor in (state(opt) | weights(model)).items()})
    assert differing(*results) == []


def test_without_room_for_a_second_bank_updates_wait(caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    with adamw(model, max_grad_norm=100.0, k=0.0) as opt:
        one, two = (sum(layout(layer.spec, banks).nbytes for layer in opt._session.layers) for banks in (1, 2))
        assert sum(layer.layout.nbytes for layer in opt._session.layers) == two and not caplog.records
    with caplog.at_level(logging.WARNING), adamw(model, max_grad_norm=100.0, k=0.0, host_memory_limit=two - 1) as opt:
        assert sum(layer.layout.nbytes for layer in opt._session.layers) == one
        train(model, opt, range(2), square_loss)
        opt.synchronize()
        assert banks(opt) == {0}
    assert "updates wait for the norm of all gradients" in caplog.text
    with adamw(model, max_grad_norm=100.0, k=0.0, objective="host-memory") as opt:
        assert sum(layer.layout.nbytes for layer in opt._session.layers) == one


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 1.0}, {"policy": "random"}, {"k": 0.5, "overlap": False}])
def test_each_layer_by_itself(options: dict[str, Any], accumulate: int) -> None:
    """As clip_grad_norm_ on each block's parameters; some are clipped and some are not."""
    ours, theirs = perceptron(), perceptron()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    limit, clipped = 0.09 * accumulate, []
    with adamw(ours, max_grad_norm=limit, clip="per_layer", grad_accumulation=accumulate, **options) as opt:
        for step in range(20):
            for index in range(accumulate):
                square_loss(ours, step + 100 * index).backward()
                square_loss(theirs, step + 100 * index).backward()
            opt.step()
            opt.zero_grad()
            clipped += [bool(nn.utils.clip_grad_norm_(block.parameters(), limit) > limit) for block in theirs]
            reference.step()
            reference.zero_grad()
        opt.synchronize()
        assert opt.grad_norm is None and len(opt._session.layers) == len(theirs)
        assert differing(weights(ours), weights(theirs)) == []
    assert 0 < sum(clipped) < len(clipped)
