"""One job in this process: builds the system, runs the segments' steps, writes a row for each. `suite` starts it.

    python -m benchmarks.step --rows-to FD JOB     JOB as JSON, see benchmarks.job; rows as JSON lines to descriptor FD

    build ─▶ segment: commands ─▶ settle ─▶ measure ─▶ row ─▶ next segment … ─▶ close

A step's time is the device's: from one step's end to the next, by CUDA events (on a CPU the wall's clock), without a
synchronisation between. What is measured is written at once, so a process that is stopped keeps its rows.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final, Self

import torch
from torch import nn

from benchmarks import idle
from benchmarks.host import used_bytes
from benchmarks.job import Job, Segment
from benchmarks.loop import Running, Setting, Unavailable, batches, build_model, flops_a_step
from benchmarks.systems import SYSTEMS

#: Steps for which k must have stood still, and no layer have moved, before a segment that has patience is measured: the
#: planner, which decides every fourth step, has looked at its last plan twice.
STILL_STEPS: Final = 8


def main() -> int:
    """The command line; 1 after an exception, whose last line is the reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--rows-to", type=int, default=1, metavar="FD")
    parser.add_argument("job", type=Job.from_json)
    arguments = parser.parse_args()
    try:
        with os.fdopen(arguments.rows_to, "w", buffering=1) as out, tempfile.TemporaryDirectory() as run_dir:
            for row in rows(arguments.job, run_dir):
                out.write(json.dumps(row) + "\n")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def rows(job: Job, run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each segment. Raises whatever the system raises, `Unavailable` if it can't run here."""
    name, _, option = job.system.partition(":")
    if name not in SYSTEMS:
        raise Unavailable(f"no system is called {name!r}; known: {', '.join(SYSTEMS)}")
    system = SYSTEMS[name]
    if (system.cuda_only or job.device == "cuda") and not (job.device == "cuda" and torch.cuda.is_available()):
        raise Unavailable(f"{name} needs a CUDA device, and there is none" + " on device cpu" * (job.device == "cpu"))
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    began_s = time.perf_counter()
    model = build_model(job, system.dtype or job.dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before a system takes them apart
    running = system.build(model, Setting(option, job.clip, job.device, job.segments[0].batch, run_dir))
    facts = {
        "parameters": parameters,
        "start_s": round(time.perf_counter() - began_s, 2),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for index, segment in enumerate(job.segments):
        row: dict[str, Any] = {"index": index, "batch": segment.batch, "label": segment.label, **facts}
        try:
            row.update(measure(job, segment, model, running))
            row["tflops"] = round(flops_a_step(job, parameters, segment.batch) / row["step_s"] / 1e12, 2)
        except Unavailable as error:
            row["error"] = str(error)
        yield row
    running.close()


def measure(job: Job, segment: Segment, model: nn.Module, running: Running) -> dict[str, Any]:
    """One segment's numbers: times in seconds, memory in GB (1e9 bytes)."""
    if running.fixed_batch and segment.batch != job.segments[0].batch:
        raise Unavailable(f"{job.system} was built for batch {job.segments[0].batch}")
    if segment.profile and job.device != "cuda":
        raise Unavailable("what keeps a GPU idle needs a GPU")
    for name, value in segment.commands:
        running.command(name, value)
    steps = Steps(job, segment, running)
    with GarbagePauses() as pauses:
        while not steps.settled():
            steps.run()
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with idle.Profile(segment.measure) if segment.profile else nullcontext() as profile:
            for _ in range(segment.measure + (profile.warm_up if profile else 0)):
                steps.run()
                if profile:
                    profile.step()
    times = steps.times()
    settling_s, steps_s = times[: -segment.measure], times[-segment.measure :]
    median_s = statistics.median(steps_s)
    row = {
        "step_s": round(median_s, 5),
        "steps_s": [round(value, 5) for value in steps_s],
        "settling_s": [round(value, 5) for value in settling_s],
        "gpu_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if job.device == "cuda" else 0.0,
        "host_used_bytes": used_bytes(),
        "loss": round(steps.loss, 4),
        "gc_pauses_ms": pauses.long_ms,
        **own_account(running, steps, segment),
    }
    if profile:
        row["idle"] = profile.result()
    if segment.digest:
        row["digest"] = digest(model, running)
    return row


class Steps:
    """The steps of one segment, and a mark after each."""

    def __init__(self, job: Job, segment: Segment, running: Running) -> None:
        self._segment, self._running = segment, running
        self._batches = batches(job, segment.batch)
        self._cuda = job.device == "cuda"
        self._marks: list[Any] = []
        self.ks: list[float | None] = []
        self._moving: list[bool] = []
        self.first = running.number() + 1
        self.loss = 0.0
        self._mark()

    def run(self) -> None:
        loss = self._running.step(self._batches[len(self.ks) % len(self._batches)])
        self._mark()
        self.ks.append(self._running.k())
        self._moving.append(self._running.moving())
        self._last_loss = loss.detach()

    def settled(self) -> bool:
        """The segment's settling is over, or its patience."""
        done, segment = len(self.ks), self._segment
        if done < segment.settle:
            return False
        same_k = done >= STILL_STEPS and len(set(self.ks[-STILL_STEPS:])) == 1
        still = same_k and not any(self._moving[-STILL_STEPS:])
        return still or done >= segment.settle + segment.patience

    def times(self) -> list[float]:
        """Seconds of each step. Waits for the device."""
        self.loss = float(self._last_loss)
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    def _mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


def own_account(running: Running, steps: Steps, segment: Segment) -> dict[str, Any]:
    """What HyTrain says of itself: k of every step, and over the measured ones its prediction and its stalls."""
    if running.optimizer is None:
        return {}
    records = running.records(steps.first, running.number(), steps.loss)
    measured = records[-segment.measure :]
    predictions = [value for record in measured if (value := record.get("predicted_step_s"))]
    return {
        "k": steps.ks[-1],
        "ks": [None if k is None else round(k, 4) for k in steps.ks],
        "moved": running.optimizer.statistics().moved,
        "policy": measured[-1].get("policy") if measured else None,
        "predicted_step_s": round(statistics.median(predictions), 5) if predictions else None,
        "stall_s": round(statistics.median(record["stall_s"] for record in measured), 5) if measured else None,
        "cpu_busy_s": round(statistics.median(record["cpu_busy_s"] for record in measured), 5) if measured else None,
    }


def digest(model: nn.Module, running: Running) -> str:
    """A checksum of all weights, to the bit."""
    if running.optimizer is not None:
        running.optimizer.synchronize()
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()[:16]


class GarbagePauses:
    """Pauses of Python's garbage collector above 5 ms, in milliseconds: outliers among steps that are nobody's."""

    def __enter__(self) -> Self:
        self.long_ms: list[float] = []
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        elif (took_ms := (time.perf_counter() - self._began_s) * 1e3) > 5:
            self.long_ms.append(round(took_ms, 1))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers leave threads and processes behind that would hold up an orderly exit
