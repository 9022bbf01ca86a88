"""From modules to layers: the models people have, and the parameters that cannot be trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hytrain.errors import UnsupportedError
from hytrain.model.layers import (
    ALIGN_ELEMENTS,
    FALLBACK_LAYERS,
    ModelLayer,
    find_blocks,
    split_layers,
)
from hytrain.tensors import flat, is_dense


def split(model: nn.Module, piece_numel: int | None = None) -> list[ModelLayer]:
    managed = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    layers = split_layers(model, managed, piece_numel=piece_numel)
    check(model, layers)
    return layers


def check(model: nn.Module, layers: list[ModelLayer]) -> None:
    """Every trained element is in one layer, once; every layer is waited for by whoever holds its parameters."""
    assert [layer.lid for layer in layers] == list(range(len(layers)))
    assert len({layer.name for layer in layers}) == len(layers)
    covered: dict[int, int] = {}
    for layer in layers:
        for piece in layer.pieces:
            assert piece.start == covered.get(id(piece.parameter), 0), "in order, without gaps"
            assert piece.start % ALIGN_ELEMENTS == 0
            covered[id(piece.parameter)] = piece.start + piece.numel
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
    assert covered == {id(parameter): parameter.numel() for parameter in trained}
    paths = dict(model.named_modules(remove_duplicate=False))
    for layer in layers:
        for path, module in paths.items():
            if {id(p) for p in module.parameters(recurse=False)} & {id(piece.parameter) for piece in layer.pieces}:
                above = [paths[path[:end]] for end in range(len(path) + 1) if path[:end] in paths]
                assert any(module is waiter for module in above for waiter in layer.modules), f"{path} does not wait"


def names(layers: list[ModelLayer]) -> list[str]:
    return [layer.name for layer in layers]


def pieces(layer: ModelLayer) -> list[tuple[str, int, int]]:
    return [(piece.name, piece.start, piece.numel) for piece in layer.pieces]


def waiting(model: nn.Module, layer: ModelLayer) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is waiter for waiter in layer.modules)]


def described(layers: list[ModelLayer], grad_dtype: torch.dtype | None = None) -> list[object]:
    group_of = {id(piece.parameter): 0 for layer in layers for piece in layer.pieces}
    return [layer.describe(layer.lid, group_of, grad_dtype) for layer in layers]


# ---------------------------------------------------------------- models people have


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **(shape | changes)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2))


def test_a_llama() -> None:
    model = llama()
    layers = split(model)
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert names(layers) == ["model.embed_tokens", *blocks, "model.norm"]
    assert [waiting(model, layer) for layer in layers[:4]] == [["model.embed_tokens"], *([b] for b in blocks)]
    assert pieces(layers[4]) == [("model.norm.weight", 0, 32), ("lm_head.weight", 0, 2048)]
    assert waiting(model, layers[4]) == ["model.norm", "lm_head"]


def test_a_llama_with_tied_embeddings() -> None:
    model = llama(tie_word_embeddings=True)
    layers = split(model)
    assert pieces(layers[0]) == [("model.embed_tokens.weight", 0, 2048)]
    assert waiting(model, layers[0]) == ["model.embed_tokens", "lm_head"]
    assert pieces(layers[-1]) == [("model.norm.weight", 0, 32)]


def test_a_gpt2() -> None:
    model = gpt2()
    layers = split(model)
    assert names(layers) == ["transformer.wte", *(f"transformer.h.{index}" for index in range(3)), "transformer.ln_f"]
    assert [name for name, _, _ in pieces(layers[0])] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert waiting(model, layers[0]) == ["transformer.wte", "transformer.wpe", "lm_head"]


def test_two_builds_give_the_same_layers() -> None:
    for build in (llama, gpt2):
        assert described(split(build(), 500)) == described(split(build(), 500))


def test_a_module_without_blocks_is_cut_by_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    model = Net()
    assert find_blocks(model) == []
    layers = split(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    bound = -(-(total // FALLBACK_LAYERS) // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    assert FALLBACK_LAYERS - 4 <= len(layers) <= FALLBACK_LAYERS + 4
    assert max(layer.numel for layer in layers) <= bound
    assert {name for layer in layers for name in waiting(model, layer)} == {"first", "second", "third"}


def test_a_sequential_has_blocks_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
    layers = split(model)
    assert names(layers) == ["0", "2", "3"]
    assert [waiting(model, layer) for layer in layers] == [["0"], ["2"], ["3"]]


def test_the_largest_list_of_blocks_counts() -> None:
    model = nn.Module()
    model.small = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])
    model.large = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    model.empty = nn.ModuleList([nn.ReLU() for _ in range(20)])
    assert find_blocks(model) == list(model.large)
    assert names(split(model)) == ["small.0", "large.0", "large.1", "large.2"]


def test_the_blocks_are_not_the_parts_of_the_model_around_them() -> None:
    """The outer list has more parameters, but most of them are in one of its parts."""
    blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model = nn.Sequential(nn.Embedding(8, 16), blocks, nn.Linear(16, 8))
    assert find_blocks(model) == list(blocks)


def test_a_block_that_runs_several_times_is_one_layer() -> None:
    block = nn.Linear(8, 8)
    model = nn.Module()
    model.blocks = nn.ModuleList([block, nn.Linear(8, 8), block])
    assert names(split(model)) == ["blocks.0", "blocks.1"]


def test_attention_and_root_level_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.attention = nn.MultiheadAttention(8, 2)

    model = Net()
    layers = split(model, 10_000)
    assert names(layers) == ["scale"]
    assert [name for name, _, _ in pieces(layers[0])][:2] == ["scale", "attention.in_proj_weight"]
    assert waiting(model, layers[0]) == ["", "attention", "attention.out_proj"]


def test_attention_inside_a_block_waits_with_the_block() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    layers = split(model)
    assert [waiting(model, layer) for layer in layers] == [["layers.0"], ["layers.1"]]


# ---------------------------------------------------------------- shared, frozen, empty


def test_a_parameter_that_two_modules_have() -> None:
    model = nn.Module()
    model.first, model.second, model.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    model.second.weight = model.first.weight
    layers = split(model, 1000)
    assert sum(layer.numel for layer in layers) == 2 * 16 + 3 * 4
    assert waiting(model, layers[0]) == ["first", "second", "other"]


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared


def test_a_module_that_blocks_share_is_waited_for_in_each() -> None:
    """It is the first block's; and the second, or whoever has it outside, may be the first to run."""
    model, shared = nn.Module(), nn.Linear(8, 8)
    model.blocks = nn.ModuleList([Block(shared), Block(shared), Block(nn.Linear(8, 8))])
    layers = split(model)
    assert names(layers) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _, _ in pieces(layers[0])] == [
        "blocks.0.own.weight",
        "blocks.0.own.bias",
        "blocks.0.shared.weight",
        "blocks.0.shared.bias",
    ]
    assert waiting(model, layers[0]) == ["blocks.0", "blocks.1"]
    assert [waiting(model, layer) for layer in layers[1:]] == [["blocks.1"], ["blocks.2"]]


@pytest.mark.parametrize("inside_first", [True, False])
def test_a_module_that_a_block_shares_with_the_rest(inside_first: bool) -> None:
    model, shared = nn.Module(), nn.Linear(8, 8)
    if not inside_first:
        model.front = shared
    model.blocks = nn.ModuleList([Block(nn.Linear(8, 8)), Block(shared)])
    if inside_first:
        model.back = shared
    layers = split(model)
    (layer,) = [layer for layer in layers if any(piece.parameter is shared.weight for piece in layer.pieces)]
    assert layer.name == ("blocks.1" if inside_first else "front")
    assert {id(model.blocks[1]), id(shared)} == {id(module) for module in layer.modules}


def test_frozen_parameters_belong_to_no_layer() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    layers = split(model)
    assert names(layers) == ["model.layers.0", "model.layers.2", "model.norm"]
    assert not any("mlp" in name for name, _, _ in pieces(layers[1]))


def test_parameters_that_are_not_managed_belong_to_no_layer() -> None:
    model = llama()
    layers = split_layers(model, {id(model.lm_head.weight)}, piece_numel=10_000)
    assert [pieces(layer) for layer in layers] == [[("lm_head.weight", 0, 2048)]]


def test_parameters_without_elements_belong_to_no_layer() -> None:
    model = nn.Module()
    model.adapter, model.linear = nn.Parameter(torch.empty(0, 4)), nn.Linear(4, 4)
    assert pieces(split(model, 1000)[0]) == [("linear.weight", 0, 16), ("linear.bias", 0, 4)]


# ---------------------------------------------------------------- pieces, dtypes


@pytest.mark.parametrize(("rows", "bound"), [(1000, 4096), (1001, 1000), (100, 128), (7, 10_000), (129, 130)])
def test_a_large_embedding_is_cut_at_multiples_of_128(rows: int, bound: int) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(rows, 10), nn.Linear(4, 4)
    layers = split(model, bound)
    parts = [piece for layer in layers for piece in layer.pieces if piece.name == "embed.weight"]
    aligned_bound = -(-bound // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    assert all(part.numel <= aligned_bound for part in parts)
    assert all(part.numel % ALIGN_ELEMENTS == 0 for part in parts[:-1])
    assert len(parts) <= -(-rows * 10 // bound)
    for layer in layers:
        if len(parts) > 1 and layer.pieces[0].name == "embed.weight":
            assert len(layer.pieces) == 1, "a piece is a layer of its own"
            assert layer.name.startswith("embed#") and waiting(model, layer) == ["embed"]


def test_a_piece_is_named_after_its_place() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(100, 10)
    layers = split(model, 512)
    specs = described(layers)
    assert names(layers) == ["embed#0", "embed#1"]
    assert [spec.segments[0].name for spec in specs] == ["embed.weight[0]", "embed.weight[512]"]
    assert [spec.segments[0].numel for spec in specs] == [512, 488]


def test_a_layer_mixes_dtypes_segment_by_segment() -> None:
    model = nn.Module()
    model.linear, model.norm = nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)
    model.linear.bias = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    (layer,) = split(model, 1000)
    group_of = {id(p): int(p.ndim < 2) for p in model.parameters()}
    for grad_dtype, norm_gradients in ((None, "float32"), (torch.bfloat16, "bfloat16")):
        spec = layer.describe(0, group_of, grad_dtype)
        assert [(s.name, s.dtype, s.grads_dtype, s.group) for s in spec.segments] == [
            ("linear.weight", "bfloat16", "bfloat16", 0),
            ("linear.bias", "float16", "float16", 1),
            ("norm.weight", "float32", norm_gradients, 1),
            ("norm.bias", "float32", norm_gradients, 1),
        ]


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(1, 4).expand(1, 4), True),
        (torch.zeros(6)[2:5], True),
        (torch.zeros(()), True),
        (torch.zeros(4, 1)[:, :1], True),
        (torch.zeros(8).as_strided((1, 4), (9, 1)), True),
        (torch.zeros(1, 4).expand(3, 4), False),
        (torch.zeros(6)[::2], False),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(8).as_strided((3, 4), (2, 1)), False),
    ],
    ids=lambda value: f"{tuple(value.shape)} by {value.stride()}" if isinstance(value, torch.Tensor) else "",
)
def test_dense_tensors_fill_one_stretch_of_memory(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def test_flat_is_a_view_of_what_lies_there() -> None:
    whole = torch.arange(14)
    tensor = whole[2:].view(3, 4).t()
    elements = flat(tensor)
    assert torch.equal(elements, whole[2:]) and elements.data_ptr() == tensor.data_ptr()
    version = tensor._version
    elements[0] = 9
    assert tensor[0, 0] == 9 and tensor._version > version


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: torch.zeros(3, 4, dtype=torch.float64),
            r"has dtype torch.float64: HyTrain trains float32, bfloat16 and float16 .*model.to\(torch.bfloat16\) first",
        ),
        (lambda: torch.zeros(3, 4, dtype=torch.complex64), "has dtype torch.complex64"),
        (
            lambda: torch.zeros(1, 4).expand(3, 4),
            r"overlaps itself or has gaps: replace it by its .contiguous\(\) copy",
        ),
        (lambda: torch.zeros(8).as_strided((3, 4), (2, 1)), "overlaps itself or has gaps"),
        (lambda: torch.zeros(4, 4)[:, :2], "overlaps itself or has gaps"),
        (lambda: torch.eye(3).to_sparse(), "only plain tensors for now"),
    ],
    ids=["float64", "complex", "expanded", "overlapping", "gaps", "sparse"],
)
def test_what_cannot_be_trained_is_refused_by_name(make: Callable[[], torch.Tensor], reason: str) -> None:
    model = nn.Module()
    model.good, model.inner = nn.Linear(2, 2), nn.Module()
    model.inner.odd = nn.Parameter(make())
    with pytest.raises(UnsupportedError, match=f"parameter inner.odd .*{reason}"):
        split(model)


def test_a_frozen_parameter_may_be_anything() -> None:
    model = nn.Module()
    model.good = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    assert [name for name, _, _ in pieces(split(model)[0])] == ["good.weight", "good.bias"]
