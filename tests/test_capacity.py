"""What fits: free GPU memory under the allocator's cap, and a k that the host's memory allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain.errors import CapacityError
from hytrain.memory import capacity
from hytrain.memory.capacity import (
    GPU_MARGIN,
    GpuMemory,
    host_bound,
    host_bytes,
    host_free,
    require_host_memory,
)
from protocol.handles import layout
from protocol.messages import Layer, Segment

GB = 10**9


def tell(
    patch: pytest.MonkeyPatch,
    cap: float,
    there: float,
    reserved: float,
    allocated: float,
    peak: float,
    fragments: float = 0,
    *,
    is_integrated: bool = False,
) -> GpuMemory:
    """A GPU of 100 GB, as torch tells of it. `cap` is a share of that, the rest is in GB.

    With negative `fragments`, segments can grow, and torch counts what is free in them.
    """
    told = {"mem_get_info": (there * GB, 100 * GB), "get_per_process_memory_fraction": cap}
    told |= {"memory_reserved": reserved * GB, "memory_allocated": allocated * GB}
    told["memory_stats_as_nested_dict"] = counted(allocated, peak, fragments)
    told |= {"get_device_properties": SimpleNamespace(is_integrated=is_integrated)}
    told |= {"get_allocator_backend": "native", "memory_snapshot": [{"is_expandable": fragments < 0}]}
    for name, value in told.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return GpuMemory(torch.device("cuda"))


def counted(allocated: float, peak: float, fragments: float = 0) -> dict[str, Any]:
    numbers = {"active_bytes": (allocated, peak), "inactive_split_bytes": (0, abs(fragments))}
    return {name: {"all": {"current": now * GB, "peak": most * GB}} for name, (now, most) in numbers.items()}


def free(memory: GpuMemory) -> int | None:
    room = memory.room()
    return None if room is None else room.free


@pytest.mark.parametrize(
    ("device", "free_gb", "for_state"),
    [
        ((1.0, 60, 35, 20, 30), 60 + 35 - 30 - GPU_MARGIN * 100, 60 + 35 - 20 - GPU_MARGIN * 100),
        # However much the driver has: 24 GB are allowed, a step has needed 20.
        ((0.24, 60, 21, 8, 20), 24 - 20 - GPU_MARGIN * 24, 24 - 8 - GPU_MARGIN * 24),
        # Others on the same GPU count below the cap.
        ((0.5, 5, 10, 6, 8), 5 + 10 - 8 - GPU_MARGIN * 50, 5 + 10 - 6 - GPU_MARGIN * 50),
        ((1.0, 0, 10, 10, 12), 0, 0),  # rather than less
        ((0.1, 0, 10, 10, 12), 0, 0),
        ((1.0, 60, 35, 20, 30, 3), 60 + 35 - 30 - 3 - GPU_MARGIN * 100, 60 + 35 - 20 - GPU_MARGIN * 100),  # fragments
        (
            (1.0, 60, 35, 20, 30, -3),
            60 + 35 - 30 - GPU_MARGIN * 100,
            60 + 35 - 20 - GPU_MARGIN * 100,
        ),  # none, in segments that grow
    ],
)
def test_what_no_step_has_needed_is_free(
    monkeypatch: pytest.MonkeyPatch, device: tuple[float, ...], free_gb: float, for_state: float
) -> None:
    memory = tell(monkeypatch, *device)
    assert (free(memory), memory.for_state_bytes()) == pytest.approx((free_gb * GB, for_state * GB))


def test_the_limit_caps_what_is_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a cap on torch's allocator; the smaller one counts."""
    capped = [(cap, limit) for cap, limit in ((0.24, None), (0.24, 50 * GB), (1.0, 24 * GB), (0.5, 24 * GB))]
    found = []
    for cap, limit in capped:
        memory = tell(monkeypatch, cap, 60, 21, 8, 20)
        memory.limit = limit
        found.append((memory.room(), memory.for_state_bytes()))
    assert found == found[:1] * 4 and found[0][1] == pytest.approx((24 - 8 - GPU_MARGIN * 24) * GB)


def test_state_that_has_just_come_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the planner, which adds it, would count it twice until the driver is asked again."""
    memory = tell(monkeypatch, 1.0, 60, 35, 20, 30)
    before = [free(memory) for _ in range(6)][-1]
    tell(monkeypatch, 1.0, 60, 35, 20, 36)
    assert before is not None and free(memory) == before - 6 * GB


def test_what_is_lent_is_used_until_it_is_back_and_then_not_needed_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, told = tell(monkeypatch, 1.0, 60, 35, 20, 30), {"allocated": 20.0, "peak": 30.0}
    usable = 60 + 35 - GPU_MARGIN * 100

    def allocate(gb: float) -> None:
        told["allocated"] += gb
        told["peak"] = max(told.values())

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: counted(**told))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: told.update(peak=told["allocated"]))
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: allocate(nbytes / GB) or "lent")
    assert memory.lend(int((usable - 29) / 2 * GB)) is None, "a step has needed 30, and as much has to stay free"
    assert memory.lend(20 * GB) is not None and free(memory) == pytest.approx((usable - 20 - 30) * GB)
    assert memory.lend(10 * GB) is not None and free(memory) == pytest.approx((usable - 30 - 30) * GB)
    for step_gb in (15, -15):
        allocate(step_gb)
    assert free(memory) == pytest.approx((usable - 30 - 35) * GB)
    for nbytes in (20, 10):
        allocate(-nbytes)
        memory.take_back(nbytes * GB)
    assert free(memory) == pytest.approx((usable - 35) * GB)
    allocate(16)
    assert free(memory) == pytest.approx((usable - 36) * GB)


@pytest.mark.parametrize("pool", [(0, 0), (0, 1)], ids=["no graphs", "graphs"])
def test_what_was_needed_before_a_session_says_nothing_unless_graphs_keep_it(
    pool: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, peak = tell(monkeypatch, 1.0, 60, 35, 20, 50), 50.0
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": (0, 0)}, {"segment_pool_id": pool}])

    def reset(_: object) -> None:
        nonlocal peak
        peak = 20.0

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: counted(20.0, peak))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    memory.begin_session()
    room = memory.room()
    assert room is not None and room.needed == (20 if pool == (0, 0) else 50) * GB


def test_without_a_gpu_nothing_is_known() -> None:
    memory = GpuMemory(torch.device("cpu"))
    assert memory.room() is None and memory.for_state_bytes() is None


SEGMENT = Segment(name="w", numel=1 << 20, dtype="bfloat16", grads_dtype="bfloat16", group=0)
LAYERS = [Layer(lid=lid, position=lid, name="layer", segments=(SEGMENT,)) for lid in range(10)]
LAYOUTS = [layout(layer) for layer in LAYERS]
ON_HOST, ON_GPU = 14 << 20, 10 << 20  # of each layer


def test_auto_is_refused_only_if_no_k_fits() -> None:
    limit = 7 * ON_HOST
    require_host_memory(LAYOUTS, None, limit, gpu_bytes=3 * ON_GPU)
    sentence = (
        r"10\.5 M parameters need 140\.0 MiB of host memory \(14\.0 bytes per parameter\) where the GPU owns none, "
        r"above 98\.0 MiB, the stated limit; the 30\.0 MiB that the GPU has for optimizer state hold 2 of 10 layers, "
        r"which leaves 112\.0 MiB to the host: "
    )
    with pytest.raises(CapacityError, match=sentence):
        require_host_memory(LAYOUTS, None, limit, gpu_bytes=3 * ON_GPU - 1)


def test_gradients_that_await_a_verdict_need_room_on_the_gpu_too() -> None:
    with pytest.raises(CapacityError):
        require_host_memory(LAYOUTS, None, 7 * ON_HOST, gpu_bytes=3 * ON_GPU, awaits_verdict=True)
    require_host_memory(LAYOUTS, None, 7 * ON_HOST, gpu_bytes=3 * (ON_GPU + (2 << 20)), awaits_verdict=True)


def test_without_a_gpu_all_lies_on_the_host() -> None:
    require_host_memory(LAYOUTS, None, 10 * ON_HOST)
    with pytest.raises(CapacityError, match=r"at k=0\.00 needs 140\.0 MiB"):
        require_host_memory(LAYOUTS, None, 10 * ON_HOST - 1)


def test_what_visits_needs_no_gradients() -> None:
    less = 2 << 20
    require_host_memory(LAYOUTS, None, 10 * (ON_HOST - less), visit=1.0)
    require_host_memory(LAYOUTS, 0.5, 5 * (ON_HOST - less), visit=0.5)
    for k, visit in ((None, 0.9), (0.5, 0.4), (0.4, 0.5)):
        with pytest.raises(CapacityError):
            require_host_memory(LAYOUTS, k, (5 if k else 10) * (ON_HOST - less), visit=visit)


def test_ranks_on_one_machine_divide_its_memory() -> None:
    require_host_memory(LAYOUTS, None, 20 * ON_HOST, ranks=2)
    with pytest.raises(
        CapacityError, match=r"140\.0 MiB, the stated limit, divided by the 2 ranks on this machine: raise"
    ):
        require_host_memory(LAYOUTS, None, 20 * ON_HOST - 1, ranks=2)


def test_a_given_k_is_taken_at_its_word() -> None:
    require_host_memory(LAYOUTS, 0.3, 7 * ON_HOST, gpu_bytes=0)
    with pytest.raises(CapacityError, match=r"at k=0\.20 needs 112\.0 MiB .* raise k"):
        require_host_memory(LAYOUTS, 0.2, 7 * ON_HOST, gpu_bytes=1 << 40)


def test_a_second_bank_takes_more_of_the_host_than_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    available = (10 * ON_HOST + capacity.HOST_MARGIN_BYTES) / (1 - capacity.HOST_MARGIN)
    monkeypatch.setattr(capacity, "available_bytes", lambda: int(available) + 1)
    double = [layout(layer, banks=2) for layer in LAYERS]
    require_host_memory(LAYOUTS, None, None)
    assert host_bytes(double) > host_bound(None) >= host_bytes(double, 0.5)


def test_what_is_left_of_host_memory_counts_from_the_same_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    left = 100 * gib
    monkeypatch.setattr(capacity, "available_bytes", lambda: left)
    gpu = torch.device("cuda")
    free, shared, stated = host_free(None, gpu), host_free(None, gpu, ranks=2), host_free(50 * gib, gpu)
    assert free() == host_bound(None) == 95 * gib
    assert shared() == host_bound(None, 2) == 46 * gib, "the second rank has processes, too"
    left = 16 * gib
    assert [host_bound(None, ranks) // 2**28 for ranks in (1, 2, 4, 8)] == [50, 25, 12, 6], "3 GiB, not 24"
    left = 15 * gib
    assert (free(), shared(), stated()) == (10 * gib, 7 * gib // 2, None)
    left = 4 * gib
    assert (free(), shared()) == (-gib, -2 * gib), "the margins are 5 and 8 GiB"
    assert host_free(None, torch.device("cpu"))() is None, "moving layers would free nothing"


def test_memory_that_gpu_and_host_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GB, of which 60 are free and may become the GPU's, 30 are its own, and 10 are cached files."""
    monkeypatch.setattr(capacity, "available_bytes", lambda: 70 * GB)
    device, margin = torch.device("cuda"), 70 * GB - host_bound(None)
    apart = tell(monkeypatch, 1.0, 60, 30, 20, 30)
    assert apart.shared_bytes() == 0
    memory = tell(monkeypatch, 1.0, 60, 30, 20, 30, is_integrated=True)
    assert memory.shared_bytes() == 60 * GB
    assert host_bound(None, 1, memory.shared_bytes()) == 10 * GB - margin
    left = host_free(None, device, 1, memory.shared_bytes)
    assert left() == 10 * GB - margin
    tell(monkeypatch, 1.0, 40, 50, 40, 50, is_integrated=True)
    monkeypatch.setattr(capacity, "available_bytes", lambda: 50 * GB)
    assert left() == 10 * GB - margin, "what the GPU has taken since, it has taken from its own part"
    with pytest.raises(CapacityError, match="and what the GPU may take of the same memory"):
        require_host_memory(LAYOUTS, None, None, gpu_bytes=1, shared=50 * GB)
    assert GpuMemory(torch.device("cpu")).shared_bytes() == 0


def test_the_host_keeps_its_margin_where_the_gpu_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 60 * GB)
    for is_integrated, free in ((False, 60 * GB), (True, host_bound(None))):
        memory = tell(monkeypatch, 1.0, 60, 0, 0, 0, is_integrated=is_integrated)
        assert memory.for_state_bytes() == free - int(GPU_MARGIN * 100 * GB)
        assert host_bound(None, 1, memory.shared_bytes()) == (0 if is_integrated else host_bound(None))
