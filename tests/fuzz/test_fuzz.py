"""The short form of the fuzzers: what they draw from one seed finds nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [*TARGETS])
def test_nothing_is_found_in_one_process(name: str) -> None:
    """A failure here is found again with: python -m tests.fuzz --target NAME --case CASE --seed 1."""
    inputs = case = 0
    while inputs < 5_000:
        inputs += TARGETS[name](random.Random(f"1-{name}-{case}"))
        case += 1


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.timeout(600)
def test_a_run_under_fire_has_the_bits_of_one_that_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.live", "--frames", "20000", "--folder", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "20,000 frames" in ran.stdout
