"""The planner's input: each layer's size and times, and the memory limits. `book.py` makes it from measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Final, NamedTuple, TypeVar

from hytrain.planner.contention import CPU_LOSS, WORK_LOSS, Crowding
from protocol.placement import Places

_T = TypeVar("_T")
#: Of visits, and of offloaded weights.
Shares = tuple[float, float]
#: Of the parameters: k, and the shares of visits and of offloaded weights.
Split = tuple[float, float, float]
HORIZON_STEPS: Final = 200
#: Step times closer than this fraction count as equal, and memory decides.
SAME_SPEED: Final = 0.01
USUAL_SLACK: Final = 0.1  # the fraction by which the CPU is assumed to be slower at times, until that was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What is known of a layer before any step."""

    lid: int
    position: int
    numel: int
    gpu_state_bytes: int  # on the GPU if it owns the layer, without weights
    host_bytes: int  # all planes of the layer in host memory if the CPU owns it
    grads_bytes: int = 0  # of `host_bytes`: gradients, which take none if the layer visits the GPU
    waiting_bytes: int = 0  # on the GPU: its gradients, while they wait there
    held_bytes: int = 0  # of `gpu_state_bytes`: gradients that await a verdict, which do not move with the layer
    spare_bytes: int = 0  # of `host_bytes`: the second bank of planes, which does not move either
    weights_bytes: int = 0  # on the GPU, unless they are offloaded; 0 if they cannot be, and are always there
    block: int = -1  # which offloaded layers have in common that are offloaded together
    must_visit: bool = False  # if its state is in host memory, as the CPU cannot update it

    def state_s(self, copy_s: float) -> float:
        """Seconds in which the link moves the layer's state one way: 10 bytes per bf16 parameter.

        The host planes are gradients, weights and state, so one copy of either, which takes `copy_s`, carries half of
        what is not state. Training goes on meanwhile, and waits for part of this at most.
        """
        return (self.gpu_state_bytes - self.held_bytes) / self.copy_bytes * copy_s

    @property
    def copy_bytes(self) -> float:
        """What a copy of its gradients or of its weights carries."""
        return max(1, (self.host_bytes - self.spare_bytes - (self.gpu_state_bytes - self.held_bytes)) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(LayerFacts):
    """A layer with its times: seconds for one step, measured while the other work goes on."""

    forward_s: float
    backward_s: float
    d2h_s: float  # its gradients to the host
    h2d_s: float  # its weights to the device
    cpu_update_s: float
    gpu_update_s: float
    visit_s: float  # its state comes to the GPU, is updated and goes back, while that of other layers does so

    @property
    def move_s(self) -> float:
        """Seconds in which the link moves its state one way, as to another owner, at the pace of the slower copy."""
        return self.state_s(max(self.d2h_s, self.h2d_s))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All trainable layers, at least one, in forward order. Sums are over all of them, whoever owns them, found once.

    `other_s` is the time between the end of backward and the first layer's forward: the loop's own work, during which
    the CPU updates. `middle_s` is the time in which there is nothing to update: between the first forward and the last
    backward of a step with several, and what the loop does before `step()` if updates begin there. Forward and backward
    are those with an idle CPU: while it updates, the share `drag` of their time is lost (contention.py). All times are
    of what has host memory, link and GPU memory to itself
    (`crowding`); while state visits, updates on the CPU take longer by the fraction `cpu_loss`, forward and backward by
    `work_loss`. The CPU is at times slower by the fraction `cpu_slack`. Its pace differs from step to step: in equally
    many of them its updates take `cpu_paces` times as long.

    The share `visit` of the parameters visits the GPU, or more if more must, in the layers that `Order.visiting` says.
    Before that, gradients and offloaded weights wait there, `hold_bytes` of them at most, or all (None). Visits take
    `for_visits_bytes` of its memory, besides what steps were seen to take. The weights of the share `offload` rest in
    host memory, in the layers of `Order.offloaded`. They come through `window_bytes` of GPU memory. Forward copies
    `activation_bytes` to host memory, and backward brings them back.

    If steps await a verdict, or begin their updates `in_step`, all updates wait for the end of backward. If the CPU
    `speculates`, its updates do not wait,
    only their weights do; in the share `clipped` of the steps they wait nevertheless.
    """

    layers: tuple[LayerProfile, ...]
    other_s: float = 0.0
    middle_s: float = 0.0
    awaits_verdict: bool = False
    in_step: bool = False
    speculates: bool = False
    clipped: float = 0.0
    drag: float = 0.0
    cpu_slack: float = USUAL_SLACK
    cpu_loss: float = CPU_LOSS
    work_loss: float = WORK_LOSS
    cpu_paces: tuple[float, ...] = ()
    visit: float = 0.0
    offload: float = 0.0
    window_bytes: int = 0
    for_visits_bytes: int = 0
    hold_bytes: int | None = None
    activation_bytes: int = 0

    order: Order = field(default_factory=lambda: Order(()), repr=False, compare=False)  # made for these layers

    def __post_init__(self) -> None:
        if self.order.layers is not self.layers:  # `replace` hands on that of the same layers
            object.__setattr__(self, "order", Order(self.layers))

    @property
    def lids(self) -> frozenset[int]:
        return self.order.lids

    @property
    def waits(self) -> bool:
        """Whether updates wait for the end of backward."""
        return self.awaits_verdict or self.in_step

    @cached_property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def weights_bytes(self) -> int:
        """Of weights that can be offloaded."""
        return sum(self.block_bytes.values())

    @cached_property
    def block_bytes(self) -> Mapping[int, int]:
        """The weights of each block that can be offloaded."""
        found = dict.fromkeys((layer.block for layer in self.layers), 0)
        for layer in self.layers:
            found[layer.block] += layer.weights_bytes
        return found

    @cached_property
    def must_visit(self) -> float:
        """The share of the parameters in layers that the CPU cannot update."""
        return sum(layer.numel for layer in self.layers if layer.must_visit) / max(1, self.numel)

    @cached_property
    def forward_s(self) -> float:  # t_F
        return sum(layer.forward_s for layer in self.layers)

    @cached_property
    def backward_s(self) -> float:  # t_B
        return sum(layer.backward_s for layer in self.layers)

    @cached_property
    def cpu_update_s(self) -> float:  # t_U, with all layers on the CPU
        return sum(layer.cpu_update_s for layer in self.layers)

    @cached_property
    def gpu_update_s(self) -> float:  # with all layers on the GPU
        return sum(layer.gpu_update_s for layer in self.layers)

    @cached_property
    def activations_s(self) -> float:
        """How long the link needs for activations, each way, at the pace of the layers' copies."""
        copies_s = sum(max(layer.d2h_s, layer.h2d_s) for layer in self.layers)
        return self.activation_bytes * copies_s / sum(layer.copy_bytes for layer in self.layers)

    @property
    def alpha(self) -> float:
        """GPU update time over CPU update time; 0 if neither takes time."""
        return self.gpu_update_s / self.cpu_update_s if self.cpu_update_s else 0.0

    def with_cpu(self, pace: float) -> Profile:
        """With updates on the CPU that take `pace` times as long, in all steps."""
        layers = (replace(layer, cpu_update_s=layer.cpu_update_s * pace) for layer in self.layers)
        return replace(self, layers=tuple(layers), cpu_paces=())

    def k_of(self, gpu_lids: frozenset[int]) -> float:
        """The fraction of the parameters in these layers."""
        return sum(layer.numel for layer in self.layers if layer.lid in gpu_lids) / max(1, self.numel)

    def split(self, gpu_lids: frozenset[int]) -> Split:
        return self.k_of(gpu_lids), self.visit, self.offload

    def gpu_state_bytes(self, gpu_lids: frozenset[int]) -> int:
        """GPU memory for the optimizer state of the layers that the GPU owns, and for weights that can be offloaded."""
        owned = [layer for layer in self.layers if layer.lid in gpu_lids]
        blocks = {layer.block for layer in owned if layer.weights_bytes}
        weights_bytes = sum(self.block_bytes[block] for block in blocks)
        return sum(layer.gpu_state_bytes for layer in owned) + self.weights_on_gpu_bytes(weights_bytes)

    def weights_on_gpu_bytes(self, owned_bytes: int) -> int:
        """What weights that can be offloaded take on the GPU, if it owns layers of blocks with so many bytes of them.

        As much rests in host memory as is wanted and can be. What the GPU owns is never offloaded.
        """
        of_blocks = sum(layer.numel for layer in self.layers if layer.weights_bytes)
        share = min(1.0, self.offload * self.numel / max(1, of_blocks))
        stay_bytes = ceil((1.0 - share) * self.weights_bytes)
        return max(stay_bytes, owned_bytes) + self.in_window_bytes

    @property
    def in_window_bytes(self) -> int:
        return self.window_bytes if self.offload else 0

    @property
    def held_for_visits_bytes(self) -> int:
        """The most GPU memory that visits take besides, whichever layers visit.

        If updates await a verdict, the gradients of all visiting layers wait, too.
        """
        share = max(self.visit, self.must_visit)
        if not share:
            return 0
        if not self.waits:
            return self.for_visits_bytes
        held = [layer.held_bytes for layer in self.layers]
        of_one = max(layer.held_bytes / max(1, layer.numel) for layer in self.layers)  # parameter
        return self.for_visits_bytes + min(sum(held), ceil(share * self.numel * of_one) + max(held))

    def places(self, gpu_lids: frozenset[int]) -> Places:
        """The placement of each layer, if the GPU owns these."""
        return self.order.places(gpu_lids, self.visit, self.offload)

    def crowding(self, places: Places) -> Crowding:
        """What updates on the CPU, visits and other copies cost each other, with these placements."""
        if not places.visiting:
            return Crowding()
        of_cpu = [layer for layer in self.layers if layer.lid in places.cpu]
        in_s = sum(layer.h2d_s for layer in of_cpu if layer.lid not in places.offloaded)
        in_s += sum(layer.h2d_s for layer in self.layers if layer.lid in places.offloaded)  # in backward: then visits
        return Crowding.of(
            visits_s=sum(layer.visit_s for layer in self.layers if layer.lid in places.visiting),
            cpu_s=sum(layer.cpu_update_s for layer in of_cpu),
            copies_s=max(in_s, sum(layer.d2h_s for layer in of_cpu)) + self.activations_s,
            work_s=self.forward_s + self.backward_s,
            other_s=self.other_s,
            cpu_loss=self.cpu_loss,
            work_loss=self.work_loss,
        )

    def host_bytes(self, gpu_lids: frozenset[int]) -> int:
        """Host memory for the planes of the layers that the GPU does not own."""
        visiting = self.places(gpu_lids).visiting
        of_planes = sum(layer.host_bytes for layer in self.layers if layer.lid not in gpu_lids)
        return of_planes - sum(layer.grads_bytes for layer in self.layers if layer.lid in visiting)


class Order:
    """Layers in the order in which more and more of them visit the GPU, or are offloaded, block by block.

    The order spreads them evenly, and a larger share adds layers to those of a smaller one: so few layers move if the
    share changes. It is that of their indices with the bits reversed (van der Corput).
    """

    def __init__(self, layers: Sequence[LayerFacts]) -> None:
        ranked = sorted(layers, key=lambda layer: layer.position)
        blocks: dict[int, list[LayerFacts]] = {}
        for layer in ranked:
            if layer.weights_bytes:
                blocks.setdefault(layer.block, []).append(layer)
        self.layers, self.lids = layers, frozenset(layer.lid for layer in ranked)
        self._numel = sum(layer.numel for layer in ranked)
        self._blocks = [_Group.of(block) for block in _spread(list(blocks.values()))]
        self._foremost = ranked[0].lid if ranked else -1
        self._layers = [_Group.of([layer]) for layer in _spread(ranked) if not layer.must_visit]
        self._must_visit = [_Group.of([layer]) for layer in ranked if layer.must_visit]
        self._known: dict[tuple[frozenset[int], float, float], Places] = {}

    def places(self, gpu_lids: frozenset[int], visit: float, offload: float) -> Places:
        """The placement of each layer if the GPU owns these, with the shares of visits and of offloaded weights."""
        asked = gpu_lids, visit, offload
        if asked not in self._known:
            offloaded = self.offloaded(gpu_lids, offload)
            visiting = self.visiting(gpu_lids, offloaded, visit)
            self._known[asked] = Places.chosen(1 + max(self.lids), gpu_lids, visiting, offloaded)
        return self._known[asked]

    def offloaded(self, gpu_lids: frozenset[int], share: float) -> frozenset[int]:
        """The layers whose weights rest in host memory, with at least this share of all, as far as they can be.

        They are whole blocks, of which the GPU owns no layer, spread evenly.
        """
        return self._first(_without(self._blocks, gpu_lids), share) if share else frozenset()

    def visiting(self, gpu_lids: frozenset[int], offloaded: frozenset[int], share: float) -> frozenset[int]:
        """The layers whose state visits the GPU, with at least this share of all, as far as it does not own them.

        Those that must visit come first. The others are spread evenly, so that link and CPU both work during all of
        backward. Those that are `offloaded` come later: their weights stay on the GPU until they are updated, and
        backward waits for that memory. The first layer comes last: forward needs it first, and backward completes it
        last.
        """
        must = _without(self._must_visit, gpu_lids)
        lids = frozenset[int]().union(*(layer.lids for layer in must))
        share -= sum(group.numel for group in must) / max(1, self._numel)
        others = sorted(
            _without(self._layers, gpu_lids),
            key=lambda group: (self._foremost in group.lids, not group.lids.isdisjoint(offloaded)),
        )
        return lids | self._first(others, share)

    def _first(self, groups: Sequence[_Group], share: float) -> frozenset[int]:
        """The layers of the first groups, with at least this share of all layers, if they have as much."""
        numel = sum(group.numel for group in groups)
        owed = min(1.0, share * self._numel / max(1, numel)) * numel
        lids = set[int]()
        for group in groups:
            if owed <= 1e-9 * numel:
                break
            lids |= group.lids
            owed -= group.numel
        return frozenset(lids)


class _Group(NamedTuple):
    """Layers that visit or are offloaded together."""

    lids: frozenset[int]
    numel: int

    @classmethod
    def of(cls, layers: Sequence[LayerFacts]) -> _Group:
        return cls(frozenset(layer.lid for layer in layers), sum(layer.numel for layer in layers))


def _without(groups: Iterable[_Group], lids: frozenset[int]) -> list[_Group]:
    """Those that have none of these layers."""
    return [group for group in groups if group.lids.isdisjoint(lids)]


def _spread(ranked: Sequence[_T]) -> list[_T]:
    order = sorted(range(len(ranked)), key=lambda index: f"{index:032b}"[::-1])
    return [ranked[index] for index in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory for optimizer state, and on the GPU for weights that can be offloaded; None means no limit."""

    gpu_state_bytes: int | None = None
    host_bytes: int | None = None

    def beside_visits(self, profile: Profile) -> Limits:
        """What the profile's visits leave for state on the GPU."""
        if self.gpu_state_bytes is None:
            return self
        return replace(self, gpu_state_bytes=max(0, self.gpu_state_bytes - profile.held_for_visits_bytes))

    def allow(self, profile: Profile, gpu_lids: frozenset[int]) -> bool:
        least = not gpu_lids  # nothing takes less
        fits_gpu = self.gpu_state_bytes is None or least or profile.gpu_state_bytes(gpu_lids) <= self.gpu_state_bytes
        fits_host = self.host_bytes is None or profile.host_bytes(gpu_lids) <= self.host_bytes
        return fits_gpu and fits_host


class Known(NamedTuple):
    """What steps with a split have shown, of which the GPU owned these layers.

    `miss`: how many times as long they took as simulated, and how many `steps` have told that. `rest_s`: how much of
    them is not explained by the layers' times. `step_s`: how long they take, or took; None if that was long ago.
    """

    gpu_lids: frozenset[int]
    miss: float
    rest_s: float
    step_s: float | None
    steps: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be decided by which policy, given the layers that the GPU owns now. The memory limits always hold.

    `visit` and `offload` are the wanted shares. With None, "deadline" chooses one for its objective, and keeps the
    current one unless another is clearly better; other policies take what needs the least GPU memory. `tried` has what
    was measured of each split that was in effect, and `now` is the current one. Others are assumed to miss the
    simulation as the nearest of these do (`miss`). None but the current one counts as faster than simulated: that may
    have been with other layers on the GPU. What a split has shown not long ago counts, if more is simulated.

    `fixed_k` is for policy "fixed". `seed` is for "random", which chooses other layers at every call. `objective` is
    for "deadline" alone, and the reason of other policies says so: "speed" takes the least GPU memory within 1 % of
    the fastest step, "gpu-memory" the least that host memory allows, "host-memory" as many layers as GPU memory
    allows.

    "deadline" moves layers for speed if the predicted gain is above the fraction `min_gain` of a step, by which steps
    scatter, and repays the moves within `horizon_steps`, and for memory if the saving is clear and costs no speed.
    "balance" follows its formula, except for small changes.
    """

    policy: str
    limits: Limits
    current: frozenset[int]
    fixed_k: float | None = None
    objective: str = "speed"
    visit: float | None = 0.0
    offload: float | None = 0.0
    now: Split = (0.0, 0.0, 0.0)
    tried: Mapping[Split, Known] = field(default_factory=dict)
    seed: int = 0
    horizon_steps: int = HORIZON_STEPS
    min_gain: float = SAME_SPEED

    def miss(self, split: Split) -> float:
        """How many times as long as simulated steps with this split take: as with the nearest that are known.

        Those have the nearest shares, and of these k on either side. At least 1, or what it is for the current one if
        that is less.
        """
        far = {other: abs(other[1] - split[1]) + abs(other[2] - split[2]) for other in self.tried}
        nearest = min(far.values(), default=0.0)
        of_shares: dict[Shares, list[tuple[float, float]]] = {}
        for other in far:
            if far[other] <= nearest + 1e-9:
                of_shares.setdefault(other[1:], []).append((other[0], self.tried[other].miss))
        least = min(1.0, self.tried[self.now].miss if self.now in self.tried else 1.0)
        return max([least, *(_between(known, split[0]) for known in of_shares.values())])

    def rest_s(self, split: Split) -> float | None:
        """What such steps take beyond the layers' times, as with the nearest k. None if its shares are not known."""
        known = [(other[0], found.rest_s) for other, found in self.tried.items() if other[1:] == split[1:]]
        return _between(known, split[0]) if known else None


def _between(points: Iterable[tuple[float, float]], at: float) -> float:
    """The value on the line through the nearest point on either side; beyond all, that of the last one."""
    known = sorted(points)
    index = bisect_left(known, at, key=lambda point: point[0])
    if index in (0, len(known)):
        return known[min(index, len(known) - 1)][1]
    (left, before), (right, after) = known[index - 1], known[index]
    return before + (after - before) * (at - left) / (right - left)
