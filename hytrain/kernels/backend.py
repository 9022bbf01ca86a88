"""What an AdamW update on host memory looks like, and the choice of who computes it.

The optimizer process loads one backend and calls it for each tile of each segment; so does a trainer
without a GPU. Addresses instead of tensors, since the native backend needs no torch, and a process that
lives on it should not have to import one.

    load("auto")  ->  native, if a C++ compiler is there  ->  torch
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from hytrain.errors import BackendUnavailable
from hytrain.kernels.scalars import Scalars

BACKENDS = ("native", "torch", "deepspeed")

# (weights, gradients) that every backend updates.
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float32", "bfloat16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Into:
    """Addresses of the planes that an update writes, where it does not write those that it reads."""

    weights: int
    remainder: int
    exp_avg: int
    exp_avg_sq: int


class Backend(Protocol):
    """AdamW on planes in this process's memory.

    `threads` may be set between two calls: from the next one on, that many threads work.
    """

    threads: int

    @property
    def name(self) -> str: ...

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
        """Update `numel` consecutive elements of one segment: in place, or `into` other planes, to the same bits.

        The planes are addresses. `remainder` is int16 for bfloat16 weights, float32 for float16 weights, which are
        only written: it is their master; 0 stands for none. The moments are float32.
        Raises ValueError for a pair of dtypes that is not in `DTYPES`.
        """

    def touch(self, address: int, nbytes: int) -> None:
        """Fault in a fresh mapping with zeros, in parallel and under this process's affinity."""


def load(name: str = "auto", threads: int | None = None) -> tuple[Backend, str]:
    """The backend called `name`, and one line that says why it is this one.

    `threads` is by default the number of cores that this process may use. Raises BackendUnavailable if
    the backend cannot run here, ValueError if there is none of that name.
    """
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if name != "auto":
        return _open(name, threads), f"{name}: as asked"
    try:
        return _open("native", threads), "native: a C++ compiler is there"
    except BackendUnavailable as reason:
        return _open("torch", threads), f"torch: native is not available ({reason})"


def why_not_native() -> str:
    """Why `load("auto")` does not choose native on this machine; empty if it does. Builds it, if nobody has."""
    from hytrain.kernels.build import build
    from hytrain.kernels.native import SOURCE

    try:
        build(SOURCE)
    except BackendUnavailable as reason:
        return str(reason)
    return ""


def check_dtypes(weights_dtype: str, grads_dtype: str, remainder: int) -> None:
    """Raise ValueError unless the planes belong together."""
    if (weights_dtype, grads_dtype) not in DTYPES:
        raise ValueError(f"no AdamW update for {weights_dtype} weights with {grads_dtype} gradients")
    if (remainder != 0) != (weights_dtype != "float32"):
        raise ValueError(f"a remainder belongs to 16-bit weights, and only to them: these are {weights_dtype}")


def _open(name: str, threads: int) -> Backend:
    """Import and construct one backend: each pulls in what only it needs."""
    if threads < 1:
        raise ValueError(f"a backend needs at least one thread, not {threads}")
    if name == "native":
        from hytrain.kernels.native import NativeBackend

        return NativeBackend(threads)
    if name == "torch":
        from hytrain.kernels.torch_backend import TorchBackend

        return TorchBackend(threads)
    if name == "deepspeed":
        from hytrain.kernels.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(threads)
    raise ValueError(f"no backend {name!r}: choose auto, {', '.join(BACKENDS)}")
