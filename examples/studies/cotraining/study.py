"""Steps of a small Llama with each number of parts on the CPU in turn, and what "auto" chooses.

    python -m examples.studies.cotraining            # minutes
    python -m examples.studies.cotraining --busy     # another program computes on the same GPU meanwhile
    python -m examples.studies.cotraining --small    # seconds
    python -m examples.studies.cotraining --recipe mine.yaml --run-dir runs/mine    # trains that recipe, with "auto"

A batch has as many parts as sequences. Without a GPU, the model is smaller, the trainer computes with one thread, and
the CPU trainer with another. The numbers take turns within one run, since what else a machine does changes with time.
Call it from the checkout's folder: the table is written as in the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, mode
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.columns import markdown, number
from examples.studies.cotraining import recipes, shares
from examples.studies.cotraining.planner import Step
from hytrain.optimizer import Optimizer
from hytrain.recipe import config
from hytrain.recipe.optimizer import hytrain_optimizer

#: So many steps have the same number of parts; the first of them does not count.
TURN = 4
#: The steps at the end from which "auto"'s choice is read.
LAST = 20
#: An argument: this process is the other program.
BURDEN = "--burden"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its batches, and how often each number of parts has its turn."""

    hidden: int
    layers: int
    length: int
    parts: int
    rounds: int
    dtype: str = "float32"

    @property
    def recipe(self) -> config.Recipe:
        heads = self.hidden // 32
        fields = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": self.length}
        llama = {"model_type": "llama", "vocab_size": 4096, **fields, **heads_of}
        steps = TURN * self.parts * self.rounds
        tree: dict[str, Any] = {
            "run": {"threads": 1},
            "model": {"config": llama, "dtype": self.dtype},
            "data": {"kind": "random", "sequence_length": self.length, "batch_size": self.parts},
            "train": {"steps": steps, "grad_accumulation": self.parts},
        }
        return config.validate(tree, "the study")


ON_GPU = Shape(hidden=512, layers=8, length=128, parts=8, rounds=5, dtype="bfloat16")
ON_CPU = Shape(hidden=256, layers=4, length=64, parts=8, rounds=5)
SMALL = Shape(hidden=64, layers=2, length=32, parts=2, rounds=3)


class InTurn:
    """In the place of the planner: each number of parts in turn."""

    why = "it is its turn"

    def __init__(self, parts: int, most: int, after: int) -> None:
        self.cpu_parts, self._numbers, self._steps = 0, most + 1, 0

    def observe(self, step: Step) -> None:
        """What was measured changes nothing."""

    def decide(self) -> bool:
        self.cpu_parts = self._steps // TURN % self._numbers
        self._steps += 1
        return self._steps % TURN == 1


def records(shape: Shape, *, in_turn: bool) -> list[dict[str, Any]]:
    """Train, and return a record for each step."""
    made = list[Optimizer]()

    def make(model: nn.Module, recipe: config.Recipe) -> Optimizer:
        made.append(hytrain_optimizer(model, recipe))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        if in_turn:
            patches.enter_context(patch.object(shares, "CpuPartsPlanner", InTurn))
            patches.enter_context(patch.object(shares, "FIRST_TRIAL", 0))  # which is no step
        try:
            recipes.train(shape.recipe, Path(folder), "auto", make)
        finally:
            [opt] = made
            opt.close()
    lines = (opt.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[-shape.recipe.train.length :]]


@contextmanager
def other_work(on_gpu: bool) -> Iterator[None]:
    """Another program that computes on the GPU without a pause, if it is wanted."""
    if not on_gpu:
        yield
        return
    command = [sys.executable, "-m", "examples.studies.cotraining", BURDEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()  # it has begun
        try:
            yield
        finally:
            program.kill()


def burden() -> None:
    """Multiply matrices until killed."""
    matrix = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    print("busy", flush=True)
    while True:
        for _ in range(4):
            matrix @ matrix
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: trains twice, prints the table and the choice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--busy", action="store_true", help="another program computes on the GPU, too")
    parser.add_argument("--recipe", type=Path, help="train this recipe in place of the study's model")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/cotraining"), help="the folder for that")
    parser.add_argument("--cpu-parts", default="auto", help='how many of its train.grad_accumulation parts; or "auto"')
    parser.add_argument(BURDEN, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.burden:
        burden()
    if given.recipe:
        given.run_dir.mkdir(parents=True, exist_ok=True)
        cpu_parts = "auto" if given.cpu_parts == "auto" else int(given.cpu_parts)
        print(recipes.train(config.load(given.recipe), given.run_dir, cpu_parts).render())
        return
    shape = SMALL if given.small else ON_GPU if torch.cuda.is_available() else ON_CPU
    with other_work(given.busy):
        fixed, chosen = records(shape, in_turn=True), records(shape, in_turn=False)
    choice = mode(int(record["cpu_parts"]) for record in chosen[-LAST:])
    warm = [record for index, record in enumerate(fixed) if index % TURN and index >= TURN * shape.parts]
    rows = [[record for record in warm if record["cpu_parts"] == parts] for parts in range(shape.parts)]
    steps_s = [median(record["step_s"] for record in row) for row in rows]
    lines = [
        [
            f"{parts}, chosen by auto" if parts == choice else str(parts),
            number(1000 * step_s, 1),
            number(step_s / min(steps_s)),
            *(number(_median_ms(row, name), 1) for name in ("gpu_part_s", "cpu_part_s")),
        ]
        for parts, (step_s, row) in enumerate(zip(steps_s, rows, strict=True))
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"A Llama of hidden size {shape.hidden}, batches in {shape.parts} parts, trained on {device}:\n")
    heads = ["parts on the CPU", "ms per step", "relative to the best", "ms per part", "ms per part, CPU trainer"]
    print(markdown(heads, lines))


def _median_ms(row: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [record[name] for record in row if name in record]
    return 1000 * median(values) if values else None
