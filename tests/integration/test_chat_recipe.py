"""examples/chat.yaml with a smaller model: what it learns, and that it goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import ROOT, train_recipe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hytrain.recipe import chat, config, model, tokenizer
from hytrain.recipe.batches import IGNORED
from hytrain.recipe.task import assemble

RECIPE = ROOT / "examples" / "chat.yaml"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 256, **SIZES}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """For a new model in the place of the demo's, in the same format, and for one epoch."""
    wanted, base = config.Model(config=LLAMA), tmp_path / "base"
    model.build(wanted, model.configuration(wanted, 256, 256), torch.device("cpu")).save_pretrained(base)
    tokenizer.build(config.Tokenizer(), None, b"").hf.save_pretrained(base)
    train = ["train.epochs=1", "train.warmup_steps=1", "train.eval_batches=1", "train.grad_accumulation=2"]
    return [f"model.path={base}", "run.threads=1", *train, "sample.tokens=4", "optimizer.k=0.5"]


def test_an_epoch_learns_each_answer_once_and_nothing_else(overrides: list[str]) -> None:
    """The last batch is filled with rows of the next epoch, so the answers in it may come twice."""
    recipe = config.load(RECIPE, overrides)
    task = assemble(recipe, None)
    of, found = task.corpus.tokenizer, []
    assert of is not None and of.hf.chat_template == chat.CHATML
    for step in range(task.recipe.train.length):
        for row in task.batch(step).labels:
            text = of.decode(row[row != IGNORED])
            found += text.split("<|im_end|>")[:-1]
            assert text.endswith("<|im_end|>")
    lines = [json.loads(line) for line in recipe.data.paths[0].read_text().splitlines()]
    said = [[m["content"] for m in line["messages"] if m["role"] == "assistant"] for line in lines]
    expected = [answer for answers in said[:95] for answer in answers]
    assert set(found) == set(expected) and len(expected) <= len(found) < len(expected) * 1.2


def test_a_resumed_chat_run_is_the_uninterrupted_one(tmp_path: Path, overrides: list[str]) -> None:
    whole = train_recipe(RECIPE, tmp_path / "whole", *overrides)
    stopped = train_recipe(RECIPE, tmp_path / "parts", *overrides, "train.stop_at=3", "sample=null")
    resumed = train_recipe(RECIPE, tmp_path / "parts", *overrides, "train.resume=latest")
    assert stopped.step == 3 and resumed.step == whole.step > 4
    assert (resumed.training_loss, resumed.validation, resumed.sample) == (
        whole.training_loss,
        whole.validation,
        whole.sample,
    )
    expected, found = (load_file(summary.checkpoint / "model.safetensors") for summary in (whole, resumed))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.sample is not None and whole.sample.startswith("What is the capital of France?\n")
    words = AutoTokenizer.from_pretrained(whole.checkpoint)
    asked = words.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = AutoModelForCausalLM.from_pretrained(whole.checkpoint).generate(**asked, max_new_tokens=2)
    assert answer.shape == (1, asked["input_ids"].shape[1] + 2)
