"""Keeps the sums of gradients over the backwards of a step, on the device or in host memory.

    DeviceSums   sums stay on the device: 4 bytes per parameter
    HostSums     sums are kept in pinned host memory, and fetched to the device one by one to add to them
    PlaneSums    the same in the `grads` planes of layers that the CPU updates, where their updates read them

        backward n    … gradient of layer 2 ─▶ + ─▶ out        H2D, ahead of the gradients: 4, 3, [2], 1
                                               ▲               D2H, behind them:            4, 3, [2]
                                               └── the sum, fetched when layer 4's was taken

The device makes all additions, in the same order, so the bits do not depend on where the sums are kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hytrain.memory.clock import Stream
from hytrain.memory.pinned import Pinned
from hytrain.memory.transfer import Copy, Transfer, Transfers
from hytrain.model.trained import TrainedParameter

#: Device memory for sums on their way in, and the same amount for sums on their way out.
WINDOW_BYTES: Final = 512 << 20


class DeviceSums:
    """One sum per parameter on the device, shape (numel,), in the parameter's storage order."""

    on_device: Final = True

    def __init__(self) -> None:
        self._sums: dict[TrainedParameter, Tensor] = {}

    def begin(self) -> None:
        """A backward begins. It needs the sums in roughly the order in which they were put."""

    def take(self, parameter: TrainedParameter) -> Tensor | None:
        """Remove and return the sum, on the device and ready on the current stream; None if there is none."""
        return self._sums.pop(parameter, None)

    def peek(self, parameter: TrainedParameter) -> Tensor | None:
        """The same, but it stays. What is written there must be put."""
        return self._sums.get(parameter)

    def put(self, parameter: TrainedParameter, total: Tensor) -> None:
        self._sums[parameter] = total

    def discard(self, parameter: TrainedParameter) -> None:
        """Remove the sum, if there is one."""
        self._sums.pop(parameter, None)

    def waiting(self) -> list[TrainedParameter]:
        return list(self._sums)

    def end_step(self) -> bool:
        """Free what copies no longer need. Returns whether anything is left."""
        return bool(self._sums)

    def close(self) -> None:
        """Free the memory. No copy may be under way."""
        self._sums.clear()


class HostSums:
    """Sums in host memory, for a device without room. Memory is pinned at its first use, and kept between steps."""

    on_device: Final = False

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._memory: dict[tuple[TrainedParameter, torch.dtype], Pinned] = {}
        # Sums in host memory, in the order of this backward: their dtypes, and the copies that brought them there.
        self._left: dict[TrainedParameter, tuple[torch.dtype, Transfer]] = {}
        self._ahead: Iterator[TrainedParameter] = iter(())  # sums of the last backward, in its order
        self._coming: dict[TrainedParameter, tuple[Tensor, Transfer, Stream]] = {}  # with the stream of its memory
        self._leaving: deque[tuple[int, Transfer, Stream]] = deque()  # bytes, the copy out of them, and their stream

    def begin(self) -> None:
        self._ahead = iter(list(self._left))
        self._fetch_ahead()

    def take(self, parameter: TrainedParameter) -> Tensor | None:
        if parameter in self._left:
            self._fetch(parameter)
        if parameter not in self._coming:
            return None
        total, arrival, _ = self._coming.pop(parameter)
        self._transfers.land(arrival)
        self._transfers.keep_for(None, [total])
        self._fetch_ahead()
        return total

    def peek(self, parameter: TrainedParameter) -> Tensor | None:
        if parameter not in self._left and parameter not in self._coming:
            return None
        total, arrival, _ = self._coming.get(parameter) or self._arriving(parameter, *self._left[parameter])
        self._transfers.land(arrival)
        self._transfers.keep_for(None, [total])
        return total

    def put(self, parameter: TrainedParameter, total: Tensor) -> None:
        self.end_step()
        while self._leaving and sum(nbytes for nbytes, _, _ in self._leaving) + total.nbytes > WINDOW_BYTES:
            self._transfers.land(*self._leaving.popleft()[1:])  # the next user of its memory waits for the copy
        departure = self._transfers.gradients_out(self._copies(parameter, total))
        self._leaving.append((total.nbytes, departure, self._transfers.stream()))
        self._left[parameter] = total.dtype, replace(departure, keep=())

    def discard(self, parameter: TrainedParameter) -> None:
        self._left.pop(parameter, None)
        if parameter in self._coming:
            self._transfers.land(*self._coming.pop(parameter)[1:])  # the next user of its memory waits for the copy

    def waiting(self) -> list[TrainedParameter]:
        return [*self._coming, *self._left]

    def end_step(self) -> bool:
        while self._leaving and self._leaving[0][1].has_ended:
            self._leaving.popleft()
        return bool(self._coming or self._left or self._leaving)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing
            self._transfers.drain()
        for memory in self._memory.values():
            memory.close()
        for held in (self._coming, self._leaving, self._left, self._memory):
            held.clear()

    def _fetch_ahead(self) -> None:
        while sum(total.nbytes for total, _, _ in self._coming.values()) < WINDOW_BYTES:
            parameter = next(self._ahead, None)
            if parameter is None:
                return
            if parameter in self._left:
                self._fetch(parameter)

    def _fetch(self, parameter: TrainedParameter) -> None:
        self._coming[parameter] = self._arriving(parameter, *self._left.pop(parameter))

    def _arriving(
        self, parameter: TrainedParameter, dtype: torch.dtype, departure: Transfer
    ) -> tuple[Tensor, Transfer, Stream]:
        total = torch.empty(parameter.own.numel(), dtype=dtype, device=parameter.own.device)
        copies = [(part, host) for host, part in self._copies(parameter, total)]
        arrival = self._transfers.sums_in(copies, self._transfers.fence(), after=departure)
        return total, arrival, self._transfers.stream()

    def _copies(self, parameter: TrainedParameter, total: Tensor) -> list[Copy]:
        """Each part of `total` after its place in host memory."""
        key = parameter, total.dtype
        if key not in self._memory:
            self._memory[key] = Pinned(total.nbytes, self._transfers)
        return [(self._memory[key].tensor.view(total.dtype), total)]


class PlaneSums(HostSums):
    """Sums in the layers' own planes. `await_update` waits for a parameter's update, which reads there.

    The layers must be the CPU's for as long as there are sums.
    """

    def __init__(self, transfers: Transfers, await_update: Callable[[TrainedParameter], None]) -> None:
        super().__init__(transfers)
        self._await_update = await_update

    @staticmethod
    def takes(parameter: TrainedParameter, total: Tensor) -> bool:
        """Whether the CPU updates all of the parameter, and reads gradients of this dtype."""
        if not parameter.is_updated_on_host:
            return False
        return all([layer.arena.grads[index].dtype == total.dtype for layer, index in parameter.places])

    def put(self, parameter: TrainedParameter, total: Tensor) -> None:
        self._await_update(parameter)
        super().put(parameter, total)

    def is_in_place(self, parameter: TrainedParameter) -> bool:
        """Whether the parameter's update can read its sum where it is."""
        return parameter in self._left

    def _copies(self, parameter: TrainedParameter, total: Tensor) -> list[Copy]:
        return [(layer.arena.grads[index], layer.segments[index].part(total)) for layer, index in parameter.places]


Sums = DeviceSums | HostSums
