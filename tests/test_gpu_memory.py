"""On a GPU: memory that gives way. State leaves at once, HyTrain parks, and a longer batch gets the room for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import assert_same, deterministic, llama, state_of
from torch import nn

import hytrain
from hytrain.memory.planes import DevicePlanes

pytestmark = [pytest.mark.gpu, pytest.mark.spawns, pytest.mark.usefixtures("forked_workers")]
__all__ = ["deterministic"]  # a fixture that all tests here use

STEPS = 20


@pytest.fixture(autouse=True)
def uncapped() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def step(model: nn.Module, opt: hytrain.AdamW, number: int, length: int = 64) -> None:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randint(0, 1024, (4, length), generator=generator).cuda()
    opt.scale(model(input_ids=batch, labels=batch).loss).backward()
    opt.step()
    opt.zero_grad()


def requested_bytes() -> int:
    """Of torch's allocator, now. It may have allocated more: a block that is found is cut only if much is left.

    What is free once streams have passed it counts until the allocator has looked.
    """
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.7}, {"visit": 0.3}], ids=["plain", "clipped", "visits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_evictions_in_any_phase_leave_the_bits(dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for chance in (0.0, 0.02):
        model = llama(dtype)
        with hytrain.AdamW(model, k=0.7, run_dir=str(tmp_path / str(chance)), **options) as opt:
            rng = random.Random(0)

            def act(*_: object, chance: float = chance, rng: random.Random = rng, opt: hytrain.AdamW = opt) -> None:
                if rng.random() < chance:
                    opt._engine.evictions.evict(1, "a test")

            for module in model.modules():
                module.register_forward_hook(act)
            for parameter in model.parameters():
                parameter.register_hook(act)
                parameter.register_post_accumulate_grad_hook(act)
            for number in range(STEPS):
                step(model, opt, number)
            found.append(state_of(model, opt))
    assert_same(found)


@pytest.mark.parametrize("weights", [False, True], ids=["state", "weights, too"])
@pytest.mark.parametrize("options", [{"k": 0.6, "visit": 0.2}, {"k": 0.5, "offload_weights": 0.4}], ids=str)
def test_parking_gives_the_memory_back_and_leaves_the_bits(
    options: dict[str, Any], weights: bool, tmp_path: Path
) -> None:
    found = []
    for parks in (False, True):
        model = llama(torch.bfloat16)
        with hytrain.AdamW(model, run_dir=str(tmp_path / str(parks)), **options) as opt:
            for number in range(STEPS):
                step(model, opt, number)
                if not parks:
                    continue
                opt.synchronize()
                layers, before = opt._session.layers, torch.cuda.memory_allocated()
                held = sum(layer.device.nbytes for layer in layers if isinstance(layer.planes, DevicePlanes))
                if weights:
                    held += sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
                with opt.parked(weights=weights):
                    assert not any(isinstance(layer.planes, DevicePlanes) for layer in layers)
                    assert held and torch.cuda.memory_allocated() <= before - held
                assert torch.cuda.memory_allocated() <= before + (1 << 20)
            found.append(state_of(model, opt))
    assert_same(found)


def test_parking_two_hundred_times_leaks_nothing(tmp_path: Path) -> None:
    model = llama(torch.bfloat16)
    with hytrain.AdamW(model, k=0.5, run_dir=str(tmp_path)) as opt:
        seen = set[int]()
        for number in range(3):
            step(model, opt, number)
        for _ in range(200):
            with opt.parked(weights=True):
                pass
            seen.add(requested_bytes())
        assert len(seen) == 1
        step(model, opt, 3)


def test_a_longer_batch_gets_its_room_before_its_forward(tmp_path: Path) -> None:
    """Below a cap that short batches fill with state."""
    found = []
    for is_capped in (False, True):
        model = llama(torch.float32)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # others have trained in this process
        with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path / str(is_capped))) as opt:
            for number in range(4):
                step(model, opt, number)
                step(model, opt, 10 + number, length=32)
            if is_capped:
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction((torch.cuda.max_memory_reserved() + (2 << 20)) / total)
                opt._session.memory.limit_to(None)
            for number, length in enumerate((256, 64, 256)):
                step(model, opt, 20 + number, length)
            # What has left visits the GPU until a plan gives it to the CPU.
            assert (len(opt.statistics().gpu_layers) < len(opt._session.layers)) is is_capped
            torch.cuda.set_per_process_memory_fraction(1.0)
            found.append(state_of(model, opt))
    assert_same(found)
