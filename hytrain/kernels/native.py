"""The updates in C++ and OpenMP: a ctypes wrapper of update.cpp, without torch.

build.py builds it at first use. ctypes releases the GIL during a call. Call it from one thread only, because OpenMP
keeps a pool of threads per caller.

libgomp's threads spin for a while after each call, then sleep. Measured on two cores: they spin for 10 ms, with
GOMP_SPINCOUNT=20000 for 2 ms, with OMP_WAIT_POLICY=passive not at all. A call has an overhead of a few us while they
spin, and of 40 us if it has to wake them. If `threads` shrinks, surplus threads end; if it grows, new ones start.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from hytrain.kernels.backend import DTYPES, FIRST, Elements, Into, check_dtypes, seeds
from hytrain.kernels.build import build
from hytrain.kernels.scalars import Scalars
from protocol.messages import STATE_DTYPES
from protocol.rules import MOMENTS, ON_DEVICE

SOURCE = Path(__file__).with_name("update.cpp")
LONE = ("lone_bfloat16", "bfloat16")  # the dtypes of weights that are their own masters, and of their gradients
SMALL_CALLS = 64  # after a call of `touch` that was refused huge pages, this many calls do not ask for them


_Moments = ctypes.c_void_p * max(map(len, MOMENTS.values()))


class _Planes(ctypes.Structure):  # update.cpp's Planes
    _fields_ = (("weights", ctypes.c_void_p), ("remainder", ctypes.c_void_p), ("moments", _Moments))


class _Elements(ctypes.Structure):  # update.cpp's Elements; ctypes keeps the lowest 32 bits
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("first", "before", "within"))


class NativeBackend:
    name = "native"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        library = ctypes.CDLL(str(build(SOURCE)))
        rules = [rule for rule in MOMENTS if rule not in ON_DEVICE]
        kinds = [(rule, *pair, state) for rule in rules for pair in (*DTYPES, LONE) for state in STATE_DTYPES]
        self._update = {each: getattr(library, f"hytrain_{'_'.join(each)}") for each in kinds}
        for function in self._update.values():
            planes, elements, pointer = ctypes.POINTER(_Planes), ctypes.POINTER(_Elements), ctypes.c_void_p
            function.argtypes = (planes, pointer, planes, ctypes.c_int64, pointer, elements, ctypes.c_int)
            function.restype = None
        self._touch = library.hytrain_touch
        self._touch.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._touch.restype = ctypes.c_int
        self._small_calls = 0
        self._float_mode, self._set_float_mode = library.hytrain_float_mode, library.hytrain_set_float_mode
        self._float_mode.argtypes, self._float_mode.restype = (), ctypes.c_uint
        self._set_float_mode.argtypes, self._set_float_mode.restype = (ctypes.c_uint,), None

    @property
    def float_mode(self) -> int:
        return int(self._float_mode())

    @float_mode.setter
    def float_mode(self, mode: int) -> None:
        self._set_float_mode(mode)

    def update(
        self,
        *,
        weights: int,
        grads: int,
        remainder: int,
        moments: tuple[int, ...],
        numel: int,
        weights_dtype: str,
        grads_dtype: str,
        scalars: Scalars,
        into: Into | None = None,
        state_dtype: str = "float32",
        elements: Elements = FIRST,
    ) -> None:
        check_dtypes(weights_dtype, grads_dtype, remainder, state_dtype)
        rounded = (ctypes.c_float * len(scalars.values))(*scalars.values)  # each double to the nearest float
        planes = _Planes(weights, remainder, _Moments(*moments))
        to = planes if into is None else _Planes(into.weights, into.remainder, _Moments(*into.moments))
        which = _Elements(elements.first, *seeds(elements.key, scalars.step))
        pair = (weights_dtype, grads_dtype) if remainder or weights_dtype == "float32" else LONE
        function = self._update[(scalars.kernel, *pair, state_dtype)]
        others = ctypes.byref(rounded), ctypes.byref(which)
        function(ctypes.byref(planes), grads, ctypes.byref(to), numel, *others, self.threads)

    def touch(self, address: int, nbytes: int) -> None:
        """See Backend.touch. Asks for huge pages, but not at each call if there are none: the search takes time."""
        asks = self._small_calls == 0
        refused = self._touch(address, nbytes, mmap.PAGESIZE, self.threads, asks)
        self._small_calls = SMALL_CALLS if refused else max(self._small_calls - 1, 0)
