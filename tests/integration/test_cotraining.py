"""Co-training, with all processes: the bits do not depend on who computes a part, and what happens to the CPU trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import differing, weights

from hytrain.recipe import config, loop
from hytrain.recipe.task import assemble

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "max_position_embeddings": 32, "tie_word_embeddings": True, **SIZES}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}  # with dropout

pytestmark = pytest.mark.spawns


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    words = random.Random(1).choices(["the", "people", "of", "these", "states", "shall", "prosper"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    tree: dict[str, Any] = {
        "run": {"seed": 5, "threads": 1},
        "model": {"config": LLAMA},
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 8},
        "train": {"steps": 6, "lr": 1e-2, "eval_batches": 2, "device": "cpu", "grad_accumulation": 4},
        "optimizer": {"k": 0.4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "recipe.yaml"


def test_x(recipe: Path, tmp_path: Path) -> None:
    for n in (1, 3):
        (tmp_path / str(n)).mkdir()
        s = loop.train(config.load(recipe, [f"train.cpu_parts={n}"]), tmp_path / str(n), terminal=False)
        print(s.training_loss, s.processes)
        print(open(tmp_path / str(n) / "metrics.jsonl").read()[-500:] if (tmp_path / str(n) / "metrics.jsonl").exists() else "")
