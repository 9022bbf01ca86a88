"""torch's allocator evicts state where it lacks memory: on device "cpu", with a budget (tests/budget.cpp)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import test_fsdp2
import test_muon_ranks
import torch
import torch.distributed as dist
from budgets import UNBOUNDED, Budget, budgeted
from helpers import DEADLINE_S, LR, adamw, differing, opened, records, state, train, wait_for_coordinator, weights
from ranks import RankGroup
from sharded_models import local, next_token_loss
from small_models import gpt2, llama, perceptron, square_loss
from test_evictions import MODES, PLACED, STEPS, at_every_turn
from torch import nn
from torch.utils.checkpoint import checkpoint
from variants import every_second

import hytrain
from hytrain.errors import UsageError
from hytrain.memory import visits
from hytrain.memory.capacity import Room
from hytrain.memory.planes import ArenaPlanes, DevicePlanes
from hytrain.model.trained import TrainedLayer
from hytrain.step import offload
from hytrain.step.arenas import Arenas
from hytrain.step.evictions import Evictions
from protocol.placement import CPU, VISIT


@pytest.fixture
def budget() -> Iterator[Budget]:
    with budgeted() as budget:
        yield budget


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)


def make_ready(opt: hytrain.AdamW) -> None:
    """Memory for all state that can leave. What is offered then, is with its next update."""
    handover, layers = opt._engine._handover, opt._session.layers
    lacking = [layer for layer in layers if handover.may_evict(layer) and handover.arenas.kept(layer) is None]
    if lacking:  # a step beside which that is done is not measured
        handover.make_ready(lacking)
        handover.wait()


def pressing(budget: Budget, chance: float, number: int = 0) -> Callable[[], None]:
    """Now and then, an allocation has no room."""
    rng = random.Random(number)

    def act() -> None:
        if rng.random() < chance:
            budget.press()

    return act


def evicted_bytes(opt: hytrain.AdamW) -> int:
    wait_for_coordinator(opt)
    return int(records(opt)[-1].get("evicted_bytes", 0))


@every_second(dtype=[torch.float32, torch.bfloat16, torch.float16], mode=MODES.keys())
def test_evictions_in_any_phase_leave_the_bits(mode: str, dtype: torch.dtype, budget: Budget) -> None:
    """Where gradients are kept for an update after backward, and where they have no room."""
    found, make = [], gpt2 if dtype is torch.float32 else llama
    for evicts, keeps in ((False, True), (True, True), (True, False)):
        model = make(dtype)
        with adamw(model, k=1.0, **MODES[mode]) as opt:
            if not keeps:
                opt._engine._device.late.heed = lambda room: None  # type: ignore[method-assign]
            make_ready(opt)
            with at_every_turn(model, pressing(budget, 0.02 if evicts else 0.0)):
                train(model, opt, range(STEPS))
            found.append(state(opt) | weights(model))
            assert bool(evicted_bytes(opt)) is evicts
    assert differing(found[1], found[0]) == [] and differing(found[2], found[0]) == []


@pytest.mark.parametrize("choice", PLACED)
def test_evictions_beside_all_placements_leave_the_bits(
    choice: str, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SLOTS", 1)
    expected, steps = llama(torch.bfloat16), 30
    clipped = {name: value for name, value in PLACED[choice].items() if name == "max_grad_norm"}
    with adamw(expected, k=0.0, **clipped) as other:
        train(expected, other, range(steps))
        wanted = state(other) | weights(expected)
    model = llama(torch.bfloat16)
    with adamw(model, **PLACED[choice]) as opt:
        with at_every_turn(model, pressing(budget, 0.01)):
            for step in range(steps):
                make_ready(opt)
                train(model, opt, [step])
                wait_for_coordinator(opt)
                opt._engine._handover.wait()
        assert evicted_bytes(opt)
        assert differing(state(opt) | weights(model), wanted) == []


@pytest.mark.parametrize("options", [{"updates": "backward"}, {"max_grad_norm": 1e-2}], ids=str)
@pytest.mark.parametrize("when", ["left_in_forward", "is_held_until"])
def test_state_leaves_before_its_update(when: str, options: dict[str, Any], budget: Budget) -> None:
    """Before backward, or while its update is held until backward is over: it visits in the same step."""
    found = []
    for evicts in (False, True):
        model = perceptron()
        with adamw(model, k=1.0, **options) as opt:
            make_ready(opt)
            train(model, opt, range(3), square_loss)
            before, loss = budget.evictions, square_loss(model, 3)
            press = lambda *_: [budget.press(), budget.press()] and None  # noqa: E731
            handle = model[0][0].weight.register_hook(press if evicts and when == "is_held_until" else lambda _: None)
            if evicts and when == "left_in_forward":
                press()
            loss.backward()
            placed = [layer.life.placement.name for layer in opt._session.layers]
            assert placed.count("visit") == budget.evictions - before == (2 if evicts else 0)
            opt.step()
            opt.zero_grad()
            handle.remove()
            train(model, opt, [4], square_loss)
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_what_was_saved_leaves_and_what_is_held_stays(budget: Budget) -> None:
    """`torch.save` makes a wrapper of each storage, which stays as long as the storage does."""
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2), square_loss)
        torch.save(opt.state_dict(), BytesIO())
        train(model, opt, [2], square_loss)
        held = opt.state_dict()["state"][0]["exp_avg"].untyped_storage()
        train(model, opt, [3], square_loss)
        before, layers = budget.evictions, opt._session.layers
        for _ in layers:
            budget.press()
        assert budget.evictions - before == len(layers) - 1 and held.nbytes()


def test_no_memory_is_kept_for_a_layer_that_leaves_while_it_is_made(
    budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[TrainedLayer]()

    def made(self: Arenas, layer: TrainedLayer, *, gently: bool) -> ArenaPlanes:
        arena = before(self, layer, gently=gently)
        if gently and not left:
            left.append(layer)
            opt._engine.evictions.evict(1 << 40, "a batch")
        return arena

    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2), square_loss)
        before = Arenas._made
        monkeypatch.setattr(Arenas, "_made", made)
        make_ready(opt)
        (layer,) = left
        assert not isinstance(layer.holds, DevicePlanes)
        assert opt._engine._handover.arenas.kept(layer) is None


def test_who_asks_while_an_eviction_is_noted_waits_for_that(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would find the layer on the GPU, where its state is no more."""
    seen = list[tuple[bool, bool]]()
    leave = Evictions.leave

    def noted(self: Evictions, layer: TrainedLayer, *given: Any, **named: Any) -> Any:
        reclaiming = opt._engine.reclaiming
        seen.append((layer.offer is reclaiming, reclaiming._lock.locked()))
        return leave(self, layer, *given, **named)

    model = perceptron()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2), square_loss)
        before = budget.evictions
        budget.press()
        assert budget.evictions > before
        monkeypatch.setattr(Evictions, "leave", noted)
        train(model, opt, range(2, 4), square_loss)
        assert seen and all(map(all, seen))


def test_updates_without_state_have_nothing_to_offer(budget: Budget) -> None:
    """SGD without momentum on float32 weights: memory is ready, and nothing leaves."""
    found = []
    for evicts in (False, True):
        model = gpt2()
        with opened(hytrain.SGD, model, lr=LR, k=1.0) as opt:
            make_ready(opt)
            with at_every_turn(model, pressing(budget, 0.2 if evicts else 0.0)):
                train(model, opt, range(STEPS))
            assert evicted_bytes(opt) == 0
            found.append(weights(model))
    assert differing(*found) == []


@pytest.mark.parametrize("many", [False, True])
def test_evictions_between_backwards_that_sum_leave_the_bits(many: bool, budget: Budget) -> None:
    found = []
    for chance in (0.0, 0.2):
        model = perceptron()
        with adamw(model, k=1.0, grad_accumulation=2 if many else 1, updates="auto") as opt:
            make_ready(opt)
            before = budget.evictions
            act = pressing(budget, chance)
            with at_every_turn(model, act):
                for step in range(STEPS):
                    for part in range(2 if many else 1):
                        square_loss(model, 2 * step + part).backward()
                        act()
                    opt.step()
                    opt.zero_grad()
            assert (budget.evictions > before) is bool(chance)
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


class Checkpointed(nn.Module):
    """Computes as `inner` does, and what autograd needs again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> Any:
        return checkpoint(self.inner, values, use_reentrant=False)


class Wide(nn.Module):
    """Most of its memory is what it computes in between. `in_backward`: only there."""

    def __init__(self, *, in_backward: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)]
        self.blocks = nn.Sequential(*[Checkpointed(block) if in_backward else block for block in blocks])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(values)
        return found


def learn(model: nn.Module, opt: hytrain.AdamW, rows: list[int]) -> None:
    for number, many in enumerate(rows):
        values = torch.randn(many, 64, generator=torch.Generator().manual_seed(number))
        model(values).square().mean().backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_batch_four_times_the_largest_so_far_goes_through(in_backward: bool, budget: Budget) -> None:
    found, rows = [], [8, 8, 8, 32, 8, 32]
    for is_capped in (False, True):
        model = Wide(in_backward=in_backward)
        with adamw(model, k=1.0) as opt:
            make_ready(opt)
            budget.begin()
            learn(model, opt, rows[:3])
            if is_capped:
                budget.limit = budget.peak + (1 << 14)
            refusals = budget.refusals
            learn(model, opt, rows[3:])
            assert (budget.refusals > refusals) is is_capped
            assert bool(opt.statistics().visiting_layers) is is_capped
            budget.limit = UNBOUNDED
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_memory_that_another_takes_and_gives_back(budget: Budget) -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        budget.begin()
        train(model, opt, range(3))
        budget.limit = budget.peak
        nbytes = sum(layer.device.nbytes for layer in opt._session.layers) // 2
        train(model, opt, [3])  # offered again
        other = torch.empty(nbytes, dtype=torch.uint8)
        train(model, opt, [4])
        assert opt.statistics().visiting_layers
        del other
        train(model, opt, [5, 6])


def test_enough_leaves_at_once_and_last_what_forward_needs_first(budget: Budget) -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2))
        positions = opt._engine._device.positions
        order = sorted(opt._session.layers, key=lambda layer: positions[layer.lid], reverse=True)
        sizes = [layer.holds.nbytes for layer in order if isinstance(layer.holds, DevicePlanes)]
        refusals, before = budget.refusals, budget.evictions
        budget.press(sizes[0] + 1)
        assert (budget.refusals - refusals, budget.evictions - before) == (1, 2)
        assert [layer.planes is layer.holds and layer.life.placement is VISIT for layer in order[:3]] == [
            *(True, True),
            False,
        ]


def test_a_plan_comes_when_state_has_left_that_it_moves(budget: Budget) -> None:
    """It does without that."""
    model = llama()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2))
        engine, layers = opt._engine, opt._session.layers
        before = engine._boundary._plans.plan
        assert before is not None and all(layer.offer is not None for layer in layers)
        budget.press()
        plan = replace(before, plan_id=before.plan_id + 1, places=before.places.moved({one.lid for one in layers}, CPU))
        engine._handover.prepare(plan)
        engine._handover.wait()
        move = engine._handover._move
        assert move is not None and len(move.leaving) == len(layers) - 1
        assert all(layer.offer is None for layer in layers)
        assert sum(layer.life.placement is VISIT for layer in layers) == 1


def test_state_that_somebody_views_stays(budget: Budget) -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2))
        viewed = {layer.lid: layer.holds.parts[0][:1] for layer in opt._session.layers}  # type: ignore[union-attr]
        budget.press(1 << 40)
        assert not any(layer.offer is not None and layer.life.placement is VISIT for layer in opt._session.layers)
        assert all(isinstance(layer.planes, DevicePlanes) for layer in opt._session.layers)
        assert all(part.untyped_storage().nbytes() for part in viewed.values())


def test_state_is_read_where_it_has_gone(budget: Budget) -> None:
    """By whoever asks, and on whichever thread."""
    found = []
    for evicts in (False, True):
        model = llama()
        with adamw(model, k=1.0) as opt:
            make_ready(opt)
            train(model, opt, range(2))
            if evicts:
                budget.press(1 << 40)
                assert all(layer.offer is not None for layer in opt._session.layers)
                thread = threading.Thread(target=lambda: found.append(state(opt)))
                thread.start()
                thread.join()
                assert all(layer.life.placement is VISIT for layer in opt._session.layers)
            else:
                found.append(state(opt))
    assert differing(*found) == []


def test_a_request_comes_while_all_parks(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment in which memory to leave to is taken and the copies, nothing else leaves there."""
    found = []
    for presses in (False, True):
        model = llama()
        with adamw(model, k=1.0) as opt:
            make_ready(opt)
            train(model, opt, range(2))
            arenas = opt._engine._handover.arenas
            own = arenas.own

            def taken(layer: TrainedLayer, own: Any = own, presses: bool = presses) -> ArenaPlanes:
                arena: ArenaPlanes = own(layer)
                if presses:
                    budget.press()
                return arena

            monkeypatch.setattr(arenas, "own", taken)
            with opt.parked():
                assert not any(isinstance(layer.planes, DevicePlanes) for layer in opt._session.layers)
            monkeypatch.setattr(arenas, "own", own)
            train(model, opt, [2])
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_the_record_says_what_has_left_and_why(budget: Budget) -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        make_ready(opt)
        train(model, opt, range(2))
        budget.press(2_000_000)
        train(model, opt, [2])
    last = records(opt, 3)[-1]
    assert last["reason"].endswith(" s, for a request of 1.9 MiB that had no room")
    assert last["evict_s"] > 0 and last["evicted_bytes"] > 0


def test_memory_is_made_ready_for_as_much_as_a_batch_takes(budget: Budget) -> None:
    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2))
        reclaiming, handover, layers = opt._engine.reclaiming, opt._engine._handover, opt._session.layers
        last = max(layers, key=lambda layer: opt._engine._device.positions[layer.lid])
        reclaiming.end_step(Room(1 << 40, 1001, 1000))
        handover.wait()
        assert [layer for layer in layers if handover.arenas.kept(layer) is not None] == [last]
        reclaiming.end_step(Room(1 << 40, 1 << 39, 1000))
        handover.wait()
        assert all(handover.arenas.kept(layer) is not None for layer in layers)


def test_a_plan_does_not_wait_until_memory_is_ready_for_all(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, has_come = llama(), Arenas._made, threading.Event()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2))
        handover, layers = opt._engine._handover, opt._session.layers

        def as_a_plan_comes(self: Arenas, layer: TrainedLayer, *, gently: bool) -> ArenaPlanes:
            with handover._lock:
                handover._run(has_come.set)
            return made(self, layer, gently=gently)

        with monkeypatch.context() as patch:
            patch.setattr(Arenas, "_made", as_a_plan_comes)
            handover.make_ready(layers)
            assert has_come.wait(DEADLINE_S)
        assert len([layer for layer in layers if handover.arenas.kept(layer) is not None]) == 1
        handover.wait()
        handover.make_ready(layers)
        handover.wait()
        assert all(handover.arenas.kept(layer) is not None for layer in layers)


def test_a_thread_that_cannot_start_is_none(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a limit on how many a process has. Later, one may begin."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model = llama()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(2))
        handover, layers = opt._engine._handover, opt._session.layers
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
            patch.setattr(threading.Thread, "start", start)
            handover.make_ready(layers)
        handover.wait()
        handover.make_ready(layers)
        handover.wait()
        assert all(handover.arenas.kept(layer) is not None for layer in layers)


def test_no_more_memory_is_made_ready_than_was_stated_for_planes(budget: Budget) -> None:
    model = llama()
    layout = [0]
    for stated in (None, 1 << 40):  # then what is stated is little more than what is made ready
        limit = {} if stated is None else {"host_memory_limit": layout[0]}
        with adamw(model, k=1.0, **limit) as opt:
            train(model, opt, range(2))
            reclaiming, arenas, layers = opt._engine.reclaiming, opt._engine._handover.arenas, opt._session.layers
            layout[0] = 2 * max(layer.layout.nbytes for layer in layers)
            for lacking in (1 << 39, 1 << 38):  # the second time, all that was made is there
                reclaiming.end_step(Room(1 << 40, lacking, 1000))
                opt._engine._handover.wait()
            ready = sum(arenas._needed(layer) for layer in layers if arenas.kept(layer) is not None)
            assert arenas.is_full is (stated is not None)
            assert 0 < ready <= layout[0] if stated else all(arenas.kept(layer) is not None for layer in layers)
            if stated:
                reclaiming.end_step(Room(1 << 40, 1001, 1000))
                assert not arenas.is_full, "steps need other memory than before: perhaps there is some now"


TAKEN = "HyTrain: after the last step, weights took 1.5 MiB of this device, optimizer state "


def test_a_forward_without_memory_says_what_took_it_and_the_loop_goes_on(budget: Budget) -> None:
    """With its next batch, as if the one that did not fit had not been there."""
    found, model = [], Wide(in_backward=False)
    for rows in ([8, 8, 8, 8], [8, 8, 4096, 8, 8]):
        model = Wide(in_backward=False)
        with adamw(model, k=1.0) as opt:
            opt._engine.reclaiming.end_step(Room(1 << 40, 2000, 1000))
            for number, many in enumerate(size for size in rows if size < 4096):
                if number == 2 and 4096 in rows:
                    budget.limit = budget.used + (1 << 20)
                    with pytest.raises(torch.OutOfMemoryError, match=TAKEN):
                        model(torch.zeros(1).expand(4096, 64))
                    budget.limit = UNBOUNDED
                values = torch.randn(many, 64, generator=torch.Generator().manual_seed(number))
                model(values).square().mean().backward()
                opt.step()
                opt.zero_grad()
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_without_the_library_a_note_says_it() -> None:
    model = Wide(in_backward=False)
    model.blocks.register_forward_hook(lambda *_: _raise(torch.OutOfMemoryError("made up")))
    with adamw(model, k=1.0) as opt:
        with pytest.raises(torch.OutOfMemoryError) as before:
            model(torch.zeros(2, 64))
        opt._engine.reclaiming.end_step(Room(1 << 40, 2000, 1000))
        with pytest.raises(torch.OutOfMemoryError) as after:
            model(torch.zeros(2, 64))
    assert not hasattr(before.value, "__notes__")
    [note] = after.value.__notes__
    assert note.startswith(TAKEN)


def _raise(error: Exception) -> None:
    raise error


#: Whether training goes on after a backward without memory, once zero_grad() was called.
GOES_ON: dict[str, tuple[bool, dict[str, Any]]] = {
    "updates begin in backward": (False, {"updates": "backward"}),
    "updates begin in step()": (True, {"updates": "step"}),
    "without overlap": (True, {"overlap": False}),
    "updates wait for the norm": (False, {"updates": "backward", "max_grad_norm": 0.05, "speculate": False}),
}


@pytest.mark.parametrize("mode", GOES_ON)
def test_a_backward_without_memory_leaves_no_half_step_in_silence(mode: str, budget: Budget) -> None:
    goes_on, options = GOES_ON[mode]
    found = []
    for fails in (False, True):
        model = Wide(in_backward=True)
        with adamw(model, k=1.0, **options) as opt:
            learn(model, opt, [8, 8])
            if fails:
                handle = model.blocks[3].inner[0].weight.register_hook(lambda _: torch.empty(1 << 50))
                with pytest.raises(torch.OutOfMemoryError):
                    model(torch.ones(8, 64)).sum().backward()
                handle.remove()
                if not goes_on:
                    with pytest.raises(UsageError, match="the updates began in backward"):
                        opt.zero_grad()
                    continue
                opt.zero_grad()
            learn(model, opt, [8])
            found.append(state(opt) | weights(model))
    assert not goes_on or differing(*found) == []


def lack_memory_on_one_rank(optimizer: str, options: dict[str, Any]) -> int:
    """Only the second rank's allocator has no room now and then. Returns how many layers' state has left."""
    found, make = [], (test_muon_ranks if optimizer == "Muon" else test_fsdp2).plain
    with pytest.MonkeyPatch.context() as patch, budgeted() as budget:
        patch.setattr(visits, "SLOT_NUMEL", 640)
        for chance in (0.0, 0.2 * dist.get_rank()):
            model = make()
            groups = [test_muon_ranks.groups_of(model)] if optimizer == "Muon" else []
            with opened(getattr(hytrain, optimizer), model, *groups, lr=LR, k=1.0, **options) as opt:
                make_ready(opt)
                with at_every_turn(model, pressing(budget, chance)):
                    for step in range(STEPS):
                        next_token_loss(model, step).backward()
                        opt.step()
                        opt.zero_grad()
                opt.synchronize()
                parts = {name: local(parameter.detach()).clone() for name, parameter in model.named_parameters()}
                found.append(state(opt) | parts)
        assert differing(*found) == []
        return budget.evictions


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {}), ("AdamW", {"max_grad_norm": 0.1}), ("AdamW", {"updates": "step"}), ("Muon", {})],
)
def test_a_rank_that_lacks_memory_goes_on_beside_one_that_does_not(
    optimizer: str, options: dict[str, Any], two_ranks: RankGroup
) -> None:
    """Its evictions are its own: no collective is in between."""
    enough, lacking = two_ranks.run(lack_memory_on_one_rank, optimizer, options)
    assert not enough and lacking
