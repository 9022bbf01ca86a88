"""The result does not depend on k, on handovers, on the backend's threads or on timing: bit for bit (I4)."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import adamw, differing, process, same_bits, state, train, wait_for, wait_for_coordinator, weights
from small_models import gpt2, llama, perceptron, square_loss
from torch import Tensor, nn
from variants import every_second, slow

import hytrain
from examples.studies.gelu.mlp import fuse
from hytrain.errors import CapacityError
from hytrain.memory import visits
from hytrain.memory.capacity import GpuMemory
from hytrain.memory.planes import ArenaPlanes
from hytrain.model.trained import TrainedLayer
from hytrain.step import device, offload
from hytrain.step.device import DeviceUpdates
from workers.watch import monitor

STEPS = 30

CHOICES: dict[str, dict[str, Any]] = {
    "all on the CPU": {"k": 0.0},
    "a part": {"k": 0.3},
    "all on the GPU": {"k": 1.0},
    "some visit the GPU": {"k": 0.2, "visit": 0.4},
    "all visit the GPU": {"k": 0.0, "visit": 1.0},
    "auto": {"k": "auto"},
    "auto, with visits": {"k": "auto", "visit": "auto"},
    "moving": {"k": "auto", "policy": "random"},
    "offloaded": {"k": 0.0, "offload_weights": 1.0},
    "some offloaded": {"k": 0.3, "offload_weights": 0.4},
    "offloaded, visiting": {"k": 0.0, "visit": 0.5, "offload_weights": 1.0},
    "offloaded, moving": {"k": "auto", "policy": "random", "offload_weights": "auto"},
}


def make(dtype: torch.dtype) -> nn.Module:
    return gpt2(dtype) if dtype is torch.float32 else llama(dtype)


@cache
def trained_at_half(dtype: torch.dtype) -> dict[str, Tensor]:
    model = make(dtype)
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(STEPS))
        return state(opt) | weights(model)


def train_and_prepare(model: nn.Module, opt: hytrain.AdamW, steps: int, *loss: Any, start: int = 0) -> None:
    """Let every handover be prepared before the next step: how often layers move then hardly depends on the machine."""
    for step in range(start, start + steps):
        train(model, opt, [step], *loss)
        wait_for_coordinator(opt)
        opt._engine._handover.wait()


@every_second(dtype=[torch.float32, torch.bfloat16], choice=CHOICES.keys())
def test_any_k_gives_the_same_bits(choice: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained_at_half(dtype)
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    monkeypatch.setattr(offload, "SLOTS", 1)
    model, share = make(dtype), CHOICES[choice].get("offload_weights", 0.0)
    with adamw(model, **CHOICES[choice]) as opt:
        train_and_prepare(model, opt, STEPS)
        assert bool(opt.statistics().offloaded_layers) >= (isinstance(share, float) and share > 0.0)
        away = [known for known in opt._session.parameters if not known.own.untyped_storage().nbytes()]
        assert bool(away) >= (share == 1.0)
        assert bool(opt.statistics().visiting_layers) >= isinstance(CHOICES[choice].get("visit"), float)
        if choice == "moving":
            assert opt.statistics().moved > 10
        assert differing(state(opt) | weights(model), expected) == []
    assert any(name.startswith("remainder") for name in expected) is (dtype is torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{"k": 0.2, "visit": 0.8}, {"k": "auto", "policy": "random", "offload_weights": "auto"}]
)
def test_visits_after_backward_give_the_same_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And blocks that wait for visits have more room. In forward order, as forward waits for them."""
    monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda memory: 1 << 30)
    monkeypatch.setattr(device, "put_off", lambda turns: {turn.lid for turn in turns if turn.visit_s and turn.lid % 3})
    orders, offloaded, make_update = defaultdict[int, list[int]](list), list[bool](), DeviceUpdates._make

    def noted(of: DeviceUpdates, due: Any) -> None:
        if due.layer.life.placement.visits and due.layer in [held.layer for held in of._held]:
            offloaded.append(due.layer.rests_on_host)
            orders[due.step].append(of.positions[due.layer.lid])
        make_update(of, due)

    monkeypatch.setattr(DeviceUpdates, "_make", noted)
    model = make(torch.bfloat16)
    with adamw(model, **options) as opt:
        train_and_prepare(model, opt, STEPS)
        assert differing(state(opt) | weights(model), trained_at_half(torch.bfloat16)) == []
    assert len(offloaded) >= 10 and any(offloaded) is ("offload_weights" in options)
    assert all(order == sorted(order) for order in orders.values())


class Backwards(nn.Module):
    """Computes with the block first that is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def test_visits_after_backward_go_in_the_order_that_forward_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when `synchronize()` asks for all updates that backward has begun."""
    monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda memory: 1 << 30)
    monkeypatch.setattr(device, "put_off", lambda turns: {turn.lid for turn in turns})
    made, make_update = list[str](), DeviceUpdates._make

    def noted(of: DeviceUpdates, due: Any) -> None:
        made.append(due.layer.name)
        make_update(of, due)

    monkeypatch.setattr(DeviceUpdates, "_make", noted)
    model, expected = Backwards(), Backwards()
    with adamw(expected, k=1.0) as other:
        train(expected, other, range(6), square_loss)
    with adamw(model, k=0.0, visit=1.0) as opt:
        names = [layer.name for layer in opt._session.layers]
        train(model, opt, range(4), square_loss)
        assert made[-4:] == names[::-1]
        model.blocks[2][0].weight.register_post_accumulate_grad_hook(lambda _: opt.synchronize())
        train(model, opt, [4, 5], square_loss)
        assert sorted(made[-4:]) == sorted(names) and made[-4:] != names[::-1]
        opt.synchronize()
        assert differing(weights(model), weights(expected)) == []


@pytest.mark.parametrize("choice", ["all on the GPU", "offloaded, visiting", "offloaded, moving"])
def test_bias_and_gelu_in_one_kernel_find_the_same_weights(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward keeps the bias, which may have left the device meanwhile."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    found = []
    for options in ({"k": 0.0}, CHOICES[choice]):
        model = gpt2()
        fuse(model)
        with adamw(model, **options) as opt:
            train_and_prepare(model, opt, 12)
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


def test_only_gradients_that_the_cpu_updates_from_take_host_memory() -> None:
    model, seen = llama(), set[str]()
    with adamw(model, k="auto", policy="random") as opt:
        for start in range(0, 24, 4):
            train_and_prepare(model, opt, 4, start=start)
            opt.synchronize()
            opt._engine._handover.wait()
            lacks = {
                layer: layer.layout.nbytes - 512 * os.fstat(layer.arena.file.descriptor).st_blocks
                for layer in opt._session.layers
                if isinstance(layer.planes, ArenaPlanes)
            }
            move = opt._engine._handover._move  # a plan that has come by now may hold memory for its layers already
            for layer in lacks.keys() - set(move.taken if move is not None else ()):
                share = lacks[layer] / layer.layout.plane_nbytes["grads"]
                seen.add(f"{layer.life.placement.name}: {share:.0%}")
    assert {"cpu: 0%", "visit: 100%"} <= seen <= {"cpu: 0%", "visit: 100%", "cpu: 100%"}, "the last has no gradient yet"


@contextmanager
def no_descriptor(pid: int) -> Iterator[None]:
    """The optimizer process cannot make an arena."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextmanager
def no_address_space(pid: int) -> Iterator[None]:
    """The trainer cannot map the arena that it got."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with mock.patch("hytrain.memory.arena.Mapping", refuse):
        yield


@contextmanager
def no_gpu_memory(pid: int) -> Iterator[None]:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError

    with mock.patch.object(TrainedLayer, "device_planes", refuse):
        yield


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize(
    ("shortage", "k", "said"),
    [
        (no_descriptor, 1.0, "stays on the gpu: no host memory for it: [Errno 24] Too many open files"),
        (no_address_space, 1.0, "stays on the gpu: host memory cannot be mapped: [Errno 12] Cannot allocate memory"),
        (no_gpu_memory, 0.0, "stays on the cpu: no GPU memory for its state"),
    ],
)
def test_layers_for_which_there_is_no_memory_stay(
    shortage: Callable[[int], AbstractContextManager[None]], k: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as there is some, they move. A busy machine may need more steps until a plan is in effect."""
    model, step = perceptron(), 3

    def told() -> list[str]:
        return [message for message in caplog.messages if said in message]

    with adamw(model, k=k) as opt:
        train(model, opt, range(step), square_loss)
        with shortage(process(opt, "optimizer").pid):
            assert monitor.main([str(opt.run_dir), "--set-k", str(1.0 - k)]) == 0
            while step < 43 or (not told() and step < 1000):
                train_and_prepare(model, opt, 1, square_loss, start=step)
                step += 1
            assert opt.statistics().k == k
        plans = (opt.run_dir / "logs" / "coordinator-0.log").read_text()
        assert told() and len(told()) == len(set(told())), f"once for each layer: {caplog.messages}, {plans}"
        while opt.statistics().k != 1.0 - k and step < 2000:
            train_and_prepare(model, opt, 1, square_loss, start=step)
            step += 1
        assert opt.statistics().k == 1.0 - k
        moved = state(opt) | weights(model)
    expected = perceptron()
    with adamw(expected, k=0.5) as opt:
        train(expected, opt, range(step), square_loss)
        assert differing(moved, state(opt) | weights(expected)) == []


@pytest.mark.usefixtures("own_run")
def test_layers_for_whose_visits_there_is_no_memory_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: visits.Visits) -> None:
        raise torch.OutOfMemoryError

    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        monkeypatch.setattr(visits.Visits, "prepare", refuse)
        assert monitor.main([str(opt.run_dir), "--set-policy", "random"]) == 0
        said, step = list[str](), itertools.count(3)

        def both_have_happened() -> bool:
            said[:] = [message for message in caplog.messages if "no GPU memory for visits" in message]
            return bool(said and opt.statistics().moved)

        wait_for(both_have_happened, lambda: train_and_prepare(model, opt, 1, square_loss, start=next(step)))
        assert not opt.statistics().visiting_layers
        assert said and len(said) == len(set(said)), "once for each layer"


def test_layers_leave_host_memory_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    ks: list[float] = []

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train_and_prepare(model, opt, 30, square_loss)
        ks.append(opt.statistics().k)

    for missing in (0, 1 << 40):
        monkeypatch.setattr("hytrain.build.host_free", lambda *_, free=-missing: lambda: free)
        same_bits(run, perceptron, {"k": "auto", "objective": "gpu-memory"})
    assert ks == [0.0, 1.0]


def test_more_threads_and_other_cores_change_nothing() -> None:
    fewest = {"k": 0.2, "threads": 1}
    same_bits(
        lambda model, opt: train(model, opt, range(20), square_loss),
        perceptron,
        fewest,
        {**fewest, "threads": 2, "cores": str(min(os.sched_getaffinity(0)))},
    )


def test_without_overlap_gradients_wait_for_step() -> None:
    model = perceptron()
    with adamw(model, k=0.5, overlap=False) as opt:
        before = weights(model)
        square_loss(model, 0).backward()
        assert all(not layer.landing and layer.life.is_current for layer in opt._session.layers)
        assert differing(weights(model), before) == []
        opt.step()
        assert all(layer.life.is_current for layer in opt._session.layers)
        assert len(differing(weights(model), before)) == len(before)
        opt.zero_grad()


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_overlap_changes_no_bit_over_many_steps(dtype: torch.dtype) -> None:
    """Layers move all the time on one side; on the other, everything happens in step(), one layer after the other."""
    moved = []

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train_and_prepare(model, opt, 80)
        moved.append(opt.statistics().moved)

    same_bits(run, lambda: make(dtype), {"policy": "random"}, {"k": 0.0, "overlap": False})
    assert moved[0] > 50 and moved[1] == 0


def test_memory_that_the_gpu_may_take_is_not_promised_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both have one memory, and the planner is free to choose. A given k says whose it is."""
    monkeypatch.setattr(GpuMemory, "shared_bytes", lambda self: 1 << 60)
    refusal = r"above 0\.0 MiB, .* and what the GPU may take of the same memory"
    with pytest.raises(CapacityError, match=refusal), adamw(perceptron()):
        pass
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), square_loss)
