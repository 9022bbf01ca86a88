"""What a user can ask of a running optimizer: `opt.statistics()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """The last finished step, counted from 1.

    Seconds are wall time; `stall_s` is what forward waited for weights, as last measured. `k` is the fraction of the
    trained parameters that the GPU owns, `gpu_layers` the IDs of its layers, `moved` the handovers since the start.
    `moving` says that handovers were under way, or their memory was made ready or given back, which can slow a step.
    """

    step: int = 0
    step_s: float = 0.0
    stall_s: float = 0.0
    k: float = 0.0
    gpu_layers: tuple[int, ...] = ()
    moved: int = 0
    moving: bool = False
