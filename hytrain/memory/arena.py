"""Shared memory for the planes of CPU-owned layers: one memfd per layer, so that a crash leaks nothing.

The optimizer process creates an arena, touches its pages first (so they are on its NUMA node), and sends the
descriptor. `grads` has pages only while the CPU updates the layer; the trainer touches and frees them. Both align the
mapping to huge pages: a page of 2 MiB is touched, pinned and freed much faster than 512 pages of 4 KiB.

    optimizer: Arena ── touch ──SCM_RIGHTS──▶ trainer: Arena ── its mapping ── tensor views, pinned on CUDA
    trainer: Arena, for state that is evicted ──SCM_RIGHTS──▶ optimizer: Arena

Views keep their mapping alive: after an arena is closed, existing views stay readable.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from hytrain.state.locks import said
from protocol.address import Address
from protocol.codec import decode, encode
from protocol.handles import ArenaLayout
from protocol.messages import PlanesReady, PlanesRefused

_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK_AND_GROW: Final = 0x2 | 0x4
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_MADV_POPULATE_WRITE, _MADV_COLLAPSE, _POPULATED_BYTES = 23, 25, 32 << 20
_MADV_DONTFORK: Final = 10
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
HUGE_PAGE_BYTES: Final = 2 << 20
#: New pages are made by so many threads. Measured on an H200 host, per GiB, with one thread and with eight: 0.22 and
#: 0.04 s for huge pages, 0.62 and 0.26 s for small ones, which then take twice as long to pin and fifty times to free.
POPULATING_THREADS: Final = 8
MAX_ANNOUNCEMENT_BYTES: Final = 4096
#: Other open files of a process: data, sockets, the GPU driver.
_OTHER_DESCRIPTORS: Final = 512

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_numbers: Final = itertools.count()


class Mapping:
    """The first `nbytes` of an arena's file, mapped at a huge-page boundary.

    Python's mmap cannot choose the address, so it only reserves room, and the file is mapped over that. Both are
    unmapped when the last view of `buffer` is gone.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Raises `OSError` if there is no address space, or if the file is shorter."""
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(errno.EINVAL, f"an arena of {nbytes} bytes cannot be mapped: its file is shorter")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        start = -address % HUGE_PAGE_BYTES
        self.address, self.nbytes, self._has_small_pages = address + start, nbytes, False
        self._map(0, nbytes, descriptor, 0, mmap.PROT_READ | mmap.PROT_WRITE)
        self.buffer = memoryview(room)[start : start + nbytes]

    def _map(self, start: int, nbytes: int, descriptor: int, offset: int, access: int) -> None:
        at = self.address + start
        if _libc.mmap(at, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) != at:
            raise OSError(ctypes.get_errno(), f"an arena of {nbytes} bytes cannot be mapped")

    def populate(self, *ranges: tuple[int, int], threads: int = POPULATING_THREADS) -> None:
        """Give each range, (start, nbytes), its pages: while the driver makes them to pin them, it launches nothing.

        The kernel places a page on the NUMA node of the thread that asks for it. Threads have this one's affinity.
        Whole blocks in a range, or in several that adjoin, become huge pages where the kernel has some (from Linux 6.1
        on). What is there already stays as it is.
        """
        spans = list[tuple[int, int]]()
        for start, nbytes in ranges:
            first = spans.pop()[0] if spans and spans[-1][1] == start else start
            spans.append((first, start + nbytes))
        pieces = list[tuple[int, int]]()
        for first, stop in spans:
            share = max(-(-(stop - first) // (threads * HUGE_PAGE_BYTES)), 1) * HUGE_PAGE_BYTES
            step, page = min(share, _POPULATED_BYTES), first - first % mmap.PAGESIZE
            pieces += [(max(at, page), min(at + step, stop)) for at in range(first // step * step, stop, step)]

        def populate(piece: tuple[int, int]) -> None:
            first, stop = piece
            blocks = range(-(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, stop - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
            if blocks and not self._has_small_pages:
                for block in blocks:  # a block with no page at all cannot become a huge one
                    _libc.madvise(self.address + block, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
                at, nbytes = self.address + blocks[0], len(blocks) * HUGE_PAGE_BYTES
                if _libc.madvise(at, nbytes, _MADV_COLLAPSE) != 0 and ctypes.get_errno() != errno.EAGAIN:
                    self._has_small_pages = True  # a search for huge pages that are not there takes long
            done = _libc.madvise(self.address + first, stop - first, _MADV_POPULATE_WRITE)
            if done != 0 and ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14; reading brings a page, too
                bytes(self.buffer[first : stop : mmap.PAGESIZE])

        if threads > 1 and len(pieces) > 1:
            with suppress(RuntimeError):  # no thread may begin: there is a limit, or the main thread has ended
                with ThreadPoolExecutor(threads) as pool:
                    for _ in pool.map(populate, pieces):
                        pass
                return
        for piece in pieces:
            populate(piece)


class ReadOnlyMapping(Mapping):
    """A mapping that this process only reads: to write into it is SIGSEGV. A forked child has none of it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        super().__init__(descriptor, nbytes)
        _libc.mprotect(self.address, nbytes, mmap.PROT_READ)
        _libc.madvise(self.address, nbytes, _MADV_DONTFORK)  # nobody would tell it when bytes are elsewhere

    def replace(self, start: int, nbytes: int, descriptor: int, offset: int) -> None:
        """Show these bytes of another file from now on. All are multiples of a page. No reader sees anything between.

        Raises `OSError`.
        """
        self._map(start, nbytes, descriptor, offset, mmap.PROT_READ)
        _libc.madvise(self.address + start, nbytes, _MADV_DONTFORK)

    @contextmanager
    def writable(self, start: int, nbytes: int) -> Iterator[None]:
        """CUDA registers only memory that may be written. It stays registered when it may not any more."""
        _libc.mprotect(self.address + start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            yield
        finally:
            _libc.mprotect(self.address + start, nbytes, mmap.PROT_READ)


def allow_descriptors(layers: int) -> None:
    """Raise this process's limit of open files, up to the hard limit, for the arenas of so many layers.

    Each arena is an open file, and a layer that changes owners may have two.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * layers + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Shared memory with weights, from byte `start` on. Another process maps so many bytes of its descriptor."""

    descriptor: int
    nbytes: int
    start: int = 0
    number: int = field(default_factory=_numbers.__next__)  # of this process's


def memfd(name: str, nbytes: int) -> int:
    """The descriptor of memory of zeros, which keeps its size. Raises `OSError`."""
    descriptor = os.memfd_create(f"hytrain-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK_AND_GROW)
    except OSError as error:  # a limit on files is one on memory that is shared, too
        os.close(descriptor)
        raise OSError(error.errno, said(error)) from None
    return descriptor


class SharedMemory:
    """Memory of this process that others map, once they have its descriptor. A page comes with its first use, or with
    `Mapping.populate`.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """Create and map memory of zeros. Raises `OSError` if there is no address space for it."""
        self.descriptor = memfd(name, nbytes)
        try:
            self.mapping = Mapping(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory = Memory(self.descriptor, nbytes)

    def close(self) -> None:
        os.close(self.descriptor)
        del self.mapping


class Arena:
    """A layer's arena, in either process: one that came as a checked descriptor, or a new one of zeros."""

    def __init__(self, layout: ArenaLayout, descriptor: int | None = None) -> None:
        """Raises `OSError` if there is no descriptor for a new one."""
        self.layout = layout
        self.descriptor = memfd(str(layout.lid), layout.nbytes) if descriptor is None else descriptor

    @cached_property
    def mapping(self) -> Mapping:
        """Raises `OSError` if there is no address space for it; then the arena is closed."""
        try:
            return Mapping(self.descriptor, self.layout.nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Its memory stays as long as a view of the mapping exists."""
        os.close(self.descriptor)
        self.descriptor = -1  # a mapping that somebody still asks for is none of another file
        self.__dict__.pop("mapping", None)


def free_pages(descriptor: int, start: int, nbytes: int) -> None:
    """Free the pages of these bytes of a file, in all processes, where the kernel can. Their next user finds zeros."""
    how = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    _libc.fallocate(descriptor, how, ctypes.c_long(start), ctypes.c_long(nbytes))


def arena_socket(socket_dir: str, rank: int) -> str:
    """The Unix socket on which the optimizer of this rank sends the descriptors of its arenas."""
    return os.path.join(socket_dir, f"arena-{rank}")


def send_arena(connection: socket.socket, arena: Arena, *, token: str, sender: Address) -> None:
    """Announce an arena and send its descriptor, in one datagram of a SEQPACKET socket."""
    message = PlanesReady(lid=arena.layout.lid)
    socket.send_fds(connection, [encode(message, token=token, sender=sender, seq=0)], [arena.descriptor])


def refuse_arena(connection: socket.socket, lid: int, reason: str, *, token: str, sender: Address) -> None:
    """Announce that there will be no arena for a layer."""
    connection.send(encode(PlanesRefused(lid=lid, reason=reason), token=token, sender=sender, seq=0))


def receive_arena(connection: socket.socket, layouts: dict[int, ArenaLayout], *, token: str) -> Arena | PlanesRefused:
    """The next announced arena, checked against the layer table; or a refusal, also if no descriptor is free here.

    Raises `ValueError` if it does not fit the table, `EOFError` if the other side has gone.
    """
    frame, descriptors, flags, _ = socket.recv_fds(connection, MAX_ANNOUNCEMENT_BYTES, 1)
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # programs that the user's script starts must not keep the memory
        if not frame:
            raise EOFError("the optimizer closed the socket that descriptors travel over")
        message = decode(frame, token=token).message
        if isinstance(message, PlanesReady) and flags & socket.MSG_CTRUNC and not descriptors:
            message = PlanesRefused(lid=message.lid, reason="the trainer has no free descriptor: raise `ulimit -n`")
        if isinstance(message, PlanesRefused) and not descriptors and message.lid in layouts:
            return message
        if not isinstance(message, PlanesReady) or len(descriptors) != 1 or message.lid not in layouts:
            raise ValueError(f"expected one arena's descriptor, got {message} and {len(descriptors)} descriptors")
        expected = layouts[message.lid]
        if (nbytes := os.fstat(descriptors[0]).st_size) != expected.nbytes:
            raise ValueError(f"arena of layer {message.lid}: {nbytes} bytes, {expected.nbytes} in the layer table")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return Arena(expected, descriptors[0])
