"""The optimizer process's memory: one arena for each layer that it owns or is about to own. `Session` calls it.

    AllocatePlanes ─▶ request ─┬▶ touch_next, piece by piece ─▶ descriptor ─▶ trainer      in the order of requests
                               └▶ no memory: a refusal ─▶ trainer
    Evicted ─▶ adopt ◀─ descriptor of the trainer's own arena
    GiveUp, ReleasePlanes ─▶ release

This process touches the memory first, so that its affinity decides on which NUMA node a page is placed. Touching takes
long, so it is done in pieces, between which the optimizer continues its updates. It leaves out `grads`, to which the
trainer gives memory while the CPU updates the layer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hytrain.kernels.backend import Backend, Elements, Into, Operands
from hytrain.kernels.scalars import Scalars
from hytrain.memory.arena import Arena, receive_arena, refuse_arena, send_arena
from protocol.address import Address
from protocol.handles import BANKED_PLANES, DTYPE_BYTES, TensorHandle, bank_plane, layout
from protocol.messages import Layer, Segment
from protocol.rules import MOMENTS, ON_DEVICE

#: All threads together touch this much in about the time of a tile's update.
PIECE_BYTES: Final = 32 << 20

#: Address and bytes per element; both 0 if a segment has no such plane.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SegmentPlanes:
    """The addresses of one segment's planes: the gradient's, and for each bank those of `BANKED_PLANES`, by name."""

    segment: Segment
    grads: Place
    banks: tuple[dict[str, Place], ...]

    @classmethod
    def of(cls, arena: Arena, index: int, segment: Segment) -> SegmentPlanes:
        def place(handle: TensorHandle | None) -> Place:
            return (0, 0) if handle is None else (arena.mapping.address + handle.offset, DTYPE_BYTES[handle.dtype])

        handles = arena.layout.handles
        banks = [
            {plane: place(handles[bank_plane(plane, bank)][index]) for plane in BANKED_PLANES}
            for bank in range(arena.layout.banks)
        ]
        return cls(segment, place(handles["grads"][index]), tuple(banks))

    def update(
        self, backend: Backend, start: int, stop: int, scalars: Scalars, *, source: int = 0, target: int = 0
    ) -> None:
        """Update elements [start, stop) of the segment. Reads bank `source` and writes bank `target`."""
        assert self.segment.rule == scalars.hyper.rule, "or its moments would be another rule's"
        assert self.segment.rule not in ON_DEVICE, "planned for the trainer's device"
        address, width = self.grads
        of = Operands(
            **self._addresses(source, start),
            grads=address + start * width,
            numel=stop - start,
            weights_dtype=self.segment.dtype,
            grads_dtype=self.segment.grads_dtype,
            scalars=scalars,
            state_dtype=self.segment.state_dtype,
            elements=Elements.of(self.segment, start),
            into=None if source == target else Into(**self._addresses(target, start)),
        )
        backend.update(of)

    def _addresses(self, bank: int, start: int) -> dict[str, Any]:
        at = {plane: address + start * width for plane, (address, width) in self.banks[bank].items()}
        moments = tuple(at[plane] for plane in MOMENTS[self.segment.rule])
        return {"weights": at["weights"], "remainder": at["remainder"], "moments": moments}


def segments_of(arena: Arena, layer: Layer) -> tuple[SegmentPlanes, ...]:
    return tuple(SegmentPlanes.of(arena, index, segment) for index, segment in enumerate(layer.segments))


class Arenas:
    """`segments[lid]` are the planes of each layer whose memory is ready; `pending` is the next layer to get ready."""

    def __init__(
        self,
        layers: Sequence[Layer],
        backend: Backend,
        connection: socket.socket,
        *,
        token: str,
        address: Address,
        banks: int = 1,
    ) -> None:
        self.segments: dict[int, tuple[SegmentPlanes, ...]] = {}
        self.banks = banks
        self._layers, self._backend = layers, backend
        self._connection, self._token, self._address = connection, token, address
        self._arenas: dict[int, Arena] = {}
        self._coming: deque[Arena] = deque()
        self._touched_bytes = 0

    def __contains__(self, lid: int) -> bool:
        return lid in self.segments

    @property
    def pending(self) -> int | None:
        return self._coming[0].layout.lid if self._coming else None

    def request(self, lid: int) -> None:
        """Create the layer's planes, or refuse for want of memory. Raises `ValueError` if it is unknown or has them."""
        if not 0 <= lid < len(self._layers) or lid in self._arenas:
            raise ValueError(f"planes requested for layer {lid}, which is unknown or already has them")
        try:
            arena = Arena(layout(self._layers[lid], self.banks))
            _ = arena.mapping  # now, while it can be refused
        except OSError as error:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be leaving: its Goodbye follows
                refuse_arena(self._connection, lid, str(error), token=self._token, sender=self._address)
            return
        self._arenas[lid] = arena
        self._coming.append(arena)

    def adopt(self, lid: int) -> None:
        """Take the arena that the trainer has made for a layer and has sent before it said so.

        Raises `ValueError` if the layer is unknown or has planes, or if the arena is not such a layer's.
        """
        if not 0 <= lid < len(self._layers) or lid in self._arenas:
            raise ValueError(f"layer {lid} was evicted, which is unknown or already has planes")
        expected = {lid: layout(self._layers[lid], self.banks)}
        arena = receive_arena(self._connection, expected, token=self._token)
        assert isinstance(arena, Arena), "the trainer refuses nothing"
        self.segments[lid] = segments_of(arena, self._layers[lid])
        self._arenas[lid] = arena

    def touch_next(self, *, whole: bool = False) -> None:
        """Touch a piece of the memory that was requested first, or the whole. After that, send the descriptor."""
        arena = self._coming[0]
        first = arena.layout.plane_nbytes["grads"] + self._touched_bytes
        left = arena.layout.nbytes - first
        piece = left if whole else min(PIECE_BYTES, left)
        arena.mapping.populate((first, piece), threads=self._backend.threads)
        self._touched_bytes += piece
        if first + piece < arena.layout.nbytes:
            return
        self._touched_bytes = 0
        self._coming.popleft()
        self.segments[arena.layout.lid] = segments_of(arena, self._layers[arena.layout.lid])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be leaving: its Goodbye follows
            send_arena(self._connection, arena, token=self._token, sender=self._address)

    def release(self, lid: int) -> None:
        """Free this process's hold on the layer's memory."""
        del self.segments[lid]
        self._arenas.pop(lid).close()

    def close(self) -> None:
        """Free all memory and close the trainer's connection."""
        self._connection.close()
        self.segments.clear()
        self._coming.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


def accept(listener: socket.socket) -> socket.socket:
    """The newest connection, which is the trainer's. Raises `PermissionError` if the kernel reports another user.

    Older ones belong to trainers that were interrupted before they sent a table.
    """
    connection, _ = listener.accept()
    while select.select([listener], [], [], 0)[0]:
        connection.close()
        connection, _ = listener.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        connection.close()
        raise PermissionError(f"user {user} asked for the arenas of user {os.getuid()}")
    return connection
