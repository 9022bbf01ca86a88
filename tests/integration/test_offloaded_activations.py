"""`offload_activations`: what autograd saves is in host memory until backward needs it. No bit depends on it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import adamw, differing, records, same_as_torch, same_bits, train, wait_for_coordinator, weights
from small_models import gpt2, language_loss, llama, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.memory import pinned
from hytrain.recipe import config
from hytrain.recipe.estimate import estimate
from hytrain.recipe.optimizer import hytrain_optimizer
from hytrain.recipe.task import assemble
from hytrain.step import activations

OFFLOADED = {"offload_activations": True}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave the device, too."""
    monkeypatch.setattr(activations, "MIN_BYTES", 512)
    monkeypatch.setattr(activations, "WINDOW_BYTES", 0)
    monkeypatch.setattr(pinned, "SLAB_BYTES", 4096)


def recomputing(make: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    model = make(dtype)
    model.train()
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))  # type: ignore[operator]
    return model


def kept(opt: hytrain.AdamW) -> activations.Activations:
    found = opt._engine._activations
    assert found is not None
    return found


def copied(opt: hytrain.AdamW) -> int:
    """Bytes to host memory since this was asked for last, or the last record."""
    return kept(opt)._transfers.traffic.take()[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_bits_do_not_depend_on_it(dtype: torch.dtype, checkpointed: bool) -> None:
    """Wherever the state is, and the weights: also where those are offloaded, and layers move all the time."""

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train(model, opt, range(5))
        if (found := opt._engine._activations) is not None:
            assert found.host_bytes > 0
            assert not [one for one in found._sent if one() is not None], "no graph is left"

    make = partial(recomputing, llama, dtype) if checkpointed else partial(llama, dtype)
    choices: list[dict[str, Any]] = [
        {"k": 0.0},
        {"k": 0.5},
        {"k": 1.0},
        {"k": 0.0, "visit": 1.0, "offload_weights": 1.0},
    ]
    choices += [{"k": 0.0, "offload_weights": 0.5}, {"policy": "random", "offload_weights": "auto"}]
    same_bits(run, make, {"k": 0.5}, *({**options, **OFFLOADED} for options in choices))


def test_dropout_and_tied_weights_have_torchs_bits() -> None:
    same_as_torch(lambda model, opt: train(model, opt, range(4)), gpt2, k=0.5, **OFFLOADED)


@pytest.mark.parametrize(
    "options", [{"grad_accumulation": 3}, {"max_grad_norm": 0.1}, {"grad_accumulation": 2, "accumulate_on": "host"}]
)
def test_sums_clipping_and_evaluation(options: dict[str, Any]) -> None:
    def run(model: nn.Module, opt: hytrain.AdamW) -> list[float]:
        losses = []
        for step in range(3):
            for part in range(options.get("grad_accumulation", 1)):
                loss = language_loss(model, 10 * step + part)
                model.eval()
                with torch.no_grad():  # between a forward and its backward
                    losses.append(language_loss(model, 7).item())
                model.train()
                loss.backward()
            opt.step()
            opt.zero_grad()
        return losses

    make = partial(recomputing, llama, torch.bfloat16)
    same_bits(run, make, {"k": 0.5, **options}, {"k": 0.5, **options, **OFFLOADED})


def test_forwards_that_share_a_backward() -> None:
    """Their last blocks' tensors leave when the next forward begins."""

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        for step in range(3):
            loss = language_loss(model, step)
            if opt._engine._activations is not None:
                copied(opt)
            other = language_loss(model, step + 100)
            (loss - other).square().backward()
            opt.step()
            opt.zero_grad()

    make = partial(recomputing, llama, torch.float32)
    same_bits(run, make, {"k": 0.5}, {"k": 0.5, **OFFLOADED})


class Watching(nn.Module):
    """Blocks under a checkpoint, and which of their inputs have memory at the end of forward."""

    def __init__(self, depth: int = 6, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(32, 32)
        self.reentrant, self.fails = reentrant, False
        self.inputs: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.clear()
        x = x * 1
        for block in self.blocks:
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = x.exp()
        self.last = weakref.ref(x.untyped_storage())  # which its own node saves
        if self.fails:
            raise ValueError("on purpose")
        y: Tensor = self.head(x)
        return y

    @property
    def there(self) -> list[bool]:
        return [reference() is not None for reference in self.inputs]


def test_inputs_leave_and_are_counted() -> None:
    model = Watching()
    with adamw(model, k=1.0, **OFFLOADED) as opt:
        for step in range(7):
            copied(opt)
            loss = square_loss(model, step)
            assert model.there == [False] * 5 + [True]
            assert copied(opt) == 5 * 8 * 32 * 4
            loss.backward()
            to_device, _ = kept(opt)._transfers.traffic.take()
            assert to_device == 5 * 8 * 32 * 4
            del loss
            opt.step()
            opt.zero_grad()
        assert kept(opt).host_bytes == -(-5 * 8 * 32 * 4 // 4096) * 4096


def test_reentrant_checkpoints() -> None:
    """Their blocks' own hooks run without gradients, and their inputs are saved after that."""

    def run(model: Any, opt: hytrain.AdamW) -> None:
        for step in range(3):
            x = vectors(step).requires_grad_()
            loss = model(x).square().mean()
            if opt._engine._activations is not None:
                assert model.there == [False] * 4 + [True] * 2
            loss.backward()
            opt.step()
            opt.zero_grad()

    same_bits(run, partial(Watching, reentrant=True), {"k": 0.5}, {"k": 0.5, **OFFLOADED})


def test_an_exception_in_forward_leaves_nothing() -> None:
    model, twin = Watching(), Watching()
    with adamw(twin, k=0.5) as opt:
        train(twin, opt, range(4), square_loss)
        opt.synchronize()
        expected = weights(twin)
    with adamw(model, k=0.5, **OFFLOADED) as opt:
        for step in range(4):
            model.fails = True
            with pytest.raises(ValueError, match="on purpose"):
                square_loss(model, step)
            gc.collect()
            assert model.there == [False] * 6 and model.last() is None
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            model.fails = False
            train(model, opt, [step], square_loss)
        opt.synchronize()
        assert differing(weights(model), expected) == []
        assert kept(opt).host_bytes == -(-5 * 8 * 32 * 4 // 4096) * 4096


def test_without_repeated_blocks() -> None:
    """All modules that read layers count as blocks."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.first, model.second, model.third = (nn.Linear(32, 32) for _ in range(3))
        model.forward = lambda x: model.third(model.second(model.first(x).tanh()).tanh())  # type: ignore[method-assign]
        return model

    def run(model: Any, opt: hytrain.AdamW) -> None:
        train(model, opt, range(3), square_loss)
        if opt._engine._activations is not None:
            assert kept(opt).host_bytes > 0

    same_bits(run, make, {"k": 0.5}, {"k": 0.5, **OFFLOADED})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks
def test_compiled_blocks() -> None:
    """What a compiled block saves goes through the same hooks."""

    def run(model: Any, opt: hytrain.AdamW) -> None:
        for block in model:
            block.compile(backend="aot_eager")
        train(model, opt, range(4), partial(square_loss))
        if opt._engine._activations is not None:
            assert kept(opt).host_bytes > 0

    same_bits(run, partial(perceptron, depth=6), {"k": 0.5}, {"k": 0.5, **OFFLOADED})
    torch.compiler.reset()


def test_a_write_that_torch_refuses_is_refused() -> None:
    """Also to a tensor that is too small to leave the device."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor, rows: int) -> Tensor:
            y = self.blocks[0](x[:rows]).exp()
            z = self.blocks[1](x).mean()
            with torch.no_grad():
                y.mul_(2)
            return (self.blocks[2](x).mean() + y.mean() + z) * 1.0

    for rows in (8, 1):
        model = Writes()
        with adamw(model, k=0.5, **OFFLOADED) as opt:
            loss = model(vectors(0), rows)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            opt.zero_grad()
            del loss


def test_a_recipe_copies_what_its_estimate_says(tmp_path: Path) -> None:
    tree = {
        "run": {"dir": str(tmp_path), "threads": 1},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 5,
                "vocab_size": 64,
            },
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
        },
        "data": {"kind": "random", "sequence_length": 32, "batch_size": 8},
        "train": {"steps": 2, "device": "cpu", "grad_accumulation": 2, "loss_chunks": 2},
        "optimizer": {"k": 0.5, "offload_activations": True},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = config.load(tmp_path / "recipe.yaml")
    task = assemble(recipe, None)
    opt: Any = hytrain_optimizer(task.model, recipe)
    with opt:
        inputs = task.batch(0).inputs(torch.device("cpu"))
        copied(opt)
        for part in range(2):
            halves = {name: each.chunk(2) for name, each in inputs.items() if isinstance(each, Tensor)}
            loss = task.model(**inputs | {name: chunks[part] for name, chunks in halves.items()}).loss
            assert copied(opt) == estimate(recipe).activations
            loss.backward()
        opt.step()


def test_records_count_the_copies() -> None:
    sums = []
    for options in ({}, OFFLOADED):
        model = Watching()
        with adamw(model, k=1.0, **options) as opt:
            train(model, opt, range(12), square_loss)
            wait_for_coordinator(opt)
            found = [record for record in records(opt) if 2 <= record["step"] <= 6]
        assert len(found) == 5
        sums.append([sum(record[f"to_{where}_bytes"] for record in found) for where in ("device", "host")])
    assert [b - a for a, b in zip(*sums, strict=True)] == [5 * 5 * 8 * 32 * 4] * 2
