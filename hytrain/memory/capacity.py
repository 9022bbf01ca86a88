"""What fits: bytes by plane and owner, checked before anything is allocated.

a parameter of       host, the CPU owns it                        GPU, the GPU owns it
bfloat16             grads 2, weights 2, remainder 2, moments 8   remainder 2, moments 8   (weights 2 always)
float16              grads 2, weights 2, remainder 4, moments 8   remainder 4, moments 8   (weights 2 always)
float32              grads 4, weights 4, moments 8                moments 8                (weights 4 always)

A second bank, with which the CPU may update ahead of the verdict on a step's norm, has all but the gradients again.
"""

from __future__ import annotations

from typing import Final

import torch

from hytrain.errors import CapacityError
from hytrain.memory.host import available_bytes
from protocol.handles import ArenaLayout

#: GPU memory that is left to fragmentation and to what the libraries take for themselves.
GPU_MARGIN: Final = 0.04
#: Host memory that is left to the processes themselves.
HOST_MARGIN_BYTES: Final = 1 << 30
#: The free memory is asked for once in so many steps: the driver's answer takes its time.
FREE_EVERY: Final = 16


class GpuMemory:
    """What the GPU still has for optimizer state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = 0
        self._free: int | None = None

    def free_bytes(self) -> int | None:
        """Bytes that no step so far has needed, less a margin; None without a GPU."""
        if self._device.type != "cuda":
            return None
        if self._asked % FREE_EVERY == 0 or self._asked < 4:
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
            self._free = max(int(free + unused - GPU_MARGIN * total), 0)
        self._asked += 1
        return self._free

    def for_state_bytes(self) -> int | None:
        """A first bound, before anything has been measured: half of what is free, the rest is the activations'."""
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self._device)[0]) // 2


def host_bytes(layouts: list[ArenaLayout]) -> int:
    """Host memory for the planes of these layers, if the CPU owns them all."""
    return sum(layout.nbytes for layout in layouts)


def second_bank_fits(layouts: list[ArenaLayout], k: float, limit: int | None) -> bool:
    """Whether the planes of `layouts`, which have two banks, fit into the host's memory at this k."""
    return host_bytes(layouts) * (1.0 - k) <= host_bound(limit)


def require_host_memory(layouts: list[ArenaLayout], k: float, limit: int | None) -> None:
    """Raise `CapacityError`, with the arithmetic, unless the planes at this k fit into the host's memory.

    `limit` states what may be used where the machine's memory grows after boot; None asks the machine.
    """
    needed = int(host_bytes(layouts) * (1.0 - k))
    numel = sum(handle.numel for layout in layouts for handle in layout.handles["weights"] if handle is not None)
    source = "the stated limit" if limit is not None else "what the machine and its control groups leave, less 1 GiB"
    bound = host_bound(limit)
    if needed > bound:
        raise CapacityError(
            f"the CPU's share of {numel / 1e6:.1f} M parameters at k={k:.2f} needs {needed / 1e9:.2f} GB of host "
            f"memory ({needed / max(numel, 1):.1f} bytes a parameter), above {bound / 1e9:.2f} GB, {source}: raise k, "
            "free host memory, or state host_memory_limit if the machine's memory grows on demand"
        )


def host_bound(limit: int | None) -> int:
    """Bytes of host memory that planes may take: as stated, or what the machine has left now, less a margin."""
    return limit if limit is not None else max(available_bytes() - HOST_MARGIN_BYTES, 0)
