"""Keeps the sums of gradients over the backwards of a step, on the device or in host memory.

    DeviceSums   sums stay on the device: 4 bytes per parameter
    HostSums     sums are kept in pinned host memory, and fetched to the device one by one to add to them

        backward n    … gradient of layer 2 ─▶ + ─▶ out        H2D, ahead of the gradients: 4, 3, [2], 1
                                               ▲               D2H, behind them:            4, 3, [2]
                                               └── the sum, fetched when layer 4's was taken

The device makes all additions, in the same order, so the bits do not depend on where the sums are kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hytrain.memory.pinned import Pinned
from hytrain.memory.transfer import Transfer, Transfers
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

    def put(self, parameter: TrainedParameter, total: Tensor) -> None:
        self._sums[parameter] = total

    def discard(self, parameter: TrainedParameter) -> None:
        """Remove the sum, if there is one."""
        self._sums.pop(parameter, None)

    def waiting(self) -> list[TrainedParameter]:
        return list(self._sums)

    def close(self) -> None:
        """Free the memory. No copy may be under way."""
        self._sums.clear()


class HostSums:
    """Sums in host memory, for a device without room. Memory is pinned at its first use, and kept between steps."""

    on_device: Final = False

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._memory: dict[tuple[TrainedParameter, torch.dtype], Pinned] = {}
        # Sums in host memory, in the order of this backward, and the copies that have brought them there.
        self._left: dict[TrainedParameter, tuple[Tensor, Transfer]] = {}
        self._ahead: Iterator[TrainedParameter] = iter(())  # sums of the last backward, in its order
        self._coming: dict[TrainedParameter, tuple[Tensor, Transfer]] = {}
        self._leaving: deque[tuple[int, Transfer]] = deque()  # bytes, and the copy that holds them

    def begin(self) -> None:
        self._ahead = iter(list(self._left))
        self._fetch_ahead()

    def take(self, parameter: TrainedParameter) -> Tensor | None:
        if parameter in self._left:
            self._fetch(parameter)
        if parameter not in self._coming:
            return None
        total, arrival = self._coming.pop(parameter)
        self._transfers.land(arrival)
        self._fetch_ahead()
        return total

    def put(self, parameter: TrainedParameter, total: Tensor) -> None:
        while self._leaving and sum(nbytes for nbytes, _ in self._leaving) + total.nbytes > WINDOW_BYTES:
            self._transfers.land(self._leaving.popleft()[1])  # the next user of its memory waits for the copy
        host = self._host(parameter, total.dtype)
        departure = self._transfers.gradients_out([(host, total)])
        self._leaving.append((total.nbytes, departure))
        self._left[parameter] = host, replace(departure, keep=())

    def discard(self, parameter: TrainedParameter) -> None:
        self._left.pop(parameter, None)
        if parameter in self._coming:
            self._transfers.land(self._coming.pop(parameter)[1])  # the next user of its memory waits for the copy

    def waiting(self) -> list[TrainedParameter]:
        return [*self._coming, *self._left]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing
            self._transfers.drain()
        for memory in self._memory.values():
            memory.close()
        for held in (self._coming, self._leaving, self._left, self._memory):
            held.clear()

    def _fetch_ahead(self) -> None:
        while sum(total.nbytes for total, _ in self._coming.values()) < WINDOW_BYTES:
            parameter = next(self._ahead, None)
            if parameter is None:
                return
            if parameter in self._left:
                self._fetch(parameter)

    def _fetch(self, parameter: TrainedParameter) -> None:
        host, departure = self._left.pop(parameter)
        total = torch.empty_like(host, device=parameter.own.device)
        arrival = self._transfers.sums_in([(total, host)], self._transfers.fence(), after=departure)
        self._coming[parameter] = total, arrival

    def _host(self, parameter: TrainedParameter, dtype: torch.dtype) -> Tensor:
        if (parameter, dtype) not in self._memory:
            self._memory[parameter, dtype] = Pinned(dtype.itemsize * parameter.own.numel(), self._transfers)
        return self._memory[parameter, dtype].tensor.view(dtype)


Sums = DeviceSums | HostSums
