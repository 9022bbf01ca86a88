"""Moments in bfloat16 or float8, and weights without masters: the same bits wherever they are updated and after a
resume, and read in each dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import minifloats
import pytest
import torch
from helpers import adamw, differing, keep, same_as_torch, saved_and_loaded, state, train, weights
from small_models import gpt2, language_loss, llama, square_loss
from test_k_invariance import train_and_prepare
from test_saving import InPieces
from torch import Tensor, nn
from variants import slow

from hytrain.algorithms import ADAMW
from hytrain.checks import check_same
from hytrain.errors import ConfigError
from hytrain.kernels.torch_backend import vectors
from hytrain.memory import visits
from hytrain.model import layers
from hytrain.options import Options
from hytrain.step import offload
from protocol.messages import STATE_DTYPES

LONE: dict[str, Any] = {"master_dtype": "bfloat16"}
SMALL: dict[str, Any] = {"state_dtype": "float8"}
MAKES = [
    (gpt2, torch.float32, {}),
    (llama, torch.bfloat16, {}),
    (llama, torch.bfloat16, LONE),
    (gpt2, torch.float32, SMALL),
    (llama, torch.bfloat16, SMALL | LONE),
]
STEPS = 12
#: All placements, fixed and moving; with a second bank; with other threads; and without overlap.
CHOICES: list[dict[str, Any]] = [
    {"k": 0.3, "threads": 1},
    {"k": 1.0},
    {"k": 0.2, "visit": 0.5, "offload_weights": 1.0},
    {"policy": "random", "offload_weights": "auto"},
    {"k": 0.0, "overlap": False, "backend": "torch"},
]
IDS = ["gpt2-float32", "llama-bfloat16", "llama-lone", "gpt2-float8", "llama-float8-lone"]


def moments(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in of.items() if name.startswith("exp_avg")}


@pytest.mark.parametrize(
    ("make", "dtype", "loss_of", "more"),
    [
        slow(InPieces, torch.float32, square_loss, {}),
        (llama, torch.bfloat16, language_loss, {"max_grad_norm": 0.5}),
        slow(llama, torch.bfloat16, language_loss, {"max_grad_norm": 0.5, **LONE}),
        (InPieces, torch.float32, square_loss, SMALL),
        (llama, torch.bfloat16, language_loss, {"max_grad_norm": 0.5, **SMALL, **LONE}),
    ],
    ids=["in pieces", "llama-bfloat16-clipped", "llama-lone-clipped", "in pieces, float8", "llama-float8-lone-clipped"],
)
def test_the_bits_do_not_depend_on_where_layers_are_updated(
    make: Callable[..., nn.Module],
    dtype: torch.dtype,
    loss_of: Callable[[nn.Module, int], Tensor],
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a whole parameter, and of one that is cut."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)
    found = []
    for options in ({"k": 0.0}, *CHOICES):
        model = make(dtype)
        with adamw(model, **{"state_dtype": torch.bfloat16} | options | more) as opt:
            train_and_prepare(model, opt, STEPS, loss_of)
            found.append(state(opt) | weights(model))
    assert {tensor.dtype for tensor in moments(found[0]).values()} == {torch.bfloat16}
    has_masters = dtype is torch.bfloat16 and "master_dtype" not in more
    assert any(name.startswith("remainder") for name in found[0]) is has_masters
    for options, other in zip(CHOICES, found[1:], strict=True):
        assert differing(other, found[0]) == [], options
    with adamw(model := make(dtype), k=0.0, **more | {"state_dtype": "float32", "master_dtype": "float32"}) as opt:
        train(model, opt, range(STEPS), loss_of)
        exact = weights(model)
    assert differing(exact, {name: found[0][name] for name in exact}), "it is not exact"


def test_nor_do_they_depend_on_how_parameters_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    found, cut = [], []
    for parts in (layers.FALLBACK_LAYERS, 1):
        monkeypatch.setattr(layers, "FALLBACK_LAYERS", parts)
        with adamw(model := InPieces(torch.float32), k=0.5, **SMALL) as opt:
            train(model, opt, range(STEPS), square_loss)
            found.append(state(opt) | weights(model))
            cut.append(len(opt._session.layers))
    assert cut[0] > cut[1] and differing(*found) == []


@pytest.mark.parametrize(("make", "dtype", "more"), MAKES, ids=IDS)
def test_saved_and_resumed(
    make: Callable[..., nn.Module], dtype: torch.dtype, more: dict[str, Any], tmp_path: Path
) -> None:
    whole, first, second = (make(dtype) for _ in range(3))
    more = {"state_dtype": "bfloat16"} | more
    with adamw(whole, k=0.3, **more) as opt:
        train(whole, opt, range(STEPS))
        expected = state(opt)
    with adamw(first, k=0.0, **more) as opt:
        train(first, opt, range(STEPS // 2))
        opt.save(tmp_path)
        kept = opt.state_dict()
    second.load_state_dict(first.state_dict())
    with adamw(second, k=0.7, **more) as opt:
        opt.load_state_dict(kept)
        opt.load(tmp_path)
        train(second, opt, range(STEPS // 2, STEPS))
        assert differing(state(opt) | weights(second), expected | weights(whole)) == []


def test_moments_of_twice_the_width_are_rounded_as_torch_does() -> None:
    """Of a state that was saved of a model in float64, or that NumPy has had."""

    def run(model: Any, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        loaded = copy.deepcopy(opt.state_dict())
        for entry in loaded["state"].values():
            entry |= {name: entry[name].double() / 3 for name in ("exp_avg", "exp_avg_sq")}
        opt.load_state_dict(loaded)
        train(model, opt, range(2, 4), square_loss)

    same_as_torch(run)


@pytest.mark.parametrize("form", ["files", "dictionary"])
@pytest.mark.parametrize(("saved", "own"), list(permutations(STATE_DTYPES, 2)))
def test_a_state_is_read_in_another_dtype_with_a_sentence(
    saved: str, own: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(torch.bfloat16)
    with adamw(model, k=0.5, state_dtype=saved) as opt:
        train(model, opt, range(5))
        opt.save(tmp_path)
        kept, theirs = opt.state_dict(), state(opt)
    with adamw(model, k=0.5, state_dtype=own) as opt:
        if form == "files":
            opt.load(tmp_path)
        else:
            opt.load_state_dict(kept)
        converted = {name: as_read(name, tensor, own) for name, tensor in moments(theirs).items()}
        assert differing(state(opt), theirs | converted) == []
        train(model, opt, range(5, 8))
    said = [message for message in caplog.messages if message.startswith("the moments in ")]
    if form == "dictionary" and saved == "float8":
        saved = "bfloat16"  # which its numbers are in there
    assert len(said) == (own != saved) and all(f"are {saved}: they become {own}" in each for each in said)
    narrower = STATE_DTYPES.index(own) > STATE_DTYPES.index(saved)
    assert all(("rounded to nearest" in each) is narrower for each in said)


def as_read(name: str, saved: Tensor, own: str) -> Tensor:
    """What the state has of a moment after loading: float8 as numbers in bfloat16."""
    if own != "float8":
        return saved.to(getattr(torch, own))
    index = int(name.startswith("exp_avg_sq"))
    nearest = torch.full(saved.shape, 1 << 15)
    return minifloats.rounded(saved.bfloat16().float(), nearest, index).bfloat16()


def test_torch_reads_8_bit_state_as_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """And HyTrain reads it again without a change, and without a sentence."""
    model = gpt2(torch.float32)
    with adamw(model, k=0.5, **SMALL) as opt:
        train(model, opt, range(5))
        kept = opt.state_dict()
        plain = torch.optim.AdamW(model.parameters())
        plain.load_state_dict(kept)
        theirs = {index: entry["exp_avg_sq"] for index, entry in plain.state_dict()["state"].items()}
        expected = {index: entry["exp_avg_sq"].float() for index, entry in kept["state"].items()}
        assert theirs.keys() == expected.keys()
        assert all(torch.equal(theirs[index], expected[index]) for index in theirs)
        before = state(opt)
        opt.load_state_dict(kept)
        assert differing(state(opt), before) == []
    assert not [message for message in caplog.messages if message.startswith("the moments in ")]


@pytest.mark.parametrize("form", ["files", "dictionary"])
@pytest.mark.parametrize(("saved", "own"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_masters_are_left_out_with_a_sentence_or_begun_anew(
    saved: str, own: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights stay as they are; those of a parameter that is frozen meanwhile, too."""
    model = llama(torch.bfloat16)
    first = next(iter(model.parameters()))
    with adamw(model, k=0.5, master_dtype=saved) as opt:
        train(model, opt, range(3))
        first.requires_grad_(False)
        opt._session.rebuild(opt._session.model)
        train(model, opt, range(3, 5))
        load, before, kept = keep(opt, form, tmp_path), weights(model), saved_and_loaded(model.state_dict())
    with adamw(model, k=0.5, master_dtype=own) as opt:
        train(model, opt, range(9, 11))  # so that there are other masters
        load(opt)
        model.load_state_dict(kept)
        found = state(opt)
        remainders = [tensor for name, tensor in found.items() if name.startswith("remainder")]
        assert bool(remainders) is (own == "float32") and not any(tensor.any() for tensor in remainders)
        assert differing(weights(model), before) == [] and len(moments(found)) == 2 * len(before)
        first.requires_grad_(True)
        train(model, opt, range(5, 8))
    said = [message for message in caplog.messages if message.startswith("the float32 masters in ")]
    assert len(said) == (own == "bfloat16")


def test_masters_can_only_be_left_out_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match="model.bfloat16"), adamw(gpt2(torch.float32), master_dtype="bfloat16"):
        pass


def test_ranks_with_another_precision_are_refused() -> None:
    """Each would train shards of its own kind. So would CPUs on which torch rounds in another way."""

    def compared(state_dtype: str, master_dtype: str) -> Any:
        ranks = Mock(world=1)
        check_same(ranks, Options.of(ADAMW, {"state_dtype": state_dtype, "master_dtype": master_dtype}))
        how_torch_rounds, (options, _) = (call.args for call in ranks.require_same.call_args_list)
        assert how_torch_rounds[0] == vectors() and "ATEN_CPU_CAPABILITY" in how_torch_rounds[1]
        return options

    exact = compared("float32", "float32")
    assert exact == compared("float32", "float32")
    assert exact not in (compared("bfloat16", "float32"), compared("float32", "bfloat16"))
