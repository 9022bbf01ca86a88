"""State on the device that torch's allocator may take when it has no memory for a request: kernels/reclaim.cpp.

    serving      the library, once a process; the allocator of a device goes through it from then on
    Offer        one layer's state, with the host memory for it: offered after an update, withdrawn before it is used

What has left is in host memory, and its storages are empty. Who withdraws it is told so, and goes on from there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels import build
from hytrain.memory.clock import current_stream
from hytrain.memory.transfer import Copy, cut
from hytrain.tensors import address, impl_of

SOURCE: Final = Path(build.__file__).with_name("reclaim.cpp")
#: Which library: that for this version of torch, whatever its device.
VARIANT: Final = f"torch{torch.__version__.partition('+')[0]}"
#: As c10::DeviceType counts them.
_TYPES: Final = {"cpu": 0, "cuda": 1}
_serving = threading.Lock()


class Left(NamedTuple):
    """When `nbytes` of state have left, in the seconds of `time.monotonic`, and for a request of how many bytes."""

    nbytes: int
    began_s: float
    ended_s: float
    asked: int


class _Piece(ctypes.Structure):  # reclaim.cpp's Piece
    _fields_ = (("to", ctypes.c_void_p), ("out_of", ctypes.c_void_p), ("nbytes", ctypes.c_int64))


def torch_flags() -> tuple[str, ...]:
    """What the library is built with: the headers of torch, whose version it is for, and its library."""
    headers, libraries = (Path(torch.__file__).with_name(name) for name in ("include", "lib"))
    linked = (f"-L{libraries}", "-Wl,--no-as-needed", "-lc10")  # whose copy in this process is found by its name
    return (f"-DHYTRAIN_TORCH={VARIANT}", "-isystem", str(headers), *linked)


@cache
def _library() -> ctypes.CDLL:
    """Raises BackendUnavailable."""
    library = build.opened(SOURCE, torch_flags(), VARIANT)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
        ("serve", ctypes.c_char_p, ctypes.c_int),
        ("add", pointer, pointer, integer, pointer, integer),
        ("offer", None, pointer, pointer, ctypes.c_int),
        ("withdraw", ctypes.c_int, pointer, ctypes.POINTER(ctypes.c_double), ctypes.POINTER(integer)),
        ("has_left", ctypes.c_int, pointer),
        ("remove", None, pointer),
        ("say", None, ctypes.c_char_p),
        ("evictions", integer),
    ):
        function = getattr(library, f"hytrain_reclaim_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def serving(device: torch.device) -> ctypes.CDLL:
    """The library, which serves the allocator of this kind of device from now on.

    Raises BackendUnavailable where it cannot be built, or cannot serve.
    """
    with _serving:
        library = _library()
        if (reason := library.hytrain_reclaim_serve(_TYPES[device.type])) is not None:
            raise BackendUnavailable(f"torch's allocator cannot be served: {reason.decode()}")
    return library


class Offer:
    """The tensors `leaving` of one device, which leave with `copies` to pinned host memory."""

    def __init__(self, library: ctypes.CDLL, leaving: Sequence[Tensor], copies: Sequence[Copy]) -> None:
        self._library = library
        self._device, self._nbytes = leaving[0].device, sum(tensor.nbytes for tensor in leaving)
        self._event = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else None
        pieces = [piece for into, out_of in copies for piece in _pieces(into, out_of)]
        table = (_Piece * len(pieces))(*pieces)
        tensors = (ctypes.c_void_p * len(leaving))(*map(impl_of, leaving))
        self._item: Any = library.hytrain_reclaim_add(table, len(pieces), tensors, len(leaving))

    def begin(self, rank: int) -> None:
        """It may leave from now on, after all that the current stream has. The highest rank leaves first."""
        last_use = None
        if self._event is not None:
            self._event.record(current_stream(self._device))
            last_use = self._event.cuda_event
        self._library.hytrain_reclaim_offer(self._item, last_use, rank)

    @property
    def has_left(self) -> bool:
        return bool(self._library.hytrain_reclaim_has_left(self._item))

    def end(self) -> Left | None:
        """It stays from now on. If it has left already, how. Waits for a copy that is under way."""
        times_s, asked = (ctypes.c_double * 2)(), ctypes.c_int64()
        if not self._library.hytrain_reclaim_withdraw(self._item, times_s, ctypes.byref(asked)):
            return None
        return Left(self._nbytes, times_s[0], times_s[1], asked.value)

    def close(self) -> None:
        """Forget it. The tensors must still be there, and not be offered."""
        if self._item is not None:
            self._library.hytrain_reclaim_remove(self._item)
            self._item = None


def _pieces(into: Tensor, out_of: Tensor) -> list[_Piece]:
    """Cut so that none crosses from one pinned piece to the next."""
    start, source = address(into), address(out_of)
    return [_Piece(first, source + first - start, stop - first) for first, stop in cut(start, into.nbytes)]
