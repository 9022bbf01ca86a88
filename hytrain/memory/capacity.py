"""What fits: bytes by plane and placement, checked before anything is allocated.

per parameter        host, the CPU owns it                        GPU, the GPU owns it
bfloat16             grads 2, weights 2, remainder 2, moments 8   remainder 2, moments 8   (weights 2 always)
float16              grads 2, weights 2, remainder 4, moments 8   remainder 4, moments 8   (weights 2 always)
float32              grads 4, weights 4, moments 8                moments 8                (weights 4 always)

These are AdamW's moments in float32; other rules keep others. A second bank, with which the CPU may update ahead of the
verdict on a step's norm, has all but the gradients again.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hytrain.errors import CapacityError
from hytrain.memory.host import available_bytes
from hytrain.readable import gib
from protocol import sizes
from protocol.handles import ArenaLayout
from protocol.placement import CPU, GPU, VISIT

#: GPU memory that is left to fragmentation and to what the libraries take for themselves.
GPU_MARGIN: Final = 0.04
#: Host memory that is left to page tables; and to the processes of each rank, with the libraries that they run. Without
#: it the machine loads code from disk again and again.
HOST_MARGIN, HOST_MARGIN_BYTES = 0.02, 3 << 30
#: Of what a process can have of the GPU's memory, for gradients and offloaded weights that wait for visits. Without
#: any, backward waits.
WAITING_SHARE: Final = 0.06
#: What the driver has is asked for once in so many steps, since its answer takes time.
DRIVER_EVERY: Final = 16


class Room(NamedTuple):
    """Bytes of a GPU's memory: what this process can have, less a margin, the most it has needed, and what it has."""

    usable: int
    needed: int
    now: int = 0

    @property
    def free(self) -> int:
        return max(self.usable - self.needed, 0)


class GpuMemory:
    """What the GPU still has for optimizer state, as far as torch's allocator may take it.

    What is lent counts as used until it is taken back, and then not as something that steps have needed. `limit`, in
    bytes, caps what is planned with; a step that needs more gets it. `arrivals` counts what optimizers have brought,
    `arriving` has those that bring more now: only `memory/arrivals.py` uses them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.serving: ctypes.CDLL | None = None  # what evicts state while torch allocates
        self.limit: int | None = None
        self._asked = 0
        self._usable = 0
        self._is_expandable: bool | None = None  # not known before the first allocation
        self.lock = threading.RLock()  # who has it may collect an optimizer that gives its part back
        self.arrivals, self.arriving = 0, weakref.WeakSet[object]()
        self._lent = self._needed = 0  # and the peak of what was not lent, until torch's was last reset

    def limit_to(self, nbytes: int | None) -> None:
        """Plan with at most so much from now on. None: with all that is free."""
        self.limit, self._asked = nbytes, 0

    @property
    def is_bounded(self) -> bool:
        """Whether there is a GPU, whose memory is what it has."""
        return self._device.type == "cuda"

    def room(self) -> Room | None:
        """What there is, and what steps so far have needed of it; None without a GPU.

        The peak of allocations is read at every call: the caller adds the state that the GPU holds by now, which must
        not be counted twice. Memory that the allocator could not join again is not usable.
        """
        if self._device.type != "cuda":
            return None
        if self._asked % DRIVER_EVERY == 0 or self._asked < 4:
            usable, cap = self._limits()
            self._usable = usable - self._fragments() - int(GPU_MARGIN * cap)
        self._asked += 1
        now, most = self._allocated()
        return Room(self._usable - self._lent, most, now)

    def lend(self, nbytes: int) -> Tensor | None:
        """Memory for a while, shape (nbytes,), or None without twice as much that no step so far has needed.

        So a plan that is on its way, and knows nothing of it, still has room to bring as much state to the GPU. To tell
        later what steps need, torch's peak of allocated memory begins anew, here and in `take_back`.
        """
        with self.lock:
            room = self.room()
            if room is None or 2 * nbytes > room.free:
                return None
            self._settle()
            try:
                lent = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:  # it is there, but in pieces
                return None
            self._lent += nbytes
            return lent

    def take_back(self, nbytes: int) -> None:
        """What was lent has been freed: give it to the driver, or torch would take small parts of it for others."""
        with self.lock:
            self._settle()
            self._lent -= nbytes
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _fragments(self) -> int:
        """Bytes that the allocator may be unable to join again. Expandable segments have none, whatever it counts."""
        if self._is_expandable is None:
            segments = self._segments()
            self._is_expandable = any(segment.get("is_expandable") for segment in segments) if segments else None
        if self._is_expandable:
            return 0
        return self._counted("inactive_split_bytes", "peak")[0]

    def _segments(self) -> list[dict[str, Any]]:
        """torch's, of any GPU. CUDA's own allocator has none."""
        has_any = self._device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        return list(torch.cuda.memory_snapshot()) if has_any else []

    def _allocated(self) -> tuple[int, int]:
        """What nobody else can have now, and the most so far, both without what is lent.

        That includes what has been freed while a stream, as that of a gradient's copy, has yet to pass it.
        """
        lent = self._lent  # counting may collect somebody who gives back
        now, most = self._counted("active_bytes", "current", "peak")
        return now - lent, max(self._needed, most - lent)

    def _counted(self, what: str, *when: str) -> list[int]:
        """Of `torch.cuda.memory_stats`, which sorts all of its numbers each time. Each call makes them all."""
        if self._device.type != "cuda":
            return [0] * len(when)
        found = torch.cuda.memory_stats_as_nested_dict(self._device).get(what, {}).get("all", {})
        return [int(found.get(each, 0)) for each in when]

    def _settle(self) -> None:
        """The lent part is about to change: note the peak so far."""
        _, self._needed = self._allocated()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin_session(self) -> None:
        """What was needed before it, to load a model for example, says nothing about its steps.

        But graphs that were captured keep their memory, of which only the peak tells.
        """
        segments = self._segments()
        if all(tuple(segment.get("segment_pool_id", ())) in ((), (0, 0)) for segment in segments):
            self.begin_anew()

    def begin_anew(self) -> None:
        """What was needed so far, before the first step or before an eviction, says nothing about the next steps."""
        with self.lock:
            self._settle()
            self._needed = 0

    def forget(self) -> None:
        """The same, where torch's peak has begun anew already. What others leave of the memory is asked for, too."""
        with self.lock:
            self._needed = self._asked = 0

    def for_state_bytes(self) -> int | None:
        """The first plan's bound, before a step was measured: what is free, less a margin.

        With "auto" that takes no more of it than the host has no room for.
        """
        if self._device.type != "cuda":
            return None
        self._asked = 0  # training begins anew
        usable, cap = self._limits()
        return max(usable - int(GPU_MARGIN * cap) - torch.cuda.memory_allocated(self._device), 0)

    def shared_bytes(self) -> int:
        """What of the host's memory this process may still take on a GPU that has none of its own; 0 on any other.

        Whoever plans with both counts it once: as the GPU's, where state takes no second copy of weights.
        """
        if self._device.type != "cuda" or not is_integrated(self._device):
            return 0
        usable, _ = self._limits()
        return max(usable - torch.cuda.memory_reserved(self._device), 0)

    def for_waiting_bytes(self) -> int:
        """What gradients may take that wait for the state of their layers to visit the GPU; on a CPU none have to."""
        if self._device.type != "cuda":
            return 0
        usable, _ = self._limits()
        return int(WAITING_SHARE * usable)

    def _limits(self) -> tuple[int, int]:
        """Bytes that this process can have in all, now; and the cap on that.

        `set_per_process_memory_fraction`, or the same in PYTORCH_CUDA_ALLOC_CONF, caps what the allocator takes.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        if is_integrated(self._device):  # it is the host's memory, of which the processes need some
            free = max(min(free, beside_margin(available_bytes())), 0)
        cap = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        cap = cap if self.limit is None else min(cap, self.limit)
        return min(free + torch.cuda.memory_reserved(self._device), cap), cap


#: That of a device, for all who plan with it.
gpu_memory: Final = cache(GpuMemory)


def is_integrated(device: torch.device) -> bool:
    """Whether this GPU's memory is the host's, as in GB10 and Jetson."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def host_bytes(layouts: list[ArenaLayout], k: float = 0.0, visit: float = 0.0) -> int:
    """Host memory for the planes of these layers."""
    planes = [plane for layout in layouts for plane in layout.plane_nbytes.items()]
    of_cpu, of_visit = (
        sum(nbytes for plane, nbytes in planes if sizes.is_on_host(plane, placement)) for placement in (CPU, VISIT)
    )
    visiting = min(visit, 1.0 - k)
    return int((1.0 - k - visiting) * of_cpu + visiting * of_visit)


def require_host_memory(
    layouts: list[ArenaLayout],
    k: float | None,
    limit: int | None,
    *,
    ranks: int = 1,
    gpu_bytes: int | None = None,
    awaits_verdict: bool = False,
    visit: float = 0.0,
    shared: int = 0,
) -> None:
    """Raise `CapacityError`, with the arithmetic, unless the planes at this k fit into the host's memory.

    The share `visit` of the parameters visits the GPU.

    With "auto" (None) some k has to fit, with at most `gpu_bytes` of optimizer state on the GPU, None being none. On a
    GPU whose updates await a verdict the gradients count as well. `limit` states what may be used where the machine's
    memory grows after boot; None asks the machine. `ranks` share the host, and each has its part of it. Of what the
    machine says, `shared` bytes are the GPU's.
    """
    bound, numel = host_bound(limit, ranks, shared), sum(layout.numel for layout in layouts)
    needed = host_bytes(layouts, visit=visit)
    each = f"{needed / max(numel, 1):.1f} bytes per parameter"
    source = "the stated limit" if limit is not None else "what the machine and its control groups leave, less a margin"
    source += " and what the GPU may take of the same memory" if shared and limit is None else ""
    source += f", divided by the {ranks} ranks on this machine" if ranks > 1 else ""
    if k is None and gpu_bytes is not None:
        left = _beyond_gpu(layouts, gpu_bytes, awaits_verdict)
        if host_bytes(left, visit=visit) > bound:
            raise CapacityError(
                f"{numel / 1e6:.1f} M parameters need {gib(needed)} of host memory ({each}) where the GPU "
                f"owns none, above {gib(bound)}, {source}; the {gib(gpu_bytes)} that the GPU has "
                f"for optimizer state hold {len(layouts) - len(left)} of {len(layouts)} layers, which leaves "
                f"{gib(host_bytes(left, visit=visit))} to the host: free memory on either side, or set "
                "host_memory_limit if the machine's memory grows on demand"
            )
        return
    share = host_bytes(layouts, k or 0.0, visit)
    if share > bound:
        raise CapacityError(
            f"the host's share of {numel / 1e6:.1f} M parameters at k={k or 0.0:.2f} needs {gib(share)} of "
            f"host memory ({each}), above {gib(bound)}, {source}: raise k, "
            "free host memory, or set host_memory_limit if the machine's memory grows on demand"
        )


def _beyond_gpu(layouts: list[ArenaLayout], gpu_bytes: int, awaits_verdict: bool) -> list[ArenaLayout]:
    """The layers that are left to the host if the GPU takes all that it has room for, as the first plan would."""
    left = []
    for layout in layouts:
        there = sizes.on_gpu(layout.plane_nbytes, GPU, waits=awaits_verdict)
        size = sum(there.values()) - there[sizes.WEIGHTS]
        if size <= gpu_bytes:
            gpu_bytes -= size
        else:
            left.append(layout)
    return left


def host_bound(limit: int | None, ranks: int = 1, shared: int = 0) -> int:
    """Bytes of host memory that planes may take on each of `ranks` ranks.

    Together they get what is stated, or what the machine has left now, less a margin and `shared`: what the GPU may
    take of the same memory. All ranks have to ask before the first one takes its part.
    """
    left = beside_margin(available_bytes(), ranks) - shared if limit is None else limit
    return max(left, 0) // ranks


def beside_margin(available: int, ranks: int = 1) -> int:
    """What planes may take of so many bytes of host memory; below 0 if the margin is more.

    Where memory is short, all ranks' processes have an eighth of it together, or the margin of one.
    """
    processes = max(HOST_MARGIN_BYTES, min(ranks * HOST_MARGIN_BYTES, available // 8))
    return int((1.0 - HOST_MARGIN) * available) - processes


class HostRoom(NamedTuple):
    """What planes may take of a rank's host memory: `free` is what `host_free` returns, `stated_bytes` are for all."""

    free: Callable[[], int | None]
    stated_bytes: int | None = None


def host_free(
    limit: int | None, device: torch.device, ranks: int = 1, shared: Callable[[], int] = lambda: 0
) -> Callable[[], int | None]:
    """What asks how many bytes the planes of each of `ranks` ranks may still take; below 0, some of the margin is used.

    The margin is that of now, as in `host_bound`. What the GPU may take of the same memory is `shared()`. It is None,
    and the machine is not asked, with a stated `limit`; and on device "cpu", where what leaves the planes stays in the
    host's memory.
    """
    if limit is not None or device.type == "cpu":
        return lambda: None
    margin = available_bytes() - beside_margin(available_bytes(), ranks)
    return lambda: (available_bytes() - shared() - margin) // ranks
