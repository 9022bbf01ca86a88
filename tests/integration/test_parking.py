"""`opt.park()` gives the device's memory back between two steps, and `opt.resume()` takes it again: the bits stay."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import adamw, differing, opened, state, train, train_until, wait_for, wait_for_coordinator, weights
from small_models import llama, perceptron, square_loss
from torch import nn
from variants import every_second

import hytrain
from hytrain.errors import CapacityError, ConfigError, UsageError
from hytrain.memory import visits
from hytrain.memory.planes import ArenaPlanes, DevicePlanes
from hytrain.model.trained import TrainedLayer
from hytrain.step import arenas, offload, parking
from hytrain.step.arenas import Arenas
from hytrain.step.life import State
from protocol.placement import CPU, GPU, VISIT, Places

STEPS = 12

PLACED: dict[str, dict[str, Any]] = {
    "all on the CPU": {"k": 0.0},
    "half": {"k": 0.5},
    "with visits": {"k": 0.3, "visit": 0.4},
    "moving": {"k": "auto", "policy": "random"},
    "offloaded, moving": {"k": "auto", "policy": "random", "offload_weights": "auto"},
    "clipped": {"k": 0.5, "max_grad_norm": 0.05},
    "in step()": {"k": 0.5, "updates": "step"},
}


def at_home(opt: hytrain.AdamW) -> list[str]:
    """The parameters that have memory."""
    return [known.name for known in opt._session.parameters if known.own.untyped_storage().nbytes()]


@every_second(choice=PLACED.keys(), weights_too=[False, True])
def test_parked_runs_have_the_bits_of_others(choice: str, weights_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)
    found = []
    for parks in (False, True):
        model = llama(torch.bfloat16)
        with adamw(model, **PLACED[choice]) as opt:
            for step in range(STEPS):
                train(model, opt, [step])
                wait_for_coordinator(opt)
                if not parks or step % 3 == 1:
                    continue
                with opt.parked(weights=weights_too):
                    assert not any(isinstance(layer.planes, DevicePlanes) for layer in opt._session.layers)
                    assert not opt._engine._visits._slots
                    assert bool(at_home(opt)) is not weights_too
                    wait_for_coordinator(opt)  # a plan may come meanwhile
                assert choice == "offloaded, moving" or len(at_home(opt)) == len(opt._session.parameters)
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_parking_again_and_again_leaks_nothing() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)

        def cycle() -> int:
            with opt.parked(weights=True):
                pass
            opt.park()
            opt.park(weights=True)
            opt.park()
            opt.resume()
            opt.resume()
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        cycle()
        first = cycle()
        assert {cycle() for _ in range(20)} == {first}
        train(model, opt, [2], square_loss)


def test_what_needs_state_is_refused_while_it_is_parked(tmp_path: Path) -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        opt.park()
        loss = square_loss(model, 2)
        with pytest.raises(UsageError, match=r"call opt\.resume\(\) before training goes on"):
            loss.backward()
        opt.zero_grad()
        with pytest.raises(UsageError, match=r"call opt\.resume\(\) before"):
            opt.step()
        with pytest.raises(UsageError, match=r"call opt\.resume\(\) before"):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with torch.no_grad():
            assert square_loss(model, 3).isfinite()
        opt.save(tmp_path / "saved")
        kept = copy.deepcopy(opt.state_dict())
        opt.load_state_dict(kept)
        opt.resume()
        train(model, opt, [2], square_loss)


def test_weights_that_are_parked_cannot_be_used() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        expected = weights(model)
        opt.park(weights=True)
        for use in (
            lambda: square_loss(model, 2),
            lambda: model[0](torch.zeros(1, 32)),
            lambda: model.state_dict(),
            lambda: next(model.parameters()).norm(),
            lambda: opt.state_dict(),
            lambda: opt.lend_weights(),
            lambda: opt.load_state_dict({}),
            lambda: opt.synchronize(),
        ):
            with torch.no_grad(), pytest.raises(UsageError, match=r"opt\.resume\(\) before they are used"):
                use()
        opt.zero_grad()
        opt.resume()
        assert differing(weights(model), expected) == []


def test_parking_is_between_steps() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        opt.park()  # also before the first
        opt.resume()
        square_loss(model, 0).backward()
        for weights_too in (False, True):
            with pytest.raises(UsageError, match=r"opt\.park\(\) between backward and step\(\): call it after"):
                opt.park(weights_too)
        opt.step()
        opt.zero_grad()
        opt.park()


def test_written_weights_are_the_masters_after_parking() -> None:
    found = []
    for parks in (False, True):
        model = perceptron()
        with adamw(model, k=0.5) as opt:
            train(model, opt, range(2), square_loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            if parks:
                opt.park(weights=True)
                opt.resume()
            train(model, opt, range(2, 4), square_loss)
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_a_view_keeps_a_parameter_where_it_is() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        view = model[1][0].weight.data
        expected = view.clone()
        opt.park(weights=True)
        assert at_home(opt) == ["1.0.weight"] and torch.equal(view, expected)
        opt.resume()


@pytest.mark.parametrize("enough_for", [0, 2])
def test_without_host_memory_nothing_is_parked(enough_for: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made until then is kept for the next time."""
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, [0], square_loss)
        layers, kept = opt._session.layers, opt._engine._handover.arenas.kept
        with monkeypatch.context() as patch:
            available = itertools.chain([1 << 40] * enough_for, itertools.repeat(0))
            patch.setattr(arenas, "available_bytes", lambda: next(available))
            with pytest.raises(CapacityError, match=r"opt\.park\(\) cannot take state from the GPU: it takes"):
                opt.park()
        assert all(isinstance(layer.planes, DevicePlanes) for layer in layers)
        assert sum(kept(layer) is not None for layer in layers) == enough_for
        train(model, opt, [1], square_loss)


@pytest.mark.parametrize("k", [0.5, 1.0])
def test_weights_of_updates_without_state_leave_and_come_back(k: float) -> None:
    """SGD without momentum on float32 weights."""
    theirs, ours = perceptron(), perceptron()
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), range(6), square_loss)
    with opened(hytrain.SGD, ours, lr=0.1, k=k) as opt:
        for step in range(6):
            train(ours, opt, [step], square_loss)
            with opt.parked(weights=True):
                assert at_home(opt) == []
        assert differing(weights(ours), weights(theirs)) == []


def test_parking_comes_between_a_plan_and_its_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's thread has not been started yet: all state leaves, and what comes later of the plan begins nothing."""
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2), square_loss)
        handover, plan = opt._engine._handover, opt._engine._boundary._plans.plan
        assert plan is not None
        next_plan = replace(plan, plan_id=plan.plan_id + 1, places=Places.of([CPU] * len(plan.places)))
        seen = list[bool]()

        def take_back(layer: TrainedLayer) -> None:
            if not seen:
                seen.append(True)
                handover.park()
                seen.append(all(map(handover.may_evict, opt._session.layers)))
                handover.resume()

        with monkeypatch.context() as patch:
            patch.setattr(TrainedLayer, "take_back", take_back)
            handover.prepare(next_plan)
        assert seen == [True, True] and handover._move is None and handover._thread is None
        train(model, opt, range(2, 4), square_loss)


def test_a_plan_that_comes_while_it_resumes_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2), square_loss)
        boundary, handover = opt._engine._boundary, opt._engine._handover
        plan, resume, asked = boundary._plans.plan, handover.resume, list[Any]()
        opt.park()

        def late(*given: Any) -> None:
            boundary._plans.holds = True
            handover.prepare(plan)  # as the link's thread does: it is still parked
            resume(*given)

        with monkeypatch.context() as patch:
            patch.setattr(handover, "resume", late)
            prepare = handover.prepare
            patch.setattr(handover, "prepare", lambda plan: asked.append((plan, handover.is_parked)) or prepare(plan))
            opt.resume()
        assert asked == [(plan, True), (plan, False)]


def test_without_gpu_memory_it_stays_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, [0], square_loss)
        expected = state(opt) | weights(model)
        opt.park(weights=True)

        def full(*tensors: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(parking, "allocate", full)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                opt.resume()
            assert "call resume() again" in raised.value.__notes__[0]
        assert opt._engine._health.life.state is State.PARKED_WEIGHTS
        opt.resume()
        assert differing(state(opt) | weights(model), expected) == []


@pytest.mark.parametrize("has_room", [True, False])
def test_closed_while_parked_weights_are_there(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        expected = weights(model)
        opt.park(weights=True)

        def full(*tensors: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        if not has_room:
            monkeypatch.setattr(parking, "allocate", full)
    assert differing(weights(model), expected) == []


def test_before_there_is_a_model_nothing_is_parked() -> None:
    model = perceptron()
    with hytrain.AdamW(model.parameters()) as opt, opt.parked(weights=True):
        assert square_loss(model, 0).isfinite()


def test_an_eviction_takes_the_memory_that_parking_has_kept() -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, [0])
        opt.park()
        planes = {id(layer.planes) for layer in opt._session.layers}
        opt.resume()
        opt._engine.evictions.evict(1 << 40, "a test")
        assert {id(layer.planes) for layer in opt._session.layers} == planes
        assert all(isinstance(layer.planes, ArenaPlanes) for layer in opt._session.layers)
        train(model, opt, range(1, 4))


def test_plans_wait_while_it_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is prepared moves first. One that comes is prepared afterwards."""
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2))
        engine, plan = opt._engine, opt._engine._boundary._plans.plan
        assert plan is not None
        then = Places.of([VISIT, *[GPU] * (len(plan.places) - 1)])
        next_plan = replace(plan, plan_id=plan.plan_id + 1, places=then)
        monkeypatch.setattr(engine._boundary, "_applied", lambda *plan, **facts: None)
        engine._boundary._plans.plan, engine._boundary._plans.holds = next_plan, True
        first = opt._session.layers[0]
        asked = monkeypatch.setattr(engine._handover.arenas, "asked_for", made_here(engine._handover.arenas))
        assert asked is None
        monkeypatch.setattr(engine._link, "post", lambda *message, **after: None)
        engine._handover.prepare(next_plan)
        opt.park()
        assert first.life.placement is VISIT and engine._handover._move is None
        later = replace(next_plan, plan_id=plan.plan_id + 2, places=Places.of([GPU] * len(plan.places)))
        engine._boundary._plans.plan, engine._boundary._plans.holds = later, True
        engine._handover.prepare(later)
        assert engine._handover._move is None
        opt.resume()
        engine._handover.wait()
        assert engine._handover._move is not None and engine._handover._move.coming == [first]
        engine._boundary._plans.holds = False
        engine._handover.begin(3)
        engine._handover.finish(3)
        engine._handover.wait()
        monkeypatch.undo()


def made_here(arenas: Arenas) -> Any:
    def made(layers: list[TrainedLayer], **how: Any) -> Iterator[tuple[TrainedLayer, ArenaPlanes]]:
        yield from ((layer, arenas.own(layer)) for layer in layers)

    return made


def test_memory_limits_change_while_training() -> None:
    model = llama()
    with adamw(model, k="auto") as opt:
        train(model, opt, [0])
        memory = opt._session.memory
        for limit in (1 << 30, 1 << 31):
            opt.limit_memory(gpu=limit)
            wait_for(lambda limit=limit: memory.limit == limit)
        memory.limit_to(None)  # all sessions of the device have it
        opt.limit_memory(host=0)
        train_until(lambda: len(opt.statistics().gpu_layers) == len(opt._session.layers), model, opt, 1)
        with pytest.raises(ConfigError, match=r"limit_memory\(gpu=-1\): give bytes"):
            opt.limit_memory(gpu=-1)
        with pytest.raises(ConfigError, match=r"limit_memory\(gpu='24'\): a size has a unit"):
            opt.limit_memory(gpu="24")
