"""Programs to run: the launcher, scripts, recipes; and the processes that they consist of.

Python programs run in forks of a process that has imported torch, but with `how=subprocess.Popen`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from forks import Forked
from torch import nn

import hytrain
from hytrain.recipe import config, loop, report
from hytrain.recipe.config import Recipe
from hytrain.recipe.optimizer import hytrain_optimizer
from hytrain.recipe.report import Summary

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
CLUSTER = ROOT / "bin" / "hytrain-cluster"


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, to its end; its output as text."""
    with started(*command, **{"stdin": None, "stderr": subprocess.PIPE, **options}) as process:
        said = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def cluster(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`bin/hytrain-cluster`, to its end."""
    return run(sys.executable, CLUSTER, *arguments, **options)


def environment(**changed: str | None) -> dict[str, str]:
    """This process's environment, changed; None takes a variable away."""
    values = {**os.environ, **changed}
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def started(
    *command: str | Path, how: type[subprocess.Popen[str]] = Forked, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes for its input and output, which is gone at the end."""
    words = [str(word) for word in command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    with how(words, text=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], start: str) -> str:
    """The first line of its output that begins with `start`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"it ended before it said {start!r}: {''.join(lines)}")


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a paused script go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def role_of(process: psutil.Process) -> str:
    """ "launcher", "optimizer", "coordinator" by the module that runs, else the program's own name."""
    words = process.cmdline() or [""]  # of a zombie
    for word in words:
        if word.startswith("workers."):
            return word.rpartition(".")[2]
    return "launcher" if str(CLUSTER) in words else Path(words[-1] if len(words) == 1 else words[1]).stem


def roles_below(process: psutil.Process) -> dict[str, psutil.Process]:
    """The children of a process, by role."""
    children = process.children()
    found = {role_of(child): child for child in children}
    assert len(found) == len(children), [child.cmdline() for child in children]
    return found


def train_recipe(recipe: Path, run_dir: Path, *overrides: str) -> Summary:
    """Train a recipe in this process, with a run of its own in `run_dir`."""
    made: list[hytrain.AdamW] = []

    def make(model: nn.Module, recipe: Recipe) -> Any:
        made.append(hytrain_optimizer(model, recipe))  # type: ignore[arg-type]
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYTRAIN_RUN_DIR", str(run_dir))
        patch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
        run_dir.mkdir(exist_ok=True)
        try:
            return loop.train(config.load(recipe, overrides), run_dir, make, terminal=False)
        finally:
            for opt in made:
                opt.close()


def write_recipe(folder: Path, **changes: Any) -> Path:
    """A recipe for a small GPT-2 on a few kilobytes of text, its sections updated by `changes`."""
    words = ["the", "people", "of", "these", "states", "shall", "prosper"]
    (folder / "text.txt").write_text(" ".join(words[(i * i + i // 7) % 7] for i in range(3000)))
    sections: dict[str, Any] = {
        "run": {"seed": 3, "threads": 1},
        "model": {
            "config": {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32},
            "dtype": "bfloat16",
        },
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 4},
        "train": {"steps": 60, "lr": 1e-2, "warmup_steps": 5, "eval_batches": 1, "device": "cpu"},
        "optimizer": {"k": 0.3},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path
