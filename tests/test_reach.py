"""The largest model by the size of its batch: the page has what is calculated, and that is near what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reach
from benchmarks.rows import Rows
from workers.watch.forecast import SHAPES

ROOT = Path(__file__).resolve().parent.parent
MEASURED = {
    "torch, no offload": "no-offload",
    "DeepSpeed ZeRO-2, offload": "deepspeed-zero2",
    "HyTrain, weights on the GPU": "hytrain:0",
    "FSDP2, CPU offload": "fsdp2",
}


def test_the_page_has_what_is_calculated() -> None:
    assert reach.table() in (ROOT / "docs" / "will-it-fit.md").read_text()


@pytest.mark.parametrize("system", reach.SYSTEMS)
def test_what_is_calculated_was_measured(system: str) -> None:
    rows = Rows.read(ROOT / "benchmarks" / "results").on_ranks(False)
    found = rows.where(system=MEASURED[system], shape="3b", batch=8, label="", sequence=1024, cap_gib=None)
    assert (measured := found.median("gpu_peak_gb")) is not None
    shape = next(shape for shape in SHAPES if shape.name == "3 B")
    assert reach.SYSTEMS[system](shape, 8 * 1024) == pytest.approx(measured * 1e9, rel=0.05)


def test_a_model_that_is_largest_fits_and_a_larger_one_does_not() -> None:
    for model, (make, _, length, _) in reach.MODELS.items():
        for system in (*reach.SYSTEMS, reach.OFFLOADED):
            found = [reach.largest(system, make, batch * length, 24) for batch in (4, 16, 64)]
            assert found == sorted(found, reverse=True), f"{model}, {system}: a larger batch leaves less"
            gpu_bytes = 24 * reach.GIB - reach.gpus.CONTEXT_BYTES
            assert reach.fits(system, make(found[0], ""), 4 * length, gpu_bytes)
            assert not reach.fits(system, make(1.03 * found[0], ""), 4 * length, gpu_bytes)
