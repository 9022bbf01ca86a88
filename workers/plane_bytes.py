"""What the layers take in host memory and on the trainer's device, by plane, for those who watch. `Planning` has one.

    layer table ─▶ PlaneBytes ─ of(placements, streamed) ─▶ bytes by plane: host, device

A plane that exists in two banks counts twice. Activations, gradients under way and the libraries are in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from protocol import messages as m
from protocol.handles import PLANES, STATE_PLANES, layout
from protocol.placement import CPU, PLACEMENTS, VISIT

#: Beside planes, on the device: the memory through which weights are streamed, and that through which state visits.
WINDOW, RING = "window", "ring"


class PlaneBytes:
    """The planes of one trainer's layers."""

    def __init__(self, table: m.LayerTable) -> None:
        self._table = table
        self._arenas: list[Counter[str]] = []
        for layer in table.layers:
            arena = Counter[str]()
            for plane, nbytes in layout(layer, table.banks).plane_nbytes.items():
                arena[plane.removesuffix("'")] += nbytes
            self._arenas.append(arena)
        self._alone = [layout(layer).plane_nbytes for layer in table.layers]
        self._known: tuple[object, tuple[dict[str, int], dict[str, int]]] | None = None

    def of(self, placements: Sequence[str], streamed: Set[int]) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by plane in host memory, and on the device; planes of no bytes are left out."""
        asked = tuple(placements), frozenset(streamed)
        if self._known is None or self._known[0] != asked:
            self._known = asked, (self._on_host(placements), self._on_device(placements, streamed))
        return self._known[1]

    def _on_host(self, placements: Sequence[str]) -> dict[str, int]:
        found = Counter[str]()
        for arena, name in zip(self._arenas, placements, strict=True):
            if PLACEMENTS[name].state == "host":
                found.update(arena)
                found["grads"] -= arena["grads"] if name == VISIT.name else 0
        return {plane: found[plane] for plane in PLANES if found[plane]}

    def _on_device(self, placements: Sequence[str], streamed: Set[int]) -> dict[str, int]:
        found = Counter[str]()
        for lid, (planes, name) in enumerate(zip(self._alone, placements, strict=True)):
            found["weights"] += 0 if lid in streamed else planes["weights"]
            if self._table.awaits_verdict and name != CPU.name:
                found["grads"] += planes["grads"]
            if PLACEMENTS[name].state == "gpu":
                found.update({plane: planes[plane] for plane in STATE_PLANES})
        found[WINDOW] = self._table.window_bytes if streamed else 0
        found[RING] = self._table.ring_bytes if VISIT.name in placements else 0
        return {plane: found[plane] for plane in (*PLANES, WINDOW, RING) if found[plane]}
