"""The short form of the soak test: every kind of fault that needs no restart, and one that does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def soak(*arguments: str | Path) -> None:
    """Run `python -m tests.soak`, which has to find nothing."""
    command = [sys.executable, "-m", "tests.soak", *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "are those of the undisturbed run" in ran.stdout


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.timeout(600)
def test_faults_change_no_bit(tmp_path: Path) -> None:
    soak("--short", "--faults", "15", "--random-placements", "--folder", tmp_path)


@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_change_no_bit_on_two_ranks(tmp_path: Path) -> None:
    """All kinds, under an agent that starts failed ranks again."""
    soak("--faults", "27", "--ranks", "2", "--max-restarts", "3", "--folder", tmp_path)
