"""`hytrain-cluster doctor`: its forecasts beside what was measured, and its advice for made-up machines."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hytrain.memory import capacity
from protocol.handles import EXACT, Precision
from workers.exits import EXIT_USAGE
from workers.planning.planning import BESIDE_TRAINING
from workers.watch import doctor
from workers.watch.doctor import Gpu, Machine, advise, render
from workers.watch.forecast import SHAPES, Rates, Shape, forecast, most_parameters

PRECISIONS = tuple(doctor.PRECISIONS.values())
ROOT = Path(__file__).resolve().parents[1]
GIB, GB = 2**30, 10**9
GPU = Gpu(
    name="a GPU",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    bound_bytes=23 * GIB,
    to_host=24e9,
    from_host=25e9,
    update=38e9,
    product=160e12,
    link=(4, 4, 16, 16),
)
MACHINE = Machine(
    gpu=GPU,
    cpu="a CPU",
    cores=8,
    pinning="6 threads on cores 2-7",
    is_shared=False,
    backend="native: a C++ compiler is there",
    cpu_update=dict(zip(doctor.PRECISIONS, (2.4e9, 2.6e9, 2.6e9, 2.6e9), strict=True)),
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    bound_bytes=56 * GIB,
    group_bytes=None,
    locked_bytes=None,
    descriptors=1 << 20,
    kernel=(6, 8),
    huge_pages="never",
    is_wsl=False,
)
#: An H100 with 16 cores, or with 8 of them: model, GiB of GPU memory, GB for planes, tokens, dtype of the moments, and
#: the seconds that a step took (docs/benchmarks.md, "Below caps on GPU memory").
MEASURED = [
    ("3 B", 8, 115, 8192, "float32", 0.79),
    ("3 B", 12, 115, 8192, "float32", 0.79),
    ("3 B", 24, 115, 8192, "float32", 0.58),
    ("3 B", 48, 115, 8192, "float32", 0.56),
    ("7 B", 8, 115, 8192, "float32", 1.67),
    ("7 B", 16, 115, 8192, "float32", 1.26),
    ("7 B", 32, 115, 8192, "float32", 1.21),
    ("3 B", 12, 27, 4096, "bfloat16", 0.63),
    ("7 B", 24, 58, 4096, "bfloat16", 1.09),
    ("8 B (Llama 3)", 24, 58, 8192, "bfloat16", 1.86),
]
#: Models below 24 GiB at batch 8 × 1024, exact: the rates that `doctor` measured just before, and a step's seconds.
ON_ITS_HOST = [
    ("3 B", Rates(710e12, 53.9e9, 52.7e9, 61e9, {EXACT: 5.16e9}), 0.653),
    ("7 B", Rates(690e12, 54.7e9, 54.5e9, 56e9, {EXACT: 6.74e9}), 1.236),
]


def shape_of(name: str) -> Shape:
    return next(shape for shape in SHAPES if shape.name == name)


@pytest.mark.parametrize(("name", "gpu_gib", "host_gb", "tokens", "state_dtype", "measured_s"), MEASURED)
def test_forecasts_are_near_what_was_measured(
    name: str, gpu_gib: int, host_gb: int, tokens: int, state_dtype: str, measured_s: float
) -> None:
    cpu = 4.6e9 if state_dtype == "float32" else 2.2e9  # 14 threads, or 6
    rates = Rates(
        product=660e12, to_host=52e9, from_host=53e9, gpu_update=90e9, cpu_update=dict.fromkeys(PRECISIONS, cpu)
    )
    bounds = {"gpu_bytes": gpu_gib * GIB, "host_bytes": host_gb * GB}
    found = forecast(shape_of(name), rates, tokens=tokens, precision=Precision(state_dtype), **bounds)
    assert found.step_s is not None and abs(found.step_s / measured_s - 1) <= 0.19


@pytest.mark.parametrize(("name", "rates", "measured_s"), ON_ITS_HOST)
def test_forecasts_from_a_hosts_own_rates(name: str, rates: Rates, measured_s: float) -> None:
    bounds = {"gpu_bytes": 24 * GIB, "host_bytes": 118 * GB}
    found = forecast(shape_of(name), rates, tokens=8192, precision=EXACT, **bounds)
    assert found.step_s is not None and abs(found.step_s / measured_s - 1) <= 0.19


def test_the_sizes_are_those_of_the_models() -> None:
    """A parameter more or less: LLaMA-2 7B has 6.74 B, LLaMA 3's models 8.03 and 70.55 B."""
    sizes = {shape.name: shape.numel / 1e9 for shape in SHAPES}
    assert [sizes[name] for name in ("7 B", "8 B (Llama 3)", "13 B", "70 B (Llama 3)")] == pytest.approx(
        [6.738, 8.030, 13.016, 70.553], abs=0.002
    )


def test_what_limits_a_step_is_forecast() -> None:
    """Full speed where all is fast, the CPU's where that is slow and nothing may visit; no room without memory."""
    shape, rates = shape_of("1 B"), Rates(1e14, 1e13, 1e13, 1e13, dict.fromkeys(PRECISIONS, 1e13))
    whole: dict[str, Any] = {"gpu_bytes": 80 * GIB, "host_bytes": 100 * GB, "tokens": 4096, "precision": EXACT}
    fast = forecast(shape, rates, **whole)
    assert fast.step_s == pytest.approx(fast.work_s, rel=0.02)
    slow = replace(rates, to_host=1e8, cpu_update={EXACT: 1e9})
    updates_s = BESIDE_TRAINING * shape.numel / 1e9
    assert (found := forecast(shape, slow, **whole | {"gpu_bytes": 6 * GIB}).step_s) and found > updates_s
    assert forecast(shape, rates, **whole | {"host_bytes": 0, "gpu_bytes": 8 * GIB}).step_s is None


def test_smaller_state_needs_less() -> None:
    most = [most_parameters(gpu_bytes=0, host_bytes=48 * GB, precision=one) / 1e9 for one in PRECISIONS]
    assert most == [4.0, 6.0, 8.0, 12.0]


def test_a_page_tells_the_machine_and_what_it_trains() -> None:
    page = render(MACHINE, 4, 1024)
    lines = page.splitlines()
    assert re.match(r"This machine trains models in bf16 of up to \d+\.\d B \(exact\), ", lines[0])
    assert lines[2].split(maxsplit=1) == ["GPU", "a GPU, 23.00 GiB of 24.00 GiB free"]
    seven = next(line for line in lines if line.startswith("7 B"))
    assert seven.split()[2:4] == ["no", "room"], "84 GB of exact state do not fit"
    *_, share, tokens = seven.split()
    assert float(seven.split()[6]) > 0 and share.endswith("%") and int(tokens.replace(",", "")) >= 4 * 1024
    assert "What to change" not in page
    alone = render(replace(MACHINE, gpu=None, no_gpu="CUDA finds no device"), 4, 1024)
    assert "none that torch can use: CUDA finds no device" in alone
    assert alone.startswith("This machine trains on its CPU alone: up to ")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backend": "torch: native is not available (there is no C++ compiler on the PATH)"}, "g++"),
        ({"is_shared": True}, "cores"),
        ({"group_bytes": 16 * GIB}, "control group"),
        ({"locked_bytes": 64 << 10}, "ulimit -l"),
        ({"is_wsl": True}, "wslconfig"),
        ({"gpu": replace(GPU, link=(4, 4, 4, 16))}, "4 of 16 PCIe lanes"),
        ({"gpu": replace(GPU, free_bytes=20 * GIB)}, "4.00 GiB of the GPU's memory are in use"),
        ({"gpu": replace(GPU, is_integrated=True)}, "share one memory"),
        ({"descriptors": 1024}, "ulimit -Hn"),
        ({"kernel": (5, 15)}, "Linux 6.1"),
    ],
)
def test_advice_is_given_where_it_helps(changes: dict[str, Any], word: str) -> None:
    assert advise(MACHINE) == []
    [found] = advise(replace(MACHINE, **changes))
    assert word in found


def test_one_memory_is_told_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    integrated = replace(GPU, is_integrated=True, total_bytes=64 * GIB, free_bytes=30 * GIB, bound_bytes=30 * GIB)
    told = render(replace(MACHINE, gpu=integrated), 8, 1024)
    assert "planes may take 56.00 GiB beside the GPU, whose memory it is" in told and "in use: by a desktop" not in told
    measured = {name: getattr(MACHINE, name) for name in ("pinning", "is_shared", "backend", "cpu_update")}
    ran = subprocess.CompletedProcess([], 0, json.dumps(measured))
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ran)
    monkeypatch.setattr(capacity, "available_bytes", lambda: 60 * GIB)
    asked = argparse.Namespace(cores="auto", threads=None, gpu_memory_limit=None, host_memory_limit=None)
    bounds = []
    for gpu in (replace(integrated, is_integrated=False), integrated):
        monkeypatch.setattr(doctor, "_measure_gpu", lambda limit, gpu=gpu: gpu)
        bounds.append(doctor.examine(asked).bound_bytes)
    assert bounds[0] - bounds[1] == 30 * GIB


def test_a_model_is_answered_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the rates that were measured. Without a GPU, the answer is that there is none, and what to do."""
    monkeypatch.setattr(doctor, "examine", lambda asked: MACHINE)
    assert doctor.main(["--model", "7B"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Yes: 7 B trains on this machine: not exact, with moments in bfloat16, about ")
    assert any(line.startswith("This machine trains models in bf16 of up to ") for line in rest)
    monkeypatch.setattr(doctor, "examine", lambda asked: replace(MACHINE, gpu=None))
    assert doctor.main(["--model", "7B"]) == 0
    assert capsys.readouterr().out.startswith("No: torch sees no GPU here. --gpu and --ram answer for a machine")


def test_this_machine_is_examined() -> None:
    """From the command line. The CPU is measured as an optimizer process would run."""
    command = [sys.executable, str(ROOT / "bin" / "hytrain-cluster"), "doctor", "--threads", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("This machine "), "the verdict comes first"
    assert "optimizer       1 thread on cores" in told and "in billions of parameters per second (native" in told


@pytest.mark.parametrize("words", [["--batch", "0"], ["--cores", "4095"]])
def test_impossible_wishes_are_refused(words: list[str]) -> None:
    assert doctor.main(words) == EXIT_USAGE
