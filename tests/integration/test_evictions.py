"""State leaves the GPU at once, in any phase of a step: the bits stay, and the other processes plan on from there."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import adamw, differing, records, state, train, wait_for_coordinator, weights
from small_models import gpt2, llama, perceptron, square_loss, tokens
from torch import nn
from variants import every_second

import hytrain
from hytrain.memory import visits
from hytrain.memory.capacity import GpuMemory, Room
from hytrain.memory.planes import DevicePlanes
from hytrain.readable import gib
from hytrain.step import arenas, offload
from protocol.placement import VISIT

STEPS = 12

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "clipped, waiting": {"max_grad_norm": 0.05, "speculate": False},
    "in step()": {"updates": "step"},
    "without overlap": {"overlap": False},
}


@contextmanager
def at_every_turn(model: nn.Module, act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` before and after modules' forwards, and as gradients come: before HyTrain's own hooks, and after."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda *_: act() and None))
        handles.append(module.register_forward_hook(lambda *_: act() and None))
    for parameter in model.parameters():
        handles.append(parameter.register_hook(lambda _: act() and None))
        handles.append(parameter.register_post_accumulate_grad_hook(lambda _: act() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def evicting(opt: hytrain.AdamW, chance: float, number: int = 0) -> Callable[[], None]:
    """Now and then, a layer's state has to leave the GPU."""
    rng = random.Random(number)

    def act() -> None:
        if rng.random() < chance:
            opt._engine.evictions.evict(1, "a test")

    return act


@every_second(dtype=[torch.float32, torch.bfloat16, torch.float16], mode=MODES.keys())
def test_evictions_in_any_phase_leave_the_bits(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    found, make = [], gpt2 if dtype is torch.float32 else llama
    for evicts in (False, True):
        model = make(dtype)
        with adamw(model, k=1.0, **MODES[mode]) as opt:
            with at_every_turn(model, evicting(opt, 0.02 if evicts else 0.0)):
                train(model, opt, range(STEPS))
            found.append(state(opt) | weights(model))
            wait_for_coordinator(opt)
            assert bool(records(opt)[-1].get("evicted_bytes")) is evicts
    assert differing(*found) == []


PLACED: dict[str, dict[str, Any]] = {
    "half": {"k": 0.5},
    "with visits": {"k": 0.4, "visit": 0.3},
    "moving": {"k": "auto", "policy": "random"},
    "offloaded": {"k": 0.6, "offload_weights": 0.4},
    "offloaded, moving": {"k": "auto", "policy": "random", "offload_weights": "auto"},
    "moving, clipped": {"k": "auto", "policy": "random", "max_grad_norm": 0.05},
}


@pytest.mark.parametrize("choice", PLACED)
def test_evictions_beside_all_placements_leave_the_bits(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left goes to the CPU with a later plan, or comes back, in memory that the trainer has made."""
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)
    expected, steps = llama(torch.bfloat16), 30
    clipped = {name: value for name, value in PLACED[choice].items() if name == "max_grad_norm"}
    with adamw(expected, k=0.0, **clipped) as other:
        train(expected, other, range(steps))
        wanted = state(other) | weights(expected)
    model = llama(torch.bfloat16)
    with adamw(model, **PLACED[choice]) as opt:
        with at_every_turn(model, evicting(opt, 0.003)):
            for step in range(steps):
                train(model, opt, [step])
                wait_for_coordinator(opt)
                opt._engine._handover.wait()
        assert records(opt)[-1]["evicted_bytes"]
        assert differing(state(opt) | weights(model), wanted) == []


@pytest.mark.parametrize("many", [False, True])
def test_evictions_between_backwards_that_sum_leave_the_bits(many: bool) -> None:
    found = []
    for chance in (0.0, 0.02):
        model = perceptron()
        with adamw(model, k=1.0, grad_accumulation=2 if many else 1, updates="auto") as opt:
            act = evicting(opt, chance)
            with at_every_turn(model, act):
                for step in range(STEPS):
                    for part in range(2):
                        square_loss(model, 2 * step + part).backward()
                        act()
                        if not many:
                            break
                    opt.step()
                    opt.zero_grad()
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_the_record_says_what_has_left_and_why() -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2))
        first = opt._engine.evictions._next()
        nbytes = first.device.nbytes
        assert opt._engine.evictions.evict(1, "a longer batch") == nbytes
        assert first.life.placement is VISIT
        train(model, opt, [2, 3])
    last = records(opt, 4)
    assert [line.get("reason", "").endswith(" s, for a longer batch") for line in last] == [False, False, True, False]
    assert [line.get("evicted_bytes") for line in last] == [None, None, nbytes, nbytes]
    assert last[2]["evict_s"] > 0 and "evict_s" not in last[3]


def test_a_plan_that_was_made_before_does_not_bring_a_layer_back() -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, [0])
        engine = opt._engine
        assert engine.evictions.evict(1 << 40, "a test") > 0
        assert all(layer.life.placement is VISIT for layer in opt._session.layers)
        before = engine._boundary._plans.plan
        assert before is not None
        engine._handover.wait()
        engine._handover.prepare(before)
        move = engine._handover._move
        assert move is not None and move.moved == 0
        engine._handover.wait()
        engine._handover._move = None
        engine._handover.prepare(replace(before, plan_id=before.plan_id + 1))
        move = engine._handover._move
        assert move is not None and len(move.coming) == len(opt._session.layers)


def test_without_host_memory_state_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(arenas, "available_bytes", lambda: 0)
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, [0])
        assert opt._engine.evictions.evict(1 << 40, "a test") == 0
        assert "cannot leave the GPU: it takes" in caplog.text
        assert len(opt.statistics().gpu_layers) == len(opt._session.layers)
        train(model, opt, [1])


def test_an_eviction_takes_weights_that_may_rest_in_host_memory() -> None:
    model = llama()
    with adamw(model, k=1.0, offload_weights="auto") as opt:
        train(model, opt, [0])
        opt._engine.evictions.evict(1 << 40, "a test")
        found = [layer for layer in opt._session.layers if layer.block is not None]
        assert found
        for layer in found:
            assert all(torch.equal(*pair) for pair in zip(layer.arena.weights, layer.weights, strict=True))


class Memory:
    """A GPU's memory, of which steps need so much for each element of a batch."""

    def __init__(self, opt: hytrain.AdamW, usable: int) -> None:
        self._opt, self._usable, self.needed, self.is_bounded = opt, usable, 0, True

    @property
    def now(self) -> int:
        layers = self._opt._session.layers
        return sum(layer.device.nbytes for layer in layers if isinstance(layer.planes, DevicePlanes))

    def room(self) -> Room:
        return Room(self._usable, self.needed, self.now)

    def begin_anew(self) -> None:
        self.needed = 0

    begin_session = forget = begin_anew

    def computes(self, elements: int) -> None:
        """A step has its peak."""
        self.needed = max(self.needed, self.now + 100 * elements)
        assert self.now + 100 * elements <= self._usable


@pytest.mark.parametrize("length", [64, 128])
def test_a_batch_larger_than_any_before_gets_room_before_its_forward(length: int) -> None:
    found = []
    for usable in (1 << 40, 0):
        model = llama()
        with adamw(model, k=1.0) as opt:
            memory = Memory(opt, usable)
            memory._usable = memory._usable or memory.now + 100 * 2 * 4 * 16  # with state, for the short batches
            opt._engine.evictions._memory = memory  # type: ignore[assignment]
            for number, rows in enumerate([16, 8, 16, length, 16, length]):
                batch = tokens(number, length=rows)
                loss = model(input_ids=batch, labels=batch).loss
                memory.computes(2 * batch.numel())
                loss.backward()
                opt.step()
                opt.zero_grad()
                opt._engine.evictions.end_step(memory.room())
            found.append(state(opt) | weights(model))
        told = [line["reason"] for line in records(opt, 6) if "evict_s" in line]
        assert len(told) == (0 if usable else 1)
        for reason in told:
            assert f"for a batch of {2 * 4 * length} elements, larger than any before" in reason
    assert differing(*found) == []


def test_the_step_after_one_without_room_gets_room_before_its_forward() -> None:
    """Another program has taken memory, and what was on offer to torch's allocator has left: the rest follows."""
    model = llama()
    with adamw(model, k=1.0) as opt:
        memory = Memory(opt, 1 << 40)
        opt._engine.evictions._memory = memory  # type: ignore[assignment]

        def step(number: int) -> int:
            batch = tokens(number)
            loss = model(input_ids=batch, labels=batch).loss
            memory.computes(batch.numel())
            loss.backward()
            opt.step()
            opt.zero_grad()
            opt._engine.evictions.end_step(memory.room())
            return len(opt.statistics().visiting_layers)

        assert [step(0), step(1)] == [0, 0]
        free, memory._usable = memory.needed - memory.now, memory.needed - 1
        opt._engine.evictions.begin_anew()  # as when state has left in the middle of the last step
        assert step(2) == 1 and memory.now + free <= memory._usable
        assert step(3) == 1
    [reason] = [line["reason"] for line in records(opt, 4) if "evict_s" in line]
    assert "for a batch as large as one that had no room" in reason


def test_evaluation_and_batches_that_are_no_larger_evict_nothing() -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        memory = Memory(opt, 0)
        opt._engine.evictions._memory = memory  # type: ignore[assignment]
        train(model, opt, [0])
        opt._engine.evictions.end_step(memory.room())
        with torch.no_grad():
            model(input_ids=tokens(0, length=64))
        train(model, opt, [1, 2])
        assert len(opt._session.layers) == len(opt.statistics().gpu_layers)


@pytest.mark.parametrize("lacking", [0, 1])
def test_where_all_would_fit_a_line_says_what_can_be_saved(
    lacking: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, model = 0, llama(torch.bfloat16)
    monkeypatch.setattr(GpuMemory, "room", lambda _: Room(1000 + away - lacking, 1000))
    with adamw(model, k=0.0, updates="backward") as opt:
        layouts = [layer.layout for layer in opt._session.layers]
        away = sum(layout.nbytes - layout.plane_nbytes["weights"] for layout in layouts)
        with caplog.at_level(logging.INFO, "hytrain.step.boundary"):
            train(model, opt, range(3))
    said = [record.getMessage() for record in caplog.records if record.name == "hytrain.step.boundary"]
    assert len(said) == 1 - lacking
    assert lacking or said[0].endswith(f"up to {gib(away)}")
