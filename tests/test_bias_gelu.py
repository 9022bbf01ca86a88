"""Bias + GELU in one pass: as near to float64 as torch's own operators are, and the same bits in each run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers.activations import ACT2FN

from examples.studies.gelu import bias_gelu as module
from examples.studies.gelu import native
from examples.studies.gelu.bias_gelu import DTYPES, bias_gelu
from examples.studies.gelu.mlp import Conv1DGelu, fuse
from hytrain.errors import ConfigError
from hytrain.recipe import config, model

Function = Callable[[Tensor, Tensor], Tensor]
Results = tuple[Tensor, Tensor, Tensor]  # y, the gradients of x and of bias

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
#: The last one has more rows than columns; the middle one is divisible by nothing.
SIZES = [(512, 1280), (517, 333), (6000, 64)]
BEFORE: dict[str, Function] = {
    "torch": lambda x, bias: gelu(x + bias, approximate="tanh"),
    "transformers": lambda x, bias: ACT2FN["gelu_new"](x + bias),
}


def some(rows: int, cols: int, dtype: torch.dtype, device: str = "cpu") -> Results:
    """x, bias and dy: the same numbers on each device."""
    generator = torch.Generator().manual_seed(rows + cols)
    sizes = ((rows, cols), (cols,), (rows, cols))
    x, bias, dy = (torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes)
    return x, bias, dy


def both_ways(function: Function, x: Tensor, bias: Tensor, dy: Tensor) -> Results:
    x, bias = (each.clone().requires_grad_() for each in (x, bias))
    y = function(x, bias)
    y.backward(dy)
    assert x.grad is not None and bias.grad is not None
    return y.detach(), x.grad, bias.grad


def exact(x: Tensor, bias: Tensor, dy: Tensor) -> Results:
    """In float64, without the cancellation of 1 + tanh."""
    slope = 2 * (2 / torch.pi) ** 0.5

    def logistic(x: Tensor, bias: Tensor) -> Tensor:
        h = x + bias
        return h * torch.sigmoid(slope * (h + 0.044715 * h**3))

    return both_ways(logistic, x.double(), bias.double(), dy.double())


def errors(found: Results, expected: Results) -> list[tuple[float, float]]:
    """The largest one and the root of the mean square, of the result and of both gradients."""
    differences = [(each.double() - right).abs() for each, right in zip(found, expected, strict=True)]
    return [(each.max().item(), each.square().mean().sqrt().item()) for each in differences]


def assert_rounded_once(found: Results, expected: Results) -> None:
    """y and the gradient of x are off by half of their last place, beside what float32 is off."""
    for each, right in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(each.double(), right, rtol=0.51 * EPSILON[each.dtype], atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_within_those_of_eager(device: str, before: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = some(*size, dtype, device)
    expected = exact(*inputs)
    found = both_ways(bias_gelu, *inputs)
    assert_rounded_once(found, expected)
    ours, eager = errors(found, expected), errors(both_ways(BEFORE[before], *inputs), expected)
    for (worst, usual), (eager_worst, eager_usual) in zip(ours[:2], eager[:2], strict=True):
        assert worst <= eager_worst and usual <= eager_usual
    # The error of a sum is mostly the chance of its last rounding.
    assert ours[2][1] <= eager[2][1] * 1.25


def test_float32_on_a_cpu_is_within_eager_near_zero_too() -> None:
    """There, 1 + tanh has no cancellation, and one rounding more would show."""
    x, bias, dy = some(512, 1280, torch.float32)
    inputs = 0.7 * x, 0.7 * bias, dy
    ours, eager = (errors(both_ways(each, *inputs), exact(*inputs)) for each in (bias_gelu, BEFORE["torch"]))
    assert all(usual <= eager_usual for (_, usual), (_, eager_usual) in zip(ours[:2], eager[:2], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (31, 257), (2, 33, 48), (7,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["", "float32 bias"])
def test_shapes(device: str, shape: tuple[int, ...], dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    """Those that fill no tile; several dimensions and one; a bias in float32, as autocast brings it."""
    x, bias, dy = (each.to(device) for each in some(torch.Size(shape[:-1]).numel(), shape[-1], dtype))
    inputs = x.view(shape), bias.to(bias_dtype or dtype), dy.view(shape)
    found = both_ways(bias_gelu, *inputs)
    for each, right, given in zip(found, exact(*inputs), (inputs[0], inputs[0], inputs[1]), strict=True):
        assert (each.shape, each.dtype, each.device) == (given.shape, given.dtype, given.device)
        tolerance = max(EPSILON[dtype], 4e-6)  # sums over the rows have the errors of all of them
        torch.testing.assert_close(each.double(), right, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_not_finite_leave_as_from_eager(device: str) -> None:
    large = [0.0, 1e4, -1e4, 1e15, -1e15, 1e18, -1e18, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
    for dtype in DTYPES:
        x = torch.tensor(large, device=device).to(dtype).view(-1, 1)
        inputs = x, x.new_zeros(1), torch.ones_like(x)
        ours, eager = (both_ways(each, *inputs)[:2] for each in (bias_gelu, BEFORE["torch"]))
        for each, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(each, other, rtol=EPSILON[dtype], atol=EPSILON[dtype], equal_nan=True)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    inputs = some(517, 333, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(both_ways(bias_gelu, *inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, first) for others in found[1:] for each, first in zip(others, found[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_same_in_each_run_on_a_gpu(dtype: torch.dtype) -> None:
    inputs = some(8192, 640, dtype, "cuda")
    first = both_ways(bias_gelu, *inputs)
    for _ in range(5):
        assert all(map(torch.equal, both_ways(bias_gelu, *inputs), first))


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_reaches_beyond_two_to_the_31() -> None:
    rows, cols, tail = (1 << 20) + 37, 2048, 100
    if torch.cuda.mem_get_info()[0] < 20 * rows * cols:
        pytest.skip("needs 44 GB of free GPU memory")
    end, bias, _ = some(tail, cols, torch.bfloat16, "cuda")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-tail:] = end
    y, dx, dbias = both_ways(bias_gelu, x, bias, torch.ones_like(x))
    expected = both_ways(bias_gelu, end, bias, torch.ones_like(end))
    assert torch.equal(y[-tail:], expected[0]) and torch.equal(dx[-tail:], expected[1])
    [slope] = both_ways(bias_gelu, torch.zeros_like(bias).view(1, -1), bias, torch.ones_like(bias).view(1, -1))[1]
    torch.testing.assert_close(dbias, expected[2] + (rows - tail) * slope, rtol=0.02, atol=1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_keep_the_contract_of_torch_library(device: str) -> None:
    """Schema, fake tensors, autograd, and the same under torch.compile's tracing, also of dynamic shapes."""
    for dtype in (torch.float32, torch.bfloat16):
        x, bias, dy = some(33, 48, dtype, device)
        torch.library.opcheck(module._backward, (dy, x, bias))
        for leaves in ((x, bias), (x.view(3, 11, 48), bias.float())):
            torch.library.opcheck(module._forward, tuple(each.clone().requires_grad_() for each in leaves))


@pytest.mark.filterwarnings("default")  # the compiler's own warnings are not ours
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break_it_has_the_same_bits(device: str) -> None:
    x, bias, dy = some(64, 48, torch.bfloat16, device)
    compiled = torch.compile(bias_gelu, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    assert all(map(torch.equal, both_ways(compiled, x, bias, dy), both_ways(bias_gelu, x, bias, dy)))


@pytest.mark.parametrize("device", DEVICES)
def test_other_layouts_and_nothing_at_all(device: str) -> None:
    """Transposed inputs, a gradient that is one number expanded, and tensors without rows or columns."""
    x, bias, dy = some(48, 64, torch.float32, device)
    plain, turned = (both_ways(bias_gelu, each, bias[:48], dy.T) for each in (x.T.contiguous(), x.T))
    assert all(map(torch.equal, plain, turned)) and turned[0].is_contiguous()
    summed = both_ways(lambda x, bias: bias_gelu(x, bias).sum(), x, bias, torch.ones((), device=device))
    assert torch.equal(summed[1], both_ways(bias_gelu, x, bias, torch.ones_like(x))[1])
    for rows, cols in ((0, 64), (48, 0)):
        y, dx, dbias = both_ways(bias_gelu, x[:rows, :cols], bias[:cols], dy[:rows, :cols])
        assert y.shape == dx.shape == (rows, cols) and torch.equal(dbias, torch.zeros_like(bias[:cols]))


def test_backward_keeps_x_and_bias_alone() -> None:
    kept: list[Tensor] = []
    x, bias, _ = some(8, 16, torch.float32)
    x.requires_grad_(), bias.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        bias_gelu(x, bias)
    assert [each is given for each, given in zip(kept, (x, bias), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), "not torch.float64"),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.bfloat16), "and torch.bfloat16"),
        (torch.ones(2, 3), torch.ones(2), r"x is \[2, 3\], bias \[2\]"),
        (torch.ones(2, 3), torch.ones(1, 3), r"bias \[1, 3\]"),
        (torch.ones(()), torch.ones(1), r"x is \[\]"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, bias: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bias_gelu(x, bias)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    caches = module._kernels, native.load
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_compiler_torch_s_operators_round_once_too(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = some(512, 320, dtype)
    expected = exact(*inputs)
    with caplog.at_level(logging.WARNING, "hytrain"):
        found = both_ways(bias_gelu, *inputs)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "bias + GELU on cpu takes torch's operators"
    ]
    assert_rounded_once(found, expected)
    torch.testing.assert_close(found[2].double(), expected[2], rtol=0.51 * EPSILON[dtype], atol=4e-5)


GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def built(fields: dict[str, Any], **others: bool) -> Any:
    """A recipe's model with weights from a fixed seed."""
    wanted = config.Model.model_validate({"config": fields, **others})
    torch.manual_seed(3)
    return model.build(wanted, model.configuration(wanted, 256, 64), torch.device("cpu"))


@pytest.mark.parametrize(
    "fields",
    [
        *({**GPT2, "activation_function": name} for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")),
        {**GPT2, "model_type": "openai-gpt"},
    ],
    ids=lambda fields: fields.get("activation_function", fields["model_type"]),
)
def test_a_fused_model_computes_what_the_plain_one_does(fields: dict[str, Any]) -> None:
    """The same names and values, gradients within rounding; also recomputed and under autocast."""
    tokens, found = torch.arange(24).view(2, 12), []
    recomputes = [{"gradient_checkpointing": True}] if fields["model_type"] == "gpt2" else []
    for is_fused, others in ((False, {}), *((True, others) for others in ({}, *recomputes))):
        module = built({**fields, **NO_DROPOUT}, **others)
        if is_fused:
            fuse(module)
        assert sum(isinstance(part, Conv1DGelu) for part in module.modules()) == 2 * is_fused
        loss = module(input_ids=tokens, labels=tokens).loss
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(input_ids=tokens, labels=tokens).loss, loss, rtol=0.01, atol=0)
        loss.backward()
        found.append({name: (p.detach(), p.grad) for name, p in module.named_parameters()})
    plain, once, *recomputed = found
    for name, (value, grad) in plain.items():
        assert torch.equal(value, once[name][0])
        torch.testing.assert_close(once[name][1], grad, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(each[name][1], once[name][1]) for each in recomputed)


def test_a_model_without_such_an_mlp_is_not_fused() -> None:
    for activation in ("relu", "gelu"):
        with pytest.raises(ConfigError, match="this gpt2 has none: leave it out"):
            fuse(built({**GPT2, "activation_function": activation}))
