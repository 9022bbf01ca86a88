"""Batches that grow, and memory that others take and give back: the parts "growing" and "giving_way", HyTrain alone.

    python -m benchmarks.suite growing giving_way
    python -m benchmarks.suite growing --shape 1b

    lengths         at random, of 256 tokens to the job's sequence      ─▶ seconds per step, beside
    longest first   the same, after one step with the longest
    four times      a batch four times the largest so far               ─▶ what that step costs more: the excess comes
                                                                           in backward, and where activations are kept,
                                                                           in forward
    neighbour       another process takes what is free on the GPU, so that steps lack what they need between two of
                    them, and gives it back                             ─▶ steps until it is as fast as before
    park            opt.park(weights=True), opt.resume(), and between them another process attaches the weights and
                    copies them to the GPU                              ─▶ seconds of each, what stays on the GPU
    steady          batches of one length: what offers cost, beside the system "hytrain-unserved"

`parts` has the jobs. A segment's label says what is measured; `systems` lists these systems, `step` calls `measure`.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.host import gpu_peak_bytes, used_bytes
from benchmarks.parts import FIRST, FOUR_TIMES, NEIGHBOUR, PARK, RANDOM, SHAPES, Job, Segment
from benchmarks.rows import times_of

SHORTEST: Final = 256
#: Bytes that another process leaves free.
LEFT_BYTES: Final = 1 << 30
#: A step that is not longer than this many times the usual one is as fast as before.
AS_FAST: Final = 1.05
#: So many such steps in a row: one alone may be fast by chance.
IN_A_ROW: Final = 5
_HOLDS: Final = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
#: What another process does with the weights of a run: it says how long it took to have them on the device.
_ATTACHES: Final = """
import sys, time, torch, hytrain.weights
run, device = sys.argv[1:]
torch.zeros(1, device=device)
print("ready", flush=True)
sys.stdin.readline()
began_s = time.perf_counter()
with hytrain.weights.attach(run) as weights:
    copies = weights.to(device)
    print(time.perf_counter() - began_s, flush=True)
"""


def measure(job: Job, segment: Segment, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Train for the segment's steps. The optimizer is HyTrain's, and only its public face is used."""
    loop = _Loop(job, segment, model, optimizer)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = loop.park() if segment.label == PARK else loop.run()
    return {
        **times_of(loop.steps_s, segment.measure),
        "mean_s": round(statistics.fmean(loop.steps_s[-segment.measure :]), 5),
        "evicted_gb": round(loop.evicted_bytes() / 1e9, 3),
        "gpu_peak_gb": round(gpu_peak_bytes() / 1e9, 2),
        "host_used_bytes": used_bytes(),
        "k": float(optimizer.statistics().k),
        **found,
    }


class _Loop:
    def __init__(self, job: Job, segment: Segment, model: nn.Module, optimizer: Any) -> None:
        self._job, self._segment, self._model, self._opt = job, segment, model, optimizer
        self._tokens = torch.Generator().manual_seed(1)
        self.steps_s: list[float] = []

    def lengths(self) -> list[int]:
        """Of each step's batch."""
        segment, most = self._segment, self._job.sequence
        count = segment.settle + segment.measure
        if segment.label in (RANDOM, FIRST):
            rng = random.Random(2)
            found = [rng.randint(min(SHORTEST, most), most) for _ in range(count)]
            return [most, *found[1:]] if segment.label == FIRST else found
        if segment.label in FOUR_TIMES:
            return [*[most // 4] * segment.settle, most, *[most // 4] * (segment.measure - 1)]
        return [most] * count

    def step(self, length: int) -> None:
        """One batch, waited for: what a step costs is also what the host waits."""
        vocabulary = SHAPES[self._job.shape].vocabulary
        shape = (self._segment.batch, length)
        batch: Tensor = torch.randint(0, vocabulary, shape, generator=self._tokens).to(self._job.device)
        began_s = time.perf_counter()
        self._model(input_ids=batch, labels=batch).loss.backward()
        self._opt.step()
        self._opt.zero_grad()
        self._wait()
        self.steps_s.append(time.perf_counter() - began_s)

    def _wait(self) -> None:
        if self._job.device == "cuda":
            torch.cuda.synchronize()

    def run(self) -> dict[str, Any]:
        lengths, settle = self.lengths(), self._segment.settle
        for length in lengths[:settle]:
            self.step(length)
        usual_s = statistics.median(self.steps_s) if self.steps_s else 0.0
        if self._segment.label != NEIGHBOUR:
            for length in lengths[settle:]:
                self.step(length)
            if self._segment.label not in FOUR_TIMES:
                return {}
            again = _Loop(self._job, self._segment, self._model, self._opt)
            again.step(lengths[settle])  # a batch as large, once there is room for it
            return {"extra_s": round(self.steps_s[settle] - again.steps_s[0], 4)}
        half = self._segment.measure // 2
        with _neighbour(self._job.device) as held_bytes:
            for length in lengths[settle : settle + half]:
                self.step(length)
        for length in lengths[settle + half :]:
            self.step(length)
        return {"held_gb": round(held_bytes / 1e9, 2), "back_steps": _back(self.steps_s[settle + half :], usual_s)}

    def park(self) -> dict[str, Any]:
        """Median seconds over the segment's cycles, between its steps."""
        self.run_steps(self._segment.settle)
        parked: list[float] = []
        resumed: list[float] = []
        left_bytes = 0
        for _ in range(self._segment.measure):
            self.run_steps(1)
            began_s = time.perf_counter()
            self._opt.park(weights=True)
            parked.append(time.perf_counter() - began_s)
            if self._job.device == "cuda":
                left_bytes = max(left_bytes, torch.cuda.memory_reserved())
            began_s = time.perf_counter()
            self._opt.resume()
            self._wait()
            resumed.append(time.perf_counter() - began_s)
        lent_s, attached_s = self._attached()
        return {
            "park_s": round(statistics.median(parked), 4),
            "resume_s": round(statistics.median(resumed), 4),
            "left_gb": round(left_bytes / 1e9, 2),
            "lend_s": round(lent_s, 4),
            "attach_s": round(attached_s, 4),
        }

    def _attached(self) -> tuple[float, float]:
        """Seconds until the weights are lent, and until another process has them on the GPU, which is parked."""
        command = [sys.executable, "-c", _ATTACHES, str(self._opt.run_dir), self._job.device]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            other.stdout.readline()
            began_s = time.perf_counter()
            with self._opt.lend_weights():
                lent_s = time.perf_counter() - began_s
                with self._opt.parked(weights=True):
                    said, _ = other.communicate("now\n")
        return lent_s, float(said)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step(self._job.sequence)

    def evicted_bytes(self) -> int:
        """Of state that has left the GPU at once so far, as far as that is recorded."""
        lines = (Path(self._opt.run_dir) / "metrics.jsonl").read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return max((int(record.get("evicted_bytes", 0)) for record in records), default=0)


@contextmanager
def _neighbour(device: str) -> Iterator[int]:
    """Another process holds the GPU's memory but `LEFT_BYTES`. Yields how much; none on a CPU."""
    if device != "cuda":
        yield 0
        return
    torch.cuda.empty_cache()
    nbytes = torch.cuda.mem_get_info()[0] - LEFT_BYTES
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _HOLDS, str(nbytes)], **pipes) as other:
        assert other.stdout is not None
        if not other.stdout.readline():
            raise RuntimeError("the other process got no GPU memory")
        try:
            yield nbytes
        finally:
            other.communicate("")


def _back(steps_s: Sequence[float], usual_s: float) -> int | None:
    """After how many steps some in a row are as fast as before; None if they never were."""
    fast = [one <= AS_FAST * usual_s for one in steps_s]
    found = (index for index in range(len(fast) - IN_A_ROW + 1) if all(fast[index : index + IN_A_ROW]))
    return next(found, None)
