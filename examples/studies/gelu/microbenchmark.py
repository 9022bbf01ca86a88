"""How fast bias + GELU in one kernel is: alone, in GPT-2 Large's MLP and, with --detailed, in a block and a whole step.

    python -m examples.studies.gelu [--detailed] [--export-csv FILE]

Each part compares systems that compute the same: Transformers' `gelu_new`, torch's operator for the tanh form,
torch.compile of that, HyTrain, and cuBLASLt, which can only do the forward and only together with the projection.

    part ─▶ cases, one for each system ─▶ once each to warm up ─▶ all in turn, repeatedly ─▶ medians ─▶ table, CSV

On a GPU, a time is that between two events around the work. The host launches the work while the device is still busy
with something else, so the time has no launches in it; and what it reads is no longer in the cache.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block

from benchmarks import host
from benchmarks.columns import MISSING, markdown, number
from examples.studies.gelu.bias_gelu import bias_gelu
from examples.studies.gelu.mlp import fuse

NEW, TANH, COMPILED, OURS, EPILOGUE = "gelu_new", "F.gelu", "torch.compile", "HyTrain", "cuBLASLt"
SYSTEMS: Final = (NEW, TANH, COMPILED, OURS, EPILOGUE)
#: Transformers' names of the activation in a model of each system.
ACTIVATIONS: Final = {NEW: "gelu_new", TANH: "gelu_pytorch_tanh", COMPILED: "gelu_pytorch_tanh", OURS: "gelu_new"}
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FIELDS: Final = ("part", "system", "dtype", "rows", "hidden", "inner", "forward_us", "forward_backward_us")

FLUSHED_BYTES: Final = 256 << 20  # several times the cache of a GPU
BUSY_CYCLES: Final = 3_000_000  # 1.5 to 2 ms, in which the host launches the work that is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model: `rows` tokens, in sequences of `sequence`."""

    rows: int
    hidden: int
    inner: int
    sequence: int
    layers: int
    heads: int
    vocabulary: int


GPT2_LARGE: Final = Sizes(rows=8 * 1024, hidden=1280, inner=5120, sequence=1024, layers=36, heads=20, vocabulary=50257)
SMALL: Final = Sizes(rows=128, hidden=64, inner=256, sequence=64, layers=2, heads=4, vocabulary=256)


@dataclass(slots=True, kw_only=True)
class Case:
    """One system in one part. `both`, forward and backward, is missing where a system has no backward."""

    part: str
    system: str
    dtype: str
    forward: Callable[[], Any] | None
    both: Callable[[], Any] | None
    forward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)

    def row(self, sizes: Sizes) -> dict[str, Any]:
        medians = (round(statistics.median(each) * 1e6, 2) if each else None for each in (self.forward_s, self.both_s))
        known = (self.part, self.system, self.dtype, sizes.rows, sizes.hidden, sizes.inner, *medians)
        return dict(zip(FIELDS, known, strict=True))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts need to make their cases."""

    sizes: Sizes
    device: torch.device
    systems: Sequence[str]

    def randn(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype).requires_grad_()

    def case(
        self, part: str, system: str, dtype: torch.dtype, run: Callable[[], Tensor], leaves: Sequence[Tensor] = ()
    ) -> Case:
        """A case of `run`, and of the gradients of `leaves`, if there are any."""
        with torch.no_grad():
            shape = run().shape
        dy = torch.randn(shape, device=self.device).to(dtype)

        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        def both() -> Sequence[Tensor]:
            return torch.autograd.grad(run(), tuple(leaves), dy)

        name = str(dtype).removeprefix("torch.")
        return Case(part=part, system=system, dtype=name, forward=forward, both=both if leaves else None)

    def of_module(self, part: str, system: str, dtype: torch.dtype, module: nn.Module, x: Tensor) -> Case:
        called = torch.compile(module, dynamic=False) if system == COMPILED else module
        return self.case(part, system, dtype, lambda: _tensor(called(x)), (x, *module.parameters()))

    def built(self, system: str, dtype: torch.dtype, make: Callable[[GPT2Config], nn.Module]) -> Any:
        """A system's model in training mode. All have the same weights."""
        sizes = self.sizes
        config = GPT2Config(
            n_embd=sizes.hidden,
            n_inner=sizes.inner,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_positions=sizes.sequence,
            vocab_size=sizes.vocabulary,
            bos_token_id=0,
            eos_token_id=0,
            activation_function=ACTIVATIONS[system],
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        with self.device:
            model: Any = make(config).to(dtype)
        if system == OURS:
            fuse(model)
        return model.train()

    @property
    def models(self) -> list[str]:
        return [system for system in ACTIVATIONS if system in self.systems]


# ---------------------------------------------------------------- parts


def kernel(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """Bias + GELU alone, as one kernel or several."""
    sizes = bench.sizes
    x, bias = bench.randn(sizes.rows, sizes.inner, dtype=dtype), bench.randn(sizes.inner, dtype=dtype)
    functions = {NEW: _new, TANH: _tanh, COMPILED: torch.compile(_tanh, dynamic=False), OURS: bias_gelu}
    return [
        bench.case("bias + GELU", system, dtype, lambda function=function: function(x, bias), (x, bias))
        for system, function in functions.items()
        if system in bench.systems
    ]


def projection(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """The projection before it, too: where the bias is added by the product, GELU is all that is left to fuse."""
    sizes = bench.sizes
    x = bench.randn(sizes.rows, sizes.hidden, dtype=dtype)
    weight = bench.randn(sizes.hidden, sizes.inner, dtype=dtype, scale=sizes.hidden**-0.5)
    bias = bench.randn(sizes.inner, dtype=dtype)
    new = ACT2FN["gelu_new"]
    functions: dict[str, Callable[[], Tensor]] = {
        NEW: lambda: new(torch.addmm(bias, x, weight)),
        TANH: lambda: functional.gelu(torch.addmm(bias, x, weight), approximate="tanh"),
        OURS: lambda: bias_gelu(x @ weight, bias),
        EPILOGUE: lambda: torch._addmm_activation(bias, x, weight, use_gelu=True),
    }
    if bench.device.type == "cpu":
        del functions[EPILOGUE]  # there, the operator takes the other form of GELU
    return [
        bench.case("up-projection, bias + GELU", system, dtype, run, () if system == EPILOGUE else (x, weight, bias))
        for system, run in functions.items()
        if system in bench.systems
    ]


def mlp(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """The whole MLP of Transformers' GPT-2: up-projection, GELU, down-projection, dropout."""
    x = bench.randn(bench.sizes.rows, bench.sizes.hidden, dtype=dtype)
    make = partial(GPT2MLP, bench.sizes.inner)
    return [bench.of_module("MLP", system, dtype, bench.built(system, dtype, make), x) for system in bench.models]


def breakdown(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """The parts of that MLP, each on its own. HyTrain's up-projection adds no bias, its GELU does."""
    sizes, cases = bench.sizes, []
    x, h = (bench.randn(sizes.rows, width, dtype=dtype) for width in (sizes.hidden, sizes.inner))
    up = bench.randn(sizes.hidden, sizes.inner, dtype=dtype, scale=sizes.hidden**-0.5)
    down = bench.randn(sizes.inner, sizes.hidden, dtype=dtype, scale=sizes.inner**-0.5)
    inner, outer = (bench.randn(width, dtype=dtype) for width in (sizes.inner, sizes.hidden))
    gelus: dict[str, Callable[[Tensor], Tensor]] = {
        NEW: ACT2FN["gelu_new"],
        TANH: lambda h: functional.gelu(h, approximate="tanh"),
        OURS: lambda h: bias_gelu(h, inner),
    }
    for system, act in gelus.items():
        if system not in bench.systems:
            continue
        ours = system == OURS
        parts: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
            "up-projection": (
                (lambda: x @ up) if ours else (lambda: torch.addmm(inner, x, up)),
                (x, up) if ours else (x, up, inner),
            ),
            "GELU": (lambda act=act: act(h), (h, inner) if ours else (h,)),
            "down-projection": (lambda: torch.addmm(outer, h, down), (h, down, outer)),
            "dropout": (lambda: functional.dropout(x, 0.1), (x,)),
        }
        cases += [bench.case(f"MLP: {part}", system, dtype, *each) for part, each in parts.items()]
    return cases


def block(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """One transformer block of GPT-2: attention and the MLP."""
    sizes = bench.sizes
    x = bench.randn(sizes.rows // sizes.sequence, sizes.sequence, sizes.hidden, dtype=dtype)
    make = partial(GPT2Block, layer_idx=0)
    models = {system: bench.built(system, dtype, make) for system in bench.models if system != COMPILED}
    return [bench.of_module("block", system, dtype, model, x) for system, model in models.items()]


def step(bench: Bench, dtype: torch.dtype) -> list[Case]:
    """A training step of the whole model on random tokens: forward, backward and torch's fused AdamW."""
    sizes = bench.sizes
    tokens = torch.randint(sizes.vocabulary, (sizes.rows // sizes.sequence, sizes.sequence), device=bench.device)
    models = {system: bench.built(system, dtype, GPT2LMHeadModel) for system in bench.models if system != COMPILED}
    optimizers = {system: torch.optim.AdamW(each.parameters(), lr=1e-5, fused=True) for system, each in models.items()}

    def run(system: str) -> None:
        models[system](input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizers[system].step()
        optimizers[system].zero_grad()

    name = str(dtype).removeprefix("torch.")
    return [Case(part="step", system=system, dtype=name, forward=None, both=partial(run, system)) for system in models]


def _new(x: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = ACT2FN["gelu_new"](x + bias)
    return result


def _tanh(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias, approximate="tanh")


def _tensor(output: Any) -> Tensor:
    """A block's output: the hidden states, in some versions of Transformers in a tuple."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


# ---------------------------------------------------------------- measuring


class Clock:
    """Seconds of the device's work, or of the host's where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES if self._cuda else 0, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], Any]) -> float:
        if not self._cuda:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def measure(cases: Sequence[Case], clock: Clock, repeats: int) -> None:
    """All cases in turn, so that a change of the device's clocks meets each of them."""
    for round_ in range(repeats + 2):  # the first two warm up
        for case in cases:
            for run, seconds in ((case.forward, case.forward_s), (case.both, case.both_s)):
                if run is not None:
                    took = clock.seconds(run)
                    if round_ >= 2:
                        seconds.append(took)


def rows(bench: Bench, dtypes: Sequence[torch.dtype], detailed: bool, repeats: int) -> Iterator[dict[str, Any]]:
    """Kernel and projection in each dtype, the rest in the first one. A part's memory is free before the next."""
    clock = Clock(bench.device)
    parts = [(part, dtype) for part in (kernel, projection) for dtype in dtypes] + [(mlp, dtypes[0])]
    if detailed:
        parts += [(part, dtypes[0]) for part in (breakdown, block, step)]
    for part, dtype in parts:
        print(f"{part.__name__}, {str(dtype).removeprefix('torch.')} …", file=sys.stderr, flush=True)
        cases = part(bench, dtype)
        measure(cases, clock, max(3, repeats // 8) if part is step else repeats)
        yield from (case.row(bench.sizes) for case in cases)
        del cases
        torch.compiler.reset()  # each dtype is compiled for itself
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- results


def table(found: Sequence[dict[str, Any]]) -> str:
    """Microseconds, and how many times as fast as the two eager forms: forward / forward and backward."""
    body = []
    for row in found:
        same = [each for each in found if (each["part"], each["dtype"]) == (row["part"], row["dtype"])]
        times = [number(row[column], 1) for column in FIELDS[-2:]]
        gains = (_gain(row, same, each) for each in (NEW, TANH))
        body.append([row["part"], row["dtype"], row["system"], *times, *gains])
    return markdown(["part", "dtype", "system", "forward, µs", "forward + backward, µs", f"× {NEW}", f"× {TANH}"], body)


def _gain(row: dict[str, Any], same: Sequence[dict[str, Any]], other: str) -> str:
    base = next((each for each in same if each["system"] == other), None)
    ratios = [
        MISSING if base is None or not row[column] or not base[column] else f"{base[column] / row[column]:.2f}"
        for column in FIELDS[-2:]
    ]
    return " / ".join(ratios)


def shares(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Which fraction of the MLP's forward and backward is its GELU, by system."""
    for system in SYSTEMS:
        parts = {row["part"]: row for row in found if row["part"].startswith("MLP: ") and row["system"] == system}
        if parts:
            gelu = parts["MLP: GELU"]
            of = [gelu[each] / sum(row[each] for row in parts.values()) for each in FIELDS[-2:]]
            yield f"GELU's share of the MLP with {system}: {of[0]:.1%} of forward, {of[1]:.1%} of forward + backward"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.studies.gelu", description=__doc__.splitlines()[0])
    parser.add_argument("--detailed", action="store_true", help="also the MLP's parts, a block and a training step")
    parser.add_argument("--export-csv", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--skip", nargs="*", choices=SYSTEMS, default=[], help="systems that are left out")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(0)
    sizes = GPT2_LARGE if device.type == "cuda" else SMALL
    bench = Bench(sizes, device, [system for system in SYSTEMS if system not in options.skip])
    found = list(rows(bench, [DTYPES[each] for each in options.dtypes], options.detailed, options.repeats))
    if options.export_csv:
        with options.export_csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(found)
    facts = host.hardware()
    print(f"{facts['gpu'] if device.type == 'cuda' else facts['cpu']}, torch {torch.__version__}")
    print(f"{sizes.rows} rows, {sizes.hidden} and {sizes.inner} columns; medians of {options.repeats}\n")
    print(table(found), *shares(found), sep="\n")
    return 0
