"""Timelines to look at: the same steps of HyTrain, overlapped and not, each in a process of its own.

python -m benchmarks.record DIR ──▶ DIR/overlapped/trace.json, DIR/serial/trace.json ──▶ benchmarks.timeline
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.job import SHAPES, Job
from benchmarks.loop import LR, batches, build_model, loss_of

#: Without overlap the planner's choice would be another, so both own about what it chooses with.
KINDS: Final[dict[str, dict[str, Any]]] = {"overlapped": {"k": "auto"}, "serial": {"k": 0.2, "overlap": False}}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the status of the first run that fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--k", type=float, help="of the overlapped run; without it, what the planner chooses")
    arguments = parser.parse_args(argv)
    if arguments.kind is not None:
        record(arguments, arguments.kind)
        return 0
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.record", *(sys.argv[1:] if argv is None else argv), "--kind", kind]
        if status := subprocess.run(command, check=False).returncode:
            return status
    return 0


def record(arguments: argparse.Namespace, kind: str) -> None:
    """Train so many steps and keep their timeline."""
    import hytrain

    job = Job(
        system="hytrain",
        segments=(),
        shape=arguments.shape,
        sequence=arguments.sequence,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    options = dict(KINDS[kind])
    if kind == "overlapped" and arguments.k is not None:
        options["k"] = arguments.k
    model = build_model(job, job.dtype)
    tokens = batches(job, arguments.batch)
    with tempfile.TemporaryDirectory() as run_dir:
        optimizer = hytrain.AdamW(model, lr=LR, run_dir=run_dir, trace=True, **options)
        for step in range(arguments.steps):
            loss_of(model, tokens[step % len(tokens)]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()  # this writes it
        trace = Path(optimizer.run_dir) / "trace.json"
        folder = arguments.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(trace, folder / trace.name)


if __name__ == "__main__":
    sys.exit(main())
