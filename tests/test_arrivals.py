"""Optimizers of one process that bring state to one GPU: whose plans know what the others have brought."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from hytrain.memory.arrivals import Arrivals
from hytrain.memory.capacity import GpuMemory


@pytest.fixture
def two() -> tuple[Arrivals, Arrivals]:
    memory = GpuMemory(torch.device("cuda"))
    return Arrivals(memory), Arrivals(memory)


def test_a_plan_is_taken_after_a_whole_step_with_what_others_have_brought(two: tuple[Arrivals, Arrivals]) -> None:
    one, other = two
    assert one.claim() and one.claim(), "what is its own counts in its plans anyway"
    for _ in range(9):
        assert not other.claim(), "both were made of the same memory, which may not be taken yet"
        other.end_step()
    one.came()
    other.end_step()
    assert not other.claim(), "it came in the middle of this step"
    other.end_step()
    assert other.claim() and not one.claim()
    other.came()
    one.end_step()
    one.end_step()
    assert one.claim()


def test_nobody_waits_for_what_does_not_come() -> None:
    memory = GpuMemory(torch.device("cuda"))
    one, other = Arrivals(memory), Arrivals(memory)
    assert one.claim()
    one.lapsed()
    assert other.claim() and not one.claim()
    del other
    assert one.claim() and not Arrivals(memory).claim(), "the other one is gone"


def test_memory_without_a_bound_has_room_for_all() -> None:
    memory = GpuMemory(torch.device("cpu"))
    one, other = Arrivals(memory), Arrivals(memory)
    assert one.claim() and other.claim()


def test_an_optimizer_may_be_collected_while_another_looks_at_the_memory() -> None:
    memory = GpuMemory(torch.device("cuda"))
    one, other = Arrivals(memory), Arrivals(memory)

    def collects() -> None:
        assert memory.lock.acquire(blocking=False), "or closing it, on this thread, would wait for itself"
        memory.lock.release()
        one.lapsed()

    assert one.claim()
    with mock.patch.object(memory, "room", collects):
        assert memory.lend(1) is None
    assert other.claim()
