"""Memory by plane and placement, in bytes, checked before anything is allocated.

per parameter        host memory, if the CPU owns it              GPU memory, if the GPU owns it
bfloat16             grads 2, weights 2, remainder 2, moments 8   remainder 2, moments 8   (weights 2 always)
float16              grads 2, weights 2, remainder 4, moments 8   remainder 4, moments 8   (weights 2 always)
float32              grads 4, weights 4, moments 8                moments 8                (weights 4 always)

A second bank, which lets the CPU update before the verdict on a step, holds everything but the gradients once more.
"""

from __future__ import annotations

from typing import Final

import torch

from hytrain.errors import CapacityError
from hytrain.memory.host import available_bytes
from protocol.handles import ArenaLayout

#: The fraction of GPU memory that is left for fragmentation and for libraries.
GPU_MARGIN: Final = 0.04
#: Host memory that is left for the processes themselves.
HOST_MARGIN_BYTES: Final = 1 << 30
#: The driver is asked for free memory once in so many steps, since it answers slowly.
FREE_EVERY: Final = 16


class GpuMemory:
    """GPU memory that torch's allocator can still take for optimizer state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = 0
        self._free: int | None = None

    def free_bytes(self) -> int | None:
        """Bytes that no step has needed so far, less a margin. None without a GPU."""
        if self._device.type != "cuda":
            return None
        if self._asked % FREE_EVERY == 0 or self._asked < 4:
            beside, cap = self._beside(torch.cuda.max_memory_allocated(self._device))
            self._free = max(int(beside - GPU_MARGIN * cap), 0)
        self._asked += 1
        return self._free

    def for_state_bytes(self) -> int | None:
        """The bound for the first plan, before any step: half of what is free, since activations need the rest."""
        if self._device.type != "cuda":
            return None
        beside, _ = self._beside(torch.cuda.memory_allocated(self._device))
        return max(beside // 2, 0)

    def _beside(self, used: int) -> tuple[int, int]:
        """The bytes that this process can take beyond the `used` ones, and the user's cap on torch's allocator."""
        free, total = torch.cuda.mem_get_info(self._device)
        cap = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        return min(free + torch.cuda.memory_reserved(self._device), cap) - used, cap


def host_bytes(layouts: list[ArenaLayout]) -> int:
    return sum(layout.nbytes for layout in layouts)


def second_bank_fits(layouts: list[ArenaLayout], k: float | None, limit: int | None) -> bool:
    """Whether planes with two banks fit into host memory at k; for "auto" (None), at k=0: no larger k is worth it."""
    return host_bytes(layouts) * (1.0 - (k or 0.0)) <= host_bound(limit)


def require_host_memory(
    layouts: list[ArenaLayout],
    k: float | None,
    limit: int | None,
    *,
    gpu_bytes: int | None = None,
    awaits_verdict: bool = False,
) -> None:
    """Raise `CapacityError`, with the arithmetic, unless the planes at this k fit into host memory.

    With "auto" (None), some k must fit with at most `gpu_bytes` of optimizer state on the GPU (None: no GPU). If
    updates await a verdict, gradients count as well. `limit` is the memory that may be used; None asks the machine.
    """
    bound, needed, numel = host_bound(limit), host_bytes(layouts), sum(layout.numel for layout in layouts)
    each = f"{needed / max(numel, 1):.1f} bytes per parameter"
    source = "the stated limit" if limit is not None else "what the machine and its control groups leave, less 1 GiB"
    if k is None and gpu_bytes is not None:
        left = _beyond_gpu(layouts, gpu_bytes, awaits_verdict)
        if host_bytes(left) > bound:
            raise CapacityError(
                f"{numel / 1e6:.1f} M parameters need {needed / 1e9:.2f} GB of host memory ({each}) where the CPU "
                f"updates them, above {bound / 1e9:.2f} GB, {source}; the {gpu_bytes / 1e9:.2f} GB that the GPU has "
                f"for optimizer state hold {len(layouts) - len(left)} of {len(layouts)} layers, which leaves "
                f"{host_bytes(left) / 1e9:.2f} GB to the host: free memory on either side, or state "
                "host_memory_limit if the machine's memory grows on demand"
            )
        return
    share = int(needed * (1.0 - (k or 0.0)))
    if share > bound:
        raise CapacityError(
            f"the CPU's share of {numel / 1e6:.1f} M parameters at k={k or 0.0:.2f} needs {share / 1e9:.2f} GB of host "
            f"memory ({each}), above {bound / 1e9:.2f} GB, {source}: raise k, "
            "free host memory, or state host_memory_limit if the machine's memory grows on demand"
        )


def _beyond_gpu(layouts: list[ArenaLayout], gpu_bytes: int, awaits_verdict: bool) -> list[ArenaLayout]:
    """The layers that are left to the host if the GPU takes as many as it has room for, as in the first plan."""
    left = []
    for layout in layouts:
        size = layout.state_nbytes + awaits_verdict * layout.plane_nbytes["grads"]
        if size <= gpu_bytes:
            gpu_bytes -= size
        else:
            left.append(layout)
    return left


def host_bound(limit: int | None) -> int:
    """The bytes of host memory that planes may take: the limit, or what the machine has left now, less a margin."""
    return limit if limit is not None else max(available_bytes() - HOST_MARGIN_BYTES, 0)
