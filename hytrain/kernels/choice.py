"""Which backend updates on host memory.

The optimizer process loads one and calls it for each tile of each segment; so does a trainer without a GPU.

    load("auto")  ->  native, if a C++ compiler is there  ->  torch
"""

from __future__ import annotations

import os

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import Backend

BACKENDS = ("native", "torch", "deepspeed")


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
