"""What layers take before any step, and what memory there is for placements, on the GPU and on the host.

    TrainerReport ─ heed ─▶ what steps need besides what is placed ─▶ limits ─▶ planner
    now, then ─ is_enough_for ─▶ whether both fit at once
    wanted, found ─ lacked ─▶ limits, where the GPU has not had the memory that was said to be there

The peak of all steps is reported. If it has grown, it is this step's. If not, it may be of a time when more was placed
on the GPU than now; or of state on its way there, which is counted by now, once whole steps have passed. What a step
has needed while nothing moved stays counted: the longest batch, or an evaluation, may come again when state has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import inf
from operator import or_
from typing import Final

from hytrain.planner.profile import LayerFacts, Limits
from protocol import messages as m
from protocol.handles import PLANES, layout
from protocol.placement import CPU, GPU, VISIT, Placement, Places
from protocol.sizes import WEIGHTS, Sizes
from workers.planning.measured import OPEN_STEPS

#: The peak of a step with new placements is that of the second step, if they came in the middle of the first.
WHOLE_STEPS: Final = 2
#: The gradients of so many more layers may wait on the GPU in one step than in another.
WAITING_LAYERS: Final = 2
#: Beside planes, a trainer with CUDA and its optimizer take so much host memory. Measured on an H200 host: 1.6 to
#: 2.2 GB in five of six runs, 0.2 in the other.
PROCESS_BYTES: Final = 1_800_000_000
#: Of the host's memory, other programs may take so much of what is left to them before planes give way.
MARGIN_TO_OTHERS: Final = 3 << 29


def sizes_of(table: m.LayerTable) -> Sizes:
    return Sizes(table.layers, banks=table.banks, waits=table.awaits_verdict or table.in_step)


def facts(layer: m.Layer, table: m.LayerTable, sizes: Sizes) -> LayerFacts:
    of_cpu, of_visit = (sum(sizes.host(layer.lid, placement).values()) for placement in (CPU, VISIT))
    owned, held = (sum(sizes.gpu(layer.lid, placement).values()) for placement in (GPU, VISIT))
    weights_bytes = sizes.gpu(layer.lid, GPU)[WEIGHTS]
    block = next((lids[0] for lids in table.blocks if layer.lid in lids), -1)
    return LayerFacts(
        lid=layer.lid,
        position=layer.position,
        numel=layer.numel,
        gpu_state_bytes=owned - weights_bytes,
        host_bytes=of_cpu,
        grads_bytes=of_cpu - of_visit,
        waiting_bytes=sizes.gradients(layer.lid),
        held_bytes=held - weights_bytes,
        spare_bytes=of_cpu - layout(layer).nbytes,
        weights_bytes=weights_bytes if block >= 0 else 0,
        block=block,
        must_visit=layer.stays_on_device,
    )


@dataclass
class _Lack:
    """Memory that state has not found: beside `found_bytes` of state, a layer's `layer_bytes` were not there.

    `least_bytes` is the least memory for state that reports have told of since then. It may have been there again
    before the first of them, so after `reports` the layer is tried once more.
    """

    found_bytes: int
    layer_bytes: int
    reports: int
    least_bytes: float = inf


class Room:
    """The memory of one trainer's placements. `limits`: for state, and on the GPU for weights that can be offloaded."""

    def __init__(self, table: m.LayerTable, sizes: Sizes) -> None:
        self._table = table
        self.resize(sizes)
        self._offloadable = frozenset(lid for block in table.blocks for lid in block)
        self.limits = Limits(gpu_state_bytes=table.gpu_bytes, host_bytes=table.host_bytes)
        self._process_bytes = 0 if table.device == "cpu" else PROCESS_BYTES
        self._waiting_bytes = WAITING_LAYERS * max(sizes.gradients(layer.lid) for layer in table.layers)
        self._activation_bytes = 0  # in host memory
        self._host_limit: int | None = None  # for planes and activations, once it was commanded
        # Of GPU memory: the peak; what of it is not ours to place; and what we have placed, for how many more steps.
        self._needed_bytes = self._for_steps_bytes = 0
        self._lacks = 0  # so many times state has found too little
        self._least_bytes = 0  # of what is not ours: some step has needed it, so that others may
        self._placed_bytes: int | None = None
        self._same_steps = WHOLE_STEPS
        self._has_ring = False  # for visits, on the GPU
        self._waited_bytes = 0  # gradients that waited for visits in a step that needed no more than `_for_steps_bytes`

    def resize(self, sizes: Sizes, places: Places | None = None) -> None:
        """From now on, layers take this much. What they take less, in these places, steps may need besides.

        Gradients that wait for `step()` are not there yet when activations are the most.
        """
        before = 0 if places is None else self._placed_on_gpu_bytes(places)
        self.sizes, self.by_plane = sizes, lru_cache(maxsize=1)(self._by_plane)
        self._lack: _Lack | None = None
        if places is not None:
            less = before - self._placed_on_gpu_bytes(places)
            self._for_steps_bytes += max(0, less)  # which steps show to be too much, if it is
            self._least_bytes = max(0, self._least_bytes + less)

    @property
    def is_known(self) -> bool:
        """Whether what steps need beside what has just been placed is known already."""
        return self._same_steps >= WHOLE_STEPS

    @property
    def for_visits_bytes(self) -> int:
        """What visits may take besides what steps were seen to need.

        That is the ring of slots, until it was made; and gradients and offloaded weights, of which more may wait than
        did then. What waits for the end of backward is counted layer by layer.
        """
        ring_bytes = 0 if self._has_ring else self._table.ring_bytes
        hold_bytes = 0 if self.sizes.waits else self._table.hold_bytes
        return ring_bytes + max(0, hold_bytes - self._waited_bytes)

    # ------------------------------------------------------------ measurements

    def heed(self, report: m.TrainerReport, *, is_warm: bool, is_moving: bool) -> None:
        """Take in what a step has needed. `is_warm`: it was no first one. `is_moving`: layers are on their way."""
        self._heed_activations(report.activation_bytes)
        if is_warm and report.gpu_usable_bytes is not None and report.gpu_needed_bytes is not None:
            self._heed_gpu(report, report.gpu_usable_bytes, report.gpu_needed_bytes, is_moving=is_moving)
        if report.host_free_bytes is not None and not is_moving and self.is_known:
            self._heed_host(report.places, report.host_free_bytes)

    def evicted(self) -> None:
        """State has left the GPU, whose steps have needed its memory: the next peak says how much they need."""
        self._needed_bytes = 0

    def _heed_activations(self, nbytes: int) -> None:
        """They take host memory that planes cannot have."""
        grown_bytes, self._activation_bytes = nbytes - self._activation_bytes, nbytes
        if self.limits.host_bytes is not None:
            self.limits = replace(self.limits, host_bytes=max(0, self.limits.host_bytes - grown_bytes))

    def limit_host(self, nbytes: int | None) -> None:
        """From now on, planes and activations take at most so much; None changes nothing."""
        if nbytes is not None:
            self._host_limit = nbytes
            self.limits = replace(self.limits, host_bytes=max(0, nbytes - self._activation_bytes))

    def _heed_gpu(self, report: m.TrainerReport, usable_bytes: int, needed_bytes: int, *, is_moving: bool) -> None:
        """What steps take beside state and weights is known: the rest is to be planned with."""
        if report.places.visiting and not self._has_ring:  # it stays from now on
            self._has_ring = True
            self._for_steps_bytes += self._table.ring_bytes
        placed = self._placed_on_gpu_bytes(report.places)
        rest = max(0, needed_bytes - placed)
        same = placed == self._placed_bytes or self._placed_bytes is None
        self._same_steps = self._same_steps + 1 if same else 0
        is_grown, is_first = needed_bytes > self._needed_bytes, self._needed_bytes == 0
        if is_grown and not is_moving and (self.is_known or is_first):
            self._least_bytes = max(self._least_bytes, rest)
        rest = max(rest, self._least_bytes)
        if is_grown:
            self._for_steps_bytes, self._waited_bytes = rest, report.waited_bytes
        elif self.is_known and rest <= self._for_steps_bytes:
            before = self._waited_bytes if rest == self._for_steps_bytes else 0
            self._for_steps_bytes, self._waited_bytes = rest, max(before, report.waited_bytes)
        self._needed_bytes, self._placed_bytes = needed_bytes, placed
        room = max(0, usable_bytes - self._for_steps_bytes - self._waiting_bytes)
        self._limit_gpu(room, is_settled=self.is_known and not is_moving)

    def lacked(self, wanted: Places, found: Places) -> None:
        """A plan has found less GPU memory than it wanted: not even enough for the first layer that lacks it.

        That holds until reports tell of more memory than they did since then, by as much as this layer takes, or for
        some hundred steps, and longer each time.
        """
        now, _ = self.bytes_of(found)
        beside = (found.moved({lid}, there) for lid, there in enumerate(wanted) if there is not found[lid])
        more = next((nbytes - now for nbytes, _ in map(self.bytes_of, beside) if nbytes > now), None)
        if more is not None and self.limits.gpu_state_bytes is not None:
            self._lacks += 1
            self._lack = _Lack(now, more, OPEN_STEPS ** (1 + self._lacks))
            self._limit_gpu(self.limits.gpu_state_bytes, is_settled=False)

    def _limit_gpu(self, nbytes: int, *, is_settled: bool) -> None:
        """So much seems to be there for state. `is_settled`: nothing moves, or has just moved."""
        if self._lack is not None and is_settled:
            self._lack.least_bytes = min(nbytes, self._lack.least_bytes)
            self._lack.reports -= 1
            if self._lack.reports == 0 or nbytes >= self._lack.least_bytes + self._lack.layer_bytes:
                self._lack = None
        if self._lack is not None:
            nbytes = min(nbytes, self._lack.found_bytes + self._lack.layer_bytes - 1)
        self.limits = replace(self.limits, gpu_state_bytes=nbytes)

    def _heed_host(self, places: Places, free_bytes: int) -> None:
        """What planes may take is what they take now, and what is free besides: others may take memory or free it.

        A part of the margin is left to those who take memory for a while.
        """
        free_bytes = 0 if -MARGIN_TO_OTHERS <= free_bytes < 0 else free_bytes
        nbytes = self._host_bytes(places) + free_bytes
        if self._host_limit is not None:
            nbytes = min(nbytes, self._host_limit - self._activation_bytes)
        self.limits = replace(self.limits, host_bytes=max(0, nbytes))

    # ------------------------------------------------------------ placements

    def is_enough_for(self, now: Places, then: Places) -> bool:
        """Whether there is memory for both at once, or they take no more of it than `now` alone."""
        limits = self.limits.gpu_state_bytes, self.limits.host_bytes
        taken = zip(self.bytes_of(now, then), self.bytes_of(now), limits, strict=True)
        return all(limit is None or both <= max(limit, alone) for both, alone, limit in taken)

    def bytes_of(self, *places: Places) -> tuple[int, int]:
        """What these placements take on the GPU and on the host, at once."""
        on_gpu = self._placed_on_gpu_bytes(*places)
        on_gpu += self.for_visits_bytes if any(each.visiting for each in places) else 0
        return on_gpu, self._host_bytes(*places)

    def _placed_on_gpu_bytes(self, *places: Places) -> int:
        """What we have placed on the GPU, with these placements at once.

        Gradients that wait for visits are not counted: those at the peak are part of what steps need.
        """
        has_window = frozenset.intersection(*(each.offloaded for each in places))
        placed = self._planes(self._placed_in, *places).total()
        return placed + (self._table.window_bytes if has_window else 0)

    def _placed_in(self, lid: int, placement: Placement) -> Mapping[str, int]:
        """Weights that cannot be offloaded are part of what steps need."""
        planes = self.sizes.gpu(lid, placement)
        return planes if lid in self._offloadable else {**planes, WEIGHTS: 0}

    def _host_bytes(self, *places: Places) -> int:
        return self._planes(self.sizes.host, *places).total()

    def _planes(self, planes_of: Callable[[int, Placement], Mapping[str, int]], *places: Places) -> Counter[str]:
        """Bytes by plane: each layer's in whichever of its placements they are there."""
        found = Counter[str]()
        for layer, *placements in zip(self._table.layers, *places, strict=True):
            found.update(reduce(or_, (Counter(planes_of(layer.lid, placement)) for placement in {*placements})))
        return found

    def _by_plane(self, places: Places) -> tuple[dict[str, int], dict[str, int]]:
        """For those who watch: bytes by plane in host memory, and on the device; planes of no bytes are left out.

        Activations, gradients under way and the libraries are in none.
        """
        host, device = self._planes(self.sizes.host, places), self._planes(self.sizes.gpu, places)
        device["window"] = self._table.window_bytes if places.offloaded else 0  # through which offloaded weights come
        device["ring"] = self._table.ring_bytes if places.visiting else 0  # through which state visits
        names = (*PLANES, "window", "ring")
        of_host, of_device = ({name: found[name] for name in names if found[name]} for found in (host, device))
        return of_host, of_device

    def predicted(self, report: m.TrainerReport) -> dict[str, int | None]:
        """What steps like this one take at most, as its record has it.

        On the GPU, that is what is placed there, and what else was seen to be needed; None if none was.
        """
        placed_bytes = self._placed_on_gpu_bytes(report.places)
        on_gpu = None if self._placed_bytes is None else self._for_steps_bytes + placed_bytes
        on_host = self._process_bytes + report.activation_bytes + self._host_bytes(report.places)
        return {"predicted_gpu_bytes": on_gpu, "predicted_host_bytes": on_host}
