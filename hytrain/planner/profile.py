"""What the planner knows: every layer's size and its measured times.

Owns the smoothing of measurements. The coordinator feeds the book with what trainer and optimizer report,
and asks it for a profile when it plans.

    {lid: seconds} of one step ──▶ one Ewma per role and layer ──▶ Profile
                                    outlier?      never measured in this role?
                                    set aside     numel x the rate of the layers that were
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from types import MappingProxyType

_NOTHING: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known of a layer before anything has run."""

    lid: int
    rank: int
    numel: int
    gpu_state_bytes: int  # on the GPU if it owns the layer, beyond what is resident anyway
    host_bytes: int  # all planes of the layer in host memory if the CPU owns it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A layer with its times: seconds for one step, measured while the other work goes on."""

    lid: int
    rank: int
    numel: int
    forward_s: float
    backward_s: float
    d2h_s: float  # its gradients down
    h2d_s: float  # its weights up
    cpu_update_s: float
    gpu_update_s: float
    gpu_state_bytes: int
    host_bytes: int

    @property
    def trip_s(self) -> float:
        """Gradient down, update, weights up, with nobody in the way."""
        return self.d2h_s + self.cpu_update_s + self.h2d_s

    @property
    def move_s(self) -> float:
        """Seconds to hand the layer to another owner: its state over the link, and one trip to wait out.

        Host planes are gradients, weights and the state, so half of what is not state is what one copy
        of `d2h_s` or `h2d_s` carries; the slower direction counts.
        """
        copy_bytes = max(1, (self.host_bytes - self.gpu_state_bytes) / 2)
        return self.gpu_state_bytes / copy_bytes * max(self.d2h_s, self.h2d_s) + self.trip_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All trainable layers, lowest rank first. Sums are over all of them, whoever owns them now."""

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        ranks = [layer.rank for layer in self.layers]
        if any(a >= b for a, b in pairwise(ranks)):
            raise ValueError(f"layers must come by ascending rank, got {ranks}")
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


@dataclass(slots=True, kw_only=True)
class Ewma:
    """A smoothed time that a hiccup does not move and a new level does.

    `spread` follows the samples' mean distance from `value`. A sample further away than four spreads
    (and than 30 % of the value, so that a quiet clock does not make every wobble an outlier) is set aside.
    Three in a row on the same side are no outliers but a new level, say another job on the machine:
    the value jumps to their median. Fewer were outliers: dropped, but they widen the spread a little, so they
    stay out while they are rare (less than one in four), else they are how the machine is.
    """

    weight: float = 0.2  # of a new sample
    value: float | None = None
    spread: float = 0.0
    suspects: list[float] = field(default_factory=list)

    def add(self, sample: float) -> None:
        """Take in a time in seconds. ValueError if it is negative or not finite."""
        if not 0 <= sample < inf:
            raise ValueError(f"a measured time must be finite and not negative, got {sample!r}")
        if self.value is None:
            self.value = sample
            return
        offset = sample - self.value
        band = max(4 * self.spread, 0.3 * self.value)
        inside = abs(offset) <= band
        if inside or (self.suspects and (self.suspects[0] > self.value) != (offset > 0)):
            self.spread += self.weight * len(self.suspects) * (band - self.spread)
            self.suspects.clear()
        if inside:
            self.value += self.weight * offset
            self.spread += self.weight * (abs(offset) - self.spread)
            return
        self.suspects.append(sample)
        if len(self.suspects) == 3:
            self.value = median(self.suspects)
            self.spread = (max(self.suspects) - min(self.suspects)) / 2
            self.suspects.clear()

    def check(self) -> None:
        assert self.value is None or 0 <= self.value < inf
        assert 0 <= self.spread < inf
        assert len(self.suspects) < 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per parameter assumed before anything was measured in that role.

    The defaults are those of one PCIe 5 card with bf16 copies beside 16 cores; they only have to last for the
    first steps. Where the "GPU" is a CPU, say so here: `gpu_update_s` is then the CPU's.
    """

    d2h_s: float = 2 / 50e9
    h2d_s: float = 2 / 50e9
    cpu_update_s: float = 1 / 4e9
    gpu_update_s: float = 1 / 100e9


class MeasurementBook:
    """Everything measured so far, by role and layer.

    A layer that was never measured in a role (the CPU's update of a layer that the GPU owns) gets the
    measured time per parameter of those that were, or else the default of `rates`. Forward and backward are
    different: all layers are timed there, so one without a time has no work of its own (a piece of a split
    embedding, a module that did not run) and counts as 0, the careful side: less time to hide an update in.
    """

    def __init__(self, layers: Iterable[LayerFacts], *, rates: Rates | None = None) -> None:
        self._layers: Sequence[LayerFacts] = tuple(layers)
        self._rank_of = {layer.lid: layer.rank for layer in self._layers}
        self._rates = rates or Rates()
        self._roles: dict[str, dict[int, Ewma]] = {
            role: {} for role in ("forward_s", "backward_s", "d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s")
        }

    def observe_trainer(
        self,
        *,
        forward_s: Mapping[int, float] = _NOTHING,
        backward_s: Mapping[int, float] = _NOTHING,
        d2h_s: Mapping[int, float] = _NOTHING,
        h2d_s: Mapping[int, float] = _NOTHING,
        gpu_update_s: Mapping[int, float] = _NOTHING,
    ) -> None:
        """One step's times by lid. ValueError for an unknown layer or an impossible time."""
        self._observe("forward_s", forward_s)
        self._observe("backward_s", backward_s)
        self._observe("d2h_s", d2h_s)
        self._observe("h2d_s", h2d_s)
        self._observe("gpu_update_s", gpu_update_s)

    def observe_optimizer(self, *, cpu_update_s: Mapping[int, float]) -> None:
        """One step's times by lid. ValueError for an unknown layer or an impossible time."""
        self._observe("cpu_update_s", cpu_update_s)

    def rerank(self, rank_of: Mapping[int, int]) -> None:
        """Take over newly learned ranks. ValueError unless they name exactly the layers of the book."""
        if rank_of.keys() != self._rank_of.keys():
            raise ValueError("new ranks must name every layer of the book and no other")
        self._rank_of = dict(rank_of)

    @property
    def ready(self) -> bool:
        """Forward and backward have been measured."""
        return bool(self._roles["forward_s"] and self._roles["backward_s"])

    def profile(self) -> Profile | None:
        """The present estimate, or None before forward and backward are known."""
        if not self.ready:
            return None
        forward_s = self._times("forward_s", 0.0)
        backward_s = self._times("backward_s", 0.0)
        d2h_s = self._times("d2h_s", self._rate("d2h_s", self._rates.d2h_s))
        h2d_s = self._times("h2d_s", self._rate("h2d_s", self._rates.h2d_s))
        cpu_update_s = self._times("cpu_update_s", self._rate("cpu_update_s", self._rates.cpu_update_s))
        gpu_update_s = self._times("gpu_update_s", self._rate("gpu_update_s", self._rates.gpu_update_s))
        return Profile(
            layers=tuple(
                LayerProfile(
                    lid=layer.lid,
                    rank=self._rank_of[layer.lid],
                    numel=layer.numel,
                    forward_s=forward_s[layer.lid],
                    backward_s=backward_s[layer.lid],
                    d2h_s=d2h_s[layer.lid],
                    h2d_s=h2d_s[layer.lid],
                    cpu_update_s=cpu_update_s[layer.lid],
                    gpu_update_s=gpu_update_s[layer.lid],
                    gpu_state_bytes=layer.gpu_state_bytes,
                    host_bytes=layer.host_bytes,
                )
                for layer in sorted(self._layers, key=lambda layer: self._rank_of[layer.lid])
            )
        )

    def check(self) -> None:
        for means in self._roles.values():
            assert means.keys() <= self._rank_of.keys()
            for mean in means.values():
                mean.check()
                assert mean.value is not None

    def _observe(self, role: str, times: Mapping[int, float]) -> None:
        for lid, time_s in times.items():
            if lid not in self._rank_of:
                raise ValueError(f"{role} was measured for layer {lid}, which is not in the layer table")
            self._roles[role].setdefault(lid, Ewma()).add(time_s)

    def _measured(self, role: str) -> dict[int, float]:
        return {lid: mean.value for lid, mean in self._roles[role].items() if mean.value is not None}

    def _rate(self, role: str, default_s: float) -> float:
        """Seconds per parameter over the layers measured in this role."""
        measured = self._measured(role)
        numel = sum(layer.numel for layer in self._layers if layer.lid in measured)
        return sum(measured.values()) / numel if numel else default_s

    def _times(self, role: str, rate_s: float) -> dict[int, float]:
        measured = self._measured(role)
        return {layer.lid: measured.get(layer.lid, layer.numel * rate_s) for layer in self._layers}
