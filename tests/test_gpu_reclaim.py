"""On a GPU: torch's allocator evicts state where it lacks memory, in any phase, and the bits stay."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import assert_same, deterministic, llama, state_of
from test_gpu_memory import Tower, begin_measuring, cap, fit, requested_bytes, step, uncapped

import hytrain

pytestmark = [pytest.mark.gpu, pytest.mark.spawns, pytest.mark.usefixtures("forked_workers")]
__all__ = ["deterministic", "uncapped"]  # fixtures that all tests here use

STEPS = 12
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYTRAIN_RECLAIM", "1")


def make_ready(opt: hytrain.AdamW) -> None:
    """Memory for all state that can leave. What is offered then, is with its next update."""
    handover = opt._engine._handover
    handover.make_ready(opt._session.layers)
    handover.wait()


def evictions(opt: hytrain.AdamW) -> int:
    return opt._engine.reclaiming._count()


def press(opt: hytrain.AdamW, nbytes: int = 1 << 22) -> None:
    """Ask for so much until what is cached does not suffice, and state leaves, if any may."""
    torch.cuda.empty_cache()
    cap(torch.cuda.memory_reserved())
    before, held = evictions(opt), []
    try:
        while evictions(opt) == before:
            held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    finally:
        cap(torch.cuda.get_device_properties(0).total_memory)


@pytest.fixture(params=[False, True], ids=["segments", "expandable segments"])
def expandable(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{request.param}")
    yield
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.7}, {"visit": 0.3}], ids=["plain", "clipped", "visits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_evictions_in_any_phase_leave_the_bits(
    dtype: torch.dtype, options: dict[str, Any], expandable: None, tmp_path: Path
) -> None:
    found = []
    for chance in (0.0, 0.02):
        model = llama(dtype)
        with hytrain.AdamW(model, k=0.7, run_dir=str(tmp_path / str(chance)), **options) as opt:
            make_ready(opt)
            rng, before = random.Random(0), evictions(opt)

            def act(*_: object, opt: Any = opt, chance: float = chance, rng: random.Random = rng) -> None:
                if rng.random() < chance:
                    press(opt)

            for module in model.modules():
                module.register_forward_hook(act)
            for parameter in model.parameters():
                parameter.register_hook(act)
                parameter.register_post_accumulate_grad_hook(act)
            for number in range(STEPS):
                step(model, opt, number)
            assert (evictions(opt) > before) is bool(chance)
            found.append(state_of(model, opt))
    assert_same(found)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["in forward", "in backward"])
def test_a_batch_four_times_the_largest_so_far_goes_through(
    checkpointed: bool, expandable: None, tmp_path: Path
) -> None:
    """Below a cap that short batches fill with state, and without what is foreseen before forward."""
    found = []
    for is_capped in (False, True):
        model = Tower(checkpointed).cuda()
        with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path / str(is_capped))) as opt:
            opt._engine.evictions.before_forward = lambda *inputs: None
            make_ready(opt)
            begin_measuring()
            for number in range(4):
                fit(model, opt, number, rows=160)
            before = evictions(opt)
            if is_capped:
                torch.cuda.empty_cache()
                cap(torch.cuda.max_memory_allocated() + (8 << 20))
            for number, rows in enumerate((640, 160, 640)):
                fit(model, opt, 20 + number, rows)
            assert (evictions(opt) > before) is is_capped
            cap(torch.cuda.get_device_properties(0).total_memory)
            found.append(state_of(model, opt))
    assert_same(found)


HOLDER = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_takes_what_is_free_and_gives_it_back(tmp_path: Path) -> None:
    found = []
    for is_crowded in (False, True):
        model = Tower(checkpointed=False).cuda()
        with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path / str(is_crowded))) as opt:
            make_ready(opt)
            for number in range(4):
                fit(model, opt, number, rows=160)
            other = None
            if is_crowded:
                torch.cuda.empty_cache()
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                other = subprocess.Popen([sys.executable, "-c", HOLDER, str(16 << 20)], **pipes)
                assert other.stdout is not None and other.stdout.readline() == "held\n"
            before = evictions(opt)
            for number in range(2):
                fit(model, opt, 20 + number, rows=320)
            assert (evictions(opt) > before) is is_crowded
            if other is not None:
                other.communicate("")
            for number in range(2):
                fit(model, opt, 30 + number, rows=320)
            found.append(state_of(model, opt))
    assert_same(found)


def test_evictions_leak_nothing(tmp_path: Path) -> None:
    """Evicted and brought back by the planner, the GPU has as much as the time before."""
    model, seen = llama(torch.bfloat16), set[int]()
    with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path)) as opt:
        number = 0
        for _ in range(3):
            for _ in range(2):
                make_ready(opt)
                step(model, opt, number := number + 1)
            before, ends_s = evictions(opt), time.monotonic() + DEADLINE_S
            press(opt)
            assert evictions(opt) > before
            while True:
                step(model, opt, number := number + 1)
                opt.synchronize()
                if len(opt.statistics().gpu_layers) == len(opt._session.layers):
                    break
                assert time.monotonic() < ends_s, "nothing has come back"
            seen.add(requested_bytes())
    assert len(seen) == 1


def test_memory_history_is_recorded_beside_it(tmp_path: Path) -> None:
    """Freeing memory then asks for Python's lock, which nobody holds who waits for the allocator."""
    model = llama(torch.float32)
    torch.cuda.memory._record_memory_history(context="all", stacks="python")  # for others, torch starts programs
    try:
        with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path)) as opt:
            make_ready(opt)
            for number in range(3):
                step(model, opt, number)
            before = evictions(opt)
            press(opt)
            assert evictions(opt) > before
            step(model, opt, 3)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_a_request_that_nothing_helps_evicts_nothing_and_says_what_took_the_memory(tmp_path: Path) -> None:
    model = llama(torch.float32)
    with hytrain.AdamW(model, k=1.0, run_dir=str(tmp_path)) as opt:
        make_ready(opt)
        for number in range(3):
            step(model, opt, number)
        before = evictions(opt)
        with pytest.raises(torch.OutOfMemoryError, match="HyTrain: after the last step, weights took"):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        assert evictions(opt) == before
        step(model, opt, 3)
