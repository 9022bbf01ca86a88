"""Steps of a small Llama with each number of parts on the CPU, and with `train.cpu_parts: auto`.

    python -m examples.studies.cotraining            # minutes
    python -m examples.studies.cotraining --busy     # another program computes on the same GPU meanwhile
    python -m examples.studies.cotraining --small    # seconds

A batch has as many parts as sequences. Without a GPU, the model is smaller, the trainer computes with one thread, and
the CPU trainer with another.
Call it from the checkout's folder: the table is written as in the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.columns import markdown, number
from hytrain.recipe import config, loop
from hytrain.recipe.optimizer import TrainingOptimizer, hytrain_optimizer

#: The steps that count: the last ones, when "auto" has decided.
COUNTED = 20
#: An argument: this process is the other program.
BURDEN = "--burden"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its batches and how long it trains."""

    hidden: int
    layers: int
    length: int
    parts: int
    steps: int
    dtype: str = "float32"

    def recipe(self, cpu_parts: int | str) -> config.Recipe:
        heads = self.hidden // 32
        fields = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": self.length}
        tree: dict[str, Any] = {
            "run": {"threads": 1},
            "model": {"config": {"model_type": "llama", "vocab_size": 4096, **fields, **heads_of}, "dtype": self.dtype},
            "data": {"kind": "random", "sequence_length": self.length, "batch_size": self.parts},
            "train": {"steps": self.steps, "grad_accumulation": self.parts, "cpu_parts": cpu_parts},
        }
        return config.validate(tree, "the study")


ON_GPU = Shape(hidden=512, layers=8, length=128, parts=8, steps=60, dtype="bfloat16")
ON_CPU = Shape(hidden=256, layers=4, length=64, parts=8, steps=60)
SMALL = Shape(hidden=64, layers=2, length=32, parts=2, steps=COUNTED + 4)


def records(shape: Shape, cpu_parts: int | str) -> list[dict[str, Any]]:
    """Train, and return the records of the steps that count."""
    made = list[Any]()

    def make(model: nn.Module, recipe: config.Recipe) -> TrainingOptimizer:
        made.append(hytrain_optimizer(model, recipe))
        return made[-1]  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory() as folder:
        try:
            loop.train(shape.recipe(cpu_parts), Path(folder), make, terminal=False)
        finally:
            [opt] = made
            opt.close()
    lines = (opt.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[-COUNTED:]]


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
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    print("busy", flush=True)
    while True:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: trains with each number, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--busy", action="store_true", help="another program computes on the GPU, too")
    parser.add_argument(BURDEN, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.burden:
        burden()
    shape = SMALL if given.small else ON_GPU if torch.cuda.is_available() else ON_CPU
    lines, best_s = list[list[str]](), float("inf")
    with other_work(given.busy):
        for cpu_parts in (*range(shape.parts), "auto"):
            found = records(shape, cpu_parts)
            step_s = statistics.median(record["step_s"] for record in found)
            best_s = min(best_s, step_s)
            took = [[record[name] for record in found if name in record] for name in ("gpu_part_s", "cpu_part_s")]
            ms = [number(1000 * statistics.median(each), 1) if each else "–" for each in took]
            chosen = f"auto: {found[-1]['cpu_parts']:g}" if cpu_parts == "auto" else str(cpu_parts)
            lines.append([chosen, number(1000 * step_s, 1), number(step_s / best_s, 3), *ms])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"A Llama of hidden size {shape.hidden}, batches in {shape.parts} parts, trained on {device}:\n")
    heads = ["parts on the CPU", "ms per step", "relative to the best above", "ms per part", "ms per part, CPU trainer"]
    print(markdown(heads, lines))


if __name__ == "__main__":
    main()
