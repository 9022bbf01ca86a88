"""What fits: free GPU memory under the allocator's cap, and a k that the host's memory allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hytrain.errors import CapacityError
from hytrain.memory import capacity
from hytrain.memory.capacity import GPU_MARGIN, GpuMemory, require_host_memory, second_bank_fits
from protocol.handles import layout
from protocol.messages import Layer, Segment

GB = 10**9
Device = Callable[..., GpuMemory]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU of 100 GB, as torch tells of it."""

    def tell(
        *, fraction: float = 1.0, free: int, reserved: int, allocated: int, peak: int, fragments: int = 0
    ) -> GpuMemory:
        for name, value in (
            ("mem_get_info", (free, 100 * GB)),
            ("memory_reserved", reserved),
            ("memory_allocated", allocated),
            ("max_memory_allocated", peak),
            ("get_per_process_memory_fraction", fraction),
            ("memory_stats", {"inactive_split_bytes.all.peak": fragments}),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        return GpuMemory(torch.device("cuda"))

    return tell


def test_what_no_step_has_needed_is_free(device: Device) -> None:
    memory = device(free=60 * GB, reserved=35 * GB, allocated=20 * GB, peak=30 * GB)
    assert memory.free_bytes() == (60 + 35 - 30) * GB - GPU_MARGIN * 100 * GB


def test_the_allocators_cap_counts(device: Device) -> None:
    """However much the driver has: 24 GB are allowed, a step has needed 20."""
    memory = device(fraction=0.24, free=60 * GB, reserved=21 * GB, allocated=8 * GB, peak=20 * GB)
    assert memory.free_bytes() == 4 * GB - GPU_MARGIN * 24 * GB
    assert memory.for_state_bytes() == (24 - 8) * GB // 2


def test_fragments_are_not_free(device: Device) -> None:
    memory = device(free=60 * GB, reserved=35 * GB, allocated=20 * GB, peak=30 * GB, fragments=3 * GB)
    assert memory.free_bytes() == (60 + 35 - 30 - 3) * GB - GPU_MARGIN * 100 * GB


def test_state_that_has_just_come_is_used_at_once(device: Device) -> None:
    """Or the planner, which adds it, would count it twice until the driver is asked again."""
    told = {"free": 60 * GB, "reserved": 35 * GB, "allocated": 20 * GB}
    memory = device(**told, peak=30 * GB)
    before = [memory.free_bytes() for _ in range(6)][-1]
    device(**told, peak=36 * GB)
    after = memory.free_bytes()
    assert before is not None and after is not None and before - after == 6 * GB


def test_others_on_the_same_gpu_count_below_the_cap(device: Device) -> None:
    memory = device(fraction=0.5, free=5 * GB, reserved=10 * GB, allocated=6 * GB, peak=8 * GB)
    assert memory.free_bytes() == (5 + 10 - 8) * GB - GPU_MARGIN * 50 * GB
    assert memory.for_state_bytes() == (5 + 10 - 6) * GB // 2


@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_nothing_is_free_rather_than_less(device: Device, fraction: float) -> None:
    memory = device(fraction=fraction, free=0, reserved=10 * GB, allocated=10 * GB, peak=12 * GB)
    assert memory.free_bytes() == 0 and memory.for_state_bytes() == 0


def test_without_a_gpu_nothing_is_known() -> None:
    memory = GpuMemory(torch.device("cpu"))
    assert memory.free_bytes() is None and memory.for_state_bytes() is None


# ---------------------------------------------------------------- the host

SEGMENT = Segment(name="w", numel=1 << 20, dtype="bfloat16", grads_dtype="bfloat16", group=0)
LAYERS = [Layer(lid=lid, position=lid, name="layer", segments=(SEGMENT,)) for lid in range(10)]
LAYOUTS = [layout(layer) for layer in LAYERS]
ON_HOST, ON_GPU = 14 << 20, 10 << 20  # of each layer


def test_auto_is_refused_only_if_no_k_fits() -> None:
    limit = 7 * ON_HOST
    require_host_memory(LAYOUTS, None, limit, gpu_bytes=3 * ON_GPU)
    sentence = (
        r"10\.5 M parameters need 0\.15 GB of host memory \(14\.0 bytes per parameter\) where the CPU updates them, "
        r"above 0\.10 GB, the stated limit; the 0\.03 GB that the GPU has for optimizer state hold 2 of 10 layers, "
        r"which leaves 0\.12 GB to the host: "
    )
    with pytest.raises(CapacityError, match=sentence):
        require_host_memory(LAYOUTS, None, limit, gpu_bytes=3 * ON_GPU - 1)


def test_gradients_that_await_a_verdict_need_room_on_the_gpu_too() -> None:
    with pytest.raises(CapacityError):
        require_host_memory(LAYOUTS, None, 7 * ON_HOST, gpu_bytes=3 * ON_GPU, awaits_verdict=True)
    require_host_memory(LAYOUTS, None, 7 * ON_HOST, gpu_bytes=3 * (ON_GPU + (2 << 20)), awaits_verdict=True)


def test_without_a_gpu_all_lies_on_the_host() -> None:
    require_host_memory(LAYOUTS, None, 10 * ON_HOST)
    with pytest.raises(CapacityError, match=r"at k=0\.00 needs 0\.15 GB"):
        require_host_memory(LAYOUTS, None, 10 * ON_HOST - 1)


def test_a_given_k_is_taken_at_its_word() -> None:
    require_host_memory(LAYOUTS, 0.3, 7 * ON_HOST, gpu_bytes=0)
    with pytest.raises(CapacityError, match=r"at k=0\.20 needs 0\.12 GB .* raise k"):
        require_host_memory(LAYOUTS, 0.2, 7 * ON_HOST, gpu_bytes=1 << 40)


def test_the_second_bank_is_not_worth_a_larger_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 10 * ON_HOST + capacity.HOST_MARGIN_BYTES)
    double = [layout(layer, banks=2) for layer in LAYERS]
    require_host_memory(LAYOUTS, None, None)
    assert not second_bank_fits(double, None, None) and second_bank_fits(double, 0.5, None)
