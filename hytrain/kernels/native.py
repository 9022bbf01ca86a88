"""The updates in C++ and OpenMP: a ctypes wrapper of update.cpp, without torch.

build.py finds it, or builds it at first use. ctypes releases the GIL during a call. Call it from one thread only,
because OpenMP keeps a pool of threads per caller.

libgomp's threads spin for a while after each call, then sleep. Measured on two cores: they spin for 10 ms, with
GOMP_SPINCOUNT=20000 for 2 ms, with OMP_WAIT_POLICY=passive not at all. A call has an overhead of a few us while they
spin, and of 40 us if it has to wake them. If `threads` shrinks, surplus threads end; if it grows, new ones start.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

from hytrain.kernels.backend import DTYPES, Operands, check_dtypes, seeds
from hytrain.kernels.build import opened
from protocol.messages import STATE_DTYPES
from protocol.rules import MOMENTS, ON_DEVICE

SOURCE = Path(__file__).with_name("update.cpp")
LONE = ("lone_bfloat16", "bfloat16")  # the dtypes of weights that are their own masters, and of their gradients
#: By whether multiplications are fused with additions, as torch does on CPUs that can.
FLAGS: Final = {True: (), False: ("-DHYTRAIN_FUSES=0",)}


_Moments = ctypes.c_void_p * max(map(len, MOMENTS.values()))


class _Planes(ctypes.Structure):  # update.cpp's Planes
    _fields_ = (("weights", ctypes.c_void_p), ("remainder", ctypes.c_void_p), ("moments", _Moments))


class _Elements(ctypes.Structure):  # update.cpp's Elements; ctypes keeps the lowest 32 bits
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("first", "before", "within"))


def _functions(*, fuses: bool) -> tuple[dict[tuple[str, str, str, str], Any], ctypes.CDLL]:
    """The updates by rule, dtypes of weights and gradients, and dtype of moments; and their library."""
    library = opened(SOURCE, FLAGS[fuses])
    rules = [rule for rule in MOMENTS if rule not in ON_DEVICE]
    kinds = [(rule, *pair, state) for rule in rules for pair in (*DTYPES, LONE) for state in STATE_DTYPES]
    update = {each: getattr(library, f"hytrain_{'_'.join(each)}") for each in kinds}
    planes, elements, pointer, integer = (*map(ctypes.POINTER, (_Planes, _Elements)), ctypes.c_void_p, ctypes.c_int64)
    for function in update.values():
        function.argtypes = (planes, pointer, ctypes.c_float, planes, integer, integer, pointer, elements, ctypes.c_int)
        function.restype = None
    return update, library


class NativeBackend:
    name = "native"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        update, library = _functions(fuses=True)
        self._updates = {True: update}
        self._float_mode, self._set_float_mode = library.hytrain_float_mode, library.hytrain_set_float_mode
        self._float_mode.argtypes, self._float_mode.restype = (), ctypes.c_uint
        self._set_float_mode.argtypes, self._set_float_mode.restype = (ctypes.c_uint,), None

    @property
    def float_mode(self) -> int:
        return int(self._float_mode())

    @float_mode.setter
    def float_mode(self, mode: int) -> None:
        self._set_float_mode(mode)

    def update(self, of: Operands) -> None:
        scalars, into = of.scalars, of.into
        check_dtypes(of.weights_dtype, of.grads_dtype, of.remainder, of.state_dtype)
        rounded = (ctypes.c_float * len(scalars.values))(*scalars.values)  # each double to the nearest float
        planes = _Planes(of.weights, of.remainder, _Moments(*of.moments))
        to = planes if into is None else _Planes(into.weights, into.remainder, _Moments(*into.moments))
        which = _Elements(of.elements.first, *seeds(of.elements.key, scalars.step))
        pair = (of.weights_dtype, of.grads_dtype) if of.remainder or of.weights_dtype == "float32" else LONE
        if of.elements.fuses not in self._updates:
            self._updates[of.elements.fuses], _ = _functions(fuses=of.elements.fuses)
        function = self._updates[of.elements.fuses][(scalars.kernel, *pair, of.state_dtype)]
        numels, others = (of.numel, of.elements.in_vectors(of.numel)), (ctypes.byref(rounded), ctypes.byref(which))
        function(ctypes.byref(planes), of.grads, scalars.by, ctypes.byref(to), *numels, *others, self.threads)
