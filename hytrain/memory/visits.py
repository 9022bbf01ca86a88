"""The GPU updates state that is kept in host memory: the state visits it, piece by piece, through a ring of slots.

    fetch      slot 0 │ slot 1 │ slot 2 │ slot 0 …      H2D, each slot after its last return
    update             slot 0 │ slot 1 │ slot 2 │ …     on a stream of its own, once the gradients are there
    return                     slot 0 │ slot 1 │ …      D2H

The weights are on the GPU and are updated there. Only remainder and moments travel: 10 bytes per bf16 parameter each
way with AdamW. An update of several passes goes through the slots once for each, with the planes that the pass uses.
Backward makes gradients faster than state comes, so they wait on the GPU; if they take more than `hold_bytes`, backward
waits. Some layers are put off until backward is over (protocol/visiting.py). On device "cpu" the slots are host memory
too, and everything has finished on return.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import Scalars
from hytrain.memory.clock import Stream
from hytrain.memory.passes import Pass, as_read, passes, work_bytes
from hytrain.memory.transfer import Transfer, Transfers
from hytrain.tensors import DTYPES, count_write
from protocol.handles import ALIGN_ELEMENTS, STATE_PLANES, plane_dtype
from protocol.messages import Segment
from protocol.visiting import most_put_off_bytes

#: While one slot is updated, another is filled and a third is emptied.
SLOTS: Final = 3
#: At most so many elements in a slot, a multiple of `ALIGN_ELEMENTS`: 168 MB for bf16 weights.
SLOT_NUMEL: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Visit:
    """The update of one segment. `weights`, `grads` and each plane of `state`, on the host, have shape (numel,).

    So have `home`, where the weights are in host memory, too, if they are, and `direction`, which only the first pass
    over a matrix that ranks share writes, in place of weights. Its memory is of the visits' stream.
    """

    segment: Segment
    weights: Tensor
    grads: Tensor
    state: Sequence[Tensor | None]
    scalars: Scalars
    home: Tensor | None = None
    direction: Tensor | None = None


class Visits:
    """The slots of one device. All layers share them, so `segments` are those of all layers.

    Gradients that wait for their visit take at most `hold_bytes` and those of one layer. That is less by `lent_bytes`,
    by which the window of offloaded weights is wider, and by the offloaded weights that are put off.
    """

    def __init__(
        self, transfers: Transfers, device: torch.device, segments: Sequence[Segment], *, hold_bytes: int
    ) -> None:
        self._transfers, self._device, self._hold_bytes = transfers, device, hold_bytes
        self._numel, self._widths = _slot_size(segments)
        self._slots: list[_Slot] = []
        self._turn = 0
        # Gradients, until their layer is updated, and the stream that has made them.
        self._waiting: deque[tuple[Transfer, list[Tensor], Stream]] = deque()
        self._waiting_bytes = self._put_off_bytes = 0
        self._staying_bytes = 0  # offloaded weights that are put off
        self._waited_bytes = 0  # the most at once in this step
        self.lent_bytes = 0
        self._lock = threading.Lock()  # forwards of several threads let go

    def prepare(self) -> None:
        """Allocate the slots, unless they are there. Raises `torch.OutOfMemoryError`."""
        if not self._slots:
            self._slots = [_Slot(self._numel, self._widths, self._device) for _ in range(SLOTS)]

    def update(
        self,
        visits: Sequence[Visit],
        *,
        after: Transfer | None,
        host: Backend | None,
        verdict: Tensor | None,
        awaited: bool = False,
    ) -> tuple[Transfer, Transfer]:
        """Update a layer, once the current stream has made its gradients. Does not wait.

        `after` is the last copy into the layer's state. Returns what ends when its weights are updated, and what ends
        when its state is back. `host` and `verdict` are as in `Pass.run`.

        If the update was `awaited`, all gradients have waited by now, and torch's allocator finds out when it may use
        their memory again.
        """
        transfers = self._transfers
        visits = [replace(visit, grads=as_read(visit.segment, visit.grads, visit.direction)) for visit in visits]
        self._begin_slots()
        marks, returned = [], None
        read_later = [] if verdict is None else [verdict]
        if awaited:
            read_later += (visit.grads for visit in visits)
        with transfers.visit(read_later):
            for visit, each, part in self._pieces(visits):
                slot, self._turn = self._slots[self._turn], (self._turn + 1) % SLOTS
                away = each.on(visit.state, part)
                here = slot.planes(away)
                pairs = [(h, a) for h, a in zip(here, away, strict=True) if h is not None and a is not None]
                assert slot.returned is not None, "of a slot that has begun"
                arrival = transfers.fetch(pairs, after=[slot.returned] if after is None else [slot.returned, after])
                transfers.land(arrival)
                each.run(here, host, verdict, part)
                home = visit.home if "remainder" in each.uses else None
                back = [] if home is None else [(home[part], each.weights[part])]
                slot.returned = returned = transfers.send_back([*[(a, h) for h, a in pairs], *back])
                after = None  # one stream fetches, in order
                marks += [*arrival.span, *returned.span]
            updated = transfers.so_far()
        count_write([visit.weights for visit in visits if visit.direction is None])
        if not awaited:
            self._hold([visit.grads for visit in visits], updated)
        assert returned is not None, "a layer has elements"
        span = marks[0], marks[-1]
        transfers.clock.recycle([*marks[1:-1], updated.span[0]])
        return replace(updated, span=span), replace(returned, span=span)

    def _hold(self, grads: list[Tensor], updated: Transfer) -> None:
        """Keep gradients until their layer is updated."""
        self.let_go()
        with self._lock:
            self._waiting.append((updated, grads, self._transfers.stream()))
            self._waiting_bytes += sum([each.nbytes for each in grads])
            self._waited_bytes = max(self._waited_bytes, self.waiting_bytes)

    def puts_off(self, grads_bytes: int, weights_bytes: int = 0) -> bool:
        """Whether a layer's gradients, and offloaded weights, may wait until backward is over. If so, they do."""
        with self._lock:
            there = self._put_off_bytes + self._staying_bytes
            if there + grads_bytes + weights_bytes > most_put_off_bytes(self._hold_bytes - self.lent_bytes):
                return False
            self._put_off_bytes += grads_bytes
            self._staying_bytes += weights_bytes
            self._waited_bytes = max(self._waited_bytes, self.waiting_bytes)
        return True

    def begin_put_off(self) -> None:
        """The updates of all that is put off are about to begin."""
        self._put_off_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Of gradients that wait now."""
        return self._waiting_bytes + self._put_off_bytes

    def end_step(self) -> int:
        """The most bytes that have waited at once in this step, of gradients and in a wider window.

        Not of offloaded weights that were put off: steps need most memory elsewhere, where they are not there.
        """
        with self._lock:
            self._staying_bytes = 0
            waited, self._waited_bytes = self._waited_bytes, self.waiting_bytes
        return waited + self.lent_bytes

    @property
    def is_full(self) -> bool:
        """Whether more waits than may."""
        waiting_bytes = self.waiting_bytes + self._staying_bytes + self.lent_bytes
        return waiting_bytes > self._hold_bytes and len(self._waiting) > 1

    def make_room(self) -> None:
        """Let the stream that makes gradients wait for the oldest visits, until no more wait than may.

        So it can use their memory again at once, and this thread need not wait for it.
        """
        with self._lock:
            while self.is_full:
                updated, grads, stream = self._waiting[0]
                self._transfers.land(updated, stream)
                self._transfers.keep_for(stream, grads)
                self._let_go()

    def let_go(self) -> None:
        """Free the gradients of layers that are updated."""
        with self._lock:
            while self._waiting and self._waiting[0][0].has_ended:
                self._let_go()

    def _let_go(self) -> None:
        _, grads, _ = self._waiting.popleft()
        self._waiting_bytes -= sum([each.nbytes for each in grads])

    def _pieces(self, visits: Sequence[Visit]) -> Iterator[tuple[Visit, Pass, slice]]:
        """Each pass over each visit's elements, in pieces as large as a slot."""
        for visit in visits:
            numel = visit.grads.numel()
            for each in passes(visit.segment, visit.weights.data, visit.grads, visit.scalars, visit.direction):
                for start in range(0, numel, self._numel):
                    yield visit, each, slice(start, min(start + self._numel, numel))

    def _begin_slots(self) -> None:
        """If a slot's memory is new, it may have pending work of an earlier user."""
        self.prepare()
        for slot in self._slots:
            if slot.returned is None:
                now = self._transfers.clock.mark()
                slot.returned = Transfer(self._transfers.fence(), (now, now))

    @property
    def slots_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def free_slots(self) -> bool:
        """Free the slots until `prepare`. No copy may be under way. Returns whether there were any."""
        self.let_go()
        there = bool(self._slots)
        self._slots.clear()
        return there

    def close(self) -> None:
        """Free the slots. No copy may be under way."""
        self._slots.clear()
        self._waiting.clear()
        self._waiting_bytes = self._put_off_bytes = 0


def ring_bytes(segments: Sequence[Segment]) -> int:
    """GPU memory for the slots, and for what updates take besides."""
    numel, widths = _slot_size(segments)
    return SLOTS * numel * sum(widths) + work_bytes(segments)


def _slot_size(segments: Sequence[Segment]) -> tuple[int, list[int]]:
    """The elements of a slot, and the bytes of each one in each of `STATE_PLANES`."""
    largest = max(segment.numel for segment in segments)
    kinds = [{plane_dtype(plane, segment) for segment in segments} - {None} for plane in STATE_PLANES]
    widths = [max((DTYPES[str(dtype)].itemsize for dtype in dtypes), default=0) for dtypes in kinds]
    return min(SLOT_NUMEL, -(-largest // ALIGN_ELEMENTS) * ALIGN_ELEMENTS), widths


class _Slot:
    """Memory on the device for a piece of a segment's state. `returned`: the last copy out of it."""

    def __init__(self, numel: int, widths: Sequence[int], device: torch.device) -> None:
        self._planes = [torch.empty(numel * width, dtype=torch.uint8, device=device) for width in widths]
        self.nbytes = sum(plane.nbytes for plane in self._planes)
        self.returned: Transfer | None = None

    def planes(self, like: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A plane for each of `like`, of the same dtype and length; None for None."""
        return [
            None if other is None else plane[: other.nbytes].view(other.dtype)
            for plane, other in zip(self._planes, like, strict=True)
        ]
