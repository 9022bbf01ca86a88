"""Measures copies and the device's update once, before the first step.

    pinned scratch ◀──▶ device scratch    seconds to copy one parameter's gradient to the host, and its weight back
    scratch segment ─▶ the device's update  seconds per parameter; it also compiles the kernel

The coordinator plans with these rates, and with the optimizer's own, until it has measured steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch

from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import TYPICAL, scalars
from hytrain.memory.planes import DevicePlanes
from hytrain.memory.transfer import Transfers
from hytrain.tensors import DTYPES
from protocol.handles import typical_segment
from protocol.messages import Calibration, Layer, Segment

TRIES: Final = 3
COPY_BYTES: Final = 64 << 20
UPDATE_NUMEL: Final = 1 << 24


def calibrate(layers: Sequence[Layer], device: torch.device, transfers: Transfers, host: Backend | None) -> Calibration:
    """Seconds per parameter, as medians of a few tries on scratch memory."""
    segments = [segment for layer in layers for segment in layer.segments]
    total = sum(segment.numel for segment in segments)
    grads_bytes = sum(one.numel * DTYPES[one.grads_dtype].itemsize for one in segments) / total
    weights_bytes = sum(one.numel * DTYPES[one.dtype].itemsize for one in segments) / total
    copied = min(COPY_BYTES, max(layer.numel for layer in layers) * 4)
    on_host = torch.empty(copied, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    on_device = torch.zeros(copied, dtype=torch.uint8, device=device)
    update = typical_segment(layers, UPDATE_NUMEL)
    return Calibration(
        d2h_s=_seconds(lambda: on_host.copy_(on_device, non_blocking=True), transfers) / copied * grads_bytes,
        h2d_s=_seconds(lambda: on_device.copy_(on_host, non_blocking=True), transfers) / copied * weights_bytes,
        gpu_update_s=_update_s(update, device, transfers, host) / update.numel,
    )


def _update_s(spec: Segment, device: torch.device, transfers: Transfers, host: Backend | None) -> float:
    weights = torch.zeros(spec.numel, dtype=DTYPES[spec.dtype], device=device)
    grads = torch.zeros(spec.numel, dtype=DTYPES[spec.grads_dtype], device=device)
    planes = DevicePlanes([spec], [weights])
    return _seconds(lambda: planes.update({0: grads}, scalars(TYPICAL[spec.rule], 1), host), transfers)


def _seconds(run: Callable[[], object], transfers: Transfers) -> float:
    took_s = []
    for _ in range(TRIES + 1):
        transfers.drain()
        began_s = time.perf_counter()
        run()
        transfers.drain()
        took_s.append(time.perf_counter() - began_s)
    return median(took_s[1:])
