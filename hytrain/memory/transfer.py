"""Moves gradients out of the device and weights into it, and tells when they have arrived.

    CudaTransfers   streams beside the user's: gradients out, weights in, state of layers that change owners
    HostTransfers   device "cpu": plain copies, done when they return

`gradients_out` is called inside backward's hooks and never waits. `weights_in` is called by the thread that
hears of finished updates. `land` makes the caller's stream wait for exactly one transfer.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hytrain.errors import CapacityError
from hytrain.memory.clock import CudaClock, HostClock, Span
from hytrain.tensors import address, count_write

#: Memory is pinned in pieces of this size. The driver takes 2 ms for one, and launches nothing meanwhile.
PIECE_BYTES: Final = 32 << 20
#: (destination, source), both 1-D of one length and dtype
Copy = tuple[torch.Tensor, torch.Tensor]
#: A stream of work on a device; None on a CPU, where everything has been done when it was called.
Stream = torch.cuda.Stream | None
#: An event from which on another stream may write memory that the current stream has allocated.
Fence = torch.cuda.Event | None


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


class HostTransfers:
    """Device "cpu": parameters and planes are separate memory of one machine."""

    def __init__(self) -> None:
        self.clock = HostClock()

    def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
        """Nothing to pin: no DMA engine reads host memory here."""

    def unpin(self, start: int, nbytes: int) -> None:
        """Nothing was pinned."""

    def stream(self) -> Stream:
        return None

    def join(self, streams: Iterable[Stream], made: Iterable[torch.Tensor]) -> None:
        """There are no streams."""

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        began = self.clock.mark()
        for destination, source in copies:
            destination.copy_(source)
        return Transfer(None, (began, self.clock.mark()))

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        transfer = self._move(copies)
        for destination, _ in copies:
            count_write(destination)
        return transfer

    def state_out(self, copies: Sequence[Copy]) -> Transfer:
        return self._move(copies)

    def sums_in(self, copies: Sequence[Copy], fence: Fence, *, after: Transfer) -> Transfer:
        return self._move(copies)

    def fence(self) -> Fence:
        return None

    def state_in(self, copies: Sequence[Copy], fence: Fence) -> Transfer:
        return self._move(copies)

    def land(self, transfer: Transfer) -> None:
        """The copies had finished when they were announced."""

    def _move(self, copies: Sequence[Copy]) -> Transfer:
        """Copy with memmove: torch's copy would start a second pool of OpenMP threads in the calling thread."""
        began = self.clock.mark()
        for destination, source in copies:
            assert destination.dtype == source.dtype, "bytes are copied, not values"
            ctypes.memmove(address(destination), address(source), destination.nbytes)
        return Transfer(None, (began, self.clock.mark()))

    def drain(self) -> None:
        """Everything has happened when it was called."""


class CudaTransfers:
    """Device "cuda": one stream in each direction, so that both copy engines work beside the user's kernels.

    State has a stream of its own: neither gradients nor weights queue behind a layer that changes owners.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = CudaClock(device)
        self._device = device
        self._out, self._in, self._state = (torch.cuda.Stream(device) for _ in range(3))

    def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
        """Register host memory with CUDA, for DMA at full speed. Raises `CapacityError` if the driver refuses.

        Meanwhile the driver launches nothing: 0.17 s for 1.75 GiB at once. So it is done in pieces, and `gently`,
        while training goes on, with as long a pause after each. No copy may cross from one piece to the next.
        """
        for first, stop in cut(start, nbytes):
            began_s = time.monotonic()
            with torch.cuda.device(self._device):
                code = int(torch.cuda.cudart().cudaHostRegister(first, stop - first, 1))
            if code != 0:
                self.unpin(start, first - start)
                raise CapacityError(
                    f"CUDA refused to pin {nbytes / 1e9:.2f} GB of host memory (error {code}): "
                    "raise the limit of locked memory (ulimit -l), or free host memory"
                )
            if gently:
                time.sleep(time.monotonic() - began_s)

    def unpin(self, start: int, nbytes: int) -> None:
        """Before the pages are given back: DMA into pages that were returned hits stale memory."""
        for first, _ in cut(start, nbytes):
            torch.cuda.cudart().cudaHostUnregister(first)

    def stream(self) -> Stream:
        """The current one: autograd runs a gradient's hook on the stream on which it made the gradient."""
        return torch.cuda.current_stream(self._device)

    def join(self, streams: Iterable[Stream], made: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for what others have made; their memory is kept for it, too."""
        current = torch.cuda.current_stream(self._device)
        others = [stream for stream in streams if stream is not None and stream != current]
        for other in others:
            current.wait_stream(other)
        for tensor in made if others else ():
            tensor.record_stream(current)

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy gradients, ready on the current stream, into pinned planes."""
        # A conversion (fp32 gradients that travel in bf16) runs where the gradient was made.
        sources = [source.to(destination.dtype) for destination, source in copies]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        into = (destination for destination, _ in copies)
        return self._copy(self._out, list(zip(into, sources, strict=True)), keep=sources)

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        """Copy updated planes into parameters.

        What read the old weights came before the gradient's copy; what reads them later meets a newer version.
        """
        transfer = self._copy(self._in, copies)
        for destination, _ in copies:
            count_write(destination)
        return transfer

    def state_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy what the current stream has left in weights and state into pinned planes."""
        self._state.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(self._state, copies, keep=[source for _, source in copies])

    def sums_in(self, copies: Sequence[Copy], fence: Fence, *, after: Transfer) -> Transfer:
        """Copy pinned memory, which `after` has written, into memory that was allocated before `fence`."""
        assert fence is not None and after.done is not None, "made by fence() and gradients_out()"
        self._in.wait_event(fence)
        self._in.wait_event(after.done)
        return self._copy(self._in, copies)

    def fence(self) -> Fence:
        """What was allocated may have been freed with work still ahead of it, on the current stream or the default."""
        current, default = torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)
        if current != default:
            current.wait_stream(default)
        fence = torch.cuda.Event()
        fence.record(current)
        return fence

    def state_in(self, copies: Sequence[Copy], fence: Fence) -> Transfer:
        """Copy pinned planes into memory that was allocated before `fence`."""
        assert fence is not None, "made by fence()"
        self._state.wait_event(fence)
        self._state.wait_stream(self._in)  # the planes are given up when this copy is over: so are those before it
        return self._copy(self._state, copies)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], keep: Sequence[torch.Tensor] = ()) -> Transfer:
        if not copies:  # torch refuses an empty list
            now = self.clock.mark()
            return Transfer(None, (now, now))
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for destination, source in copies:
            on_host, width = source if destination.is_cuda else destination, destination.element_size()
            numels = [(stop - start) // width for start, stop in cut(address(on_host), on_host.nbytes)]
            # `data` has a version counter of its own: however many pieces, a transfer is one write.
            destinations += destination.data.split(numels)
            sources += source.split(numels)
        with torch.cuda.stream(stream):
            began = self.clock.mark()
            # One call: for each that gives Python's lock back, another thread may take it, and this one waits.
            torch._foreach_copy_(destinations, sources, non_blocking=True)
            ended = self.clock.mark()
            done = torch.cuda.Event(blocking=True)
            done.record()
        return Transfer(done, (began, ended), keep)

    def land(self, transfer: Transfer) -> None:
        """Make the current stream wait for the copies; the calling thread does not."""
        if transfer.done is not None:
            transfer.done.wait(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """Wait until every stream has done what it was given: before state that any of them wrote is moved."""
        torch.cuda.synchronize(self._device)


def cut(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The range of memory in pieces that end at multiples of `PIECE_BYTES`: first and last address of each."""
    end = start + nbytes
    while start < end:
        stop = min((start // PIECE_BYTES + 1) * PIECE_BYTES, end)
        yield start, stop
        start = stop


Transfers = HostTransfers | CudaTransfers


def transfers_for(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
