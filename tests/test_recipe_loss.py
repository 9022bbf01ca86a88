"""The loss in chunks: the model's own loss, gradients and hits, with the logits of one chunk at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hytrain.errors import ConfigError
from hytrain.recipe.adapters import adapt
from hytrain.recipe.config import Lora
from hytrain.recipe.loss import hits_of, in_chunks

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 96},  # its head is tied
    # Its logits are changed behind the head. Small weights would hide that.
    "gemma2": {**SIZES, "head_dim": 16, "num_key_value_heads": 2, "final_logit_softcapping": 0.5, "pad_token_id": 0},
    "cohere": {**SIZES, "logit_scale": 0.25, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
LENGTH = 20


def model_of(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    hf = AutoConfig.for_model(kind, **SHAPES.get(kind, SIZES) | fields)
    model = AutoModelForCausalLM.from_config(hf).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch() -> dict[str, Tensor]:
    """Rows of which the first tokens are not learnt."""
    tokens = torch.randint(3, 96, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :7], labels[2, 15:] = -100, -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("chunks", [2, 3, LENGTH, 4 * LENGTH])
@pytest.mark.parametrize("kind", SHAPES)
def test_loss_gradients_and_hits_are_the_models_own(kind: str, chunks: int) -> None:
    model, seen, inputs = model_of(kind), list[int](), batch()
    likely = model(input_ids=inputs["input_ids"]).logits.argmax(-1)
    inputs["labels"][1, 1::2] = likely[1, :-1:2]
    whole = model(**inputs)
    whole.loss.backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    in_chunks(other, chunks)
    other.get_output_embeddings().register_forward_hook(lambda _, __, logits: seen.append(logits.shape[1]))
    output = other(**inputs)
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-6, atol=1e-6)
    assert hits_of(output, inputs["labels"]) == hits_of(whole, inputs["labels"]) >= LENGTH // 2
    output.loss.backward()
    assert max(seen) == -(-LENGTH // chunks) and len(seen) == 1 + 2 * -(-LENGTH // max(seen)), "again in backward"
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_without_labels_all_is_as_before() -> None:
    model, tokens = model_of("llama"), batch()["input_ids"]
    mask = torch.ones_like(tokens)[:, :5]
    mask[0, :3] = 0

    def outputs() -> list[Tensor]:
        said = model.generate(tokens[:, :5], attention_mask=mask, do_sample=False, max_new_tokens=8, pad_token_id=0)
        last = model.generate(tokens[:, :5], do_sample=False, max_new_tokens=8, pad_token_id=int(tokens[0, 0]))
        return [model(input_ids=tokens).logits, said, last]

    before = outputs()
    in_chunks(model, 2)
    assert all(map(torch.equal, before, outputs()))


def test_padding_and_positions_reach_the_model() -> None:
    inputs = batch() | {"attention_mask": torch.ones(3, LENGTH, dtype=torch.int64)}
    inputs["attention_mask"][2, 15:] = 0
    model = model_of("llama")
    losses = [model(**inputs).loss, model(**batch(), position_ids=torch.arange(LENGTH).flip(0)[None]).loss]
    in_chunks(model, 3)
    chunked = [model(**inputs).loss, model(**batch(), position_ids=torch.arange(LENGTH).flip(0)[None]).loss]
    torch.testing.assert_close(chunked, losses, rtol=1e-6, atol=1e-6)
    assert losses[0] != losses[1]


def test_under_adapters(tmp_path: Path) -> None:
    model = adapt(model_of("llama"), Lora(), None)
    expected = model(**batch()).loss
    in_chunks(model, 3)
    loss = model(**batch()).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_a_loss_that_cannot_be_taken_apart_is_refused() -> None:
    model = model_of("llama")
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    with pytest.raises(ConfigError, match="leave loss_chunks out"):
        in_chunks(model, 2)
    with pytest.raises(ConfigError, match="loss of routers"):
        in_chunks(model_of("mixtral", num_local_experts=2, num_key_value_heads=2, output_router_logits=True), 2)


@pytest.mark.parametrize("kind", ["opt", "bamba"])
def test_what_only_the_forward_shows_is_refused_there(kind: str) -> None:
    """Whose body is not the one that is called, and which adds to the loss behind it."""
    shapes: dict[str, dict[str, Any]] = {
        "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
        | {"word_embed_proj_dim": 32, "pad_token_id": 1},
        "bamba": SIZES
        | {"z_loss_coefficient": 0.1, "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 16}
        | {"mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [0, 1], "pad_token_id": 0},
    }
    model = model_of(kind, **shapes[kind])
    in_chunks(model, 2)
    with pytest.raises(ConfigError, match="or adds to it"):
        model(**batch())
