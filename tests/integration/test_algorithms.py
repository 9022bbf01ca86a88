"""The optimizers besides AdamW, through all three processes: torch's bits for each placement, and their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import lion
import muon
import pytest
import torch
from helpers import OnMasters, adamw, differing, keep, opened, seed, state, train, weights
from programs import train_recipe, write_recipe
from small_models import Poisoned, perceptron, square_loss, vectors
from test_k_invariance import train_and_prepare
from test_saving import checkpoint, dcp_load, dcp_save
from torch import nn
from variants import every_second, slow

import hytrain
from hytrain.errors import ConfigError, UsageError
from hytrain.memory import visits
from hytrain.optim import Optimizer
from hytrain.step import offload
from protocol.rules import MOMENT_PLANES

STEPS = 16
WIDTH = 35
PLACEMENTS: list[dict[str, Any]] = [
    {"k": 0.0},
    {"k": 0.4, "threads": 2},
    {"k": 1.0},
    {"k": 0.2, "visit": 0.5},
    {"k": 0.0, "visit": 0.5, "offload_weights": 1.0},
    {"k": "auto", "visit": "auto"},
    {"policy": "random", "offload_weights": "auto"},
    {"k": 0.0, "overlap": False, "backend": "torch"},
]


class Adam(OnMasters, torch.optim.Adam):
    """torch's fused one in this process."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]] | None = None, **options: Any) -> None:
        super().__init__(model, groups, **options, fused=True)


class SGD(OnMasters, torch.optim.SGD):
    """torch's own in this process."""


class Lion(OnMasters, lion.Lion):
    """As published."""


class Muon(OnMasters, muon.Muon):
    """torch's own, with AdamW for the biases."""


class Case(NamedTuple):
    """An optimizer of HyTrain, what it is compared with, and hyperparameters for both."""

    kind: type[Optimizer]
    reference: type[OnMasters]
    options: dict[str, Any]


CASES = {
    "adam": Case(hytrain.Adam, Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": Case(hytrain.SGD, SGD, {"lr": 0.3, "weight_decay": 0.01}),
    "momentum": Case(hytrain.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": Case(hytrain.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "lion": Case(hytrain.Lion, Lion, {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "muon": Case(hytrain.Muon, Muon, {"lr": 0.02, "adamw": {"lr": 1e-2, "weight_decay": 0.3}}),
}
of_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
DTYPES = (torch.float32, torch.bfloat16)


def of_width(model: nn.Module, step: int) -> torch.Tensor:
    x = vectors(step, WIDTH, next(model.parameters()).dtype)
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def weights_and_second_moments(model: nn.Module, opt: Any) -> dict[str, torch.Tensor]:
    """In the latter a rounding shows at once."""
    entries = opt.state_dict()["state"].items()
    return weights(model) | {str(i): it["exp_avg_sq"].clone() for i, it in entries if "exp_avg_sq" in it}


@every_second(dtype=DTYPES, case=CASES)
def test_every_placement_gives_the_references_bits(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an odd width, most tensors do not fill torch's vectors."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)
    theirs = perceptron(WIDTH, dtype=dtype)
    reference = case.reference(theirs, **case.options)
    train(theirs, reference, range(STEPS), of_width)
    expected = weights_and_second_moments(theirs, reference)
    for placement in PLACEMENTS:
        ours = perceptron(WIDTH, dtype=dtype)
        with opened(case.kind, ours, **case.options, **placement) as opt:
            train_and_prepare(ours, opt, STEPS, of_width)
            assert opt.statistics().moved > 3 or placement.get("policy") != "random"
            assert differing(weights_and_second_moments(ours, opt), expected) == [], placement


@every_second(
    kept={
        "float16": (torch.float16, {"loss_scale": 64.0}),
        "lone": (torch.bfloat16, {"master_dtype": "bfloat16"}),
        "bfloat16": (torch.bfloat16, {"state_dtype": "bfloat16", "max_grad_norm": 0.1}),
        "float32": (torch.float32, {"state_dtype": "bfloat16", "grad_accumulation": 2}),
        "float8": (torch.bfloat16, {"state_dtype": "float8"}),
    },
    case=CASES,
)
def test_the_bits_do_not_depend_on_the_placement(
    case: Case, kept: tuple[torch.dtype, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what torch has no counterpart of: rounded state, scaled losses, norms that are HyTrain's."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    found, (dtype, more) = [], kept
    for placement in (PLACEMENTS[i] for i in (0, 2, 4, 6, 7)):
        model = perceptron(dtype=dtype)
        with opened(case.kind, model, **case.options, **more, **placement) as opt:
            for step in range(STEPS):
                seed(step)
                for part in range(more.get("grad_accumulation", 1)):
                    opt.scale(square_loss(model, 2 * step + part)).backward()
                opt.step()
                opt.zero_grad()
            found.append(state(opt) | weights(model))
        assert differing(found[-1], found[0]) == [], placement


@of_case
@pytest.mark.parametrize("k", [0.0, 0.5])
def test_a_skipped_step_is_no_first_one(case: Case, k: float) -> None:
    """The first gradients are not finite, so the second step is the first update: torch's bits without the others."""
    poison = {0: (0, math.nan), 7: (3, math.inf)}
    theirs, ours = Poisoned(perceptron(), {}), Poisoned(perceptron(), poison)
    reference = case.reference(theirs, **case.options)
    train(theirs, reference, [step for step in range(STEPS) if step not in poison], square_loss)
    with opened(case.kind, ours, k=k, on_nonfinite="skip", **case.options) as opt:
        for ours.step in range(STEPS):
            train(ours, opt, [ours.step], square_loss)
        opt.synchronize()
        assert opt.skipped_steps == len(poison)
        assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("form", ["files", "dictionary"])
@every_second(dtype=DTYPES, case=CASES)
def test_saved_and_resumed(case: Case, dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    whole, first, second = (perceptron(dtype=dtype) for _ in range(3))
    with opened(case.kind, whole, k=0.5, **case.options) as opt:
        train(whole, opt, range(STEPS), square_loss)
        expected = state(opt) | weights(whole)
    with opened(case.kind, first, k=0.0, **case.options) as opt:
        train(first, opt, range(STEPS // 2), square_loss)
        load = keep(opt, form, tmp_path / "state")
    second.load_state_dict(first.state_dict())
    with opened(case.kind, second, k=1.0, **case.options) as opt:
        load(opt)
        train(second, opt, range(STEPS // 2, STEPS), square_loss)
        assert differing(state(opt) | weights(second), expected) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@of_case
def test_a_distributed_checkpoint_goes_on(case: Case, tmp_path: Path) -> None:
    whole, second = perceptron(dtype=torch.bfloat16), perceptron(dtype=torch.bfloat16)
    with opened(case.kind, whole, k=0.5, **case.options) as opt:
        train(whole, opt, range(STEPS // 2), square_loss)
        dcp_save(whole, opt, tmp_path, {})
        train(whole, opt, range(STEPS // 2, STEPS), square_loss)
        expected = state(opt) | weights(whole)
    with opened(case.kind, second, k=0.0, **case.options) as opt:
        dcp_load(second, opt, tmp_path, {})
        train(second, opt, range(STEPS // 2, STEPS), square_loss)
        assert differing(state(opt) | weights(second), expected) == []


@of_case
def test_the_reference_goes_on_from_our_state_and_we_from_its(case: Case) -> None:
    whole, ours, theirs = (perceptron() for _ in range(3))
    train(whole, case.reference(whole, **case.options), range(STEPS), square_loss)
    reference = case.reference(theirs, **case.options)
    with opened(case.kind, ours, k=0.5, **case.options) as opt:
        train(ours, opt, range(STEPS // 3), square_loss)
        opt.synchronize()
        theirs.load_state_dict(ours.state_dict())
        reference.load_state_dict(opt.state_dict())
    train(theirs, reference, range(STEPS // 3, 2 * STEPS // 3), square_loss)
    ours.load_state_dict(theirs.state_dict())
    plain = reference.state_dict()
    for entry in plain["state"].values():
        if "exp_avg_sq" not in entry:  # AdamW alone counts
            entry.pop("step")
    with opened(case.kind, ours, k=0.0, **case.options) as opt:
        opt.load_state_dict(plain)
        train(ours, opt, range(2 * STEPS // 3, STEPS), square_loss)
        opt.synchronize()
        assert differing(weights(ours), weights(whole)) == []


def test_groups_with_and_without_momentum_and_a_frozen_parameter(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        *first, last = model.parameters()
        return [{"params": first, "momentum": 0.9}, {"params": [last]}]

    def run(model: nn.Module, opt: Any, saved: Path | None = None) -> None:
        weight = next(iter(model.parameters()))
        train(model, opt, range(6), square_loss)
        weight.requires_grad_(False)
        train(model, opt, range(6, 9), square_loss)
        if saved is not None:
            opt.save(saved)
            opt.load(saved)
        weight.requires_grad_(True)
        train(model, opt, range(9, 15), square_loss)

    theirs, ours = perceptron(), perceptron()
    run(theirs, torch.optim.SGD(groups(theirs), lr=0.1))
    with opened(hytrain.SGD, ours, groups(ours), lr=0.1, k=0.3) as opt:
        run(ours, opt, tmp_path)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
        entries = opt.state_dict()["state"]
        assert [("momentum_buffer" in entry) for entry in entries.values()] == [True] * 7 + [False]


def test_a_group_that_comes_later_may_have_the_first_momentum() -> None:
    def run(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        *_, last = model
        train(model, opt, range(4), square_loss)
        opt.add_param_group({"params": list(last.parameters()), "momentum": 0.9, "weight_decay": 0.1})
        train(model, opt, range(4, 10), square_loss)

    def others(model: Any) -> list[nn.Parameter]:
        return [parameter for block in model[:-1] for parameter in block.parameters()]

    theirs, ours = perceptron(), perceptron()
    run(theirs, torch.optim.SGD(others(theirs), lr=0.1))
    with opened(hytrain.SGD, ours, others(ours), lr=0.1, k=0.3) as opt:
        run(ours, opt)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


def test_momentum_neither_comes_nor_goes(tmp_path: Path) -> None:
    """Its buffer would have to. Other changes are as in torch."""
    plain, theirs, model = perceptron(), perceptron(), perceptron()
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    with opened(hytrain.SGD, plain, lr=0.1) as opt:
        opt.save(tmp_path / "plain")
        kept = opt.state_dict()
    with opened(hytrain.SGD, model, lr=0.1, momentum=0.9) as opt:
        for step, momentum in enumerate((0.9, 0.5, 0.99)):
            reference.param_groups[0]["momentum"] = opt.param_groups[0]["momentum"] = momentum
            train(theirs, reference, [step], square_loss)
            train(model, opt, [step], square_loss)
        opt.synchronize()
        assert differing(weights(model), weights(theirs)) == []
        with pytest.raises(ConfigError, match="in the loaded state, the momentum"):
            opt.load_state_dict(kept)
        with pytest.raises(ConfigError, match="in the loaded state, the momentum"):
            opt.load(tmp_path / "plain")
        opt.param_groups[0]["momentum"] = 0.0
        with pytest.raises(UsageError, match="the momentum of a parameter group has changed to 0 or from 0"):
            train(model, opt, [3], square_loss)


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(tmp_path)
        kept = opt.state_dict()
    with opened(hytrain.SGD, perceptron(), lr=0.1, momentum=0.9) as opt:
        with pytest.raises(ConfigError, match=r"is hytrain\.AdamW's, not hytrain\.SGD's"):
            opt.load(tmp_path)
        with pytest.raises(ConfigError, match="is not SGD's: it has step, exp_avg, exp_avg_sq"):
            opt.load_state_dict(kept)
    with opened(hytrain.Lion, perceptron(), lr=1e-3) as opt:  # which has an exp_avg, too
        with pytest.raises(ConfigError, match="is not Lion's: it has step, exp_avg, exp_avg_sq"):
            opt.load_state_dict(kept)


@pytest.mark.parametrize("optimizer", ["sgd", slow("lion"), slow("muon")])
def test_a_recipe_resumes_with_its_optimizer(optimizer: str, tmp_path: Path) -> None:
    """And not with another one."""
    numbers = {"momentum": 0.9, "lr": 0.1} if optimizer == "sgd" else {"betas": [0.8, 0.95], "lr": 1e-3}
    recipe = write_recipe(tmp_path, train={"optimizer": optimizer, "steps": 20, **numbers})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_recipe(recipe, whole)
    train_recipe(recipe, parts, "train.stop_at=10", "optimizer.k=1")
    train_recipe(recipe, parts, "train.resume=latest", "optimizer.k=0")
    found = checkpoint(parts, 20)
    assert differing(found, checkpoint(whole, 20)) == []
    moments = {name.partition(":")[2].partition(".")[0] for name in found} & {*MOMENT_PLANES}
    expected = {"sgd": {"momentum_buffer"}, "lion": {"exp_avg"}, "muon": {*MOMENT_PLANES}}
    assert moments == expected[optimizer]
    with pytest.raises(ConfigError, match=r"is hytrain\.(SGD|Lion|Muon)'s, not hytrain\.AdamW's"):
        default = ["train.optimizer=adamw", "train.momentum=0", "train.betas=[0.9, 0.95]"]
        train_recipe(recipe, parts, "train.resume=latest", "train.steps=30", *default)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"betas": (0.9, 1.0)}, "lr and weight_decay must not be negative, betas lie in"),
        ({"betas": 0.9}, "betas is 0.9: two numbers"),
        ({"weight_decay": -1.0}, "lr and weight_decay must not be negative"),
    ],
    ids=str,
)
def test_what_lion_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hytrain.Lion(perceptron(), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": -0.1}, "lr, momentum and weight_decay must not be negative"),
        ({"nesterov": True}, "nesterov=True needs a momentum above 0, and no dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True needs"),
        ({"nesterov": 1}, "nesterov is 1: True or False"),
        ({"dampening": "none"}, "dampening is 'none': a number"),
        ({"backend": "deepspeed"}, 'backend "deepspeed" has only AdamW and Adam'),
    ],
    ids=str,
)
def test_what_sgd_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hytrain.SGD(perceptron(), **options)
