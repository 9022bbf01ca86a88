"""Chooses the backend that updates on host memory.

The optimizer process and a trainer without a GPU load one and call it for each tile of each segment.

    load("auto")  ->  native, or torch where no library of the package fits and there is no C++ compiler
"""

from __future__ import annotations

import importlib
import os

from hytrain.errors import BackendUnavailable
from hytrain.kernels.backend import Backend

#: Module and class by name. Each module imports what only its backend needs.
BACKENDS = {
    "native": ("hytrain.kernels.native", "NativeBackend"),
    "torch": ("hytrain.kernels.torch_backend", "TorchBackend"),
    "deepspeed": ("hytrain.kernels.deepspeed_backend", "DeepSpeedBackend"),
}


def load(name: str = "auto", threads: int | None = None) -> tuple[Backend, str]:
    """The backend called `name`, and one line that says why it was chosen.

    `threads` is by default the number of cores that this process may use. Raises BackendUnavailable if the backend
    cannot run here, ValueError for an unknown name.
    """
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if name != "auto":
        return _open(name, threads), f"{name}: as asked"
    try:
        return _open("native", threads), "native: a library for this CPU is there"
    except BackendUnavailable as reason:
        return _open("torch", threads), f"torch: native is not available ({reason})"


def why_not_native(*, fuses: bool = True) -> str:
    """Why `load("auto")` does not choose native on this machine; empty if it does. Builds native if necessary."""
    from hytrain.kernels.build import opened
    from hytrain.kernels.native import FLAGS, SOURCE

    try:
        opened(SOURCE, FLAGS[fuses])
    except BackendUnavailable as reason:
        return str(reason)
    return ""


def _open(name: str, threads: int) -> Backend:
    if threads < 1:
        raise ValueError(f"a backend needs at least one thread, not {threads}")
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    module, kind = BACKENDS[name]
    backend: Backend = getattr(importlib.import_module(module), kind)(threads)
    return backend
