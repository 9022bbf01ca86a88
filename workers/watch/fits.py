"""Whether a model fits a machine, how fast it trains there, whether exactly, and the line to paste: doctor's answer.

    --gpu, --ram, --cores ─▶ described ─┐
    what doctor has measured ───────────┼─▶ Host ─┐
    --model ─▶ model_named ─▶ Shape ────┴─────────┴─▶ answer ─▶ Answer, whose first line is the verdict

What fits and how long a step takes is `forecast`'s to say. Here are only the rates of a machine that nobody has
measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hytrain import gpus
from hytrain.errors import ConfigError
from hytrain.extras import needed
from hytrain.memory.capacity import beside_margin
from hytrain.model.layers import find_blocks
from hytrain.planner.profile import SAME_SPEED
from hytrain.readable import GIB, gib, nearest, table
from protocol.handles import DTYPE_BYTES, EXACT, Precision
from workers import affinity
from workers.watch.forecast import SHAPES, Forecast, Rates, Shape, forecast, state_bytes

#: What a large product reaches of the peak that the vendor states, copies of the link's, and updates on the GPU of its
#: memory's, as on H100 hosts.
OF_PEAK, OF_LINK, OF_MEMORY = 0.7, 0.85, 0.45
#: Parameters per second that a thread updates on the CPU, and the bytes per second that all of them have: 14 threads of
#: servers (docs/benchmarks.md, "The CPU kernel"), and two channels of DDR5.
THREAD_UPDATES, SERVER_BYTES, DESKTOP_BYTES = 0.4e9, 190e9, 55e9
#: Sizes of host memory, in GiB, of which the least is named that would do.
RAM_GIB: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_SIZE: Final = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?([bm])(?![a-z])", re.IGNORECASE)
_MATRICES: Final = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Host:
    """A machine: how fast it is, and the bytes that are free on its GPU and for planes in host memory."""

    name: str
    rates: Rates
    gpu_bytes: int
    host_bytes: int

    def forecast(self, shape: Shape, tokens: int, precision: Precision, **changes: Any) -> Forecast:
        bounds = {"gpu_bytes": self.gpu_bytes, "host_bytes": self.host_bytes, **changes}
        return forecast(shape, self.rates, tokens=tokens, precision=precision, **bounds)


def described(gpu: str, ram_bytes: int, cores: int, precisions: Iterable[Precision]) -> Host:
    """The machine that is described, of which nothing is measured. Raises `ConfigError` for an unknown GPU."""
    if (name := gpus.named(gpu)) is None:
        meant = nearest(gpu, gpus.GPUS)
        known = f"did you mean {meant}?" if meant else f"known are {', '.join(gpus.GPUS)}"
        raise ConfigError(f'--gpu: there is no row for "{gpu}": {known}')
    if cores < 1:
        raise ConfigError("--cores: with --gpu, give the number of cores, such as 8")
    row = gpus.GPUS[name]
    threads = affinity.part(tuple(range(cores)), None, "", 0, 1, trainer_cores=affinity.TRAINER_CORES).threads
    moved_bytes = {
        one: DTYPE_BYTES["bfloat16"] + 2 * (DTYPE_BYTES["bfloat16"] + state_bytes(one)) for one in precisions
    }
    host_bytes_s = DESKTOP_BYTES if row.is_desktop else SERVER_BYTES
    rates = Rates(
        product=OF_PEAK * 1e12 * row.tflops,
        to_host=OF_LINK * 1e9 * row.link_gbs,
        from_host=OF_LINK * 1e9 * row.link_gbs,
        gpu_update=OF_MEMORY * 1e9 * row.memory_gbs / moved_bytes[EXACT],
        cpu_update={one: min(threads * THREAD_UPDATES, host_bytes_s / moved) for one, moved in moved_bytes.items()},
    )
    its = f"{'an' if name[0] in 'AHLR' else 'a'} {name} with {ram_bytes / GIB:g} GiB of host memory and {cores} cores"
    return Host(its, rates, row.memory_gib * GIB - gpus.CONTEXT_BYTES, max(0, beside_margin(ram_bytes)))


# ---------------------------------------------------------------- the model


def model_named(text: str) -> Shape:
    """A folder with a config.json, a name of the Hub whose config was downloaded, a size, or four numbers.

    Sizes are those of LLaMAs: "7B", "llama3-8b", "350M". The numbers are `hidden x intermediate x blocks x vocabulary`.
    Raises `ConfigError`.
    """
    if Path(text).is_dir() or "/" in text:
        return _configured(text)
    if numbers := _MATRICES.fullmatch(text):
        hidden, intermediate, blocks, vocabulary = map(int, numbers.groups())
        return Shape(text, hidden, intermediate, blocks, vocabulary)
    if not (sizes := _SIZE.findall(text)):
        raise ConfigError(
            f'--model: "{text}" is no size such as 7B, no hidden x intermediate x blocks x vocabulary such as '
            "4096x11008x32x32000, and no folder with a config.json"
        )
    number, unit = sizes[-1]
    for shape in SHAPES:
        if unit in "bB" and shape.name.split()[0] == number:
            return shape
    return scaled(float(number) * (1e9 if unit in "bB" else 1e6), f"{number} {unit.upper()}")


def scaled(numel: float, name: str) -> Shape:
    """The most similar of `SHAPES`, as much wider or narrower as it takes to have so many parameters."""
    base = min(SHAPES, key=lambda shape: abs(shape.numel - numel))
    low, high = 0.0, 8.0
    for _ in range(40):
        wide = (low + high) / 2
        shape = replace(base, name=name, hidden=int(wide * base.hidden), intermediate=int(wide * base.intermediate))
        low, high = (wide, high) if shape.numel < numel else (low, wide)
    return shape


def _configured(name: str) -> Shape:
    """The model of a configuration, whose parameters are counted."""
    with needed("--model with a folder or a name of the Hub", "recipe"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    try:
        config: Any = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        raise ConfigError(
            f"--model: there is no configuration of {name} on this machine. HyTrain downloads nothing: run "
            f"`hf download {name} config.json` first, or give its size, such as 8B"
        ) from None
    text = config.get_text_config()
    if getattr(text, "num_experts_per_tok", None):
        raise ConfigError(f"--model: {name} has experts, which doctor does not forecast; --dry-run counts their memory")
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model)]
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Shape(
        Path(name).name,
        text.hidden_size,
        intermediate,
        len(blocks),
        text.vocab_size,
        counted=max(blocks, default=1),
        tied=bool(text.tie_word_embeddings),
    )


# ---------------------------------------------------------------- the answer


@dataclass(frozen=True)
class Answer:
    """What is forecast of a model on a machine, in each precision, the exact one first.

    `alone`: torch's own AdamW has room for everything on the GPU. `plain`: the options need not name a placement.
    """

    shape: Shape
    host: Host
    batch: int
    sequence: int
    found: dict[Precision, Forecast]
    alone: bool
    plain: Forecast | None

    @property
    def fits(self) -> tuple[Precision, Forecast] | None:
        """The first precision in which it fits."""
        return next(((one, found) for one, found in self.found.items() if found.step_s is not None), None)

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def verdict(self) -> str:
        """One sentence: whether it fits, how fast it is, and whether exactly."""
        if self.fits is None:
            no = f"No: {self.shape.name} does not train on {self.host.name}"
            if remedy := "; or ".join(f"{size} GiB, {_how(precision)}" for precision, size in self.remedy()):
                return f"{no} in any precision. With this GPU it needs {remedy}."
            return f"{no}, whose GPU has too little memory for steps of {self.batch} x {self.sequence} tokens."
        precision, found = self.fits
        step_s = found.step_s or found.work_s
        per_step = f"about {step_s:.2f} s per step of {self.batch} x {self.sequence} tokens"
        speed = f"{per_step}, {self.tokens / step_s:,.0f} tokens/s, {found.work_s / step_s:.0%} of full speed"
        without = " It fits without HyTrain, too, with torch's AdamW." if self.alone else ""
        return f"Yes: {self.shape.name} trains on {self.host.name}: {_how(precision)}, {speed} (a forecast).{without}"

    def remedy(self) -> list[tuple[Precision, int]]:
        """How much host memory would do, in GiB, exactly and at least; nothing if none would."""
        found = []
        for precision in (EXACT, [*self.host.rates.cpu_update][-1]):
            for size in RAM_GIB:
                most = max(0, beside_margin(size * GIB))
                if self.host.forecast(self.shape, self.tokens, precision, host_bytes=most).step_s is not None:
                    found.append((precision, size))
                    break
        return found

    def paste(self) -> str:
        """The line of a training loop."""
        if self.fits is None:
            return ""
        precision, found = self.fits
        options = {} if precision.state_dtype == "float32" else {"state_dtype": precision.state_dtype}
        options |= {} if precision.master_dtype == "float32" else {"master_dtype": precision.master_dtype}
        if self.plain is None:
            options |= {"visit": "auto"} if found.visit else {}
            options |= {"offload_weights": "auto", "device": "cuda"} if found.offload else {}
        told = "".join(f', {name}="{value}"' for name, value in options.items())
        first = "model" if "offload_weights" in options else "model.parameters()"
        return f"model.gradient_checkpointing_enable()\nopt = hytrain.AdamW({first}, lr=1e-5{told})"

    def render(self) -> str:
        """The verdict, the line to paste, and the forecast of each precision."""
        rates = self.host.rates
        rows = [
            (str(one), *cells(found, self.tokens), f"{rates.cpu_update[one] / 1e9:.1f}")
            for one, found in self.found.items()
        ]
        parts = [
            self.verdict(),
            self.paste(),
            table(("state", "s/step", "tokens/s", "of full speed", "G updates/s on the CPU"), rows),
            f"{self.shape.numel / 1e9:.2f} B parameters in bf16, with activation checkpointing and the loss in parts. "
            f"Counted with products of {rates.product / 1e12:.0f} TFLOP/s,\ncopies of {rates.to_host / 1e9:.0f} GB/s, "
            f"{gib(self.host.gpu_bytes)} of GPU memory, and {gib(self.host.host_bytes)} of host memory for planes. "
            "Full speed is that of\na GPU that could hold everything.",
            f"The largest batch has {self.shape.most_tokens(self.host.gpu_bytes, EXACT):,} tokens, with visits and "
            "offloaded weights.",
        ]
        return "\n\n".join(part for part in parts if part)


def _how(precision: Precision) -> str:
    return "exact" if precision.is_exact else f"not exact, with {precision}"


def answer(shape: Shape, host: Host, batch: int, sequence: int, *, first: bool = False) -> Answer:
    """Forecasts the model on the machine, in steps of `batch` sequences of so many tokens.

    `first`: only up to the first precision in which it fits.
    """
    tokens, found = batch * sequence, dict[Precision, Forecast]()
    for one in host.rates.cpu_update:
        found[one] = host.forecast(shape, tokens, one)
        if first and found[one].step_s is not None:
            break
    result = Answer(shape, host, batch, sequence, found, alone=False, plain=None)
    if result.fits is None:
        return result
    precision, best = result.fits
    gradients = shape.numel * DTYPE_BYTES["bfloat16"]
    alone = host.forecast(shape, tokens, EXACT, host_bytes=0, gpu_bytes=max(0, host.gpu_bytes - gradients))
    plain = host.forecast(shape, tokens, precision, visit=0.0, offload=0.0)
    is_as_good = plain.step_s is not None and plain.step_s <= (1 + 2 * SAME_SPEED) * (best.step_s or 0.0)
    return replace(result, alone=alone.step_s is not None, plain=plain if is_as_good else None)


def cells(found: Forecast, tokens: int) -> tuple[str, str, str]:
    """A forecast in a table: seconds per step, tokens per second, the share of full speed."""
    if found.step_s is None:
        return "no room", "-", "-"
    return f"{found.step_s:.2f}", f"{tokens / found.step_s:,.0f}", f"{found.work_s / found.step_s:.0%}"
