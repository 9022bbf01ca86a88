"""Recipes on several ranks: the weights, samples, losses and decisions of one rank."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from ranks import RankGroup
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hytrain.errors import ConfigError
from hytrain.recipe import config, loop, report
from hytrain.recipe.config import Recipe
from hytrain.recipe.optimizer import hytrain_optimizer
from hytrain.recipe.parallel import Job, is_first
from hytrain.recipe.report import Summary
from hytrain.recipe.task import assemble
from hytrain.run.ranks import Ranks

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, "num_key_value_heads": 2, **SIZES}
CHAT = "data={kind: chat, paths: [%s], sequence_length: 64, batch_size: 8}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    words = random.Random(1)
    vocabulary = ["the", "people", "of", "these", "states", "shall", "prosper"]
    (tmp_path / "text.txt").write_text(" ".join(words.choices(vocabulary, k=2000)))
    rows = [{"prompt": "say", "completion": " ".join(words.choices(vocabulary, k=i % 9 + 1))} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "run": {"seed": 5, "threads": 1},
        "model": {"config": LLAMA},
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 8},
        "train": {"steps": 6, "lr": 1e-2, "warmup_steps": 2, "eval_batches": 3, "device": "cpu"},
        "sample": {"prompt": "the people", "tokens": 6},
        "optimizer": {"k": 0.5},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "recipe.yaml"


def train(recipe: Path, name: str, *overrides: str) -> Summary:
    made: list[Any] = []

    def make(model: nn.Module, recipe: Recipe) -> Any:
        made.append(hytrain_optimizer(model, recipe))
        return made[-1]

    folder = recipe.parent / name
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
        summary = loop.train(config.load(recipe, overrides), folder, make, terminal=False)
    made[0].close()
    return summary


def weights(recipe: Path, *overrides: str) -> dict[str, Tensor]:
    """Before the first step, whole."""
    model = assemble(config.load(recipe, overrides), None).model
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


def alike(found: Summary, expected: Summary) -> bool:
    assert found.validation is not None and expected.validation is not None
    return (found.step, found.sample, found.training_loss, found.validation.nats_per_token) == (
        expected.step,
        expected.sample,
        pytest.approx(expected.training_loss, rel=1e-4),
        pytest.approx(expected.validation.nats_per_token, rel=1e-4),
    )


def test_two_ranks_train_as_one_and_one_goes_on_from_them(two_ranks: RankGroup, recipe: Path) -> None:
    """In two parts, with the norm clipped, and the loss in chunks. Only rank 0 writes the report."""
    options = ("train.grad_accumulation=2", "train.max_grad_norm=0.5", "train.loss_chunks=2")
    whole = train(recipe, "whole", *options)
    both = two_ranks.run(train, recipe, "ranks", *options)
    assert all(alike(summary, whole) for summary in both) and both[0].checkpoint == both[1].checkpoint
    two_ranks.run(train, recipe, "parts", *options, "train.stop_at=3")
    assert alike(train(recipe, "parts", *options, "train.resume=latest"), whole)


def test_ranks_share_the_matrices_of_muon(two_ranks: RankGroup, recipe: Path) -> None:
    """In its products, a last bit becomes several: so the losses are near to those of one rank."""
    options = ("train.optimizer=muon", "train.lr=0.002", "sample=null")
    whole = train(recipe, "whole", *options)
    for found in two_ranks.run(train, recipe, "ranks", *options):
        assert found.training_loss == pytest.approx(whole.training_loss, rel=1e-2)


def test_ranks_that_share_each_sequence_train_as_one(two_ranks: RankGroup, recipe: Path) -> None:
    """SGD, with which a gradient's size matters; a length that two ranks cannot share evenly, and two parts."""
    sgd = ("train.optimizer=sgd", "train.momentum=0.9", "train.lr=0.1")
    options = (*sgd, "train.grad_accumulation=2", "model.gradient_checkpointing=true", "data.sequence_length=31")
    whole = train(recipe, "whole", *options)
    both = two_ranks.run(train, recipe, "ranks", *options, "parallel.context=2")
    assert all(alike(summary, whole) for summary in both) and both[0].checkpoint == both[1].checkpoint
    two_ranks.run(train, recipe, "parts", *options, "parallel.context=2", "train.stop_at=3")
    assert alike(train(recipe, "parts", *options, "train.resume=latest"), whole)


def of_this_rank(recipe: Path, *overrides: str) -> tuple[int, int, float, list[float]]:
    """Its seed and its samples, a mean of losses, and how many ranks wish what the last one does."""
    job = Job.of(config.load(recipe, overrides), torch.device("cpu"))
    loss, wished = job.mean(torch.ones(()), job.ranks.rank == job.ranks.world - 1)
    assert wished is not None
    return job.seed(7), job.data_rank, float(loss), wished.tolist()


def new_groups(recipe: Path, *overrides: str) -> tuple[int, int]:
    """How many process groups a job makes, and how many a job and its model."""
    made, counts = config.load(recipe, overrides), [0, 0, 0]
    for i, make in enumerate((lambda: None, lambda: Job.of(made, torch.device("cpu")), lambda: assemble(made, None))):
        make()
        counts[i] = len(dist.distributed_c10d._world.pg_map)
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("sizes", [("parallel.tensor=2",), ("parallel.data_replicate=2",)])
def test_a_model_is_sharded_over_the_groups_of_the_job(
    four_ranks: RankGroup, recipe: Path, sizes: tuple[str, ...]
) -> None:
    """One group for the same ranks: torch's communicators are slow to start, and take memory of the GPU."""
    for of_job, of_both in four_ranks.run(new_groups, recipe, *sizes):
        assert of_both == of_job > 0


@pytest.mark.parametrize(("sizes", "seeds"), [("parallel.tensor=2", 1), ("parallel.context=2", 2)])
def test_ranks_with_the_same_samples(two_ranks: RankGroup, recipe: Path, sizes: str, seeds: int) -> None:
    """Ranks with other parts of them drop out other elements. All hear of one's wish."""
    found = two_ranks.run(of_this_rank, recipe, sizes)
    assert len({seed for seed, *_ in found}) == seeds
    assert [rest for _, *rest in found] == [[0, 1.0, [1.0]]] * 2


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [(("parallel.tensor=2",), 2), (("parallel.context=2",), 2), (("parallel.tensor=2", "parallel.context=2"), 4)],
)
def test_a_mesh_weighs_answers_by_their_tokens(
    four_ranks: RankGroup, recipe: Path, sizes: tuple[str, ...], heads: int
) -> None:
    """Answers differ in length, so that ranks differ in how many tokens they learn. Weights are tied.

    In attention, each rank has one head of keys and values.
    """
    chat = ("tokenizer.chat_template=chatml", CHAT % (recipe.parent / "rows.jsonl"), "model.config.vocab_size=256")
    short = ("train.steps=2", "train.warmup_steps=0", "train.eval_batches=1", "sample=null")
    options = (*chat, *short, "model.config.tie_word_embeddings=true", f"model.config.num_key_value_heads={heads}")
    expected = train(recipe, "one", *options)
    assert all(alike(found, expected) for found in four_ranks.run(train, recipe, "mesh", *options, *sizes))


@pytest.mark.parametrize("options", [("parallel.tensor=2",), ("parallel.data_replicate=2", "model.dtype=bfloat16")])
def test_weights_are_those_of_one_rank(four_ranks: RankGroup, recipe: Path, options: tuple[str, ...]) -> None:
    """New ones, and those of a folder."""
    dtype = [option for option in options if "dtype" in option]
    folder = recipe.parent / "model"
    assemble(config.load(recipe, ["run.seed=6", *dtype]), None).model.save_pretrained(folder)
    for source in ([], ["model.config=null", f"model.path={folder}", "tokenizer.kind=bytes"]):
        expected = weights(recipe, *dtype, *source)
        for found in four_ranks.run(weights, recipe, *options, *source):
            assert found.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def one_fails() -> tuple[bool, bool]:
    """Whether this rank raises what rank 1 alone has found, and whether it is the one to tell."""
    job = Job(Ranks.of_job())
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    try:
        with job.ranks.together():
            if job.ranks.rank == 1:
                raise ConfigError("no data")
    except ConfigError as error:
        return "no data" in str(error), is_first(store)
    return False, False


def test_all_ranks_end_with_one_rank_s_error_and_one_of_them_tells(two_ranks: RankGroup) -> None:
    assert sorted(two_ranks.run(one_fails)) == [(True, False), (True, True)]


def refusal(recipe: Path, *overrides: str) -> str:
    try:
        assemble(config.load(recipe, overrides), None)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("parallel.tensor=3", "3 ranks (tensor 3), but this job has 2"),
        ("data.batch_size=3", "make it a multiple of 2"),
        ("data.paths=[/nowhere.txt]", "does not exist"),
        ("model.config={model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2}", "a gpt2 has none in Transformers"),
        ("model.config.num_key_value_heads=1", "num_key_value_heads, 1"),
        ("model.config={model_type: bloom, hidden_size: 32, n_layer: 1, n_head: 2}", "takes no position_ids"),
        (
            "model.config={model_type: falcon, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4}",
            "needs a mask",
        ),
    ],
)
def test_what_ranks_cannot_train_is_one_sentence_on_all(
    two_ranks: RankGroup, recipe: Path, override: str, part: str
) -> None:
    options = [override]
    if override.startswith("model"):
        kind = "context" if "bloom" in override or "falcon" in override else "tensor"
        options = [f"parallel.{kind}=2", *(["model.config=null"] if "model_type" in override else []), override]
    first, second = two_ranks.run(refusal, recipe, *options)
    assert first == second and part in first
