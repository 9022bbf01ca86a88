"""On a GPU: memory that gives way. State leaves at once, HyTrain parks, and a longer batch gets the room for it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import assert_same, deterministic, llama, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.memory.planes import DevicePlanes

pytestmark = [pytest.mark.gpu, pytest.mark.spawns, pytest.mark.usefixtures("forked_workers")]
__all__ = ["deterministic"]  # a fixture that all tests here use

STEPS = 20


@pytest.fixture(autouse=True)
def uncapped() -> Iterator[None]:
    gc.collect()  # earlier tests' errors hold frames in cycles, which Python would free at any time
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def step(model: nn.Module, opt: hytrain.AdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randint(0, 1024, (4, 64), generator=generator).cuda()
    opt.scale(model(input_ids=batch, labels=batch).loss).backward()
    opt.step()
    opt.zero_grad()


class Tower(nn.Module):
    """192 MB of state in 24 layers, and a batch of 640 needs 92 MB more than one of 160, or half of that."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def fit(model: nn.Module, opt: hytrain.AdamW, number: int, rows: int) -> None:
    """A step."""
    x = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(number)).cuda()
    (model(x) - x.sin()).square().mean().backward()
    opt.step()
    opt.zero_grad()


def cap(nbytes: int) -> None:
    """torch may take so many bytes of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)


def begin_measuring() -> None:
    """torch's peak of memory is that of what comes now. An earlier model may be part of a cycle."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


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
        model = Tower(checkpointed=False).cuda()
        begin_measuring()
        with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path / str(is_capped))) as opt:
            for number in range(4):
                fit(model, opt, number, rows=160)
                fit(model, opt, 10 + number, rows=80)
            if is_capped:
                torch.cuda.empty_cache()
                cap(torch.cuda.max_memory_allocated() + (8 << 20))
                opt._session.memory.limit_to(None)
            for number, rows in enumerate((640, 160, 640)):
                fit(model, opt, 20 + number, rows)
            # What has left visits the GPU until a plan gives it to the CPU.
            assert (len(opt.statistics().gpu_layers) < len(opt._session.layers)) is is_capped
            cap(torch.cuda.get_device_properties(0).total_memory)
            found.append(state_of(model, opt))
    assert_same(found)
