"""What the optimizer process works on next: a pure state machine over the layers that it owns.

    GradReady ────────────▶ queued, in forward order ─▶ next_tile() … tile_done() ─▶ WeightsReady
              ─(Verdict)──▶
    TakeOver ─▶ owned                          owned ─▶ GiveUp

Layers are worked on in tiles of some million elements, and the queue is looked at again after each tile, so
that a gradient whose weights are needed sooner goes first. A layer whose update has begun keeps its progress.
A tile takes a few milliseconds: long against what it costs to look, short against a layer.

Where a step awaits its verdict, gradients wait for it; or, speculating, they are updated as if its scale were 1.0, out
of the bank that holds into the other one, and their WeightsReady waits:

    scale 1.0        the other bank holds: what is done is announced, what is half done goes on
    another scale    nothing has changed: the update begins anew, in place
    skipped          nothing has changed, and that is all

A gradient that comes with the word that the norm is above its limit already ends the speculation of that step.
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
    multiplied by `scale`. The update reads bank `source` and writes bank `target`. `begins`: it is the update's first.
    """

    lid: int
    step: int
    segment: int
    start: int
    stop: int
    count: int
    hyper: GroupHyper
    scale: float
    source: int
    target: int
    begins: bool


@dataclass(slots=True)
class _Work:
    """One layer's update in progress. If it is `ahead` of its verdict it writes the other bank."""

    ready: GradReady
    groups: tuple[GroupHyper, ...]
    scale: float = 1.0
    ahead: bool = False
    segment: int = 0
    start: int = 0

    @property
    def is_complete(self) -> bool:
        return not any(self.ready.counts[self.segment :])

    def begin_anew(self) -> None:
        """In place, since the verdict is known then."""
        self.ahead, self.segment, self.start = False, 0, 0


@dataclass(slots=True)
class UpdateQueue:
    """The layers that the optimizer owns, and the updates it still owes.

    `banks` are those that hold the segments of each layer that is owned; `speculate` is the mode of steps to come.
    """

    layers: tuple[Layer, ...]
    tile_numel: int = TILE_NUMEL
    positions: list[int] = field(default_factory=list)
    banks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    speculate: bool = False
    _step: int = -1
    _groups: tuple[GroupHyper, ...] = ()
    _work: dict[int, _Work] = field(default_factory=dict)
    _heap: list[tuple[int, int]] = field(default_factory=list)
    _done: dict[int, int] = field(default_factory=dict)
    _verdict: Verdict | None = None
    _awaits_verdict: bool = False
    _speculating: bool = False
    _unjudged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.positions = [layer.position for layer in self.layers]

    @property
    def owned(self) -> set[int]:
        return set(self.banks)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to work on, though gradients may wait for a verdict."""
        return not self._heap

    @property
    def step(self) -> int:
        return self._step

    def take_over(self, lid: int) -> None:
        """The layer is the optimizer's from now on. Raises `QueueError` if it is already, or is unknown."""
        if not 0 <= lid < len(self.layers) or lid in self.banks:
            raise QueueError(f"TakeOver of layer {lid}, which is {'already owned' if lid in self.banks else 'unknown'}")
        self.banks[lid] = (0,) * len(self.layers[lid].segments)

    def give_up(self, lid: int) -> None:
        """The layer is the GPU's from now on. Raises `QueueError` while an update of it is owed."""
        if lid not in self.banks or lid in self._work:
            raise QueueError(f"GiveUp of layer {lid}, which is {'being updated' if lid in self._work else 'not owned'}")
        del self.banks[lid]

    def learn_positions(self, positions: tuple[int, ...]) -> None:
        """The forward order was observed: from now on priorities follow it."""
        if len(positions) != len(self.layers):
            raise QueueError(f"{len(positions)} positions for {len(self.layers)} layers")
        self.positions = list(positions)
        self._requeue()

    def _requeue(self) -> None:
        """What can be worked on: all but what waits for a verdict, or is complete but for it."""
        self._heap = [
            (self.positions[lid], lid)
            for lid, work in self._work.items()
            if not work.is_complete and (work.ahead or lid not in self._unjudged)
        ]
        heapq.heapify(self._heap)

    def begin(self, message: StepBegin) -> None:
        """Hyperparameters of a step; it must be later than the last. Updates of the last one may still be owed."""
        if message.step <= self._step:
            raise QueueError(f"StepBegin({message.step}) after step {self._step}")
        if self._unjudged:
            raise QueueError(f"StepBegin({message.step}) without a verdict on step {self._step}")
        self._step, self._groups = message.step, message.groups
        self._awaits_verdict, self._verdict = message.awaits_verdict, None
        self._speculating = self.speculate

    def verdict(self, message: Verdict) -> list[WeightsReady]:
        """What waited is queued, or done already, in forward order; of a skipped step all is done, unchanged."""
        if message.step != self._step or not self._awaits_verdict or self._verdict is not None:
            raise QueueError(f"Verdict on step {message.step} in step {self._step}, which awaits none")
        self._verdict, unjudged, self._unjudged = message, self._unjudged, set()
        found = [self._judged(lid, message) for lid in sorted(unjudged, key=self.positions.__getitem__)]
        self._requeue()
        return [done for done in found if done is not None]

    def _judged(self, lid: int, verdict: Verdict) -> WeightsReady | None:
        """The layer's WeightsReady, if nothing is left to do."""
        work = self._work[lid]
        if work.ahead and (verdict.skipped or verdict.scale != 1.0):
            work.begin_anew()
        work.scale = verdict.scale
        return self._finish(lid) if verdict.skipped or work.is_complete else None

    def _finish(self, lid: int) -> WeightsReady:
        """The layer's update holds; one that was ahead of its verdict has filled the other bank."""
        work, banks = self._work.pop(lid), self.banks[lid]
        if work.ahead:
            banks = tuple(1 - bank if count else bank for bank, count in zip(banks, work.ready.counts, strict=True))
        self.banks[lid], self._done[lid] = banks, work.ready.step
        return WeightsReady(step=work.ready.step, lid=lid, banks=banks)

    def _stop_speculating(self) -> None:
        """The verdict will be another one: what was updated ahead of it waits for it like the rest."""
        self._speculating = False
        for lid in self._unjudged:
            self._work[lid].begin_anew()
        self._requeue()

    def grad_ready(self, message: GradReady) -> WeightsReady | None:
        """Queue the layer's update. Raises `QueueError` for a layer, step or segment count that cannot be.

        If the step was skipped already, the layer is done, unchanged.
        """
        lid = message.lid
        if lid not in self.banks:
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
        work = self._work[lid] = _Work(message, self._groups)
        if self._awaits_verdict and self._verdict is None:
            self._unjudged.add(lid)
            if self._speculating and message.exceeds:
                self._stop_speculating()
            work.ahead = self._speculating
        elif self._verdict is not None and (done := self._judged(lid, self._verdict)) is not None:
            return done
        if work.ahead or lid not in self._unjudged:
            heapq.heappush(self._heap, (self.positions[lid], lid))
        return None

    def next_tile(self) -> Tile | None:
        """The next range to update, of the owed layer that comes first in forward order; None when nothing is owed."""
        if not self._heap:
            return None
        lid = self._heap[0][1]
        work = self._work[lid]
        while work.ready.counts[work.segment] == 0:
            work.segment += 1
        segment = self.layers[lid].segments[work.segment]
        stop = min(work.start + self.tile_numel, segment.numel)
        bank = self.banks[lid][work.segment]
        return Tile(
            lid=lid,
            step=work.ready.step,
            segment=work.segment,
            start=work.start,
            stop=stop,
            count=work.ready.counts[work.segment],
            hyper=work.groups[segment.group],
            scale=work.scale,
            source=bank,
            target=1 - bank if work.ahead else bank,
            begins=work.start == 0 and not any(work.ready.counts[: work.segment]),
        )

    def tile_done(self, tile: Tile) -> WeightsReady | None:
        """`tile` has been updated; the message to send if that was the layer's last."""
        work = self._work[tile.lid]
        assert (work.segment, work.start) == (tile.segment, tile.start), "tiles are done in order"
        work.start = tile.stop
        if tile.stop == self.layers[tile.lid].segments[tile.segment].numel:
            work.segment, work.start = work.segment + 1, 0
        if not work.is_complete:
            return None
        self._heap.remove((self.positions[tile.lid], tile.lid))
        heapq.heapify(self._heap)
        return None if tile.lid in self._unjudged else self._finish(tile.lid)

    def check(self) -> None:
        queued, waiting = {lid for _, lid in self._heap}, set(self._work) - {lid for _, lid in self._heap}
        assert set(self._work) <= set(self.banks), "updates are owed only on layers that are owned"
        assert queued <= set(self._work) and len(queued) == len(self._heap), "the heap holds what is owed"
        assert waiting <= self._unjudged <= set(self._work), "what is not queued awaits a verdict"
        assert not self._unjudged or (self._awaits_verdict and self._verdict is None), "none was given"
        for lid, work in self._work.items():
            assert work.is_complete <= (lid in self._unjudged and work.ahead), "finished work leaves"
            assert lid not in queued & self._unjudged or work.ahead, "in place only what was judged"
