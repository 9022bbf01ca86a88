"""What the optimizer process works on next: a pure state machine over the layers that it owns.

    GradReady ─(Verdict)─▶ queued, lowest rank first ─▶ next_tile() … tile_done() ─▶ WeightsReady
    TakeOver ─▶ owned                          owned ─▶ GiveUp

Layers are worked on in tiles of some million elements, and the queue is looked at again after each tile, so
that a gradient whose weights are needed sooner goes first. A layer whose update has begun keeps its progress.
Where a step awaits its verdict, gradients wait for it.
A tile takes a few milliseconds: long against what it costs to look, short against a layer.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

from protocol.messages import GradReady, GroupHyper, Layer, StepBegin, Verdict, WeightsReady

TILE_NUMEL: Final = 1 << 24


class QueueError(RuntimeError):
    """A message that the state of the optimizer's layers does not allow."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of one segment to update: elements [start, stop) of segment `segment` of layer `lid`.

    `count` is the segment's step count, `hyper` its group's hyperparameters in this step; the gradient is to be
    multiplied by `scale`.
    """

    lid: int
    step: int
    segment: int
    start: int
    stop: int
    count: int
    hyper: GroupHyper
    scale: float


@dataclass(slots=True)
class _Work:
    """One layer's update in progress."""

    ready: GradReady
    groups: tuple[GroupHyper, ...]
    scale: float = 1.0
    segment: int = 0
    start: int = 0


@dataclass(slots=True)
class UpdateQueue:
    """The layers that the optimizer owns, and the updates it still owes."""

    layers: tuple[Layer, ...]
    tile_numel: int = TILE_NUMEL
    ranks: list[int] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    _step: int = -1
    _groups: tuple[GroupHyper, ...] = ()
    _work: dict[int, _Work] = field(default_factory=dict)
    _heap: list[tuple[int, int]] = field(default_factory=list)
    _done: dict[int, int] = field(default_factory=dict)
    _verdict: Verdict | None = None
    _awaits_verdict: bool = False
    _held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [layer.rank for layer in self.layers]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to work on, though gradients may wait for a verdict."""
        return not self._heap

    @property
    def step(self) -> int:
        return self._step

    def take_over(self, lid: int) -> None:
        """The layer is the optimizer's from now on. Raises `QueueError` if it is already, or is unknown."""
        if not 0 <= lid < len(self.layers) or lid in self.owned:
            raise QueueError(f"TakeOver of layer {lid}, which is {'already owned' if lid in self.owned else 'unknown'}")
        self.owned.add(lid)

    def give_up(self, lid: int) -> None:
        """The layer is the GPU's from now on. Raises `QueueError` while an update of it is owed."""
        if lid not in self.owned or lid in self._work:
            raise QueueError(f"GiveUp of layer {lid}, which is {'being updated' if lid in self._work else 'not owned'}")
        self.owned.remove(lid)

    def learn_ranks(self, ranks: tuple[int, ...]) -> None:
        """The forward order was observed: from now on priorities follow it."""
        if len(ranks) != len(self.layers):
            raise QueueError(f"{len(ranks)} ranks for {len(self.layers)} layers")
        self.ranks = list(ranks)
        self._heap = [(self.ranks[lid], lid) for lid in self._work if lid not in self._held]
        heapq.heapify(self._heap)

    def begin(self, message: StepBegin) -> None:
        """Hyperparameters of a step; it must be later than the last. Updates of the last one may still be owed."""
        if message.step <= self._step:
            raise QueueError(f"StepBegin({message.step}) after step {self._step}")
        if self._awaits_verdict and self._verdict is None and self._held:
            raise QueueError(f"StepBegin({message.step}) without a verdict on step {self._step}")
        self._step, self._groups = message.step, message.groups
        self._awaits_verdict, self._verdict = message.awaits_verdict, None

    def verdict(self, message: Verdict) -> list[WeightsReady]:
        """Gradients that waited are queued; of a skipped step, all that waited are done, unchanged."""
        if message.step != self._step or not self._awaits_verdict or self._verdict is not None:
            raise QueueError(f"Verdict on step {message.step} in step {self._step}, which awaits none")
        self._verdict, held, self._held = message, self._held, []
        return [done for lid in held if (done := self._judged(lid, message)) is not None]

    def _judged(self, lid: int, verdict: Verdict) -> WeightsReady | None:
        work = self._work[lid]
        if verdict.skipped:
            del self._work[lid]
            self._done[lid] = work.ready.step
            return WeightsReady(step=work.ready.step, lid=lid)
        work.scale = verdict.scale
        heapq.heappush(self._heap, (self.ranks[lid], lid))
        return None

    def grad_ready(self, message: GradReady) -> WeightsReady | None:
        """Queue the layer's update. Raises `QueueError` for a layer, step or segment count that cannot be.

        If the step was skipped already, the layer is done, unchanged.
        """
        lid = message.lid
        if lid not in self.owned:
            raise QueueError(f"GradReady of layer {lid}, which the optimizer does not own")
        if message.step != self._step:
            raise QueueError(f"GradReady of step {message.step} in step {self._step}")
        if lid in self._work or self._done.get(lid, -1) >= message.step:
            raise QueueError(f"a second GradReady of layer {lid} in step {message.step}")
        segments = self.layers[lid].segments
        if len(message.counts) != len(segments):
            raise QueueError(f"GradReady of layer {lid} counts {len(message.counts)} of {len(segments)} segments")
        if any(segment.group >= len(self._groups) for segment in segments):
            raise QueueError(f"layer {lid} has a parameter group that StepBegin({self._step}) did not name")
        self._work[lid] = _Work(message, self._groups)
        if self._awaits_verdict and self._verdict is None:
            self._held.append(lid)
            return None
        return self._judged(lid, self._verdict or Verdict(step=message.step, scale=1.0, skipped=False))

    def next_tile(self) -> Tile | None:
        """The next range to update, of the owed layer with the lowest rank; None when nothing is owed."""
        if not self._heap:
            return None
        lid = self._heap[0][1]
        work = self._work[lid]
        while work.ready.counts[work.segment] == 0:
            work.segment += 1
        segment = self.layers[lid].segments[work.segment]
        stop = min(work.start + self.tile_numel, segment.numel)
        count, hyper = work.ready.counts[work.segment], work.groups[segment.group]
        return Tile(lid, work.ready.step, work.segment, work.start, stop, count, hyper, work.scale)

    def tile_done(self, tile: Tile) -> WeightsReady | None:
        """`tile` has been updated; the message to send if that was the layer's last."""
        work = self._work[tile.lid]
        assert (work.segment, work.start) == (tile.segment, tile.start), "tiles are done in order"
        work.start = tile.stop
        if tile.stop == self.layers[tile.lid].segments[tile.segment].numel:
            work.segment, work.start = work.segment + 1, 0
        if any(work.ready.counts[work.segment :]):
            return None
        del self._work[tile.lid]
        self._heap.remove((self.ranks[tile.lid], tile.lid))
        heapq.heapify(self._heap)
        self._done[tile.lid] = tile.step
        return WeightsReady(step=tile.step, lid=tile.lid)

    def check(self) -> None:
        assert set(self._work) <= self.owned, "updates are owed only on layers that are owned"
        assert sorted([lid for _, lid in self._heap] + self._held) == sorted(self._work), "the heap holds what is owed"
        assert not self._held or (self._awaits_verdict and self._verdict is None), "what is held awaits a verdict"
        assert all(any(w.ready.counts[w.segment :]) for w in self._work.values()), "finished work leaves"
