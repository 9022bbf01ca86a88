"""From modules to layers: the models people have, and the parameters that cannot be trained."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from hytrain.build import build_gates, build_layers
from hytrain.errors import UnsupportedError
from hytrain.kernels.rounding import key_of
from hytrain.model.layers import ALIGN_ELEMENTS, FALLBACK_LAYERS, MANY_BLOCKS, ModelLayer, find_blocks, split_layers
from hytrain.tensors import flat, is_dense
from protocol.handles import EXACT, Precision
from protocol.messages import Layer


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
                assert any(module is waiter for module in above for waiter in layer.readers), f"{path} does not wait"


def names(layers: list[ModelLayer]) -> list[str]:
    return [layer.name for layer in layers]


def pieces(layer: ModelLayer) -> list[tuple[str, int, int]]:
    return [(piece.name, piece.start, piece.numel) for piece in layer.pieces]


def waiting(model: nn.Module, layer: ModelLayer) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is waiter for waiter in layer.readers)]


def described(layers: list[ModelLayer]) -> list[Layer]:
    group_of = {id(piece.parameter): 0 for layer in layers for piece in layer.pieces}
    return [layer.describe(group_of, ["adamw"] * 2, None, EXACT) for layer in layers]


# ---------------------------------------------------------------- models people have


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))


def test_a_llama() -> None:
    model = llama()
    layers = split(model)
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert names(layers) == ["model.embed_tokens", *blocks, "model.norm"]
    assert [waiting(model, layer) for layer in layers[:4]] == [["model.embed_tokens"], *([b] for b in blocks)]
    assert pieces(layers[4]) == [("model.norm.weight", 0, 32), ("lm_head.weight", 0, 2048)]
    assert waiting(model, layers[4]) == ["model.norm", "lm_head"]


def test_a_gpt2() -> None:
    """Its embeddings are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2))
    layers = split(model)
    assert names(layers) == ["transformer.wte", *(f"transformer.h.{index}" for index in range(3)), "transformer.ln_f"]
    assert [name for name, _, _ in pieces(layers[0])] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert waiting(model, layers[0]) == ["transformer.wte", "transformer.wpe", "lm_head"]


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
    blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    around = nn.Sequential(nn.Embedding(8, 16), blocks, nn.Linear(16, 8))
    assert find_blocks(around) == list(blocks), "most parameters of the outer list are in one of its parts"


def test_compiled_blocks() -> None:
    """They have no truth value: bool() raises."""
    model = nn.Sequential(*(torch.compile(nn.Linear(8, 8), backend="eager") for _ in range(3)))
    layers = split(model)
    check(model, layers)
    assert [waiting(model, layer) for layer in layers] == [["0"], ["1"], ["2"]]
    assert described(layers)[1].segments[0].key == key_of("1.weight"), "as without torch.compile"


def test_the_largest_list_of_blocks_counts() -> None:
    model = nn.Module()
    model.small = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])
    twice = nn.Linear(16, 16)
    model.large = nn.ModuleList([twice, nn.Linear(16, 16), twice])
    model.empty = nn.ModuleList([nn.ReLU() for _ in range(20)])
    assert find_blocks(model) == list(model.large)[:2]
    assert names(split(model)) == ["small.0", "large.0", "large.1"], "one that runs several times is one layer"


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
    assert waiting(model, layers[0]) == ["", "attention"], "it reads its children's parameters"


# ---------------------------------------------------------------- shared, frozen, empty


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared


@pytest.mark.parametrize(("outside", "owner"), [("", "blocks.0"), ("front", "front"), ("rear", "blocks.0")])
def test_a_module_that_blocks_share_is_waited_for_in_each(outside: str, owner: str) -> None:
    """It is the first one's that has it; the second, or whoever has it outside, may be the first to run."""
    model, shared = nn.Module(), nn.Linear(8, 8)
    if outside == "front":
        model.front = shared
    model.blocks = nn.ModuleList([Block(shared), Block(shared), Block(nn.Linear(8, 8))])
    if outside == "rear":
        model.rear = shared
    layers = split(model)
    (layer,) = [layer for layer in layers if any(piece.parameter is shared.weight for piece in layer.pieces)]
    assert layer.name == owner
    assert {id(module) for module in layer.readers} == {
        id(module) for module in (*model.blocks[:2], *([shared] if outside else []))
    }
    assert [waiting(model, layer) for layer in layers[-2:]] == [["blocks.1"], ["blocks.2"]]


def test_parameters_that_are_not_trained_belong_to_no_layer() -> None:
    """Frozen ones, which may be anything, those without elements, and those that the optimizer does not have."""
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    model.adapter = nn.Parameter(torch.empty(0, 4))
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    layers = split(model)
    assert names(layers) == ["model.layers.0", "model.layers.2", "model.norm"]
    assert not any("mlp" in name for name, _, _ in pieces(layers[1]))
    layers = split_layers(model, {id(model.lm_head.weight)}, piece_numel=10_000)
    assert [pieces(layer) for layer in layers] == [[("lm_head.weight", 0, 2048)]]


# ---------------------------------------------------------------- pieces, dtypes


@pytest.mark.parametrize(("rows", "bound"), [(1000, 4096), (1001, 1000), (100, 512), (7, 10_000), (129, 130)])
def test_a_large_embedding_is_cut_at_multiples_of_128(rows: int, bound: int) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(rows, 10), nn.Linear(4, 4)
    layers = split(model, bound)
    specs = described(layers)
    parts = [piece for layer in layers for piece in layer.pieces if piece.name == "embed.weight"]
    aligned_bound = -(-bound // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    assert all(part.numel <= aligned_bound for part in parts)
    assert all(part.numel % ALIGN_ELEMENTS == 0 for part in parts[:-1])
    assert len(parts) <= -(-rows * 10 // bound)
    for index, part in enumerate(parts if len(parts) > 1 else []):
        assert pieces(layers[index]) == [("embed.weight", part.start, part.numel)], "a piece is a layer of its own"
        assert layers[index].name == f"embed#{index}" and waiting(model, layers[index]) == ["embed"]
        [segment] = specs[index].segments
        assert (segment.name, segment.numel) == (f"embed.weight[{part.start}]", part.numel)
        assert (segment.key, segment.start) == (key_of("embed.weight"), part.start), "as of the whole parameter"


def test_a_layer_mixes_dtypes_segment_by_segment() -> None:
    model = nn.Module()
    model.linear, model.norm = nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)
    model.linear.bias = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    (layer,) = split(model, 1000)
    group_of = {id(p): int(p.ndim < 2) for p in model.parameters()}
    smaller = Precision("bfloat16", "bfloat16")
    for grad_dtype, norm_gradients in ((None, "float32"), (torch.bfloat16, "bfloat16")):
        spec = layer.describe(group_of, ["adamw", "lion"], grad_dtype, smaller)
        assert [(s.name, s.dtype, s.grads_dtype, s.group) for s in spec.segments] == [
            ("linear.weight", "bfloat16", "bfloat16", 0),
            ("linear.bias", "float16", "float16", 1),
            ("norm.weight", "float32", norm_gradients, 1),
            ("norm.bias", "float32", norm_gradients, 1),
        ]
        assert {s.state_dtype for s in spec.segments} == {"bfloat16"}
        assert [s.master_dtype for s in spec.segments] == ["bfloat16", "float32", "float32", "float32"]
        assert [s.rule for s in spec.segments] == ["adamw", "lion", "lion", "lion"], "by group"


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(6)[2:5], True),
        (torch.zeros(()), True),
        (torch.zeros(8).as_strided((1, 4), (9, 1)), True),
        (torch.zeros(1, 4).expand(3, 4), False),
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
    ("odd", "reason"),
    [
        (
            torch.zeros(3, 4, dtype=torch.float64),
            r"has dtype torch.float64: HyTrain trains float32, bfloat16 and float16 .*model.to\(torch.bfloat16\) first",
        ),
        (torch.zeros(1, 4).expand(3, 4), r"overlaps itself or has gaps: replace it by its .contiguous\(\) copy"),
        (torch.eye(3).to_sparse(), "HyTrain trains plain tensors, and DTensors of them"),
    ],
    ids=["float64", "expanded", "sparse"],
)
def test_what_cannot_be_trained_is_refused_by_name(odd: torch.Tensor, reason: str) -> None:
    model = nn.Module()
    model.good, model.inner = nn.Linear(2, 2), nn.Module()
    model.inner.odd = nn.Parameter(odd)
    with pytest.raises(UnsupportedError, match=f"parameter inner.odd .*{reason}"):
        split(model)


def tiny_blocks(count: int) -> nn.Module:
    """Some of them larger than hundreds of others."""
    return nn.Sequential(*(nn.Linear(2, 300 if index % 400 == 7 else 2) for index in range(count)))


def test_hundreds_of_tiny_blocks_share_layers() -> None:
    """Each layer costs messages in each step."""
    assert len(split(tiny_blocks(MANY_BLOCKS))) == MANY_BLOCKS
    model = tiny_blocks(1500)
    layers = split(model)
    assert MANY_BLOCKS // 4 < len(layers) <= MANY_BLOCKS + 2
    assert names(layers)[0] == "0 to 7" and waiting(model, layers[0]) == [str(index) for index in range(8)]


@pytest.mark.parametrize(
    "make", [tiny_blocks, lambda count: nn.ParameterList(torch.zeros(2) for _ in range(2 * count))]
)
def test_the_work_of_splitting_is_linear(make: Any) -> None:
    """In the number of parameters, in calls of Python."""
    assert calls(make(1600)) < 4.5 * calls(make(400))


def calls(model: nn.Module) -> int:
    """Of functions, also of C, when a model becomes layers with gates."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    parameters = list(model.parameters())
    sys.setprofile(count)
    try:
        parts = split_layers(model, {id(parameter) for parameter in parameters})
        layers, _ = build_layers(parts, [parameters], ["adamw"], None)
        build_gates(layers, parts)
    finally:
        sys.setprofile(None)
    return counted
