"""Writes docs/will-it-fit-table.js, what docs/will-it-fit.md looks up: `doctor`'s answers for many machines and models.

    python -m benchmarks.fits        some minutes on two cores; it needs no GPU

A cell is what the page says of one GPU, model, size of host memory and number of cores. Of a model that fits:
`[precision, seconds per step, percent of full speed, flags]`, with the flags `ALONE` and those of options. Of one that
does not: the sizes of host memory in GiB that would do, exactly and at least; nothing if none would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Final

from hytrain.readable import GIB
from protocol.handles import Precision
from workers.watch.doctor import PRECISIONS
from workers.watch.fits import Answer, Host, answer, described
from workers.watch.forecast import SHAPES, Forecast, Shape, state_bytes

TABLE: Final = Path(__file__).resolve().parent.parent / "docs" / "will-it-fit-table.js"
GPUS: Final = ("RTX 3090", "RTX 4090", "RTX 5090", "A100", "H100")
MODELS: Final = tuple(shape for shape in SHAPES if shape.name not in ("1 B", "20 B"))
RAMS_GIB: Final = (64, 128, 256, 512)
CORES: Final = (8, 16)
BATCH, SEQUENCE = 4, 1024
ALONE, VISIT, OFFLOAD = 1, 2, 4

Cell = list[Any]


def cell(told: Answer) -> Cell:
    """An answer in numbers."""
    if told.fits is None:
        return [size for _, size in told.remedy()]
    precision, found = told.fits
    step_s = found.step_s or found.work_s
    options = told.paste()
    flags = ALONE * told.alone + VISIT * ("visit=" in options) + OFFLOAD * ("offload_weights=" in options)
    return [[*PRECISIONS.values()].index(precision), round(step_s, 6), round(100 * found.work_s / step_s), flags]


class Remembering(Host):
    """A machine that forecasts once what comes to the same: as fast a CPU, or more memory than planes take."""

    known: ClassVar[dict[Any, Forecast]] = {}

    def forecast(self, shape: Shape, tokens: int, precision: Precision, **changes: Any) -> Forecast:
        """As a `Host` does."""
        rates, bounds = self.rates, {"gpu_bytes": self.gpu_bytes, "host_bytes": self.host_bytes, **changes}
        bounds["host_bytes"] = min(bounds["host_bytes"], int(1.05 * shape.numel * (state_bytes(precision) + 4)))
        rest = (rates.product, rates.to_host, rates.gpu_update, rates.cpu_update[precision])
        key = (shape, tokens, precision, *rest, *sorted(bounds.items()))
        if key not in self.known:
            self.known[key] = super().forecast(shape, tokens, precision, **bounds)
        return self.known[key]


def row(gpu: str, shape: Shape) -> list[Cell]:
    """The cells of one GPU and model, by host memory and cores."""
    found = list[Cell]()
    for ram, cores in product(RAMS_GIB, CORES):
        host = Remembering(**vars(described(gpu, ram * GIB, cores, PRECISIONS.values())))
        found.append(cell(answer(shape, host, BATCH, SEQUENCE, first=True)))
    return found


def lines(rows: Iterator[tuple[str, str, list[Cell]]]) -> Iterator[str]:
    """The script, whose only name is FITS."""
    head = {
        "gpus": {gpu: described(gpu, GIB, 1, PRECISIONS.values()).name.partition(" with ")[0] for gpu in GPUS},
        "models": [shape.name for shape in MODELS],
        "rams": RAMS_GIB,
        "cores": CORES,
        "precisions": [str(one) for one in PRECISIONS.values()],
        "options": [
            {name: value for name, value in one._asdict().items() if value != "float32"} for one in PRECISIONS.values()
        ],
        "batch": BATCH,
        "sequence": SEQUENCE,
    }
    yield "// Written by python -m benchmarks.fits, which says what is in it."
    yield f'const FITS = {json.dumps(head)[:-1]}, "cells": {{'
    for gpu, model, cells in rows:
        yield f"{json.dumps(f'{gpu}, {model}')}: {json.dumps(cells, separators=(',', ':'))},"
    yield "}};\n"


def main() -> None:
    """Ask for all, and write the table."""
    asked = [(gpu, shape) for gpu in GPUS for shape in MODELS]
    with ProcessPoolExecutor() as pool:
        rows = (
            (gpu, shape.name, cells) for (gpu, shape), cells in zip(asked, pool.map(row, *zip(*asked)), strict=True)
        )
        TABLE.write_text("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
