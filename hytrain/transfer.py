"""Moves gradients out of the device and weights into it, and tells when they have arrived.

    CudaTransfers   two streams beside the user's; pinned planes; events instead of waiting
    HostTransfers   device "cpu": plain copies, done when they return

`gradients_out` is called inside backward's hooks and never waits. `weights_in` is called by the thread that
hears of finished updates. `land` makes the caller's stream wait for exactly one `weights_in`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hytrain.arena import Mapping
from hytrain.errors import CapacityError
from hytrain.measure import Clock, CudaClock, HostClock, Span

#: (destination, source), both 1-D of one length and dtype
Copy = tuple[torch.Tensor, torch.Tensor]
STAGING_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies under way. `done` is None when they were finished at once; `keep` lives until they are."""

    done: torch.cuda.Event | None
    span: Span
    keep: Sequence[torch.Tensor] = ()

    def synchronize(self) -> None:
        """Block the calling thread, asleep, until the copies have finished."""
        if self.done is not None:
            self.done.synchronize()


class Transfers(Protocol):
    @property
    def clock(self) -> Clock: ...

    def pin(self, mapping: Mapping) -> None: ...

    def unpin(self, mapping: Mapping) -> None: ...

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer: ...

    def weights_in(self, copies: Sequence[Copy]) -> Transfer: ...

    def land(self, transfer: Transfer) -> None: ...

    def move(self, copies: Sequence[Copy]) -> None: ...


class HostTransfers:
    """Device "cpu": parameters and planes are separate memory of one machine."""

    def __init__(self) -> None:
        self.clock: Clock = HostClock()

    def pin(self, mapping: Mapping) -> None:
        """Nothing to pin: no DMA engine reads host memory here."""

    def unpin(self, mapping: Mapping) -> None:
        """Nothing was pinned."""

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        began = self.clock.mark()
        for destination, source in copies:
            destination.copy_(source)
        return Transfer(None, (began, self.clock.mark()))

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        """Copy with memmove: torch's copy would start a second pool of OpenMP threads in the calling thread."""
        began = self.clock.mark()
        for destination, source in copies:
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)
            torch.autograd.graph.increment_version(destination)
        return Transfer(None, (began, self.clock.mark()))

    def land(self, transfer: Transfer) -> None:
        """The copies had finished when they were announced."""

    def move(self, copies: Sequence[Copy]) -> None:
        for destination, source in copies:
            destination.copy_(source)


class CudaTransfers:
    """Device "cuda": one stream in each direction, so that both copy engines work beside the user's kernels."""

    def __init__(self, device: torch.device) -> None:
        self.clock: Clock = CudaClock()
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._staging: torch.Tensor | None = None

    def pin(self, mapping: Mapping) -> None:
        """Register the mapping with CUDA, for DMA at full speed. Raises `CapacityError` if the driver refuses."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.nbytes, 1))
        if code != 0:
            raise CapacityError(
                f"CUDA refused to pin {mapping.nbytes / 1e9:.2f} GB of host memory (error {code}): "
                "raise the limit of locked memory (ulimit -l), or free host memory"
            )

    def unpin(self, mapping: Mapping) -> None:
        """Before the pages are given back: DMA into pages that were returned hits stale memory."""
        torch.cuda.cudart().cudaHostUnregister(mapping.address)

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy gradients, ready on the current stream, into pinned planes."""
        # A conversion (fp32 gradients that travel in bf16) runs where the gradient was made.
        sources = [source.to(destination.dtype) for destination, source in copies]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            began = self.clock.mark()
            for (destination, _), source in zip(copies, sources, strict=True):
                destination.copy_(source, non_blocking=True)
            ended = self.clock.mark()
            done = torch.cuda.Event(blocking=True)
            done.record()
        return Transfer(done, (began, ended), sources)

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        """Copy updated planes into parameters. All that read the old weights came before the gradient's copy."""
        with torch.cuda.stream(self._in):
            began = self.clock.mark()
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            ended = self.clock.mark()
            done = torch.cuda.Event()
            done.record()
        return Transfer(done, (began, ended))

    def land(self, transfer: Transfer) -> None:
        """Make the current stream wait for the copies; the calling thread does not."""
        if transfer.done is not None:
            transfer.done.wait(torch.cuda.current_stream(self._device))

    def move(self, copies: Sequence[Copy]) -> None:
        """Copy between device and unpinned planes through a small pinned buffer; returns when all is there."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        torch.cuda.current_stream(self._device).synchronize()
        for destination, source in copies:
            step = STAGING_BYTES // destination.element_size()
            for start in range(0, destination.numel(), step):
                part, whole = source[start : start + step], destination[start : start + step]
                staged = self._staging[: part.nbytes].view(part.dtype)
                staged.copy_(part)
                whole.copy_(staged)


def transfers_for(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
