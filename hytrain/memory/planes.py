"""A layer's arrays in the trainer, for each placement.

ArenaPlanes    state in host memory: views of the optimizer's arena. `weights` are pinned, and so is `grads` while the
               CPU updates the layer: only then it takes memory. With two banks, the current one is used.
DevicePlanes   state on the GPU: `remainder` and moments. `Moving` is state on its way there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hytrain.errors import CapacityError
from hytrain.kernels.backend import Backend, Elements
from hytrain.kernels.gpu import Rows, update_rows
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.split import clear_remainder
from hytrain.memory.arena import POPULATING_THREADS, Arena, Memory, free_pages
from hytrain.memory.passes import as_read, passes
from hytrain.memory.transfer import Copy, Fence, Transfer, Transfers
from hytrain.tensors import DTYPES, count_write, holders, in_one_piece
from protocol.handles import STATE_PLANES, TensorHandle, bank_plane, plane_dtype
from protocol.messages import Segment
from protocol.rules import MOMENTS


class ArenaPlanes:
    """The planes of a layer whose state is in host memory, as views of the optimizer's arena.

    `banks[i]` is the current bank of segment i. `weights` and `state` read only from it.
    """

    def __init__(self, file: Arena, transfers: Transfers, *, gently: bool = False, is_own: bool = False) -> None:
        """Map the file, and pin `weights`. Raises `CapacityError` if it cannot be mapped; then the file is closed.

        `is_own`: this process has made it, so that no plane has pages yet.
        """
        self.file, self._transfers, self._is_own = file, transfers, is_own
        self._pinned, self._pinning = set[str](), threading.Lock()  # a handover pins on its own thread
        layout = file.layout
        grads, shared, end = layout.plane_nbytes["grads"], layout.shared_nbytes, layout.nbytes
        self.memory = Memory(file.descriptor, shared, grads)  # with the weights, for other processes
        self._ranges = {"grads": (0, grads), "weights": (grads, shared - grads), "state": (shared, end - shared)}
        try:
            self._address = file.mapping.address
        except OSError as error:
            raise CapacityError(f"host memory cannot be mapped: {error}") from None
        self.pin("weights", gently=gently)
        self._parts: dict[tuple[str, int], Tensor | None] = {}  # of the state, by bank and segment
        self._states: dict[str, list[Tensor | None]] = {}  # those of the current banks, by plane
        self.grads = self._views("grads")
        self._weights = [self._views(bank_plane("weights", bank)) for bank in range(layout.banks)]
        self.banks = (0,) * len(layout.handles["grads"])

    @property
    def banks(self) -> tuple[int, ...]:
        return self._banks

    @banks.setter
    def banks(self, banks: tuple[int, ...]) -> None:
        self._banks, self._states = banks, {}
        self.weights = [self._weights[bank][index] for index, bank in enumerate(banks)]

    def weights_offset(self, index: int) -> int:
        """Where the current weights of segment `index` begin in the file, in bytes."""
        handle = self.file.layout.handles[bank_plane("weights", self.banks[index])][index]
        assert handle is not None, "each segment has weights"
        return handle.offset

    def state(self, plane: str) -> list[Tensor | None]:
        """A state plane's segments. The optimizer must be done with the layer."""
        if plane not in self._states:
            self._states[plane] = [self.part(plane, index) for index in range(len(self.banks))]
        return self._states[plane]

    def part(self, plane: str, index: int) -> Tensor | None:
        """One segment of a state plane."""
        bank = bank_plane(plane, self.banks[index])
        if (bank, index) not in self._parts:
            with torch.inference_mode(False):  # for a loop that reads state where others may not write
                self._parts[bank, index] = self._view(self.file.layout.handles[bank][index])
        return self._parts[bank, index]

    def drop_gradients(self) -> None:
        """Free the memory of `grads`. The last update from it must be over."""
        if self.unpin("grads"):
            free_pages(self.file.descriptor, *self._ranges["grads"])

    def pin(self, what: str, *, gently: bool = True) -> None:
        """Pin "weights", "state" or "grads", so that they are copied at the link's full speed. `grads` gets memory."""
        start, nbytes = self._ranges[what]
        with self._pinning:
            if what not in self._pinned:
                if what == "grads" or self._is_own:
                    self.file.mapping.populate((start, nbytes), threads=1 if gently else POPULATING_THREADS)
                self._transfers.pin(self._address + start, nbytes, gently=gently)
                self._pinned.add(what)

    def unpin(self, what: str) -> bool:
        """Whether it was pinned."""
        start, nbytes = self._ranges[what]
        with self._pinning:
            if was_pinned := what in self._pinned:
                self._pinned.remove(what)
                self._transfers.unpin(self._address + start, nbytes)
        return was_pinned

    def free_state(self) -> None:
        """Free the memory of the state planes for good, unless somebody has a view of one. Nothing else may use them.

        So what is left of training has room in host memory.
        """
        self.unpin("state")
        is_viewed = any(part is not None and holders(part) > 1 for part in self._parts.values())
        self._parts.clear()
        self._states.clear()
        if not is_viewed:
            free_pages(self.file.descriptor, *self._ranges["state"])

    def close(self) -> None:
        """Unpin and release the mapping. Its pages stay as long as a view exists."""
        for what in self._ranges:
            self.unpin(what)
        self._parts.clear()
        self.grads, self._weights, self.banks = [], [], ()
        self.file.close()

    def _views(self, plane: str) -> list[Tensor]:
        found = map(self._view, self.file.layout.handles[plane])
        return [view for view in found if view is not None]

    def _view(self, handle: TensorHandle | None) -> Tensor | None:
        if handle is None:
            return None
        dtype = DTYPES[handle.dtype]
        return torch.frombuffer(self.file.mapping.buffer, dtype=dtype, count=handle.numel, offset=handle.offset)


class DevicePlanes:
    """The state of a layer that the GPU owns."""

    def __init__(self, segments: Sequence[Segment], weights: Sequence[Tensor], *, fresh: bool = True) -> None:
        """`weights[i]` has shape (numel,). Unless `fresh`, state is uninitialized. Raises `torch.OutOfMemoryError`."""
        device = weights[0].device
        self._segments, self._weights = segments, weights
        dtypes = {plane: [plane_dtype(plane, segment) for segment in segments] for plane in STATE_PLANES}
        wanted = [
            (segment.numel, DTYPES[dtype])
            for of in dtypes.values()
            for segment, dtype in zip(segments, of, strict=True)
            if dtype is not None
        ]
        made = iter(in_one_piece(wanted, device, fresh=fresh))
        self._planes = {plane: [None if dtype is None else next(made) for dtype in of] for plane, of in dtypes.items()}
        self._known: dict[tuple[int, ...], list[tuple[object, list[int], Rows]]] = {}
        for values, remainder in zip(weights, self._planes["remainder"], strict=True):
            if fresh and remainder is not None:
                clear_remainder(remainder, values)

    def state(self, plane: str) -> list[Tensor | None]:
        return self._planes[plane]

    def part(self, plane: str, index: int) -> Tensor | None:
        return self._planes[plane][index]

    def update(
        self,
        gradients: dict[int, Tensor],
        scalars: Scalars,
        host: Backend | None = None,
        verdict: Tensor | None = None,
        directions: dict[int, Tensor] | None = None,
    ) -> None:
        """Update segments by passes, on the current stream, or with the `host` backend on device "cpu".

        `gradients[i]` is segment i's, shape (numel,). `verdict` is the step's scale on the device: float32, shape ().
        The host backend gets it in `scalars` instead. `directions[i]` is written in place of weights, as `passes` says.
        """
        directions, items = directions or {}, sorted(gradients.items())
        found = {i: as_read(self._segments[i], mine, directions.get(i)) for i, mine in items}
        for i, mine in found.items():
            state = [self._planes[plane][i] for plane in STATE_PLANES]
            for each in passes(self._segments[i], self._weights[i], mine, scalars, directions.get(i)):
                each.run(each.on(state), host, verdict)
        count_write([self._weights[i] for i in found if i not in directions])

    @staticmethod
    def update_together(
        of: Sequence[tuple[DevicePlanes, dict[int, Tensor]]], scalars: Scalars, verdict: Tensor | None = None
    ) -> None:
        """The same for several layers on a GPU, in one launch for all segments whose planes have the same dtypes."""
        alike: dict[object, tuple[list[Rows], list[Tensor]]] = {}
        for planes, gradients in of:
            for dtypes, indices, rows in planes._rows(tuple(sorted(gradients))):
                all_rows, found = alike.setdefault(dtypes, ([], []))
                all_rows.append(rows)
                found += [as_read(planes._segments[i], gradients[i], None) for i in indices]
        for all_rows, found in alike.values():
            update_rows(all_rows, found, scalars, verdict)
        count_write([planes._weights[i] for planes, gradients in of for i in gradients])

    def _rows(self, of: tuple[int, ...]) -> list[tuple[object, list[int], Rows]]:
        """The rows that update these segments, by the dtypes of their planes."""
        if (known := self._known.get(of)) is None:
            alike: dict[object, list[int]] = {}
            for i in of:
                spec = self._segments[i]
                dtypes = [plane_dtype(plane, spec) for plane in STATE_PLANES]
                alike.setdefault((spec.dtype, spec.grads_dtype, spec.fuses, *dtypes), []).append(i)
            known = self._known[of] = [(dtypes, indices, self._rows_of(indices)) for dtypes, indices in alike.items()]
        return known

    def _rows_of(self, of: Sequence[int]) -> Rows:
        specs = [self._segments[i] for i in of]
        moments = [[self._planes[plane][i] for plane in MOMENTS[spec.rule]] for i, spec in zip(of, specs, strict=True)]
        return Rows(
            [self._weights[i] for i in of],
            [self._planes["remainder"][i] for i in of],
            [[moment for moment in own if moment is not None] for own in moments],
            [Elements.of(spec, 0) for spec in specs],
        )

    @property
    def parts(self) -> list[Tensor]:
        """All its tensors that have elements."""
        return [part for parts in self._planes.values() for part in parts if part is not None and part.numel()]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def close(self) -> None:
        """Drop the planes. The allocator gets the memory back when no other reference is left."""
        self._planes, self._known = {}, {}


@dataclass(slots=True, eq=False)
class Moving:
    """A layer's state on its way to the device. The copy, once started, is `arrival`; it begins after `fence`."""

    device: DevicePlanes
    fence: Fence
    arrival: Transfer | None = None

    def start(self, arena: ArenaPlanes, transfers: Transfers) -> None:
        """Copy the state in, after the optimizer's last update."""
        self.arrival = transfers.state_in(state_copies(self.device, arena), self.fence)


Planes = ArenaPlanes | DevicePlanes


def state_copies(into: Planes, out_of: Planes) -> list[Copy]:
    return [
        (destination, source)
        for plane in STATE_PLANES
        for destination, source in zip(into.state(plane), out_of.state(plane), strict=True)
        if destination is not None and source is not None
    ]
