"""Seconds a training step: HyTrain at several k beside systems without offload, in one run on one machine.

    python -m benchmarks.step compare --shape 3b no-offload hytrain:0 hytrain:0.2 hytrain:auto
    python -m benchmarks.step one     --shape 3b hytrain:0.2          one system, in this process: a JSON line

`compare` starts each system in a process of its own, one after the other, `--rounds` times, and prints a Markdown
table of medians with the ratio to the first. A step's time is the device's: from one step's end to the next, without
a synchronisation between, over `--steps` steps after `--warm-up` that are not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

#: hidden, intermediate, layers, heads, vocabulary
SHAPES: Final = {
    "demo": (176, 480, 5, 4, 256),
    "tiny": (256, 688, 4, 4, 2048),
    "1b": (2048, 5632, 22, 16, 32000),
    "3b": (3200, 8640, 26, 32, 32000),
}


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("compare", "one"))
    parser.add_argument("systems", nargs="+", help="forward-backward, no-offload, torch, hytrain:K")
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="of the trainer on a CPU")
    parser.add_argument("--json", type=Path, help="append the result lines to this file")
    arguments = parser.parse_args()
    if arguments.mode == "one":
        print(json.dumps(measure(arguments.systems[0], arguments)), flush=True)
        return 0
    rows = compare(arguments)
    print(table(rows, arguments.systems))
    return 0


def measure(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One system in this process: median and all step times in seconds, memory in GB, loss at the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.systems import SYSTEMS

    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    name, _, option = system.partition(":")
    hidden, intermediate, layers, heads, vocabulary = SHAPES[arguments.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    with torch.device(arguments.device):
        model = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    cuda = arguments.device == "cuda"
    if cuda:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, arguments.sequence)
    batches = [torch.randint(0, vocabulary, shape, generator=generator).to(arguments.device) for _ in range(4)]
    k: float | str = "auto" if option in ("", "auto") else float(option)
    with tempfile.TemporaryDirectory(prefix="hytrain-bench-") as run_dir:
        began = time.perf_counter()
        step, close = SYSTEMS[name](model, k=k, run_dir=run_dir)
        started_s = time.perf_counter() - began
        with GarbagePauses() as pauses:
            times, losses = _run(step, batches, arguments, cuda)
        extra = close()
        if os.environ.get("HYTRAIN_BENCH_LOGS"):
            for log in sorted(Path(run_dir, "logs").glob("*")):
                print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
            print((Path(run_dir) / "metrics.jsonl").read_text()[-1500:] if extra else "", file=sys.stderr)
    numel = sum(parameter.numel() for parameter in model.parameters())
    median_s = statistics.median(times)
    flops = (6 * numel + 6 * layers * hidden * arguments.sequence) * arguments.batch * arguments.sequence
    return {
        "system": system,
        "shape": arguments.shape,
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "parameters": numel,
        "step_s": round(median_s, 5),
        "steps_s": [round(value, 4) for value in times],
        "tflops": round(flops / median_s / 1e12, 2),
        "gpu_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else 0.0,
        "start_s": round(started_s, 2),
        "loss": round(losses, 4),
        "gc_pauses_ms": pauses.long_ms,
        **extra,
    }


class GarbagePauses:
    """Pauses of Python's garbage collector above 5 ms, in milliseconds: outliers among steps that are nobody's."""

    def __enter__(self) -> GarbagePauses:
        self.long_ms: list[float] = []
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif (took_ms := (time.perf_counter() - self._began) * 1e3) > 5:
            self.long_ms.append(round(took_ms, 1))


def _run(step: Any, batches: list[Any], arguments: argparse.Namespace, cuda: bool) -> tuple[list[float], float]:
    """Step times by the device's clock, and the last loss."""
    import torch

    marks: list[Any] = []
    for index in range(arguments.warm_up + arguments.steps + 1):
        if index == arguments.warm_up and cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = step(batches[index % len(batches)])
        if cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
        else:
            marks.append(time.perf_counter())
    marks = marks[arguments.warm_up :]
    if not cuda:
        return [after - before for before, after in zip(marks, marks[1:], strict=False)], loss.item()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return [before.elapsed_time(after) / 1e3 for before, after in pairs], loss.item()


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each system in turn, in its own process; a system that fails is a row with its error."""
    passed = ["--shape", arguments.shape, "--batch", str(arguments.batch), "--sequence", str(arguments.sequence)]
    passed += ["--device", arguments.device, "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    passed += ["--warm-up", str(arguments.warm_up)]
    if arguments.threads:
        passed += ["--threads", str(arguments.threads)]
    rows = []
    for _ in range(arguments.rounds):
        for system in arguments.systems:
            command = [sys.executable, "-m", "benchmarks.step", "one", system, *passed]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            row = json.loads(lines[-1]) if lines else {"system": system, "error": done.stderr.strip()[-600:]}
            print(json.dumps(row), file=sys.stderr, flush=True)
            if done.returncode or os.environ.get("HYTRAIN_BENCH_LOGS"):
                print(done.stderr[-3500:], file=sys.stderr, flush=True)
            rows.append(row)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def table(rows: list[dict[str, Any]], systems: list[str]) -> str:
    """A Markdown table: the median of the rounds for each system, and its ratio to the first."""
    lines = [
        "| system | k | s/step | ratio | TFLOP/s | GPU peak GB | stall ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    first: float | None = None
    for system in systems:
        found = [row for row in rows if row["system"] == system and "step_s" in row]
        if not found:
            lines.append(f"| {system} | failed | | | | | |")
            continue
        step_s = statistics.median(row["step_s"] for row in found)
        first = first or step_s
        row = found[-1]
        lines.append(
            f"| {system} | {row.get('k', '')} | {step_s:.4f} | {step_s / first:.3f} | {row['tflops']} "
            f"| {row['gpu_peak_gb']} | {row.get('stall_ms', '')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
