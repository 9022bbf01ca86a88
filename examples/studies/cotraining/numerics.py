"""Settings of torch that decide about bits, which each process has for itself: all parts have the trainer's.

trainer    present ─▶ JSON, with the order of each part ─▶ use    CPU trainer
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch

from hytrain.kernels.torch_backend import flushes_denormals


def _dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _set_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))


#: By name, what returns a setting, and what sets it.
_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]] = {
    "flush_denormal": (flushes_denormals, torch.set_flush_denormal),
    "default_dtype": (_dtype, _set_dtype),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "flash_sdp": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "math_sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}


def present() -> str:
    """This thread's settings, as JSON."""
    return json.dumps({name: get() for name, (get, _) in _SETTINGS.items()})


def use(settings: str) -> None:
    """Make what `present` has returned elsewhere this thread's settings."""
    if settings == present():
        return
    for name, value in json.loads(settings).items():
        _SETTINGS[name][1](value)
