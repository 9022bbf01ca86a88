"""The placements that a layer can have: where its optimizer state is held, and who runs its update.

Messages carry a placement's name for each layer. The planner chooses, the trainer's planes carry it out, and everybody
else looks the name up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Placement:
    """`state`: where the optimizer state is held, "gpu" or "host". `updates`: who runs the update, "gpu" or "cpu"."""

    name: str
    state: str
    updates: str


GPU: Final = Placement("gpu", state="gpu", updates="gpu")
CPU: Final = Placement("cpu", state="host", updates="cpu")
PLACEMENTS: Final[dict[str, Placement]] = {placement.name: placement for placement in (GPU, CPU)}


def gpu_fraction(placements: Sequence[str], numels: Sequence[int]) -> float:
    """k: the fraction of the parameters whose optimizer state is held by the GPU; both arguments by layer."""
    held = sum(numel for name, numel in zip(placements, numels, strict=True) if PLACEMENTS[name].state == "gpu")
    return held / sum(numels)
