"""Brings the weights of offloaded blocks to the GPU before they are needed, and frees their memory there after that.

    forward    enter ─▶ fetch, and the next blocks ahead       leave ─▶ free what is not needed soon
    backward   enter, before the block's first gradient        after its last gradient: the same
    update     the CPU's is in host memory: nothing to copy    a visit's weights are copied back with the state

The order of blocks is learned: what came after a block in the step before is fetched next. So the last blocks of a
forward are still there when backward begins with them. Only the threads that compute fetch and free.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from hytrain.errors import HyTrainError
from hytrain.memory.transfer import Fence, Transfers
from hytrain.model.block_life import Event, Pin, State
from hytrain.model.trained import OffloadedBlock, TrainedLayer, written
from hytrain.model.watched import unwatched
from hytrain.tensors import has_memory, local, storage_of, untraced
from protocol.visiting import wider_by_bytes

_log = logging.getLogger(__name__)

#: While one block computes, the next ones come: so many of the largest one's size have room.
SLOTS: Final = 3


def window_bytes(blocks: Sequence[OffloadedBlock]) -> int:
    """GPU memory for the weights of these blocks while they are offloaded."""
    return SLOTS * max((block.nbytes for block in blocks), default=0)


#: A block in forward (False) or in backward (True).
Place = tuple[OffloadedBlock, bool]


class Order:
    """In which order blocks are needed: what came after a block in the step before comes after it again.

    A block that computes in parts of the batch is entered several times in a row in forward. In backward it stays from
    the first part to the last gradient.
    """

    def __init__(self, blocks: Sequence[OffloadedBlock]) -> None:
        ways = [(block, False) for block in blocks] + [(block, True) for block in reversed(blocks)]
        self._next: dict[Place, Place] = dict(zip(ways, ways[1:] + ways[:1], strict=True))
        self.last: Place | None = None
        self._times, self._in_a_row = 0, dict[Place, int]()  # that `last` was entered; and others in the step before

    def come_to(self, place: Place) -> None:
        if self.last != place:
            if self.last is not None:
                self._next[self.last], self._in_a_row[self.last] = place, self._times
            self.last, self._times = place, 0
        self._times += 1

    def after(self, place: Place) -> Place:
        """The same block, if its forward is expected to be entered again at once."""
        block, in_backward = place
        again = not place[1] and self.last == place and self._times < self._in_a_row.get(place, 1)
        return place if again else self._next[place]

    def soon(self, place: Place, room_bytes: int) -> list[OffloadedBlock]:
        """The offloaded blocks that are needed from `place` on, in their order, as many as have room."""
        soon = dict[OffloadedBlock, None]()
        for _ in self._next:
            block = place[0]
            if block.life.is_offloaded and block not in soon:
                if block.nbytes > room_bytes:
                    break
                soon[block] = None
                room_bytes -= block.nbytes
            place = self._next[place]
        return list(soon)


class Offload:
    """The offloaded blocks of one model, in forward order.

    `for_visits_bytes`: GPU memory for those that wait for a visit, besides `window_bytes`: a part of `hold_bytes`.
    """

    def __init__(self, blocks: Sequence[OffloadedBlock], transfers: Transfers, *, hold_bytes: int = 0) -> None:
        self._import_written: Callable[[], None] = lambda: None
        self._before_free: Callable[[OffloadedBlock], None] = lambda block: None
        self._blocks, self._transfers = blocks, transfers
        self._window_bytes = window_bytes(blocks)
        self._wider_by_bytes = wider_by_bytes(hold_bytes, self._window_bytes // SLOTS)
        self.for_visits_bytes = 0
        self._order = Order(blocks)
        self._here = dict[OffloadedBlock, None]()  # those that rest in host memory and are on the GPU, too
        self._touched = set[OffloadedBlock]()  # by this step
        self._computing: deque[OffloadedBlock] = deque(maxlen=2)  # in backward: a node may need weights of two
        self._of_storage: dict[int, OffloadedBlock] = {}
        self._ended: HyTrainError | None = None

    def heed(self, import_written: Callable[[], None], before_free: Callable[[OffloadedBlock], None]) -> None:
        """Call `before_free` for each block that is freed; `import_written`, if written weights stand in the way."""
        self._import_written, self._before_free = import_written, before_free

    @property
    def may_offload(self) -> bool:
        """Whether there are blocks that may be offloaded."""
        return bool(self._blocks)

    def block_of(self, tensor: Tensor) -> OffloadedBlock | None:
        """The block of which the tensor is a weight, or a view of one."""
        if not (type(tensor) is Tensor or isinstance(tensor, nn.Parameter)) or tensor.layout is not torch.strided:
            return None
        try:
            return self._of_storage.get(storage_of(tensor))
        except NotImplementedError:  # a tensor of `torch.func`
            return None

    def start(self) -> None:
        """All layers have their first placement."""
        if not self._blocks:
            return
        self._transfers.drain()
        for block in self._blocks:
            self._begin_offloading(block)
            if block.life.is_offloaded and not all(has_memory(known.own) for known in block.parameters):
                self._on(block, Event.FREE)
        self.note_storages()
        self._make_room((self._blocks[0], False))

    def enter(self, block: OffloadedBlock, inside_backward: bool) -> None:
        """The block is about to compute on the current stream. Its updates have been waited for."""
        life = block.life
        if not inside_backward:
            self._follow_plan(block)
            life.unpin(Pin.VISIT)
        if not life.is_offloaded:
            self._land(block)  # it has settled, and only the stream of that time has waited
            return
        here = block, inside_backward
        if inside_backward and self._order.last == here and Pin.COMPUTES in life.pins and life.state is State.HERE:
            self._land(block)  # on another stream, perhaps
            return
        self._order.come_to(here)
        if not inside_backward:
            self._forget_views(block)  # before its own forward makes some
        elif not block.is_gathered:
            self._compute(block)
        self._bring(block)
        life.pin(Pin.COMPUTES)
        self._look_ahead(here)
        self._land(block)

    def plan(self, offloaded: Set[int]) -> None:
        """From each block's next forward on, the weights of these layers are to rest in host memory."""
        for block in self._blocks:
            block.life.planned = all(layer.lid in offloaded for layer in block.layers)

    def _follow_plan(self, block: OffloadedBlock) -> None:
        """A block begins to be offloaded when a step first uses it: no graph of the step has saved its weights yet."""
        is_first = block not in self._touched
        self._touched.add(block)
        life = block.life
        if life.planned and not life.is_offloaded:
            if is_first and all(layer.life.is_current for layer in block.layers):
                self._begin_offloading(block)
        elif life.is_offloaded and not life.planned:
            try:
                if life.is_away:
                    self._fetch(block)
            except torch.OutOfMemoryError:
                return  # it is offloaded for as long as there is no room
            self._land(block)
            self._on(block, Event.SETTLE)

    def _begin_offloading(self, block: OffloadedBlock) -> None:
        """Let it leave, if its layers' state is in host memory. All of its updates were waited for."""
        if block.life.planned and block.state_rests_on_host:
            self._on(block, Event.OFFLOAD)
            block.life.pin(Pin.VIEWED)
            self._forget_views(block)

    def _on(self, block: OffloadedBlock, event: Event) -> None:
        block.life.on(event)
        if block.life.state in (State.HERE, State.STALE):
            self._here[block] = None
        else:
            self._here.pop(block, None)

    @staticmethod
    def _forget_views(block: OffloadedBlock) -> None:
        """Whoever has used its weights did so without keeping a view."""
        if Pin.VIEWED in block.life.pins and not block.is_aliased:
            block.life.unpin(Pin.VIEWED)

    def _compute(self, block: OffloadedBlock) -> None:
        """Backward computes with the block. One before the last one has been computed with: it comes again if not."""
        if block not in self._computing:
            if len(self._computing) == self._computing.maxlen:
                self._computing[0].life.unpin(Pin.COMPUTES)
            self._computing.append(block)

    def leave(self, block: OffloadedBlock) -> None:
        """The block's forward has ended. Backward enters it again."""
        if block.life.is_offloaded:
            self._rest(block, (block, False))

    def after_gather(self, block: OffloadedBlock, inside_backward: bool) -> None:
        """The current stream has copied its weights. In backward, a visit's update needs them once more."""
        visits = inside_backward and any([layer.life.placement.visits for layer in block.layers])
        if block.life.is_offloaded and not visits:
            self._rest(block, (block, inside_backward))

    def had_gradient(self, block: OffloadedBlock, backward: int) -> None:
        """A parameter's gradient of this backward was taken. After the last one, the block has computed."""
        if block.backward != backward:
            block.backward, block.lacking = backward, len(block.parameters)
        block.lacking -= 1
        if block.lacking > 0 or not block.life.is_offloaded:
            return
        if not block.is_gathered:
            self._rest(block, (block, True))
        elif Pin.COMPUTES in block.life.pins:
            self._rest(block, self._order.last or (block, True))  # all-gathers are ahead of gradients

    def end_backward(self) -> None:
        """Some blocks may lack gradients."""
        self._computing.clear()
        for block in self._here:
            block.life.unpin(Pin.COMPUTES)

    def end_step(self) -> None:
        """What else has used weights has ended by now, unless it keeps a view of them."""
        for block in self._here:
            self._forget_views(block)
            block.life.unpin(Pin.GRAPH if block in self._touched else Pin.GRAPH | Pin.VISIT)
        self._touched.clear()
        offloaded = [block for block in self._blocks if block.life.is_offloaded]
        visits = any(layer.life.placement.visits for block in offloaded for layer in block.layers)
        outside = max(0, sum(block.nbytes for block in offloaded) - self._window_bytes)
        self.for_visits_bytes = min(self._wider_by_bytes, outside) if visits else 0

    def note_storages(self) -> None:
        self._of_storage = {storage_of(known.own): block for block in self._blocks for known in block.parameters}

    def use(self, layer: TrainedLayer) -> None:
        """Somebody else uses the layer's weights on the current stream, and may keep a view of them."""
        block = layer.block
        if block is not None and not block.life.is_offloaded:
            self._follow_plan(block)
        if block is not None and block.life.is_offloaded:
            block.life.pin(Pin.VIEWED)
            block.life.unpin(Pin.VISIT)
            if not block.life.is_present:
                self._free([other for other in self._here if other is not block])
            self._bring(block)
        self.land(layer)

    @contextmanager
    def using(self, block: OffloadedBlock) -> Iterator[None]:
        """An operation outside of its forward uses a weight of the block: others of it may need room meanwhile."""
        block.life.begin_use()
        try:
            yield
        finally:
            block.life.end_use()
            self.note_use(block)  # perhaps on a stream of the user's own

    def begin_update(self, block: OffloadedBlock) -> None:
        """The CPU is about to update a layer of it in host memory."""
        if block.life.is_offloaded:
            self._on(block, Event.UPDATE)

    def end_in_child(self, error: HyTrainError) -> None:
        """In a forked child, what is in host memory is the parent's."""
        self._ended = error

    def land(self, layer: TrainedLayer) -> None:
        """Let the current stream wait for what has been fetched."""
        if layer.block is not None:
            self._land(layer.block)

    def refresh_views(self) -> None:
        """Views that others have of weights show their values, on the host. All updates have been waited for."""
        for block in self._blocks:
            if block.life.state is State.STALE and block.is_aliased:
                self._bring(block)
                if block.arrival is not None:
                    block.arrival.synchronize()

    def before_update(self, block: OffloadedBlock) -> None:
        """The GPU is about to update a layer of it, perhaps long after its backward."""
        if block.life.is_offloaded:
            if not block.life.is_present:
                self._make_room((block, False))
                self._bring(block)
            self._land(block)  # it may have been fetched ahead

    def settle(self, block: OffloadedBlock) -> None:
        """The GPU takes over a layer, so the block stays. All of its updates have been waited for."""
        self._bring(block)
        self._land(block)
        self._on(block, Event.SETTLE)

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on the GPU."""
        return not any(block.life.is_away for block in self._blocks)

    def restore(self) -> None:
        """Bring all weights to the GPU for good. What has no room there stays in host memory."""
        for block in self._blocks:
            if block.life.is_away:
                try:
                    self._fetch(block)
                except torch.OutOfMemoryError:
                    with unwatched():
                        for known in block.parameters:
                            if not known.is_gone:
                                local(known.parameter).data = known.values().clone()
                    _log.warning("the weights of layer %s stay in host memory: the GPU is full", block.layers[0].name)
            self._on(block, Event.END)
            self._transfers.keep_for(None, block.memory)  # whoever frees it, and when
        if self._blocks:
            self._transfers.drain()

    # ------------------------------------------------------------ memory

    def _rest(self, block: OffloadedBlock, place: Place) -> None:
        """Nobody computes with the block, and `place` is what was entered last."""
        block.life.unpin(Pin.COMPUTES)
        if block in self._computing:
            self._computing.remove(block)
        self.note_use(block)
        self._look_ahead(self._order.after(place))

    def _look_ahead(self, place: Place) -> None:
        """Free what will not be needed soon, then fetch what will be, as far as it is current in host memory."""
        for block in self._make_room(place):
            if block.life.is_away and Pin.COMPUTES not in block.life.pins:
                if not block.is_current_on_host:
                    return
                try:
                    self._fetch(block)
                except torch.OutOfMemoryError:
                    return

    def _make_room(self, place: Place) -> list[OffloadedBlock]:
        """Free all blocks but those that are needed from `place` on, which are returned in their order."""
        soon = self._order.soon(place, self._window_bytes + self.for_visits_bytes)
        self._free([block for block in self._here if block not in soon])
        return soon

    def _free(self, blocks: Iterable[OffloadedBlock]) -> None:
        """Free those that may leave."""
        for block in blocks:
            if block.may_leave:
                with untraced():
                    self._before_free(block)
                    if not block.is_pooled:
                        self.leave_to_others(block, block.memory)
                    self._on(block, Event.FREE)
                    self._transfers.free(block.memory, after=self._users(block))

    def free_all(self) -> None:
        """Free what need not stay: it comes again when it is needed."""
        self._free([*self._here])

    def replace(self, block: OffloadedBlock, tensors: Sequence[Tensor]) -> None:
        """These weights of it get other memory, of the user's: what they had goes to whoever gets it."""
        self.leave_to_others(block, tensors)
        block.is_pooled = False

    def leave_to_others(self, block: OffloadedBlock, tensors: Sequence[Tensor]) -> None:
        """Their memory is about to be freed for anyone, not for fetched weights: not before its users have ended."""
        for copy in block.copies_out:
            self._transfers.land(copy)
        self._land(block)
        for stream in {self._transfers.stream(), *block.computed}:
            self._transfers.keep_for(stream, tensors)

    def _users(self, block: OffloadedBlock) -> list[Fence]:
        """Events before which its memory may not be written: what uses it now, and copies out of it."""
        users = [*self._transfers.events(), *block.computed.values(), *(copy.done for copy in block.copies_out)]
        block.leaving.clear()
        block.computed.clear()
        return users

    def note_use(self, block: OffloadedBlock) -> None:
        """The current stream has used its weights."""
        block.computed[self._transfers.stream()] = self._transfers.event()

    def _bring(self, block: OffloadedBlock) -> None:
        if not block.life.is_away:
            return
        try:
            self._fetch(block)
        except torch.OutOfMemoryError:
            if written(known for other in self._blocks for known in other.parameters):
                self._import_written()  # into host memory, so that their blocks may leave
            for other in self._here:
                other.life.unpin(Pin.VISIT)  # it is fetched again
            self._free([other for other in self._here if other is not block])
            self._fetch(block)

    @untraced()
    def _fetch(self, block: OffloadedBlock) -> None:
        """Raises `torch.OutOfMemoryError`; then nothing has changed."""
        if self._ended is not None:
            raise self._ended
        is_current = block.is_current_on_host  # before the copies begin
        is_present = block.life.is_present
        users = self._users(block) if is_present else []  # whoever reads the old weights comes first
        freed = [] if is_present else block.memory
        block.arrival = self._transfers.stream_in(freed, block.incoming(), after=users)
        block.is_pooled = block.is_pooled or bool(freed)
        self._on(block, Event.FETCH if is_current else Event.FETCH_EARLY)

    def _land(self, block: OffloadedBlock) -> None:
        if block.arrival is not None and block.arrival.done is not None:
            self._transfers.land(block.arrival)
