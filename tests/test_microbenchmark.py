"""The microbenchmark compares systems that compute the same, and writes what it has measured."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bias_gelu import DEVICES

from examples.studies.gelu import microbenchmark
from examples.studies.gelu.microbenchmark import COMPILED, EPILOGUE, FIELDS, NEW, OURS, SMALL, SYSTEMS, TANH, Bench


def seeded(run: Callable[[], Any]) -> Any:
    """With the same masks of dropout for all."""
    torch.manual_seed(1)
    return run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["kernel", "projection", "mlp", "block"])
def test_the_systems_of_a_part_compute_the_same(part: str, device: str) -> None:
    """But for torch.compile, which has dropout masks of its own and a compiler that takes long on a CPU."""
    bench = Bench(SMALL, torch.device(device), [system for system in SYSTEMS if system != COMPILED])
    torch.manual_seed(0)
    first, *others = cases = getattr(microbenchmark, part)(bench, torch.float32)
    systems = [case.system for case in cases]
    assert systems == [NEW, TANH, OURS] + [EPILOGUE] * (part == "projection" and device == "cuda")
    for case in others:
        torch.testing.assert_close(seeded(case.forward), seeded(first.forward), rtol=1e-4, atol=1e-5)
        assert (case.both is None) is (case.system == EPILOGUE)


@pytest.mark.slow
def test_a_small_run_measures_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.csv"
    options = ["--detailed", "--device", "cpu", "--dtypes", "float32", "bfloat16", "--repeats", "1"]
    assert microbenchmark.main([*options, "--skip", COMPILED, "--export-csv", str(file)]) == 0
    found = list(csv.DictReader(file.read_text().splitlines()))
    assert tuple(found[0]) == FIELDS
    stages = [f"MLP: {stage}" for stage in ("up-projection", "GELU", "down-projection", "dropout")]
    both = ("bias + GELU", "up-projection, bias + GELU")
    expected = {(part, dtype) for part in both for dtype in ("float32", "bfloat16")}
    expected |= {(part, "float32") for part in ("MLP", *stages, "block", "step")}
    for system in (NEW, TANH, OURS):
        mine = [row for row in found if row["system"] == system]
        assert {(row["part"], row["dtype"]) for row in mine} == expected and len(mine) == len(expected)
        assert all(float(row["forward_backward_us"]) > 0 for row in mine)
        assert [row["part"] for row in mine if not row["forward_us"]] == ["step"]
    page = capsys.readouterr().out
    assert page.count("\n| ") == len(found) + 2 and "GELU's share of the MLP with HyTrain: " in page


def test_ratios_are_those_of_one_part_and_dtype() -> None:
    def row(system: str, dtype: str, forward: float | None, both: float | None) -> dict[str, Any]:
        return dict(zip(FIELDS, ("kernel", system, dtype, 8, 4, 16, forward, both), strict=True))

    found = [row(NEW, "a", 30.0, 60.0), row(TANH, "b", 1.0, 1.0), row(OURS, "a", 10.0, 40.0)]
    found.append(row(EPILOGUE, "a", 5.0, None))
    lines = microbenchmark.table(found).splitlines()
    assert lines[4] == "| kernel | a | HyTrain | 10.0 | 40.0 | 3.00 / 1.50 | – / – |"
    assert lines[5] == "| kernel | a | cuBLASLt | 5.0 | – | 6.00 / – | – / – |"
