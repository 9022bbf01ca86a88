"""Decides what the optimizer process updates next: a pure state machine over the layers that it owns.

    GradReady ────────────▶ queued, in forward order ─▶ next_tile() … tile_done() ─▶ WeightsReady
              ─(Verdict)──▶
    TakeOver, Counted ─▶ owned                 owned ─▶ GiveUp

Layers are updated in tiles of some million elements. The optimizer asks for the next tile after each one, so a layer
whose weights are needed sooner goes first. A layer that was interrupted keeps its progress. A tile takes a few
milliseconds: long compared with choosing it, short compared with a layer.

If a step awaits its verdict, its updates wait for it (defer), or are made as if its scale were 1.0 (speculate). A
speculative update reads the current bank and writes the other one. Its WeightsReady waits for the verdict:

    scale 1.0        the other bank becomes current: finished updates are announced, unfinished ones continue
    another scale    the current bank is unchanged: the update starts again, in place
    skipped          the current bank is unchanged: the layer is announced

The queue counts each segment's updates. A GradReady says the count that its update is to have, and both must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import GradReady, Layer, StepBegin, Verdict, WeightsReady
from protocol.rules import TILE_NUMEL, Hyper


class QueueError(RuntimeError):
    """The state of the optimizer's layers does not allow this message."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of one segment to update: elements [start, stop) of segment `segment` of layer `lid`.

    `count` is the segment's step count, `hyper` its group's hyperparameters in this step, and `scale` the factor for
    the gradient, which is rounded to its own dtype if it `rounds`. The update reads bank `source` and writes bank
    `target`. `begins`: this is the update's first tile. `float_mode`: that of its step.
    """

    lid: int
    step: int
    segment: int
    start: int
    stop: int
    count: int
    hyper: Hyper
    scale: float
    source: int
    target: int
    begins: bool
    float_mode: int = 0
    rounds: bool = False


@dataclass(slots=True)
class _Work:
    """One layer's update in progress. If it is `ahead` of its verdict, it writes the other bank."""

    ready: GradReady
    groups: tuple[Hyper, ...]
    float_mode: int
    scale: float = 1.0
    rounds: bool = False
    ahead: bool = False
    segment: int = 0
    start: int = 0

    @property
    def is_complete(self) -> bool:
        return not any(self.ready.counts[self.segment :])

    def begin_anew(self) -> None:
        """Start again, in place."""
        self.ahead, self.segment, self.start = False, 0, 0


@dataclass(slots=True)
class UpdateQueue:
    """The layers that the optimizer owns, and the updates that it still has to make.

    `banks[lid][i]` is the current bank of segment i of an owned layer, `counts[lid][i]` the number of its updates, once
    it was told. `speculate` is the mode of the next steps.
    """

    layers: tuple[Layer, ...]
    tile_numel: int = TILE_NUMEL
    positions: list[int] = field(default_factory=list)
    banks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    speculate: bool = False
    step: int = -1
    _groups: tuple[Hyper, ...] = ()
    _float_mode: int = 0
    _work: dict[int, _Work] = field(default_factory=dict)
    _queued: set[int] = field(default_factory=set)
    _done: dict[int, int] = field(default_factory=dict)
    _verdict: Verdict | None = None
    _awaits_verdict: bool = False
    _speculating: bool = False
    _unjudged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.positions = [layer.position for layer in self.layers]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to update now. Gradients may still wait for a verdict."""
        return not self._queued

    def take_over(self, lid: int, banks: tuple[int, ...]) -> None:
        """The optimizer owns the layer from now on, with these current banks of its segments.

        Raises `QueueError` if it already does, if the layer is unknown, or if these are not its segments.
        """
        if not 0 <= lid < len(self.layers) or lid in self.banks:
            raise QueueError(f"TakeOver of layer {lid}, which is {'already owned' if lid in self.banks else 'unknown'}")
        if len(banks) != len(self.layers[lid].segments):
            raise QueueError(f"TakeOver of layer {lid} with {len(banks)} banks")
        self.banks[lid] = banks

    def counted(self, lid: int, counts: tuple[int, ...]) -> None:
        """So many updates have been made of the layer's segments.

        Raises `QueueError` if the layer is not owned or is being updated, or if these are not its segments.
        """
        if lid not in self.banks:
            raise QueueError(f"Counted of layer {lid}, which is not owned")
        if lid in self._work:
            raise QueueError(f"Counted of layer {lid}, which is being updated")
        if len(counts) != len(self.layers[lid].segments):
            raise QueueError(f"Counted of layer {lid} with {len(counts)} counts")
        self.counts[lid] = counts

    def give_up(self, lid: int) -> None:
        """The GPU owns the layer from now on. Raises `QueueError` while an update of it is unfinished."""
        if lid not in self.banks or lid in self._work:
            raise QueueError(f"GiveUp of layer {lid}, which is {'being updated' if lid in self._work else 'not owned'}")
        del self.banks[lid]
        self.counts.pop(lid, None)

    def learn_positions(self, positions: tuple[int, ...]) -> None:
        """The forward order was observed. Priorities follow it from now on."""
        if len(positions) != len(self.layers):
            raise QueueError(f"{len(positions)} positions for {len(self.layers)} layers")
        self.positions = list(positions)

    def begin(self, message: StepBegin) -> None:
        """Begin a step, with its hyperparameters. Updates of the last step may still be unfinished."""
        if message.step <= self.step:
            raise QueueError(f"StepBegin({message.step}) after step {self.step}")
        if self._unjudged:
            raise QueueError(f"StepBegin({message.step}) without a verdict on step {self.step}")
        self.step, self._groups, self._float_mode = message.step, message.groups, message.float_mode
        self._awaits_verdict, self._verdict = message.awaits_verdict, None
        self._speculating = self.speculate

    def verdict(self, message: Verdict) -> list[WeightsReady]:
        """Queue the updates that waited. Returns the finished layers in forward order; after a skipped step, all."""
        if message.step != self.step or not self._awaits_verdict or self._verdict is not None:
            raise QueueError(f"Verdict on step {message.step} in step {self.step}, which awaits none")
        self._verdict, unjudged, self._unjudged = message, self._unjudged, set()
        found = [self._judged(lid, message) for lid in sorted(unjudged, key=self.positions.__getitem__)]
        self._queued = {lid for lid, work in self._work.items() if not work.is_complete}
        return [done for done in found if done is not None]

    def _judged(self, lid: int, verdict: Verdict) -> WeightsReady | None:
        """The layer's WeightsReady, if nothing is left to do after the verdict."""
        work = self._work[lid]
        if work.ahead and (verdict.skipped or verdict.scale != 1.0):
            work.begin_anew()
        work.scale, work.rounds = verdict.scale, verdict.rounds
        return self._finish(lid, skipped=verdict.skipped) if verdict.skipped or work.is_complete else None

    def _finish(self, lid: int, *, skipped: bool = False) -> WeightsReady:
        """The layer's update is final. If it was ahead of its verdict, the other bank becomes current."""
        work, banks = self._work.pop(lid), self.banks[lid]
        if not skipped:
            pairs = zip(self.counts[lid], work.ready.counts, strict=True)
            self.counts[lid] = tuple(count or last for last, count in pairs)
        if work.ahead:
            banks = tuple(1 - bank if count else bank for bank, count in zip(banks, work.ready.counts, strict=True))
        self.banks[lid], self._done[lid] = banks, work.ready.step
        return WeightsReady(step=work.ready.step, lid=lid, banks=banks)

    def grad_ready(self, message: GradReady) -> WeightsReady | None:
        """Queue the layer's update. Raises `QueueError` if layer, step or segment counts do not fit.

        If the step was already skipped, the unchanged layer is finished at once.
        """
        lid = message.lid
        if lid not in self.banks:
            raise QueueError(f"GradReady of layer {lid}, which the optimizer does not own")
        if message.step != self.step:
            raise QueueError(f"GradReady of step {message.step} in step {self.step}")
        if lid in self._work or self._done.get(lid, -1) >= message.step:
            raise QueueError(f"a second GradReady of layer {lid} in step {message.step}")
        segments = self.layers[lid].segments
        if len(message.counts) != len(segments):
            raise QueueError(f"GradReady of layer {lid} counts {len(message.counts)} of {len(segments)} segments")
        known = self.counts.get(lid)
        if known is None or any(count not in (0, last + 1) for last, count in zip(known, message.counts, strict=True)):
            raise QueueError(f"GradReady of layer {lid} counts updates {message.counts} after {known}")
        if any(segment.group >= len(self._groups) for segment in segments):
            raise QueueError(f"layer {lid} has a parameter group that StepBegin({self.step}) did not name")
        work = self._work[lid] = _Work(message, self._groups, self._float_mode)
        if self._awaits_verdict and self._verdict is None:
            self._unjudged.add(lid)
            work.ahead = self._speculating
        elif self._verdict is not None and (done := self._judged(lid, self._verdict)) is not None:
            return done
        if work.ahead or lid not in self._unjudged:
            self._queued.add(lid)
        return None

    def next_tile(self) -> Tile | None:
        """The next tile, of the first queued layer in forward order; None if none is queued."""
        if not self._queued:
            return None
        lid = min(self._queued, key=self.positions.__getitem__)
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
            float_mode=work.float_mode,
            rounds=work.rounds,
        )

    def tile_done(self, tile: Tile) -> WeightsReady | None:
        """`tile` was updated. Returns the message to send if it was the layer's last."""
        work = self._work[tile.lid]
        assert (work.segment, work.start) == (tile.segment, tile.start), "tiles are done in order"
        work.start = tile.stop
        if tile.stop == self.layers[tile.lid].segments[tile.segment].numel:
            work.segment, work.start = work.segment + 1, 0
        if not work.is_complete:
            return None
        self._queued.remove(tile.lid)
        return None if tile.lid in self._unjudged else self._finish(tile.lid)

    def check(self) -> None:
        waiting = set(self._work) - self._queued
        assert set(self._work) <= set(self.counts) <= set(self.banks), "updates are owed only on layers that are owned"
        assert self._queued <= set(self._work), "updates are queued"
        assert waiting <= self._unjudged <= set(self._work), "an update that is not queued awaits a verdict"
        assert not self._unjudged or (self._awaits_verdict and self._verdict is None), "none was given"
        for lid, work in self._work.items():
            assert work.is_complete <= (lid in self._unjudged and work.ahead), "finished updates are removed"
            assert lid not in self._queued & self._unjudged or work.ahead, (
                "only a speculative update runs before the verdict"
            )
