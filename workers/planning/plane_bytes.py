"""What the layers take in host memory and on the trainer's device, by plane, for those who watch. `Planning` has one.

    layer table ─▶ PlaneBytes ─ of(places) ─▶ bytes by plane: host, device

A plane that exists in two banks counts twice. Activations, gradients under way and the libraries are in none.
"""

from __future__ import annotations

from collections import Counter

from protocol import messages as m
from protocol.handles import PLANES
from protocol.placement import Places
from protocol.sizes import Sizes


class PlaneBytes:
    """The planes of one trainer's layers."""

    def __init__(self, table: m.LayerTable, sizes: Sizes) -> None:
        self._table, self._sizes = table, sizes
        self._known: tuple[Places, tuple[dict[str, int], dict[str, int]]] | None = None

    def of(self, places: Places) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by plane in host memory, and on the device; planes of no bytes are left out."""
        if self._known is None or self._known[0] != places:
            self._known = places, self._count(places)
        return self._known[1]

    def _count(self, places: Places) -> tuple[dict[str, int], dict[str, int]]:
        host, device = Counter[str](), Counter[str]()
        for lid, placement in enumerate(places):
            host.update(self._sizes.host(lid, placement))
            device.update(self._sizes.gpu(lid, placement))
        device["window"] = self._table.window_bytes if places.offloaded else 0  # through which offloaded weights come
        device["ring"] = self._table.ring_bytes if places.visiting else 0  # through which state visits
        names = (*PLANES, "window", "ring")
        by_plane, by_device_plane = ({name: found[name] for name in names if found[name]} for found in (host, device))
        return by_plane, by_device_plane
