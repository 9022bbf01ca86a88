"""What the planner reckons with: every layer's size and times, and the memory there is.

Owns the values that the policies take. `book.py` makes them from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

#: By how much of its time the CPU is taken to be slower at times, before that was seen.
USUAL_SLACK: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known of a layer before anything has run."""

    lid: int
    position: int
    numel: int
    gpu_state_bytes: int  # on the GPU if it owns the layer, beyond what is resident anyway
    host_bytes: int  # all planes of the layer in host memory if the CPU owns it
    held_bytes: int = 0  # of `gpu_state_bytes`: gradients that await a verdict, which do not move with the layer
    spare_bytes: int = 0  # of `host_bytes`: the second bank of planes, which does not either


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A layer with its times: seconds for one step, measured while the other work goes on."""

    lid: int
    position: int
    numel: int
    forward_s: float
    backward_s: float
    d2h_s: float  # its gradients down
    h2d_s: float  # its weights up
    cpu_update_s: float
    gpu_update_s: float
    gpu_state_bytes: int
    host_bytes: int
    held_bytes: int = 0
    spare_bytes: int = 0

    @property
    def trip_s(self) -> float:
        """Gradient down, update, weights up, with nobody in the way."""
        return self.d2h_s + self.cpu_update_s + self.h2d_s

    @property
    def move_s(self) -> float:
        """Seconds of the link that it takes to hand the layer to another owner: its state, 10 bytes a bf16 parameter.

        Host planes are gradients, weights and the state, so half of what is not state is what one copy
        of `d2h_s` or `h2d_s` carries; the slower direction counts. Training goes on meanwhile, and waits
        for a part of this at most.
        """
        state_bytes = self.gpu_state_bytes - self.held_bytes
        copy_bytes = max(1, (self.host_bytes - self.spare_bytes - state_bytes) / 2)
        return state_bytes / copy_bytes * max(self.d2h_s, self.h2d_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All trainable layers, in forward order. Sums are over all of them, whoever owns them now.

    `other_s` is what a step takes between the end of backward and the first layer's forward: the loop's own work.
    The CPU's updates go on meanwhile. `middle_s` lies between the first forward and the last backward of a step that
    has several, when there is nothing to update. Forward and backward are those beside an idle CPU: while it updates,
    the share `drag` of their time is lost (contention.py). At times the CPU is slower, by the share `cpu_slack`.

    `awaits_verdict`: all updates wait for the end of backward; those of the CPU do not if it `speculates`, but their
    weights do, and the share `clipped` of its steps is as if it did not.
    """

    layers: tuple[LayerProfile, ...]
    other_s: float = 0.0
    middle_s: float = 0.0
    awaits_verdict: bool = False
    speculates: bool = False
    clipped: float = 0.0
    drag: float = 0.0
    cpu_slack: float = USUAL_SLACK

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
    def forward_s(self) -> float:
        """t_F"""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """t_B"""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def cpu_update_s(self) -> float:
        """t_U: the update of everything on the CPU."""
        return sum(layer.cpu_update_s for layer in self.layers)

    @property
    def gpu_update_s(self) -> float:
        """The update of everything on the GPU."""
        return sum(layer.gpu_update_s for layer in self.layers)

    @property
    def alpha(self) -> float:
        """GPU update time over CPU update time, 0 where neither takes time."""
        return self.gpu_update_s / self.cpu_update_s if self.cpu_update_s else 0.0

    def k_of(self, gpu_lids: frozenset[int]) -> float:
        """The fraction of the parameters in these layers."""
        return sum(layer.numel for layer in self.layers if layer.lid in gpu_lids) / max(1, self.numel)

    def gpu_state_bytes(self, gpu_lids: frozenset[int]) -> int:
        """GPU memory for the optimizer state of the layers that the GPU owns."""
        return sum(layer.gpu_state_bytes for layer in self.layers if layer.lid in gpu_lids)

    def host_bytes(self, gpu_lids: frozenset[int]) -> int:
        """Host memory for the planes of the layers that are left to the CPU."""
        return sum(layer.host_bytes for layer in self.layers if layer.lid not in gpu_lids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory for optimizer state; None is unbounded."""

    gpu_state_bytes: int | None = None
    host_bytes: int | None = None

    def allow(self, profile: Profile, gpu_lids: frozenset[int]) -> bool:
        fits_gpu = self.gpu_state_bytes is None or profile.gpu_state_bytes(gpu_lids) <= self.gpu_state_bytes
        fits_host = self.host_bytes is None or profile.host_bytes(gpu_lids) <= self.host_bytes
        return fits_gpu and fits_host
