"""What the layers take in host memory and on the trainer's device, by plane, for those who watch. `Planning` has one.

    layer table ─▶ PlaneBytes ─ of(places) ─▶ bytes by plane: host, device

A plane that exists in two banks counts twice. Activations, gradients under way and the libraries are in none.
"""

from __future__ import annotations

from collections import Counter

from protocol import messages as m
from protocol.handles import PLANES, STATE_PLANES, layout
from protocol.placement import Places

#: Beside planes, on the device: the memory through which weights are offloaded, and that through which state visits.
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
        self._known: tuple[Places, tuple[dict[str, int], dict[str, int]]] | None = None

    def of(self, places: Places) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by plane in host memory, and on the device; planes of no bytes are left out."""
        if self._known is None or self._known[0] != places:
            self._known = places, (self._on_host(places), self._on_device(places))
        return self._known[1]

    def _on_host(self, places: Places) -> dict[str, int]:
        found = Counter[str]()
        for arena, placement in zip(self._arenas, places, strict=True):
            if placement.state == "host":
                found.update(arena)
                found["grads"] -= arena["grads"] if placement.visits else 0
        return {plane: found[plane] for plane in PLANES if found[plane]}

    def _on_device(self, places: Places) -> dict[str, int]:
        found = Counter[str]()
        for planes, placement in zip(self._alone, places, strict=True):
            found["weights"] += planes["weights"] if placement.weights == "gpu" else 0
            if self._table.awaits_verdict and placement.updates == "gpu":
                found["grads"] += planes["grads"]
            if placement.state == "gpu":
                found.update({plane: planes[plane] for plane in STATE_PLANES})
        found[WINDOW] = self._table.window_bytes if places.offloaded else 0
        found[RING] = self._table.ring_bytes if places.visiting else 0
        return {plane: found[plane] for plane in (*PLANES, WINDOW, RING) if found[plane]}
