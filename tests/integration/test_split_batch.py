"""`split_batch`: blocks compute parts of the batch one after another, and the rest of a step does not notice."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Reference, adamw, differing, same_as_torch, same_bits, train, weights
from small_models import gpt2, language_loss, llama, mixtral, perceptron, square_loss, tokens, vectors
from torch import Tensor, nn

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.step import offload

PLACEMENTS: list[dict[str, Any]] = [
    {"k": 1.0},
    {"k": 0.0},
    {"k": 0.5},
    {"k": 0.0, "offload_weights": 1.0},
    {"k": 0.0, "visit": 1.0, "offload_weights": 1.0, "offload_activations": True},
]


def split(make: Callable[[], nn.Module], parts: int, checkpoint: bool = False) -> nn.Module:
    model = make()
    hytrain.split_batch(model, parts, checkpoint=checkpoint)
    return model


def recomputing(make: Callable[[], nn.Module], parts: int) -> nn.Module:
    """With checkpoints of its own, as Transformers makes them."""
    model = split(make, parts)
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def by_hand(model: nn.Module, step: int) -> Tensor:
    """As `square_loss` of a perceptron whose blocks compute in three parts."""
    x = vectors(step)
    for block in model.children():
        x = torch.cat([block(part) for part in x.split([3, 3, 2])])
    return (x - vectors(step).sin()).square().mean()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_it_is_what_a_loop_over_parts_computes(checkpoint: bool) -> None:
    ours, theirs = split(perceptron, 3, checkpoint), perceptron()
    found = train(ours, Reference(ours, lr=1e-3), range(4), square_loss)
    assert found == train(theirs, Reference(theirs, lr=1e-3), range(4), by_hand)
    assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("make", [gpt2, llama, mixtral], ids=["gpt2", "llama", "mixtral"])
def test_the_gradients_are_those_of_the_whole_batch(make: Callable[..., nn.Module]) -> None:
    """Within rounding."""
    one, other = make(torch.float64).eval(), make(torch.float64).eval()
    hytrain.split_batch(one, 3)
    for model in (one, other):
        model.config.use_cache = False
        language_loss(model, 0).backward()
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    "make", [partial(split, gpt2, 3), partial(split, gpt2, 4, True), partial(recomputing, gpt2, 2)], ids=["", "c", "r"]
)
def test_torchs_bits_wherever_layers_are(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """With dropout, tied embeddings and a last part that is smaller."""

    def without_cache() -> nn.Module:
        model = make()
        model.config.use_cache = False
        return model

    same_as_torch(lambda model, opt: train(model, opt, range(4)), without_cache, **options)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_offloaded_weights_come_once_for_all_parts(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward, once the order of a step is known."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    fetch, events = offload.Offload._fetch, list[tuple[str, str]]()

    def noted(self: offload.Offload, block: Any) -> None:
        events.append(("fetch", block.layers[0].name))
        fetch(self, block)

    monkeypatch.setattr(offload.Offload, "_fetch", noted)
    model = split(perceptron, 4, checkpoint)
    for name, block in model.named_children():
        block[0].register_forward_pre_hook(lambda *_, name=name: events.append(("part", name)))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        events.append(("forward", ""))
        loss = square_loss(model, step)
        events.append(("backward", ""))
        return loss

    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        train(model, opt, range(3), loss_of)
        events.append(("forward", ""))
    ways = [place for place, (what, _) in enumerate(events) if what in ("forward", "backward")]
    for begins, ends in list(itertools.pairwise(ways))[2:]:
        (way, _), *come = events[begins:ends]
        parts = [name for what, name in come if what == "part"]
        order = list("0123") if way == "forward" else list("3210") if checkpoint else []
        assert parts == [name for name in order for _ in range(4)]
        for name in order if way == "forward" else order[:-1]:  # the next forward begins with the first one
            since = come.index(("part", name))
            assert ("fetch", name) not in come[since:], f"{name} comes again in {way}"
    assert {name for what, name in events if what == "fetch"} == set("0123")


def test_a_step_of_another_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of an epoch, and around an evaluation, which computes all at once."""
    monkeypatch.setattr(offload, "SLOTS", 1)

    def run(model: nn.Module, opt: Any) -> None:
        for step, rows in enumerate((8, 8, 1, 2, 8, 7)):
            model(vectors(step)[:rows]).square().mean().backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model(vectors(step))

    same_bits(run, partial(split, perceptron, 4), *PLACEMENTS)


def test_accumulation_and_clipping() -> None:
    """Several backwards of several parts."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(3):
            for part in range(2):
                square_loss(model, 2 * step + part).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()

    same_bits(run, partial(split, perceptron, 4, True), *PLACEMENTS)


class Block(nn.Module):
    """Takes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, more: dict[str, Any], *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        self.seen.append((len(x), len(more["rows"]), len(more["shared"]), 0 if mask is None else len(mask)))
        made = {"rows": more["rows"] * 2, "name": more["name"], "no": None}
        return self.line(x) * more["rows"] + more["shared"], made


def test_what_has_the_batch_is_split_and_joined() -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    hytrain.split_batch(blocks, 3)
    x, rows, shared = torch.randn(7, 8), torch.randn(7, 1), torch.randn(1, 8)
    for block in blocks:
        block(x[:2], {"rows": rows[:2], "shared": shared, "name": "it"})  # which tries its rows
        block.seen.clear()
    y, more = blocks[0](x, {"rows": rows, "shared": shared, "name": "it"}, mask=torch.ones(7))
    assert blocks[0].seen == [(3, 3, 1, 3), (3, 3, 1, 3), (1, 1, 1, 1)]
    torch.testing.assert_close(y, blocks[0].line(x) * rows + shared)
    assert torch.equal(more["rows"], rows * 2) and more["name"] == "it" and more["no"] is None
    with torch.no_grad():
        blocks[1](x, {"rows": rows, "shared": shared, "name": "it"})
    blocks[1](x[:1], {"rows": rows[:1], "shared": shared, "name": "it"})
    assert blocks[1].seen == [(7, 7, 1, 0), (1, 1, 1, 0)], "without gradients, or with one row, all at once"


def test_what_cannot_be_told_apart_is_refused() -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    hytrain.split_batch(blocks, 2)
    x, shared = torch.randn(8, 8), torch.randn(1, 8)
    with pytest.raises(UsageError, match="8 rows, which may be the batch or another dimension of"):
        blocks[0](x, {"rows": torch.ones(8, 1), "shared": shared, "name": "it"})
    with pytest.raises(UsageError, match="Block is given a list_iterator, which may hold all of the batch"):
        blocks[0](x, {"rows": iter([]), "shared": shared, "name": "it"})
    with pytest.raises(UsageError, match="Block returns something that is not split by the batch"):
        blocks[0](x[:6], {"rows": torch.ones(1, 1), "shared": shared, "name": "it"})


class Causal(nn.Module):
    """Row by row, or each row with those before."""

    def __init__(self, mixes: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.line, self.mixes = nn.Linear(16, 16, dtype=dtype), mixes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        return x + (y.cumsum(0) if self.mixes else y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["attention", "causal"])
def test_a_batch_that_is_in_another_dimension_is_refused(kind: str, dtype: torch.dtype) -> None:
    """Its parts would not see each other. Until then, nothing has changed."""
    torch.manual_seed(0)
    both = [Causal(mixes, dtype) for mixes in (True, False)]
    if kind == "attention":
        both = [nn.TransformerEncoderLayer(16, 2, 16, batch_first=first, dtype=dtype) for first in (False, True)]
    hytrain.split_batch(nn.ModuleList(both), 2)
    with pytest.raises(UnsupportedError, match=f"{type(both[0]).__name__} computes rows of a batch together"):
        both[0](torch.randn(6, 5, 16, dtype=dtype))
    assert all(module.training for module in both[0].modules())
    assert both[1](torch.randn(6, 5, 16, dtype=dtype)).shape == (6, 5, 16)


def test_a_cache_is_refused() -> None:
    """Transformers would make one, of which a part would see the part before."""
    model = split(llama, 2)
    with pytest.raises(UsageError, match="is given a DynamicCache"):
        model(input_ids=tokens(0), use_cache=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4), "no repeated blocks"),
        (nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)), "BatchNorm1d computes"),
    ],
)
def test_models_that_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hytrain.split_batch(model, 2)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        hytrain.split_batch(model, 0)


def test_a_model_can_be_copied_and_split_anew() -> None:
    model = split(perceptron, 4)
    kind = type(model[0])
    hytrain.split_batch(model, 2)
    assert type(model[0]).__mro__[1] is nn.Sequential and type(model[0]) is not kind
    copied = copy.deepcopy(model)
    assert type(copied[0]) is type(model[0])
    hytrain.split_batch(model, 1)
    assert type(model[0]) is nn.Sequential
    pickle.loads(pickle.dumps(model))
