"""Copies gradients out of the device and weights into it, and tells when the copies have finished.

    CudaTransfers   streams of its own: gradients out, weights in, state of layers that change owners, visits of state
    HostTransfers   device "cpu": plain copies, finished on return

`gradients_out` is called in backward's hooks and never waits. The link's receiver thread calls `weights_in`. `land`
makes the caller's stream wait for exactly one transfer.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, pairwise
from types import NoneType
from typing import Any, Final, TypeVar

import torch

from hytrain.memory.clock import CudaClock, HostClock, OnStream, Span, Stream, current_stream
from hytrain.readable import gib
from hytrain.tensors import address, addresses, allocate, count_write, free

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Memory is pinned in pieces of this size. Each takes 2 ms, in which the driver launches nothing.
PIECE_BYTES: Final = 32 << 20
#: Weights are copied so much at a time, in 1.3 ms. Each turn is one more call, in which the launching thread may wait.
TURN_BYTES: Final = 64 << 20
#: (destination, source), both 1-D, of the same length.
Copy = tuple[torch.Tensor, torch.Tensor]
#: An event after which another stream may write memory that the current stream has allocated.
Fence = torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies under way. `done` is None if they have finished already. `keep` keeps tensors alive until then."""

    done: torch.cuda.Event | None
    span: Span
    keep: Sequence[torch.Tensor] = ()

    @property
    def has_ended(self) -> bool:
        return self.done is None or self.done.query()

    def synchronize(self) -> None:
        """Block the calling thread until the copies have finished. It sleeps and does not spin."""
        if self.done is not None:
            self.done.synchronize()


class Traffic:
    """How many bytes arrive on the device and in host memory. Several threads copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_device = self._to_host = 0

    def to_device(self, copies: Iterable[Copy]) -> None:
        with self._lock:
            self._to_device += sum([destination.nbytes for destination, _ in copies])

    def to_host(self, copies: Iterable[Copy]) -> None:
        with self._lock:
            self._to_host += sum([destination.nbytes for destination, _ in copies])

    def take(self) -> tuple[int, int]:
        """Bytes to the device and to host memory since the last call."""
        with self._lock:
            taken = self._to_device, self._to_host
            self._to_device = self._to_host = 0
        return taken


class HostTransfers:
    """Copies for device "cpu", between parameters and planes in one machine's memory."""

    #: The current stream: there is none.
    stream: Callable[[], Stream] = staticmethod(NoneType)

    def __init__(self) -> None:
        self.clock, self.traffic = HostClock(), Traffic()

    def _nothing(self, *args: Any, **options: Any) -> None:
        """No DMA engine reads host memory here, and there are no streams: copies have finished."""

    pin = unpin = join = land = keep_for = drain = release = _nothing

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        self.traffic.to_host(copies)
        began = self.clock.mark()
        for destination, source in copies:
            destination.copy_(source)
        return Transfer(None, (began, self.clock.mark()))

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        transfer = self._in(copies)
        for destination, _ in copies:
            count_write(destination)
        return transfer

    def fence(self) -> Fence:
        return None

    event = fence

    def events(self) -> list[Fence]:
        return []

    def _move(self, copies: Sequence[Copy]) -> Transfer:
        """Copy with memmove: torch's copy would start a second pool of OpenMP threads in the calling thread."""
        began = self.clock.mark()
        ends = addresses(chain.from_iterable(copies))
        for (destination, source), into, out_of in zip(copies, ends[::2], ends[1::2], strict=True):
            assert destination.dtype == source.dtype, "bytes, not values"
            ctypes.memmove(into, out_of, destination.nbytes)
        return Transfer(None, (began, self.clock.mark()))

    def _in(self, copies: Sequence[Copy], fence: Fence = None, *, after: Transfer | None = None) -> Transfer:
        self.traffic.to_device(copies)
        return self._move(copies)

    def _out(self, copies: Sequence[Copy]) -> Transfer:
        self.traffic.to_host(copies)
        return self._move(copies)

    state_in = sums_in = activations_in = _in
    weights_out = state_out = send_back = activations_out = _out

    def visit(self, made: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
        return nullcontext()

    def fetch(self, copies: Sequence[Copy], *, after: Iterable[Transfer]) -> Transfer:
        return self._in(copies)

    def let_go(self, leaving: Transfer) -> Transfer:
        return leaving

    def so_far(self) -> Transfer:
        now = self.clock.mark()
        return Transfer(None, (now, now))

    def stream_in(self, tensors: Sequence[torch.Tensor], copies: Sequence[Copy], *, after: Iterable[Fence]) -> Transfer:
        allocate(*tensors)
        return self._in(copies)

    def free(self, tensors: Iterable[torch.Tensor], *, after: Iterable[Fence]) -> None:
        free(*tensors)


class CudaTransfers:
    """Copies for device "cuda": streams for each direction, so that both copy engines run beside the user's kernels.

    State has its own stream, so that gradients and weights do not queue behind a layer that changes owners.

    A copy engine serves a stream as long as that stream has copies that are ready. After a verdict, all weights come at
    once, and a small copy of others (a batch, or FSDP2's own in each all-gather) would wait for all of them: measured,
    100 ms. State that visits comes and goes all the time, and offloaded weights would wait for it. So two streams for
    each of these take turns, and between two turns the engine serves whoever else is ready.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock, self.traffic = CudaClock(device), Traffic()
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        #: The current stream. Autograd runs a gradient's hook on the stream that computed the gradient.
        self.stream: Callable[[], Stream] = partial(current_stream, self._device)
        self._default = torch.cuda.default_stream(device)
        self._out, self._state, self._visiting, self._window = (torch.cuda.Stream(device) for _ in range(4))
        self._saving, self._restoring = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in, self._fetching, self._returning = ([torch.cuda.Stream(device) for _ in range(2)] for _ in range(3))
        self._pinned = dict[int, int]()  # pieces: bytes by address
        self._is_told = False

    def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
        """Register host memory with CUDA, for DMA at full speed, as far as the driver lets it be locked.

        What is not registered is copied by way of the driver's own buffer. That is slower, and a copy to the host ends
        before its call returns.

        The driver launches nothing in the meantime: 0.17 s for 1.75 GiB. So memory is pinned in pieces; with `gently`,
        during training, an equally long pause follows each piece. No copy may cross from one piece to the next.
        """
        for first, stop in cut(start, nbytes):
            began_s = time.monotonic()
            with torch.cuda.device(self._device):
                code = int(torch.cuda.cudart().cudaHostRegister(first, stop - first, 1))
            if code != 0:
                self._forget_error()
                self._tell(code)
                return
            self._pinned[first] = stop - first
            if gently:
                time.sleep(time.monotonic() - began_s)

    def _forget_error(self) -> None:
        """CUDA keeps an error of a call until somebody asks, on the same thread: torch does, with its next kernel."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1)

    def _tell(self, code: int) -> None:
        """Once, how much memory could be pinned."""
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "CUDA pins no more than %s of host memory here (error %d), so copies of what lies beyond take "
                "longer. Raise the limit of locked memory (ulimit -l), if there is one",
                gib(sum(self._pinned.values())),
                code,
            )

    def unpin(self, start: int, nbytes: int) -> None:
        """Unregister host memory. This must come before its pages are freed: DMA would still use the old pages."""
        for first, _ in cut(start, nbytes):
            if self._pinned.pop(first, None) is not None:
                with torch.cuda.device(self._device):
                    torch.cuda.cudart().cudaHostUnregister(first)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which this stream is the current one."""
        assert stream is not None, "on a GPU there is one"
        return OnStream(self._device, stream)

    def join(self, streams: Iterable[Stream], made: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for `streams`, and keep the tensors that they have `made` alive for it."""
        current = current_stream(self._device)
        others = [stream for stream in streams if stream is not None and stream != current]
        for other in others:
            current.wait_stream(other)
        for tensor in made if others else ():
            tensor.record_stream(current)

    def gradients_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy gradients, ready on the current stream, into pinned planes.

        It ends after all earlier ones, and after whatever the current stream has, also if there are none to copy.
        """
        self.traffic.to_host(copies)
        # The current stream, which made the gradients, also converts them (for example float32 to bfloat16).
        sources = [source.to(destination.dtype) for destination, source in copies]
        self._out.wait_stream(current_stream(self._device))
        if not copies:
            with self.on(self._out):
                so_far = self.so_far()
                return replace(so_far, span=(so_far.span[0], self.clock.mark()))  # each mark is recycled once
        into = (destination for destination, _ in copies)
        return self._copy(self._out, list(zip(into, sources, strict=True)), keep=sources)

    #: Copy elements of weights. They arrive before this step's gradients, so before new weights overwrite them.
    weights_out = gradients_out

    def let_go(self, leaving: Transfer) -> Transfer:
        """The same as `gradients_out` has returned, but torch's allocator alone keeps what it owns of the sources.

        So their memory is free once the copy has ended, and not when a thread hears of that. Memory of others, such as
        another library's, is theirs as soon as nobody refers to it: the transfer goes on to keep that.
        """
        is_torchs = [source.untyped_storage().resizable() for source in leaving.keep]
        self.keep_for(self._out, compress(leaving.keep, is_torchs))
        return replace(leaving, keep=[source for source, own in zip(leaving.keep, is_torchs, strict=True) if not own])

    def weights_in(self, copies: Sequence[Copy]) -> Transfer:
        """Copy updated planes into parameters. Kernels that read the old weights came before the gradient's copy."""
        self.traffic.to_device(copies)
        made = [self._copy(_next(self._in), turn) for turn in turns(_pieces(copies))] or [self._copy(self._in[0], ())]
        (began, _), (_, ended) = made[0].span, made[-1].span
        for earlier, later in pairwise(made):
            self.clock.recycle((earlier.span[1], later.span[0]))
        transfer = Transfer(made[-1].done, (began, ended))
        for destination, _ in copies:
            count_write(destination)
        return transfer

    def state_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy weights and state, ready on the current stream, into pinned planes."""
        self.traffic.to_host(copies)
        self._state.wait_stream(current_stream(self._device))
        return self._copy(self._state, copies, keep=[source for _, source in copies])

    def sums_in(self, copies: Sequence[Copy], fence: Fence, *, after: Transfer) -> Transfer:
        """Copy pinned memory, which `after` has written, into device memory allocated before `fence`."""
        return self._back(self._in[0], copies, fence, after)

    def activations_out(self, copies: Sequence[Copy]) -> Transfer:
        """Copy activations, ready on the current stream, into pinned memory that earlier `activations_in` have read."""
        self.traffic.to_host(copies)
        self._saving.wait_stream(current_stream(self._device))
        self._saving.wait_stream(self._restoring)
        return self._copy(self._saving, copies, keep=[source for _, source in copies])

    def activations_in(self, copies: Sequence[Copy], fence: Fence, *, after: Transfer) -> Transfer:
        """Copy pinned memory, which `after` has written, into device memory allocated before `fence`."""
        return self._back(self._restoring, copies, fence, after)

    def _back(self, stream: torch.cuda.Stream, copies: Sequence[Copy], fence: Fence, after: Transfer) -> Transfer:
        assert fence is not None and after.done is not None, "made by fence() and a copy out"
        self.traffic.to_device(copies)
        stream.wait_event(fence)
        stream.wait_event(after.done)
        return self._copy(stream, copies)

    def fence(self) -> Fence:
        """Memory allocated now may have pending work of earlier users, on the current or the default stream."""
        current = current_stream(self._device)
        if current != self._default:
            current.wait_stream(self._default)
        return self.event()

    def event(self, stream: Stream = None) -> Fence:
        """What ends with the work that the stream, or else the current one, has now. No stream waits for another."""
        event = torch.cuda.Event()
        event.record(current_stream(self._device) if stream is None else stream)
        return event

    def events(self) -> list[Fence]:
        """The same of the current stream and of the default one, on which others may have used anything."""
        return [self.event(), self.event(self._default)]

    def state_in(self, copies: Sequence[Copy], fence: Fence) -> Transfer:
        """Copy pinned planes into device memory allocated before `fence`."""
        assert fence is not None, "made by fence()"
        self.traffic.to_device(copies)
        self._state.wait_event(fence)
        for stream in self._in:  # the planes are closed after this copy, so earlier copies must end first
            self._state.wait_stream(stream)
        return self._copy(self._state, copies)

    def visit(self, made: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
        """A context whose stream is that of visits. It comes after the current stream, which has `made` tensors."""
        current = current_stream(self._device)
        self._visiting.wait_stream(current)
        for tensor in made:
            tensor.record_stream(self._visiting)
        return self.on(self._visiting)

    def fetch(self, copies: Sequence[Copy], *, after: Iterable[Transfer]) -> Transfer:
        """Copy pinned state into a slot, `after` others have used both, and after the last fetch."""
        self.traffic.to_device(copies)
        stream = _next(self._fetching)
        for other in after:
            if other.done is not None:
                stream.wait_event(other.done)
        return self._copy(stream, copies)

    def send_back(self, copies: Sequence[Copy]) -> Transfer:
        """Copy a slot's state, ready on the current stream, into pinned planes."""
        self.traffic.to_host(copies)
        stream = _next(self._returning)
        stream.wait_stream(current_stream(self._device))
        return self._copy(stream, copies)

    def so_far(self) -> Transfer:
        """What ends with the work that the current stream has now."""
        done = torch.cuda.Event(blocking=True)
        done.record(current_stream(self._device))
        now = self.clock.mark()
        return Transfer(done, (now, now))

    def stream_in(self, tensors: Sequence[torch.Tensor], copies: Sequence[Copy], *, after: Iterable[Fence]) -> Transfer:
        """Allocate memory for tensors that were freed, and copy pinned weights into it.

        `after`: whoever uses memory that is still there, and is written again. Raises `torch.OutOfMemoryError`; then
        all of `tensors` are freed.
        """
        self.traffic.to_device(copies)
        with self.on(self._window):  # all such memory comes from this stream's pool, and goes back there
            allocate(*tensors)
            self._stream_after(after)
            return self._copy_on(self._window, copies)

    def free(self, tensors: Iterable[torch.Tensor], *, after: Iterable[Fence]) -> None:
        """Free their memory for `stream_in`, `after` those who use it.

        Its stream waits from now on: all that the allocator does with the memory, it does in this stream's order. To
        give it to the driver, it waits for that stream alone.
        """
        self._stream_after(after)
        free(*tensors)

    def _stream_after(self, events: Iterable[Fence]) -> None:
        for event in events:
            if event is not None:
                self._window.wait_event(event)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], keep: Sequence[torch.Tensor] = ()) -> Transfer:
        if not copies:  # torch refuses an empty list; each mark is recycled once, so these are two
            return Transfer(None, (self.clock.mark(), self.clock.mark()))
        with self.on(stream):
            return self._copy_on(stream, copies, keep)

    def _copy_on(
        self, stream: torch.cuda.Stream, copies: Sequence[Copy], keep: Sequence[torch.Tensor] = ()
    ) -> Transfer:
        """The same on the current stream, of at least one copy."""
        destinations, sources = zip(*_pieces(copies), strict=True)
        began = self.clock.mark_on(stream)
        # One call for all copies: each call releases the GIL, and then this thread may wait to get it back.
        torch._foreach_copy_(list(destinations), list(sources), non_blocking=True)
        ended = self.clock.mark_on(stream)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        return Transfer(done, (began, ended), keep)

    def land(self, transfer: Transfer, stream: Stream = None) -> None:
        """Make the stream, or else the current one, wait for the copies. The calling thread does not wait."""
        if transfer.done is not None:
            transfer.done.wait(current_stream(self._device) if stream is None else stream)

    def keep_for(self, stream: Stream, tensors: Iterable[torch.Tensor]) -> None:
        """Whoever gets their memory next comes after what the stream has so far, if it is another stream's memory."""
        on = current_stream(self._device) if stream is None else stream
        for tensor in tensors:
            tensor.record_stream(on)

    def release(self) -> None:
        """Give the driver all memory that torch's allocator keeps and nobody uses."""
        torch.cuda.empty_cache()

    def drain(self) -> None:
        """Wait for all work on the device, before state that any stream wrote is moved."""
        torch.cuda.synchronize(self._device)


def _next(streams: list[torch.cuda.Stream]) -> torch.cuda.Stream:
    """The one of two streams whose turn it is now, after the other's."""
    streams.reverse()
    streams[0].wait_stream(streams[1])
    return streams[0]


def _pieces(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Cut so that none crosses from one pinned piece to the next."""
    for destination, source in copies:
        on_host, into = source if destination.is_cuda else destination, destination.data
        pieces = list(cut(address(on_host), on_host.nbytes))
        # `data` has its own version counter: a transfer counts as one write, whatever the number of pieces.
        if len(pieces) == 1:
            yield into, source
            continue
        numels = [(stop - start) // source.element_size() for start, stop in pieces]
        yield from zip(into.split(numels), source.split(numels), strict=True)


def turns(pairs: Iterable[tuple[T, torch.Tensor]]) -> Iterator[list[tuple[T, torch.Tensor]]]:
    """In the same order, pairs whose tensors have at most `TURN_BYTES` at a time, or one that has more."""
    turn: list[tuple[T, torch.Tensor]] = []
    nbytes = 0
    for pair in pairs:
        nbytes += pair[1].nbytes
        if nbytes > TURN_BYTES and turn:
            yield turn
            turn, nbytes = [], pair[1].nbytes
        turn.append(pair)
    if turn:
        yield turn


def cut(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a memory range into pieces that end at multiples of `PIECE_BYTES`. Yields each piece's start and end."""
    end = start + nbytes
    while start < end:
        stop = min((start // PIECE_BYTES + 1) * PIECE_BYTES, end)
        yield start, stop
        start = stop


Transfers = HostTransfers | CudaTransfers


def transfers_for(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
