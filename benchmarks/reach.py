"""The largest model that one GPU trains, by the size of its batch, in HyTrain and in others: arithmetic, without a GPU.

    python -m benchmarks.reach        some seconds

    a shape, wider or narrower ─┐
    tokens of a batch ──────────┴─▶ bytes that each of `SYSTEMS` needs ─▶ the widest that fits

It writes the table in docs/will-it-fit.md and docs/pictures/reach.png. HyTrain's bytes are those of `doctor`. The
others' are formulas of what they keep on the GPU; a test compares all of them with peaks that were measured. All train
exactly, with blocks that are computed again in backward, and with as much host memory as that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.columns import markdown
from benchmarks.report import fill
from hytrain import gpus
from hytrain.memory.capacity import GPU_MARGIN
from hytrain.readable import GIB
from protocol.handles import EXACT
from workers.watch.fits import scaled
from workers.watch.forecast import Shape

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
GPUS_GIB: Final = (24, 80)
#: DeepSpeed reduces gradients in buckets: two of half a billion elements each.
BUCKETS_BYTES: Final = 2 * 2 * 500_000_000
#: Of a ViT for images of 224 x 224 in patches of 14 x 14.
TOKENS_PER_IMAGE: Final = 257
LARGEST: Final = 2e12


def vit(numel: float, name: str) -> Shape:
    """A ViT with 48 blocks. Its blocks keep two tensors of the inner width for backward, where a Llama's keep three."""
    hidden = int((numel / 48 / 12) ** 0.5)
    return Shape(name, hidden, 8 * hidden // 3, 48, vocabulary=4, counted=12 * hidden**2)


def _of_torch(shape: Shape, tokens: int) -> int:
    """Weights and gradients in bf16, masters and moments, and either activations or what a step of AdamW makes."""
    return 16 * shape.numel + max(2 * shape.numel, shape.token_bytes(tokens))


def _of_zero2(shape: Shape, tokens: int) -> int:
    return 2 * shape.numel + BUCKETS_BYTES + shape.token_bytes(tokens)


def _of_fsdp2(shape: Shape, tokens: int) -> int:
    """Of all blocks, two are gathered at a time, and have gradients."""
    return shape.step_bytes(tokens) + 8 * shape.block_numel


def _with_weights(shape: Shape, tokens: int) -> int:
    return 2 * shape.numel + shape.step_bytes(tokens)


#: By system: the bytes that it needs on the GPU.
SYSTEMS: Final[Mapping[str, Callable[[Shape, int], int]]] = {
    "torch, no offload": _of_torch,
    "DeepSpeed ZeRO-2, offload": _of_zero2,
    "HyTrain, weights on the GPU": _with_weights,
    "FSDP2, CPU offload": _of_fsdp2,
}
OFFLOADED: Final = "HyTrain, weights offloaded"
#: By model: how it is made of a size, what a batch consists of, tokens in each of these, batches.
MODELS: Final[Mapping[str, tuple[Callable[[float, str], Shape], str, int, tuple[int, ...]]]] = {
    "Llama": (scaled, "sequences of 1024 tokens", 1024, (1, 4, 16, 64)),
    "ViT": (vit, f"images of {TOKENS_PER_IMAGE} tokens", TOKENS_PER_IMAGE, (4, 16, 64, 256)),
}


def fits(system: str, shape: Shape, tokens: int, gpu_bytes: int) -> bool:
    if system == OFFLOADED:
        return shape.most_tokens(gpu_bytes, EXACT) >= tokens
    return SYSTEMS[system](shape, tokens) <= (1 - GPU_MARGIN) * gpu_bytes


def largest(system: str, make: Callable[[float, str], Shape], tokens: int, gpu_gib: int) -> float:
    """The parameters of the largest model that fits, to some percent; 0 for none."""
    gpu_bytes = gpu_gib * GIB - gpus.CONTEXT_BYTES
    low, high = 1e7, LARGEST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(system, make(middle, ""), tokens, gpu_bytes) else (low, middle)
    return low if low > 1e7 else 0.0


def _told(numel: float) -> str:
    return f"{numel / 1e9:.1f} B" if numel < 1e10 else f"{numel / 1e9:.0f} B"


def table() -> str:
    lines = []
    for model, (make, _, length, batches) in MODELS.items():
        for gib, batch in product(GPUS_GIB, batches):
            found = [largest(system, make, batch * length, gib) for system in (*SYSTEMS, OFFLOADED)]
            lines.append([model, f"{gib} GiB", f"{batch} × {length}", *map(_told, found)])
    return markdown(["model", "GPU", "batch × tokens", *SYSTEMS, OFFLOADED], lines)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from benchmarks.pictures import OURS, THEIRS

    styles: dict[str, dict[str, Any]] = {
        "torch, no offload": {"color": THEIRS, "linestyle": ":"},
        "DeepSpeed ZeRO-2, offload": {"color": THEIRS, "linestyle": "-."},
        "FSDP2, CPU offload": {"color": THEIRS, "linestyle": "--"},
        "HyTrain, weights on the GPU": {"color": OURS, "linestyle": "--"},
        OFFLOADED: {"color": OURS, "linewidth": 2.2},
    }
    figure, grid = pyplot.subplots(len(MODELS), len(GPUS_GIB), figsize=(9.0, 7.0), sharey="row")
    for row, (model, (make, unit, length, batches)) in zip(grid, MODELS.items(), strict=True):
        for axes, gib in zip(row, GPUS_GIB, strict=True):
            points = [batches[0] * 2**power for power in range(8)]
            for system, style in styles.items():
                found = [largest(system, make, batch * length, gib) / 1e9 for batch in points]
                axes.plot(points, [each or float("nan") for each in found], label=system, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{model}, {gib} GiB", loc="left")
            axes.set_xlabel(f"batch, {unit}")
            axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g} B"))
            axes.grid(alpha=0.25)
    grid[0][0].set_ylabel("parameters")
    grid[1][0].set_ylabel("parameters")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    page = DOCS / "will-it-fit.md"
    page.write_text(fill(page.read_text(), {"reach": table()}))
    draw(DOCS / "pictures" / "reach.png")


if __name__ == "__main__":
    main()
