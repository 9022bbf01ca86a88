"""What a system's steps take from the socket: the part "power".

    Power ─ python -m benchmarks.power GPU ─▶ counters of energy, four times a second ─▶ watts over time, as JSON
          └▶ of: means, joules per token ─▶ row

A GPU's power is NVML's, as nvidia-ml-py reads it; the host's is that of its processors, where Linux lets this user read
their counters (RAPL, mostly as the administrator). The rest of the machine, its memory among it, counts nowhere.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from benchmarks.watcher import Watcher, ticks
from workers.coordinate.gauges import Gauges

#: The driver refreshes its counter of energy ten times a second or more often.
TICK_S: Final = 0.25
NAMES: Final = ("gpu_watts", "host_watts")


class Power(Watcher):
    """Watches the power within a `with` block, of the GPU with this UUID ("" for none) and of the host."""

    def __init__(self, gpu: str) -> None:
        super().__init__("benchmarks.power", gpu)

    def of(self, began_s: float, ended_s: float, tokens: int) -> dict[str, Any]:
        """A row's fields, after the block, for steps with so many tokens; empty if nothing tells its power.

        Means in watts, joules per token, and `watts`: seconds since `began_s`, and the mean power of the time up to
        each. Moments are of the monotonic clock.
        """
        return of(self.told, began_s, ended_s, tokens)


def of(readings: list[dict[str, float]], began_s: float, ended_s: float, tokens: int) -> dict[str, Any]:
    """See `Power.of`. A reading has the watts since the one before; what is in part within the time counts in part."""
    spans = [
        (min(after["at_s"], ended_s) - max(before["at_s"], began_s), after)
        for before, after in zip(readings, readings[1:], strict=False)
    ]
    within = [(span_s, after) for span_s, after in spans if span_s > 0]
    row: dict[str, Any] = {}
    for name in NAMES:
        known = [(span_s, after[name]) for span_s, after in within if name in after]
        if not known:
            continue
        mean = sum(span_s * watts for span_s, watts in known) / sum(span_s for span_s, _ in known)
        row[name] = round(mean, 1)
        row[name.replace("watts", "joules_per_token")] = round(mean * (ended_s - began_s) / tokens, 5)
        whole = [after for span_s, after in within if span_s > TICK_S / 2]  # in less, a counter may not have moved
        over_time = row.setdefault("watts", {"at_s": [round(after["at_s"] - began_s, 3) for after in whole]})
        over_time[name] = [round(after[name], 1) if name in after else None for after in whole]
    return row


def main(gpu: str) -> None:
    gauges = Gauges()
    readings = [_read(gauges, gpu)]
    for _ in ticks(TICK_S):
        readings.append(_read(gauges, gpu))
    readings.append(_read(gauges, gpu))
    print(json.dumps(readings))


def _read(gauges: Gauges, gpu: str) -> dict[str, float]:
    now_s = time.monotonic()
    found = gauges.read([gpu], now_s)[gpu]
    return {"at_s": now_s, **{name: found[name] for name in NAMES if name in found}}


if __name__ == "__main__":
    main(*sys.argv[1:])
