"""The AdamW update in C++ and OpenMP: a ctypes wrapper of adamw.cpp, without torch.

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

from hytrain.kernels.backend import DTYPES, Into, check_dtypes
from hytrain.kernels.build import build
from hytrain.kernels.scalars import KERNEL_SCALARS, Scalars, kernel_scalars

SOURCE = Path(__file__).with_name("adamw.cpp")
SMALL_CALLS = 64  # after a call of `touch` that was refused huge pages, this many calls do not ask for them


class _Scalars(ctypes.Structure):  # adamw.cpp's Scalars; ctypes rounds each double to the nearest float
    _fields_ = tuple((name, ctypes.c_float) for name in KERNEL_SCALARS)


class _Planes(ctypes.Structure):  # adamw.cpp's Planes
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "remainder", "exp_avg", "exp_avg_sq"))


class NativeBackend:
    name = "native"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        library = ctypes.CDLL(str(build(SOURCE)))
        self._update = {pair: getattr(library, f"hytrain_adamw_{pair[0]}_{pair[1]}") for pair in DTYPES}
        for function in self._update.values():
            planes, numbers = ctypes.POINTER(_Planes), ctypes.POINTER(_Scalars)
            function.argtypes = (planes, ctypes.c_void_p, planes, ctypes.c_int64, numbers, ctypes.c_int)
            function.restype = None
        self._touch = library.hytrain_touch
        self._touch.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._touch.restype = ctypes.c_int
        self._small_calls = 0

    def update(
        self,
        *,
        weights: int,
        grads: int,
        remainder: int,
        exp_avg: int,
        exp_avg_sq: int,
        numel: int,
        weights_dtype: str,
        grads_dtype: str,
        scalars: Scalars,
        into: Into | None = None,
    ) -> None:
        check_dtypes(weights_dtype, grads_dtype, remainder)
        rounded = _Scalars(*kernel_scalars(scalars))
        planes = _Planes(weights, remainder, exp_avg, exp_avg_sq)
        to = planes if into is None else _Planes(into.weights, into.remainder, into.exp_avg, into.exp_avg_sq)
        function = self._update[weights_dtype, grads_dtype]
        function(ctypes.byref(planes), grads, ctypes.byref(to), numel, ctypes.byref(rounded), self.threads)

    def touch(self, address: int, nbytes: int) -> None:
        """See Backend.touch. Asks for huge pages, but not at each call if there are none: the search takes time."""
        asks = self._small_calls == 0
        refused = self._touch(address, nbytes, mmap.PAGESIZE, self.threads, asks)
        self._small_calls = SMALL_CALLS if refused else max(self._small_calls - 1, 0)
