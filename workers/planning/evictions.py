"""What has left the GPU at once, with no plan, for the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hytrain.readable import gib
from protocol import messages as m


@dataclass(slots=True)
class Evictions:
    """`nbytes`: of those since training began. The others are of the step that has not ended."""

    nbytes: int = 0
    _now: tuple[m.Evicted, ...] = ()

    def add(self, evicted: m.Evicted) -> str:
        """Returns what has left in this step, and what for."""
        self.nbytes += evicted.nbytes
        self._now = (*self._now, evicted)
        return self._told()

    def _told(self) -> str:
        nbytes, seconds = sum(one.nbytes for one in self._now), sum(one.evict_s for one in self._now)
        layers = "1 layer" if len(self._now) == 1 else f"{len(self._now)} layers"
        return f"the state of {layers} has left the GPU, {gib(nbytes)} in {seconds:.2f} s, for {self._now[-1].reason}"

    def take(self, reason: str | None) -> dict[str, Any]:
        """What a record has of the step that ends. `reason`: of a plan that has taken effect in it."""
        found: dict[str, Any] = {"evicted_bytes": self.nbytes} if self.nbytes else {}
        told, seconds = self._told() if self._now else None, sum(one.evict_s for one in self._now)
        if self._now:
            found["evict_s"] = seconds
        if news := "; ".join(each for each in (told, reason) if each is not None):
            found["reason"] = news
        self._now = ()
        return found
