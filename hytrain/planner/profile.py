"""The planner's input: each layer's size and times, and the memory limits. `book.py` makes it from measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Final

USUAL_SLACK: Final = 0.1  # the fraction by which the CPU is assumed to be slower at times, until that was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known of a layer before any step."""

    lid: int
    position: int
    numel: int
    gpu_state_bytes: int  # on the GPU if it owns the layer, without what is always there
    host_bytes: int  # all planes of the layer in host memory if the CPU owns it
    held_bytes: int = 0  # of `gpu_state_bytes`: gradients that await a verdict, which do not move with the layer
    spare_bytes: int = 0  # of `host_bytes`: the second bank of planes, which does not move either


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(LayerFacts):
    """A layer with its times: seconds for one step, measured while the other work goes on."""

    forward_s: float
    backward_s: float
    d2h_s: float  # its gradients to the host
    h2d_s: float  # its weights to the device
    cpu_update_s: float
    gpu_update_s: float

    @property
    def move_s(self) -> float:
        """Seconds in which the link moves the layer's state one way, as to another owner: 10 bytes per bf16 parameter.

        The host planes are gradients, weights and state, so one copy of `d2h_s` or `h2d_s` carries half of what is
        not state. The slower direction counts. Training goes on meanwhile, and waits for part of this at most.
        """
        state_bytes = self.gpu_state_bytes - self.held_bytes
        copy_bytes = max(1, (self.host_bytes - self.spare_bytes - state_bytes) / 2)
        return state_bytes / copy_bytes * max(self.d2h_s, self.h2d_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All trainable layers, in forward order. Sums are over all of them, whoever owns them.

    `other_s` is the time between the end of backward and the first layer's forward: the loop's own work, during which
    the CPU updates. `middle_s` is the time between the first forward and the last backward of a step with several, in
    which there is nothing to update. Forward and backward are those with an idle CPU: while it updates, the share
    `drag` of their time is lost (contention.py). The CPU is at times slower by the fraction `cpu_slack`.

    The share `visit` of the parameters visits the GPU, in the layers that `visiting_lids` says.

    If `awaits_verdict`, all updates wait for the end of backward. If the CPU `speculates`, its updates do not wait,
    only their weights do; in the share `clipped` of the steps they wait nevertheless.
    """

    layers: tuple[LayerProfile, ...]
    other_s: float = 0.0
    middle_s: float = 0.0
    awaits_verdict: bool = False
    speculates: bool = False
    clipped: float = 0.0
    drag: float = 0.0
    cpu_slack: float = USUAL_SLACK
    visit: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        positions = [layer.position for layer in self.layers]
        if any(a >= b for a, b in pairwise(positions)):
            raise ValueError(f"layers must come by ascending position, got {positions}")
        if len(self.lids) != len(self.layers):
            raise ValueError("two layers have the same lid")

    @property
    def lids(self) -> frozenset[int]:
        return frozenset(layer.lid for layer in self.layers)

    def require(self, lids: frozenset[int]) -> None:
        """ValueError if one of these layers is not in the profile."""
        if unknown := lids - self.lids:
            raise ValueError(f"layers {sorted(unknown)} are not in the profile")

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def forward_s(self) -> float:  # t_F
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:  # t_B
        return sum(layer.backward_s for layer in self.layers)

    @property
    def cpu_update_s(self) -> float:  # t_U, with all layers on the CPU
        return sum(layer.cpu_update_s for layer in self.layers)

    @property
    def gpu_update_s(self) -> float:  # with all layers on the GPU
        return sum(layer.gpu_update_s for layer in self.layers)

    @property
    def alpha(self) -> float:
        """GPU update time over CPU update time; 0 if neither takes time."""
        return self.gpu_update_s / self.cpu_update_s if self.cpu_update_s else 0.0

    def k_of(self, gpu_lids: frozenset[int]) -> float:
        """The fraction of the parameters in these layers."""
        return sum(layer.numel for layer in self.layers if layer.lid in gpu_lids) / max(1, self.numel)

    def gpu_state_bytes(self, gpu_lids: frozenset[int]) -> int:
        """GPU memory for the optimizer state of the layers that the GPU owns."""
        return sum(layer.gpu_state_bytes for layer in self.layers if layer.lid in gpu_lids)

    @property
    def held_for_visits_bytes(self) -> int:
        """The most GPU memory that gradients of visiting layers take while they await a verdict, whoever visits."""
        held = [layer.held_bytes for layer in self.layers]
        of_one = max(layer.held_bytes / max(1, layer.numel) for layer in self.layers)  # parameter
        return min(sum(held), ceil(self.visit * self.numel * of_one) + max(held)) if self.visit else 0

    def visiting(self, gpu_lids: frozenset[int]) -> frozenset[int]:
        """The layers whose state visits the GPU, if it owns these."""
        return visiting_lids(self.layers, gpu_lids, self.visit)

    def host_bytes(self, gpu_lids: frozenset[int]) -> int:
        """Host memory for the planes of the CPU-owned layers."""
        return sum(layer.host_bytes for layer in self.layers if layer.lid not in gpu_lids)


def visiting_lids(layers: Iterable[LayerFacts], gpu_lids: frozenset[int], share: float) -> frozenset[int]:
    """The layers whose state visits the GPU, with at least this share of all.

    They are spread evenly among those that it does not own, so that link and CPU both work during all of backward.
    """
    if not share:
        return frozenset()
    layers = sorted(layers, key=lambda layer: layer.position)
    others = [layer for layer in layers if layer.lid not in gpu_lids]
    numel = sum(layer.numel for layer in layers)
    of_others = min(1.0, share * numel / max(1, sum(layer.numel for layer in others)))
    owed, lids = 0.0, set[int]()
    for layer in others:
        owed += of_others * layer.numel
        if owed > 1e-9 * numel:
            lids.add(layer.lid)
            owed -= layer.numel
    return frozenset(lids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory for optimizer state; None means no limit."""

    gpu_state_bytes: int | None = None
    host_bytes: int | None = None

    def beside_visits(self, profile: Profile) -> Limits:
        """What the profile's visits leave for state on the GPU."""
        if self.gpu_state_bytes is None:
            return self
        return replace(self, gpu_state_bytes=max(0, self.gpu_state_bytes - profile.held_for_visits_bytes))

    def allow(self, profile: Profile, gpu_lids: frozenset[int]) -> bool:
        fits_gpu = self.gpu_state_bytes is None or profile.gpu_state_bytes(gpu_lids) <= self.gpu_state_bytes
        fits_host = self.host_bytes is None or profile.host_bytes(gpu_lids) <= self.host_bytes
        return fits_gpu and fits_host
