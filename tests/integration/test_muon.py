"""Muon through all three processes: torch's bits in long runs, and what others have got wrong without an error."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import muon
import pytest
import torch
from helpers import OnMasters, differing, opened, train, weights
from small_models import language_loss, llama, perceptron, square_loss
from test_k_invariance import train_and_prepare
from torch import Tensor, nn

import hytrain
from hytrain.checks import muon_groups
from hytrain.errors import CapacityError, ConfigError, UnsupportedError, UsageError
from hytrain.memory import visits
from protocol.placement import CPU, GPU, VISIT

NUMBERS: dict[str, Any] = {"lr": 0.02, "adamw": {"lr": 1e-2}}
PLACEMENTS: list[dict[str, Any]] = [{"k": 0.0}, {"k": 0.5}, {"k": 1.0}, {"policy": "random"}]


class Muon(OnMasters, muon.Muon):
    """torch's own, with AdamW for the biases."""


class Shapes(nn.Module):
    """Linear layers whose weights have the same number of elements, and other shapes: flat, tall, by columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(32, 64), (64, 32), (32, 128), (128, 16), (16, 256), (256, 32)]
        self.blocks = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.blocks[1].weight = nn.Parameter(self.blocks[1].weight.detach().T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_hundred_steps(dtype: torch.dtype) -> None:
    theirs = perceptron(dtype=dtype)
    train(theirs, Muon(theirs, **NUMBERS), range(200), square_loss)
    expected = weights(theirs)
    for placement in PLACEMENTS:
        ours = perceptron(dtype=dtype)
        with opened(hytrain.Muon, ours, **NUMBERS, **placement) as opt:
            train_and_prepare(ours, opt, 200, square_loss)
            assert opt.statistics().moved > 100 or placement.get("policy") != "random"
            opt.synchronize()
            assert differing(weights(ours), expected) == [], placement


@pytest.mark.parametrize(
    "rounded", [{"state_dtype": "float8"}, {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}], ids=str
)
def test_rounded_state_is_the_same_everywhere(rounded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    found = []
    for options in ({}, *({**rounded, **placement} for placement in PLACEMENTS)):
        model = perceptron(dtype=torch.bfloat16)
        with opened(hytrain.Muon, model, **NUMBERS, **options) as opt:
            train(model, opt, range(20), square_loss)
            opt.synchronize()
            found.append(weights(model))
    exact, first, *others = found
    assert differing(exact, first) != []
    assert [differing(first, other) for other in others] == [[] for _ in others]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_matrices_keep_their_shape(placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are larger than a layer, come in pieces, or lie by columns."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    ours, theirs = Shapes(), Shapes()
    train(theirs, Muon(theirs, lr=0.02), range(8), square_loss)
    with opened(hytrain.Muon, ours, lr=0.02, **placement) as opt:
        train(ours, opt, range(8), square_loss)
        assert {entry["momentum_buffer"].shape for entry in opt.state_dict()["state"].values()} == {
            parameter.shape for parameter in ours.parameters()
        }
        assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_update_is_orthogonal(placement: dict[str, Any]) -> None:
    """And not the momentum's own: all directions of the batch's eight gradients alike, whatever their size."""
    model = perceptron()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    with opened(hytrain.Muon, model, lr=0.01, weight_decay=0.0, **placement) as opt:
        for step in range(3):
            before = [matrix.detach().clone() for matrix in matrices]
            (1e3 * square_loss(model, step)).backward()
            opt.step()
            opt.zero_grad()
            opt.synchronize()
            for old, new in zip(before, matrices, strict=True):
                singular = torch.linalg.svdvals(new.detach() - old)
                assert 0.004 < singular[7] and singular[0] < 0.013, singular


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_one_update_for_all_micro_batches(placement: dict[str, Any]) -> None:
    """Whose gradients are summed before: torch's bits for the sum, and one momentum of it."""
    ours, theirs = perceptron(), perceptron()
    reference = Muon(theirs, **NUMBERS)
    with opened(hytrain.Muon, ours, grad_accumulation=3, **NUMBERS, **placement) as opt:
        for step in range(5):
            for model in (ours, theirs):
                for part in range(3):
                    (square_loss(model, 3 * step + part) / 3).backward()
            for optimizer in (opt, reference):
                optimizer.step()
                optimizer.zero_grad()
        entries = opt.state_dict()["state"]
        assert {int(entry["step"]) for entry in entries.values()} == {5}
        for index, entry in reference.state_dict()["state"].items():
            for name in entry.keys() - {"step"}:
                assert torch.equal(entries[index][name], entry[name])
        assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_clipped_as_by_torch(placement: dict[str, Any]) -> None:
    ours, theirs = perceptron(), perceptron()
    reference = Muon(theirs, **NUMBERS)
    with opened(hytrain.Muon, ours, max_grad_norm=0.05, **NUMBERS, **placement) as opt:
        for step in range(12):
            square_loss(theirs, step).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            reference.step()
            reference.zero_grad()
            train(ours, opt, [step], square_loss)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("overlap", [True, False])
def test_an_autocast_around_the_update_changes_nothing(overlap: bool) -> None:
    """torch's bits, from gradients that were made in it."""
    ours, theirs = perceptron(), perceptron()
    reference = Muon(theirs, **NUMBERS)
    with opened(hytrain.Muon, ours, k=0.5, overlap=overlap, **NUMBERS) as opt:
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                square_loss(theirs, step).backward()
                square_loss(ours, step).backward()
                opt.step()
            reference.step()
            reference.zero_grad()
            opt.zero_grad()
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


def test_which_parameters_are_muons_and_where_they_are() -> None:
    """The matrices of blocks. A layer with one of them is never the CPU's."""
    model = llama()
    of_muon, others = ([name for name, _ in group["params"]] for group in muon_groups(model))
    assert len(of_muon) == 3 * 7 and all("proj" in name for name in of_muon)
    assert {name.rpartition(".")[2] for name in others} == {"weight"} and {*others} >= {"lm_head.weight"}
    with opened(hytrain.Muon, model, k=0.0, **NUMBERS) as opt:
        train(model, opt, range(2), language_loss)
        engine = opt._engine
        placements = {layer.name: layer.life.placement for layer in engine._layers}
        blocks = {name for name in placements if name.startswith("model.layers")}
        assert {placements[name] for name in blocks} == {VISIT}
        assert {placements[name] for name in placements.keys() - blocks} == {CPU}
        groups = opt.state_dict()["param_groups"]
        assert [group["use_muon"] for group in groups] == [True, False]
        assert "momentum" not in groups[1] and "betas" not in groups[0]
    with opened(hytrain.Muon, llama(), k=1.0, **NUMBERS) as opt:
        assert {layer.life.placement for layer in opt._engine._layers} == {GPU}


def test_memory_for_undone_updates_is_taken_only_on_demand() -> None:
    """What the CPU cannot update is not undone."""
    for options, banks in (({}, 1), ({"speculate": True}, 2)):
        with opened(hytrain.Muon, perceptron(), k=0.0, max_grad_norm=1.0, **NUMBERS, **options) as opt:
            assert {layer.layout.banks for layer in opt._engine._layers} == {banks}


def test_gradients_of_what_must_visit_need_no_host_memory() -> None:
    """Where there is room for weights and momentum, 8 bytes per fp32 parameter, a run begins."""
    numel = sum(parameter.numel() for parameter in Shapes().parameters())
    with opened(hytrain.Muon, Shapes(), k=0.0, host_memory_limit=10 * numel) as opt:
        assert {layer.life.placement for layer in opt._engine._layers} == {VISIT}
    with pytest.raises(CapacityError, match="raise k, free host memory"):
        hytrain.Muon(Shapes(), k=0.0, host_memory_limit=6 * numel)


def test_torchs_state_and_groups_go_on(tmp_path: Path) -> None:
    """Of `torch.optim.Muon` alone, whose groups say nothing of AdamW; and files keep hyperparameters."""
    ours, theirs = Shapes(), Shapes()
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02)
    train(theirs, reference, range(4), square_loss)
    ours.load_state_dict(theirs.state_dict())
    with opened(hytrain.Muon, ours, ours.parameters(), k=0.0, lr=1.0) as opt:
        opt.load_state_dict(reference.state_dict())
        opt.save(tmp_path)
        opt.load(tmp_path)
        assert opt.param_groups[0]["ns_coefficients"] == reference.param_groups[0]["ns_coefficients"]
        train(ours, opt, range(4, 8), square_loss)
        train(theirs, reference, range(4, 8), square_loss)
        reference.load_state_dict(deepcopy(opt.state_dict()))
        train(ours, opt, range(8, 12), square_loss)
        opt.synchronize()
    train(theirs, reference, range(8, 12), square_loss)
    assert differing(weights(ours), weights(theirs)) == []


def test_a_group_that_comes_later_and_one_that_changes_its_algorithm() -> None:
    model = perceptron()
    *blocks, last = model
    first = [parameter for block in blocks for parameter in block.parameters()]
    matrices = [parameter for parameter in first if parameter.ndim == 2]
    rest = [parameter for parameter in first if parameter.ndim != 2]
    groups = [{"params": matrices}, {"params": rest, "use_muon": False, "lr": 0.5}]
    with opened(hytrain.Muon, model, groups, k=0.3, **NUMBERS) as opt:
        assert [group["lr"] for group in opt.param_groups] == [0.02, 0.5]
        train(model, opt, range(2), square_loss)
        with pytest.raises(ConfigError, match=r"a parameter of shape \(32,\) is in a group of Muon"):
            opt.add_param_group({"params": list(last.parameters())})
        opt.add_param_group({"params": list(last.parameters()), "use_muon": False})
        train(model, opt, range(2, 4), square_loss)
        kept = opt.state_dict()
        kept["param_groups"][2] = {**kept["param_groups"][2], "use_muon": True}
        with pytest.raises(ConfigError, match="in the loaded state, use_muon of a parameter group has changed"):
            opt.load_state_dict(
                {**kept, "param_groups": [{**kept["param_groups"][0], **g} for g in kept["param_groups"]]}
            )
        opt.param_groups[0].update(use_muon=False, betas=(0.9, 0.99), maximize=False)
        with pytest.raises(UsageError, match="use_muon of a parameter group has changed"):
            train(model, opt, [4], square_loss)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr, eps, momentum and weight_decay must not be negative"),
        ({"ns_steps": 2.5}, "ns_steps is 2.5: a whole number of Newton-Schulz steps, from 0 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\): three numbers"),
        ({"adjust_lr_fn": "spectral"}, 'adjust_lr_fn is \'spectral\': "original", "match_rms_adamw", or None'),
        ({"adamw": {"momentum": 0.9}}, "adamw has 'momentum': it takes lr, betas, eps, weight_decay, maximize"),
        ({"adamw": {"betas": (0.9, 1.0)}}, "lr, eps and weight_decay must not be negative, betas lie in"),
        ({"backend": "deepspeed"}, 'backend "deepspeed" has only AdamW and Adam'),
    ],
    ids=str,
)
def test_what_muon_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hytrain.Muon(perceptron(), **options)


def test_which_groups_cannot_be() -> None:
    model = perceptron()
    with pytest.raises(ConfigError, match=r"a parameter of shape \(32,\) .* put it into a group with use_muon=False"):
        hytrain.Muon(model.parameters())
    with pytest.raises(ConfigError, match="use_muon is 1: True or False"):
        hytrain.Muon([{"params": list(model.parameters()), "use_muon": 1}])
    with pytest.raises(UnsupportedError, match="hytrain.Muon has no option 'maximize'"):
        hytrain.Muon([{"params": [model[0][0].weight], "maximize": True}])
    with pytest.raises(
        ConfigError, match="Linear has no repeated blocks with matrices for Muon: name them in param_groups"
    ):
        hytrain.Muon(nn.Linear(4, 4))
