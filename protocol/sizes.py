"""What layers take in each placement: which plane is where, and how many bytes that is. Whoever counts bytes asks here.

plane                        in host memory                          on the GPU
grads                        if the CPU updates                      if they wait for backward's end and the GPU updates
weights                      if state rests there                    if weights rest there
remainder, moments           if state rests there                    if state rests there
a second bank, plane'        as the first                            never

On the GPU, gradients have the dtype of their weights. They get another one, if `grads` has one, on their way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from protocol.handles import layout
from protocol.messages import Layer
from protocol.placement import GPU, Placement

WEIGHTS: Final = "weights"
GRADS: Final = "grads"


def is_on_host(plane: str, placement: Placement) -> bool:
    return placement.state == "host" and (plane != GRADS or placement.updates == "cpu")


def is_on_gpu(plane: str, placement: Placement, *, waits: bool = False) -> bool:
    if plane.endswith("'"):
        return False
    if plane == GRADS:
        return waits and placement.updates == "gpu"
    return (placement.weights if plane == WEIGHTS else placement.state) == "gpu"


def on_gpu(planes: Mapping[str, int], placement: Placement, *, waits: bool = False) -> Mapping[str, int]:
    """The bytes of a layer there, whose `planes` have so many in host memory."""
    there = {**planes, GRADS: planes[WEIGHTS]}
    return {plane: nbytes for plane, nbytes in there.items() if is_on_gpu(plane, placement, waits=waits)}


class Sizes:
    """Of a trainer's layers, by LID: bytes by plane, both banks together.

    `waits`: updates wait for the end of backward, for a verdict or for `step()`.
    """

    def __init__(self, layers: Sequence[Layer], *, banks: int, waits: bool) -> None:
        self._planes = [layout(layer, banks).plane_nbytes for layer in layers]
        self.waits = waits
        self.host, self.gpu = cache(self._on_host), cache(self._on_gpu)

    def _on_host(self, lid: int, placement: Placement) -> Mapping[str, int]:
        """What it takes there in this placement."""
        found = dict[str, int]()
        for plane, nbytes in self._planes[lid].items():
            if is_on_host(plane, placement):
                name = plane.removesuffix("'")
                found[name] = found.get(name, 0) + nbytes
        return found

    def _on_gpu(self, lid: int, placement: Placement) -> Mapping[str, int]:
        """What it takes there in this placement, but for gradients that are on their way."""
        return on_gpu(self._planes[lid], placement, waits=self.waits)

    def gradients(self, lid: int) -> int:
        """What its gradients take on the GPU while they wait there."""
        return on_gpu(self._planes[lid], GPU, waits=True)[GRADS]
