"""Which models' sequences can be divided among ranks, and what each rank gets of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hytrain.errors import ConfigError
from hytrain.recipe import context
from hytrain.recipe.context import Context

CPU = torch.device("cpu")
LENGTH = 64
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}


class Mesh:
    """One of some ranks."""

    def __init__(self, ranks: int = 2, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def get_local_rank(self) -> int:
        return self._rank


def of_ranks(ranks: int = 2, rank: int = 0) -> Context:
    return Context(cast(DeviceMesh, Mesh(ranks, rank)))


def model_of(kind: str, **fields: Any) -> Any:
    """A new model, whose small weights must not hide anything."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES) | fields))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("gpt2", TOKENS),
        ("mixtral", {"num_key_value_heads": 2, **EXPERTS}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": LENGTH}),
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}),
    ],
)
def test_models_that_can_be_divided(kind: str, fields: dict[str, Any]) -> None:
    """Also those with experts, and with a window that is as long as the sequence. Asking leaves nothing behind."""
    model = model_of(kind, **fields)
    of_ranks().check(model, CPU, LENGTH)
    assert model.config._attn_implementation == "sdpa" and context.ALONE not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("gptj", {**GPT2, "rotary_dim": 8}, "but a gptj .*lets them do so elsewhere: use"),
        (
            "lfm2",
            {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
            "has conv layers and lets them do so elsewhere",
        ),
        ("mamba", {}, "lets them do so elsewhere"),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": LENGTH - 1}, f"has a window of {LENGTH - 1}"),
        ("llama4_text", {"num_key_value_heads": 2, "head_dim": 8, **EXPERTS, **TOKENS}, "has chunked_attention layers"),
        ("bloom", {}, "takes no position_ids"),
        ("falcon", {}, "needs a mask"),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}, "computes with eager attention"),
        ("llama", {"num_key_value_heads": 1}, "which does not divide a llama's 1 heads"),
    ],
)
def test_models_that_cannot_are_refused(kind: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.context.*{why}"):
        of_ranks().check(model_of(kind, **fields), CPU, LENGTH)


def test_tokens_that_see_later_ones_are_refused() -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="a llama lets them see later ones"):
        of_ranks().check(model, CPU, LENGTH)


def test_another_fault_of_a_model_is_not_taken_for_a_mask_that_it_needs() -> None:
    model = model_of("llama")
    model.model.norm = None
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        of_ranks().check(model, CPU, LENGTH)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32, **TOKENS}),
    ],
)
def test_a_part_is_rotated_as_in_the_whole_sequence(kind: str, fields: dict[str, Any]) -> None:
    """Its frequencies depend on the length, which is at first more than the model has been trained for."""
    fields = {"max_position_embeddings": 32, **fields}
    whole = model_of(kind, **fields).model.rotary_emb
    x, places = torch.zeros(1), torch.arange(LENGTH - 1)[None]
    for rank in (0, 1):
        context = of_ranks(2, rank)
        context.divide(model := model_of(kind, **fields))
        for length, divided in ((LENGTH - 1, True), (8, False), (8, True), (LENGTH - 1, False)):
            context.enter(model, length if divided else None)
            given = places[:, :length]
            part = context.part(given, 0) if divided else given
            for found, expected in zip(model.model.rotary_emb(x, part), whole(x, given), strict=True):
                assert torch.equal(found, expected[:, part[0]])


def test_parts_follow_each_other_with_their_places() -> None:
    """A sequence that ranks cannot share evenly ends with others that are not learnt."""
    tokens = torch.arange(1, 8).repeat(2, 1)
    given = [
        of_ranks(3, rank).inputs(tokens, attention_mask=torch.ones_like(tokens), use_cache=False) for rank in (0, 1, 2)
    ]
    assert all(each.keys() == {"input_ids", "position_ids", "use_cache"} for each in given)
    assert torch.cat([each["input_ids"] for each in given], 1).tolist() == [[*range(1, 8), 0, 0]] * 2
    assert torch.cat([each["position_ids"] for each in given], 1).tolist() == [[*range(7), 0, 0]]
