"""How long the GPU computes nothing while training goes on, and why.

    torch.profiler ─▶ Chrome trace ─▶ kernels, copies into the GPU, launches ─▶ gaps between kernels ─▶ causes

Busy is the union of the intervals of all kernels, and of copies and fills within the device, on whatever stream.
Copies between host and device run on engines of their own and do not count.
A gap between two busy stretches gets one of five causes:

weights      a copy into the GPU ended in the gap, when the kernel that ends the gap was launched: it waited for it
launch       else, if that kernel was launched only when the GPU had run dry: the host was late
turnaround   shorter than 5 µs, and the next kernel was there: the GPU going from one kernel to the next
copies       longer, the next kernel was there, and data went over the link in the gap: the GPU's commands, too, come to
             it over the link
other        the next kernel was there and waited for something else, such as another stream
"""

from __future__ import annotations

import bisect
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

from workers.watch.timeline import Interval, union

TURNAROUND_US: Final = 5.0
CAUSES: Final = ("weights", "launch", "turnaround", "copies", "other")


@dataclass
class Trace:
    """What the GPU did: kernels as (start, end, when their launch call returned), copies into the GPU and out of it."""

    kernels: list[tuple[float, float, float]] = field(default_factory=list)
    copies_in: list[Interval] = field(default_factory=list)
    copies_out: list[Interval] = field(default_factory=list)

    @classmethod
    def read(cls, events: Iterable[dict[str, Any]]) -> Self:
        """Out of a Chrome trace's events. A kernel whose launch is unknown counts as launched in time."""
        trace, launches, works = cls(), dict[Any, float](), list[tuple[float, float, Any]]()
        for event in events:
            if event.get("ph") != "X":
                continue
            start, category, of = event["ts"], event.get("cat"), event.get("args", {}).get("correlation")
            end = float(start) + float(event.get("dur", 0.0))
            if category in ("cuda_runtime", "cuda_driver"):
                launches[of] = end
            elif category in ("kernel", "gpu_memset") or (category == "gpu_memcpy" and "DtoD" in event["name"]):
                works.append((start, end, of))
            elif category == "gpu_memcpy" and "HtoD" in event["name"]:
                trace.copies_in.append((start, end))
            elif category == "gpu_memcpy" and "DtoH" in event["name"]:
                trace.copies_out.append((start, end))
        launches.pop(None, None)
        trace.kernels += [(start, end, launches.get(of, -math.inf)) for start, end, of in works]
        trace.kernels.sort()
        return trace


def gaps(busy: Iterable[Interval]) -> list[Interval]:
    """What lies between disjoint, ordered intervals."""
    return [(before[1], after[0]) for before, after in pairwise(busy)]


def idle_shares(trace: Trace) -> dict[str, float]:
    """The share of the time from the first kernel to the last in which none ran, in all and by cause."""
    busy = union((start, end) for start, end, _ in trace.kernels)
    if not busy:
        return {}
    wall_us = busy[-1][1] - busy[0][0]
    launched = {start: launch for start, _, launch in reversed(trace.kernels)}
    arrivals = sorted(end for _, end in trace.copies_in)
    copies = union([*trace.copies_in, *trace.copies_out])
    lost = dict.fromkeys(CAUSES, 0.0)
    for start, end in gaps(busy):
        if _last(arrivals, end) >= max(start, launched[end]):
            cause = "weights"
        elif launched[end] > start:
            cause = "launch"
        elif end - start < TURNAROUND_US:
            cause = "turnaround"
        else:
            cause = "copies" if _meets(copies, start, end) else "other"
        lost[cause] += end - start
    shares = {cause: lost_us / wall_us for cause, lost_us in lost.items()}
    return {"share": sum(shares.values()), **shares, "wall_us": wall_us}


def _last(moments: Sequence[float], until: float) -> float:
    """The last of ordered moments that is not after `until`."""
    index = bisect.bisect_right(moments, until) - 1
    return moments[index] if index >= 0 else -math.inf


def _meets(intervals: Sequence[Interval], start: float, end: float) -> bool:
    """Whether one of disjoint, ordered intervals has time in common with start to end."""
    index = bisect.bisect_left(intervals, (end, end)) - 1
    return index >= 0 and intervals[index][1] > start


class Profile:
    """Records the GPU over some steps. The profiler's own start and the first step after it are left out."""

    warm_up: Final = 2

    def __init__(self, steps: int) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        self._steps, self._events = steps, list[dict[str, Any]]()
        self._taken = 0
        self._profile = profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=self.warm_up, active=steps, repeat=1),
            on_trace_ready=self._keep,
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)

    def step(self) -> None:
        """After each step, the warm-up's among them."""
        import torch

        self._taken += 1
        if self._taken == self.warm_up + self._steps:
            torch.cuda.synchronize()  # what still runs belongs to the record
        self._profile.step()

    def _keep(self, profile: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self._events = json.loads(path.read_text())["traceEvents"]

    def result(self) -> dict[str, float]:
        """`idle_shares` without the first step, how many steps that were, and a step's kernels and their seconds."""
        trace = Trace.read(self._events)
        if not trace.kernels:
            return {}
        first, last = trace.kernels[0][0], max(end for _, end, _ in trace.kernels)
        later = [kernel for kernel in trace.kernels if kernel[0] >= first + (last - first) / self._steps]
        shares = idle_shares(replace(trace, kernels=later))
        steps = self._steps - 1
        busy_s = (1 - shares["share"]) * shares["wall_us"] / 1e6 / steps
        counted = {"steps": steps, "kernels": len(later) / steps, "busy_s": busy_s}
        return {name: round(value, 5) for name, value in (shares | counted).items()}
