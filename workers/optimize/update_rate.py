"""Measures this machine's CPU seconds per parameter before the first step, for the coordinator's first plan.

It uses the same kind of memory, layout and number of threads as updates do, and the model's most frequent dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Final

from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import TYPICAL, scalars
from hytrain.memory.arena import Arena
from protocol.handles import layout, typical_segment
from protocol.messages import Layer
from protocol.rules import TILE_NUMEL
from workers.optimize.arenas import segments_of

PASSES: Final = 3
#: Training waits for this measurement, so it takes about this long at most. A slow backend makes fewer passes.
BUDGET_S: Final = 0.2


def seconds_per_parameter(backend: Backend, layers: Sequence[Layer]) -> float:
    """Seconds per parameter of a tile's update: the median of a few passes over scratch memory, after a warm-up."""
    enough_s = time.perf_counter() + BUDGET_S
    segment = typical_segment(layers, TILE_NUMEL)
    layer = Layer(lid=0, position=0, name="scratch", segments=(segment,))
    arena = Arena(layout(layer))
    arena.mapping.populate((0, arena.layout.nbytes), threads=backend.threads)
    try:
        [planes] = segments_of(arena, layer)
        took_s: list[float] = []
        for step in range(1, PASSES + 2):
            began_s = time.perf_counter()
            if len(took_s) > 1 and began_s > enough_s:
                break
            planes.update(backend, 0, layer.numel, scalars(TYPICAL[segment.rule], step))
            took_s.append(time.perf_counter() - began_s)
        return median(took_s[1:]) / layer.numel
    finally:
        arena.close()
