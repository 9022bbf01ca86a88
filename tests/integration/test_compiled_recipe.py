"""`train.compile: blocks`: the bits of the same compiled model with torch's AdamW, and few compilations."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import Reference, adamw, differing, train, weights
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hytrain.errors import ConfigError
from hytrain.recipe import config, loop, report
from hytrain.recipe.model import compile_blocks
from hytrain.recipe.optimizer import hytrain_optimizer
from hytrain.recipe.task import assemble
from hytrain.step import activations

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS = 8

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """More blocks than one code object may be compiled for."""
    words = random.Random(1).choices(["the", "people", "of", "these", "states", "shall", "prosper"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    tree: dict[str, Any] = {
        "run": {"seed": 5, "threads": 1},
        "model": {"config": {"model_type": "llama", "num_hidden_layers": 10, "max_position_embeddings": 32, **SIZES}},
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 4},
        "train": {"steps": STEPS, "lr": 1e-2, "eval_batches": 2, "eval_every": 4, "device": "cpu", "compile": "blocks"},
        "optimizer": {"k": 0.4},
        "sample": {"prompt": "the people", "tokens": 4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "recipe.yaml"


def compiled_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ({"k": 0.4}, ()),
        ({"k": 0.0, "visit": 0.5, "offload_weights": 1.0}, ("model.gradient_checkpointing=true",)),
        ({"k": 0.0, "offload_weights": 1.0}, ("model.gradient_checkpointing=true", "model.split_batch=2")),
        ({"k": 0.4, "offload_activations": True}, ("model.gradient_checkpointing=true",)),
    ],
    ids=["resident", "offloaded, recomputed", "in parts", "offloaded activations"],
)
def test_the_bits_of_torchs_adamw(
    backend: str, options: dict[str, Any], overrides: tuple[str, ...], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, results = compiled_by(backend, monkeypatch), list[Any]()
    monkeypatch.setattr(activations, "MIN_BYTES", 512)

    def run(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        before = counter.frame_count
        losses = train(model, opt, range(STEPS), lambda model, step: model(**task.batch(step).inputs(CPU)).loss)
        assert counter.frame_count - before == 1, "one compilation is for all blocks"
        results.append((losses, model))

    task = assemble(config.load(recipe, overrides), None)
    run(task.model, Reference(task.model, lr=1e-2))
    task = assemble(config.load(recipe, overrides), None)
    with adamw(task.model, **options) as opt:
        run(task.model, opt)
        opt.synchronize()
        (theirs, reference), (ours, model) = results
        assert ours == theirs
        assert differing(weights(model), weights(reference)) == []


def test_a_whole_run_compiles_for_training_and_validation_alone(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the sample, whose context grows token by token; nor for one block after another."""
    counter, made = compiled_by("eager", monkeypatch), list[Any]()
    monkeypatch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
    folder = recipe.parent / "run"
    folder.mkdir()

    def make(model: nn.Module, recipe: config.Recipe) -> Any:
        made.append(hytrain_optimizer(model, recipe))
        return made[-1]

    summary = loop.train(config.load(recipe), folder, make, terminal=False)
    made[0].close()
    assert summary.step == STEPS and summary.sample is not None
    assert counter.frame_count == 1 + 2, "what it is tried out with, and a block with gradients and without"


def test_what_cannot_be_compiled_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a model with repeated blocks"):
        compile_blocks(nn.Linear(2, 2), CPU)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    with pytest.raises(ConfigError, match=r"install a C\+\+ compiler.*: No working C\+\+ compiler found\n") as caught:
        compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), CPU)
    assert "\n" not in str(caught.value)
