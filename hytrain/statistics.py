"""What `opt.statistics()` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """The last finished step. Before the first one, `k` and the layers are those of the first plan.

    Attributes:
        step: Its number, counted from 1.
        step_s: Its wall time in seconds.
        stall_s: How many seconds forward waited for weights, as last measured.
        k: The fraction of the trained parameters that the GPU owns.
        gpu_layers: The IDs of the layers that the GPU owns.
        visiting_layers: The IDs of the layers whose state visits the GPU.
        offloaded_layers: The IDs of the layers whose weights rest in host memory.
        moved: The number of handovers since the start.
        moving: Whether handovers were running, or their memory was prepared or released; this can slow a step down.
    """

    step: int = 0
    step_s: float = 0.0
    stall_s: float = 0.0
    k: float = 0.0
    gpu_layers: tuple[int, ...] = ()
    visiting_layers: tuple[int, ...] = ()
    offloaded_layers: tuple[int, ...] = ()
    moved: int = 0
    moving: bool = False
