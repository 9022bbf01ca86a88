"""The kernel benchmark measures what it says: whole passes, the bytes of the update, ratios of like with like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernel
from hytrain.kernels.choice import load
from protocol.rules import TILE_NUMEL

ROOT = Path(__file__).resolve().parent.parent


def row(system: str, seconds: list[float], **others: object) -> dict[str, object]:
    usual = {"dtype": "bfloat16", "tile": TILE_NUMEL, "threads": 2, "numel": 1_000_000_000, "bytes_each": 26}
    return {"system": system, **usual, **others, "seconds": seconds}


def test_medians_and_ratios_compare_like_with_like() -> None:
    rows = kernel.medians(
        [
            row("native", [0.1, 0.9]),
            row("native", [0.1], tile=1),
            row("native", [0.4], threads=1),
            row("native", [0.05], dtype="float32"),
            row("native", [0.01], numel=500_000_000),  # the sweep's: half the work, a part of it from the cache
            {"system": "torch", "error": "first"},
            row("native without prefetch", [0.25]),
            row("native into a second bank", [0.22]),
            row("native", [0.2]),  # of another process
            row("stream", [0.2]),
            row("stream", [0.01], numel=500_000_000),
            row("stream without prefetch", [0.18]),  # the better one
            row("deepspeed with casts", [0.4], tile=1),  # its best
            row("deepspeed with casts", [0.5], tile=2),
            row("gpu", [0.01], threads=0),
            {"system": "torch", "error": "second"},
        ]
    )
    assert len(rows) == 14 and rows[-1] == {"system": "torch", "error": "second"}
    assert [rows[0][name] for name in ("gparam_s", "gb_s", "spread")] == pytest.approx([5.0, 130.0, 9.0])
    assert kernel.summary(rows, threads=2) == pytest.approx(
        {
            "native / stream": 0.9,
            "native / native without prefetch": 1.25,
            "native / native into a second bank": 1.1,
            "native / DeepSpeed's operator with casts, at its best tile": 2.0,
            "alpha, the GPU's time / the CPU's": 0.05,
        }
    )
    assert kernel.summary([row for row in rows if row["system"] != "native"], threads=2) == {}


@pytest.mark.parametrize("flag", ["-DHYTRAIN_PREFETCH=0", "-DHYTRAIN_PREFETCH=512"])
@pytest.mark.parametrize("numel", [1, 4096, 3 * 4096 + 77])
def test_stream_reads_and_writes_every_element(numel: int, flag: str) -> None:
    planes = kernel.Planes(numel, "bfloat16", load("native", 2)[0])
    before = {plane: bytes(planes.buffer(plane)) for plane in planes.base}
    with kernel.compiled_with(flag):
        stream = kernel.Stream()
    stream.over(planes, tile=4096, threads=2).run()
    after = {plane: bytes(planes.buffer(plane)) for plane in planes.base}
    assert after["grads"] == before["grads"]
    for plane, width in (("remainder", 2), ("exp_avg", 4), ("exp_avg_sq", 4)):
        assert flipped(before[plane], after[plane], width) == [1] * numel
    signs = [high >> 7 for high in before["grads"][1::2]]
    assert flipped(before["weights"], after["weights"], 2) == signs
    planes.arena.close()


def flipped(before: bytes, after: bytes, width: int) -> list[int]:
    """The exclusive or of two arrays of little-endian numbers."""
    pieces = range(0, len(before), width)
    return [
        int.from_bytes(before[i : i + width], "little") ^ int.from_bytes(after[i : i + width], "little") for i in pieces
    ]


@pytest.mark.slow
@pytest.mark.spawns
def test_command(tmp_path: Path) -> None:
    """All of it on few elements, but for the systems that bring torch."""
    command = [sys.executable, "-m", "benchmarks.kernel", "--threads", "2", "--numel", "65536", "--rounds", "1"]
    command += ["--skip", "deepspeed", "torch", "gpu", "--json", str(tmp_path / "kernel.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    result = json.loads((tmp_path / "kernel.json").read_text())
    cases = {(r["system"], r["dtype"], r["threads"]) for r in result["rows"]}
    assert cases >= {("copy", "float32", 2), ("native", "float32", 2), ("native", "bfloat16", 1)}
    assert cases >= {("stream", "bfloat16", 1), ("native into a second bank", "bfloat16", 2)}
    assert cases >= {(f"{system} without prefetch", "bfloat16", 2) for system in ("native", "stream")}
    assert all(r["gparam_s"] > 0 for r in result["rows"])
    assert result["machine"]["cpu"] in done.stdout and "| native | bfloat16 |" in done.stdout
