"""Sparse mixtures of experts: a skipped expert is left alone as by torch, and fused experts are cut into pieces.

Experts that are modules of their own have no gradient in a step that skips them. Fused ones, of which a tensor has all
that a block has, get zeros there: for torch and for HyTrain these are gradients like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LR, Reference, adamw, differing, keep, same_as_torch, same_bits, seed, state, train, weights
from small_models import language_loss, mixtral, mixture, routed_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from variants import every_second

import hytrain
from hytrain.memory import visits
from hytrain.model import layers
from hytrain.step import offload

STEPS = 10
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the CPU": {"k": 0.0},
    "a part": {"k": 0.5},
    "all on the GPU": {"k": 1.0},
    "all visit the GPU": {"k": 0.0, "visit": 1.0},
    "offloaded": {"k": 0.0, "offload_weights": 1.0},
    "offloaded, visiting": {"k": 0.0, "visit": 0.5, "offload_weights": 1.0},
    "moving": {"k": "auto", "policy": "random", "offload_weights": "auto"},
    "without overlap": {"k": 0.5, "overlap": False},
}
each_placement = pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS.keys())
DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits in many pieces, and one offloaded block at a time."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)


def counts(opt: torch.optim.Optimizer) -> dict[int, int]:
    """The number of updates that each parameter has had."""
    return {index: int(entry["step"]) for index, entry in opt.state_dict()["state"].items()}


@every_second(dtype=DTYPES, options=PLACEMENTS)
def test_skipped_experts_are_left_alone(options: dict[str, Any], dtype: torch.dtype) -> None:
    """With weight decay, an update by a gradient of zeros would show; and so would a step that is counted."""

    def run(model: nn.Module, opt: Any) -> Any:
        losses = train(model, opt, range(STEPS), routed_loss)
        assert 0 < min(counts(opt).values()) < STEPS / 2 < max(counts(opt).values()) == STEPS
        return losses, counts(opt)

    same_as_torch(run, lambda: mixture(dtype), weight_decay=0.1, **options)


def test_an_expert_that_no_step_has_chosen_yet_is_saved_and_begins_later(tmp_path: Path) -> None:
    """At another k. Its update is the first, as with torch, where it has no state before."""

    def loss(model: nn.Module, step: int) -> Tensor:
        """One row, always the same: two experts of a block alone are trained in the first steps."""
        x = vectors(0 if step < 4 else step)[:1]
        found: Tensor = (model(x) - x.sin()).square().mean()
        return found

    ours, theirs = mixture(), mixture()
    reference = Reference(theirs, lr=LR)
    train(theirs, reference, range(12), loss)
    for form in ("files", "dictionary"):
        model = mixture()
        with adamw(model, k=0.0) as opt:
            train(model, opt, range(4), loss)
            assert len(counts(opt)) < len(list(model.parameters())), "most experts have no state"
            load = keep(opt, form, tmp_path / form)
            before = weights(model)
        ours = mixture()
        ours.load_state_dict(before)
        with adamw(ours, k=0.7) as opt:
            load(opt)
            train(ours, opt, range(4, 12), loss)
            assert counts(opt) == counts(reference)
            opt.synchronize()
            assert differing(weights(ours), weights(theirs)) == []


def clipped_as_by_torch(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], limit: float, **options: Any
) -> None:
    """Some steps are clipped. The norm is of the parameters that have gradients."""
    ours, theirs, clipped = make(), make(), 0
    reference = torch.optim.AdamW(theirs.parameters(), lr=LR, fused=True)
    with adamw(ours, max_grad_norm=limit, **options) as opt:
        for step in range(STEPS):
            train(ours, opt, [step], loss)
            seed(step)
            loss(theirs, step).backward()
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
            reference.step()
            reference.zero_grad()
            assert opt.grad_norm is not None and torch.equal(opt.grad_norm, norm)
            clipped += bool(norm > limit)
        assert counts(opt) == counts(reference)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
    assert 0 < clipped < STEPS


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    "options", [{"k": 0.0}, {"k": 0.5}, {"k": 0.0, "visit": 1.0}, {"k": 0.0, "offload_weights": 1.0}]
)
def test_clipping_with_skipped_experts(options: dict[str, Any], speculate: bool) -> None:
    clipped_as_by_torch(mixture, routed_loss, 0.17, speculate=speculate, **options)


@each_dtype
def test_experts_that_only_some_micro_batches_choose(dtype: torch.dtype) -> None:
    """An expert's sum has the gradients of those that chose it; one that none chose is skipped."""

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        for step in range(8):
            for index in range(2):
                (routed_loss(model, 2 * step + index) / 2).backward()
            opt.step()
            opt.zero_grad()
        assert min(counts(opt).values()) < 8

    choices: list[dict[str, Any]] = [
        {"k": 0.0},
        {"k": 1.0, "accumulate_on": "host"},
        {"k": 0.0, "visit": 1.0},
        {"policy": "random", "offload_weights": "auto"},
    ]
    same_bits(run, lambda: mixture(dtype), *({"grad_accumulation": 2, **options} for options in choices))
    if dtype is torch.float32:
        same_as_torch(run, mixture, grad_accumulation=2, k=0.5)


@pytest.mark.parametrize("placement", ["a part", "offloaded, visiting", "moving"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_fused_experts(implementation: str, placement: str) -> None:
    def run(model: nn.Module, opt: Any) -> list[float]:
        return train(model, opt, range(STEPS), language_loss)

    same_as_torch(run, lambda: mixtral(torch.float32, implementation), weight_decay=0.1, **PLACEMENTS[placement])


@each_placement
def test_fused_experts_in_pieces(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's bound that is less than a block's experts: as of 134 M elements, which those of 10 B exceed."""
    monkeypatch.setattr(layers, "MIN_PIECE_NUMEL", 1 << 11)
    monkeypatch.setattr(layers, "MAX_PIECE_NUMEL", 1 << 12)

    def run(model: nn.Module, opt: Any) -> list[float]:
        losses = train(model, opt, range(STEPS), language_loss)
        if isinstance(opt, hytrain.AdamW):
            cut = [s for layer in opt._session.layers for s in layer.segments if "experts" in s.spec.name]
            assert len(cut) == 3 * (8 + 4), "of each block 32768 and 16384 elements"
        return losses

    same_as_torch(run, lambda: mixtral(torch.bfloat16), weight_decay=0.1, **options)


def test_clipping_of_fused_experts() -> None:
    clipped_as_by_torch(mixtral, language_loss, 1.1, k=0.4)


def test_clipping_of_fused_experts_in_pieces_does_not_depend_on_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of a tensor in pieces may differ from torch's in the last bit."""
    monkeypatch.setattr(layers, "MIN_PIECE_NUMEL", 1 << 11)
    monkeypatch.setattr(layers, "MAX_PIECE_NUMEL", 1 << 12)
    choices = ({"k": 0.0, "speculate": True}, {"k": 0.5, "speculate": False}, {"k": 0.0, "visit": 1.0}, {"k": 1.0})
    run = lambda model, opt: train(model, opt, range(STEPS))  # noqa: E731
    same_bits(run, mixtral, *({"max_grad_norm": 1.1, **options} for options in choices))


def test_recomputed_experts() -> None:
    """Under activation checkpointing, each block's router chooses again in backward, and the weights come again."""

    def loss(model: nn.Module, step: int) -> Tensor:
        x = vectors(step)[:3].requires_grad_()
        y = x
        for block in model.children():
            y = checkpoint(block, y, use_reentrant=False)
        found: Tensor = (y - x.sin()).square().mean()
        return found

    for options in ({"k": 0.5}, {"k": 0.0, "visit": 0.5, "offload_weights": 1.0}):
        same_as_torch(lambda model, opt: (train(model, opt, range(STEPS), loss), counts(opt)), mixture, **options)


def test_a_deferred_mixture_of_experts() -> None:
    """Built without memory, it trains as one that was built at once."""
    results = []
    for build in (lambda make: make(), hytrain.deferred_init):
        model = build(mixtral)
        with adamw(model, k=0.3) as opt:
            train(model, opt, range(4))
            results.append(state(opt) | weights(model))
    assert differing(*results) == []
