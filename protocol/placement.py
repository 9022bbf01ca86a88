"""The placements of a layer: where its optimizer state is held, and who runs its update.

Messages contain the name of each layer's placement. The planner chooses placements, the trainer's planes implement
them, and all other code looks the names up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Placement:
    """`state`: where the optimizer state is held, "gpu" or "host". `updates`: who runs the update, "gpu" or "cpu".

    If the GPU updates state that is held on the host, the state visits it: it is fetched for each update.
    """

    name: str
    state: str
    updates: str


GPU: Final = Placement("gpu", state="gpu", updates="gpu")
CPU: Final = Placement("cpu", state="host", updates="cpu")
VISIT: Final = Placement("visit", state="host", updates="gpu")
PLACEMENTS: Final[dict[str, Placement]] = {placement.name: placement for placement in (GPU, CPU, VISIT)}


def gpu_fraction(placements: Sequence[str], numels: Sequence[int]) -> float:
    """k: the fraction of the parameters whose optimizer state is on the GPU. Both arguments are indexed by layer."""
    held = sum(numel for name, numel in zip(placements, numels, strict=True) if PLACEMENTS[name].state == "gpu")
    return held / sum(numels)
