"""Shared memory for the planes of CPU-owned layers: one memfd per layer, so that a crash leaks nothing.

The optimizer creates an arena and first touches its pages (under its own affinity: NUMA locality), then sends
the descriptor. The trainer maps `grads` and `weights`, the planes it works with, and the state planes only
when it has to read them. Both map it where huge pages can be: a page of 2 MiB is touched, pinned and given back in
much less time than 512 of 4 KiB.

    optimizer: HostArena ── touch ──SCM_RIGHTS──▶ trainer: ArenaFile ── Mapping ── tensor views, pinned on CUDA

Views keep their mapping alive: an arena that was given up stays readable to whoever still holds a view.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
from typing import Final

from protocol.address import Address
from protocol.codec import decode, encode
from protocol.handles import ArenaLayout, TensorHandle, check_arena, check_handle
from protocol.messages import PlanesReady

_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK_AND_GROW: Final = 0x2 | 0x4
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
HUGE_PAGE_BYTES: Final = 2 << 20
MAX_ANNOUNCEMENT_BYTES: Final = 4096
#: Files that a process has open besides: data, sockets, a GPU's driver.
_OTHER_DESCRIPTORS: Final = 512


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


class Mapping:
    """The first `nbytes` of an arena's file in this process's memory, beginning where a huge page can.

    Python's mmap lets the kernel choose the address. So it only reserves room, and the file is mapped over that; the
    kernel takes both away when nobody holds a view of `buffer` any more.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Raises `OSError` if there is no address space, or the file is shorter."""
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(errno.EINVAL, f"an arena of {nbytes} bytes cannot be mapped: its file is shorter")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        start = -address % HUGE_PAGE_BYTES
        self.address, self.nbytes = address + start, nbytes
        access, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self.address, nbytes, access, how, descriptor, 0) != self.address:
            raise OSError(ctypes.get_errno(), f"an arena of {nbytes} bytes cannot be mapped")
        self.buffer = memoryview(room)[start : start + nbytes]


def allow_descriptors(layers: int) -> None:
    """Let this process have as many files open as arenas of so many layers need, as far as its hard limit goes.

    An arena is a file for as long as it lives, and while a layer changes owners it may have two.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * layers + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class HostArena:
    """The optimizer's side of a layer's arena: the owner of its memory."""

    def __init__(self, layout: ArenaLayout) -> None:
        """Create and map an arena of zeros. Raises `OSError` if the machine has no memory for it."""
        self.layout = layout
        self.descriptor = os.memfd_create(f"hytrain-{layout.lid}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, layout.nbytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK_AND_GROW)
            self._mapping = Mapping(self.descriptor, layout.nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def address(self) -> int:
        return self._mapping.address

    def address_of(self, handle: TensorHandle) -> int:
        """Where the handle's first element lies. Raises `HandleError` for a handle of something else."""
        check_handle(handle, self.layout)
        return self._mapping.address + handle.offset

    def close(self) -> None:
        """Give the memory back, as far as this process holds it."""
        os.close(self.descriptor)
        del self._mapping


class ArenaFile:
    """The trainer's side: a checked descriptor from which it maps what it needs."""

    def __init__(self, layout: ArenaLayout, descriptor: int) -> None:
        self.layout, self.descriptor = layout, descriptor

    def map_shared(self) -> Mapping:
        """Map `grads` and `weights`."""
        return Mapping(self.descriptor, self.layout.shared_nbytes)

    def map_all(self) -> Mapping:
        """Map every plane."""
        return Mapping(self.descriptor, self.layout.nbytes)

    def close(self) -> None:
        os.close(self.descriptor)


def arena_socket(socket_dir: str, rank: int) -> str:
    """The Unix socket on which the optimizer of this rank hands out the descriptors of its arenas."""
    return os.path.join(socket_dir, f"arena-{rank}")


def send_arena(connection: socket.socket, arena: HostArena, *, token: str, sender: Address) -> None:
    """Announce an arena and hand its descriptor over, as one datagram of a SEQPACKET socket."""
    message = PlanesReady(lid=arena.layout.lid, nbytes=arena.layout.nbytes)
    socket.send_fds(connection, [encode(message, token=token, sender=sender, seq=0)], [arena.descriptor])


def receive_arena(connection: socket.socket, layouts: dict[int, ArenaLayout], *, token: str) -> ArenaFile:
    """The next arena that is announced, checked against the layer table.

    Raises `WireError` or `HandleError` for what does not fit it, `EOFError` when the other side has gone.
    """
    frame, descriptors, _, _ = socket.recv_fds(connection, MAX_ANNOUNCEMENT_BYTES, 1)
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # a program that the user's script starts must not keep the memory
        if not frame:
            raise EOFError("the optimizer closed the socket that descriptors travel over")
        message = decode(frame, token=token).message
        if not isinstance(message, PlanesReady) or len(descriptors) != 1 or message.lid not in layouts:
            raise ValueError(f"expected one arena's descriptor, got {message} and {len(descriptors)} descriptors")
        expected = layouts[message.lid]
        file_bytes = os.fstat(descriptors[0]).st_size
        check_arena(expected, lid=message.lid, nbytes=message.nbytes, file_bytes=file_bytes)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return ArenaFile(expected, descriptors[0])


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
