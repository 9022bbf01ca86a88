"""`updates`: when a step's updates begin. In `step()`, every loop has torch's bits, whatever it does with gradients."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import test_fifty_practices as practices
import torch
from helpers import (
    LR,
    Reference,
    adamw,
    differing,
    late_weights,
    same,
    same_as_torch,
    same_bits,
    seed,
    train,
    train_until,
    wait_for_coordinator,
    weights,
)
from small_models import fails_in_backward, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.algorithms import ADAMW
from hytrain.errors import UsageError
from hytrain.memory.capacity import Room
from hytrain.memory.planes import DevicePlanes
from hytrain.memory.transfer import HostTransfers
from hytrain.model.trained import TrainedLayer
from hytrain.options import Options
from hytrain.run.link import Link
from hytrain.step.device import DeviceUpdates
from protocol.messages import TrainerReport

STEPS = 5

Step = Callable[[nn.Module, Any, int], object]

#: What a loop does in a step, by what HyTrain says of it; "" if its updates may begin in backward.
LOOPS: dict[str, tuple[str, Step]] = {}


def loop(seen: str) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        LOOPS[step.__name__] = seen, step
        return step

    return add


def backward(model: nn.Module, number: int) -> float:
    seed(number)
    loss = square_loss(model, number)
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@loop("")
def plain(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    opt.step()
    opt.zero_grad()
    return loss


@loop("scales gradients")
def clips(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    opt.step()
    opt.zero_grad()
    return norm


@loop("takes norms of gradients")
def logs_norms(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norms = [gradient.norm().item() for gradient in gradients(model)]
    opt.step()
    opt.zero_grad()
    return norms


@loop("scales gradients")
def clips_by_hand(model: nn.Module, opt: Any, number: int) -> object:
    """And writes the factor after using it."""
    backward(model, number)
    given = gradients(model)
    norm = torch.stack([gradient.norm() for gradient in given]).norm()
    factor = (0.1 / norm).clamp(max=1.0)
    for gradient in given:
        gradient.mul_(factor)
    factor.fill_(7.0)
    opt.step()
    found = [gradient.sum().item() for gradient in given]
    opt.zero_grad()
    return found


@loop("scales gradients")
def clips_between_two_steps(model: nn.Module, opt: Any, number: int) -> object:
    """With the gradients of one backward, whose norms are others after the first."""
    backward(model, number)
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
    opt.step()
    opt.step()
    norms += [gradient.norm().item() for gradient in gradients(model)]
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
    opt.step()
    opt.zero_grad()
    return norms


@loop("scales gradients")
def scales_by_an_array(model: nn.Module, opt: Any, number: int) -> object:
    """Which is written for each gradient, and autograd does not count that. Then by a number of inference mode."""
    backward(model, number)
    given = gradients(model)
    factor = torch.ones((), dtype=torch.float32)
    array = factor.numpy()
    for index, gradient in enumerate(given if given[0].dtype == torch.float32 else []):
        array[...] = 0.1 * (index // 3 + 1)
        gradient.mul_(factor)
    with torch.inference_mode():
        half = torch.tensor(0.5, dtype=given[0].dtype)
    for gradient in given:
        gradient.mul_(half)
    opt.step()
    opt.zero_grad()
    return number


@loop("scales gradients")
def scales_some(model: nn.Module, opt: Any, number: int) -> object:
    """Each by another number, one of them twice, one not at all; and one step adds to what was scaled."""
    backward(model, number)
    given = gradients(model)
    for index, gradient in enumerate(given[1:]):
        gradient.mul_(torch.tensor(0.1 * (index + 1), dtype=gradient.dtype))
    given[1].mul_(torch.tensor(-3.0, dtype=given[1].dtype))
    if number == 3:
        backward(model, number + 1)
    opt.step()
    opt.zero_grad()
    return number


@loop("scales gradients")
def clips_parts(model: nn.Module, opt: Any, number: int) -> object:
    """And keeps gradients of a step, which the next one adds to."""
    backward(model, number)
    for part in model.children():
        nn.utils.clip_grad_norm_(part.parameters(), 0.05)
    opt.step()
    if number % 2:
        opt.zero_grad()
    return number


@loop("calls backward several times")
def norms_of_sums(model: nn.Module, opt: Any, number: int) -> object:
    """After each of two backwards, and of what it has added besides."""
    norms = []
    for part in range(2):
        backward(model, 2 * number + part)
        norms.append([gradient.norm().item() for gradient in gradients(model)])
    first = gradients(model)[0]
    first.add_(torch.ones_like(first))
    norms.append(first.norm().item())
    first.mul_(2.0)
    norms.append(first.norm().item())
    opt.step()
    opt.zero_grad()
    return norms


@loop("uses gradients")
def adds_noise(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    for gradient in gradients(model):
        gradient.add_(torch.randn(gradient.shape))
    opt.step()
    opt.zero_grad()
    return number


@loop("calls backward several times")
def sums(model: nn.Module, opt: Any, number: int) -> object:
    losses = [backward(model, 3 * number + part) for part in range(3)]
    opt.step()
    opt.zero_grad()
    return losses


@loop("uses weights")
def evaluates(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    with torch.no_grad():
        seen = square_loss(model, 99).item()
    opt.step()
    opt.zero_grad()
    return seen


@loop("uses weights")
def logs_weights(model: nn.Module, opt: Any, number: int) -> object:
    backward(model, number)
    norms = [parameter.norm().item() for parameter in model.parameters()]
    opt.step()
    opt.zero_grad()
    return norms


@loop("uses weights")
def logs_weights_in_backward(model: Any, opt: Any, number: int) -> object:
    """When their gradient has come. In backward, that would be too late."""
    seen, read = list[float](), model[2][0].weight
    handle = model[1].register_full_backward_hook(lambda *_: seen.append(read.norm().item()))
    backward(model, number)
    handle.remove()
    opt.step()
    opt.zero_grad()
    return seen


@loop("sets hyperparameters")
def sets_the_rate(model: nn.Module, opt: Any, number: int) -> object:
    """At first to what it is."""
    backward(model, number)
    for group in opt.param_groups:
        group["lr"] = LR * (1.0 - 0.1 * number)
    opt.step()
    opt.zero_grad()
    return number


@loop("drops gradients")
def drops_steps(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    if number % 2:
        opt.step()
    opt.zero_grad()
    return loss


@loop("drops gradients")
def drops_a_gradient(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    next(model.parameters()).grad = None
    opt.step()
    opt.zero_grad()
    return loss


@loop("drops gradients")
def drops_all_gradients(model: nn.Module, opt: Any, number: int) -> object:
    """In the first step, and again later."""
    loss = backward(model, number)
    if number % 3 == 0:
        for parameter in model.parameters():
            parameter.grad = None
    opt.step()
    opt.zero_grad()
    return loss


@loop("drops gradients")
def goes_on_after_an_exception(model: nn.Module, opt: Any, number: int) -> object:
    """In every second backward."""
    if number % 2:
        fails_in_backward(model)
        opt.zero_grad()
        return number
    return plain(model, opt, number)


@loop("uses gradients")
def takes_what_an_exception_has_left(model: nn.Module, opt: Any, number: int) -> object:
    (fails_in_backward if number % 2 else partial(backward, number=number))(model)
    norms = [gradient.norm().item() for gradient in gradients(model)]
    norms += [gradient.sum().item() for gradient in gradients(model)]
    opt.step()
    opt.zero_grad()
    return norms


@loop("begins backward in a reentrant checkpoint")
def checkpoints_the_whole_model(model: nn.Module, opt: Any, number: int) -> object:
    made = checkpoint(model, vectors(number, dtype=next(model.parameters()).dtype).requires_grad_(), use_reentrant=True)
    loss: Tensor = made.square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


@loop("uses gradients")
def keeps_tensors(model: nn.Module, opt: Any, number: int) -> object:
    opt.zero_grad(set_to_none=False)
    loss = backward(model, number)
    opt.step()
    return loss


@loop("sets or keeps gradients")
def steps_twice(model: nn.Module, opt: Any, number: int) -> object:
    loss = backward(model, number)
    opt.step()
    opt.step()
    opt.zero_grad()
    return loss


@loop("keeps gradients")
def keeps_them(model: nn.Module, opt: Any, number: int) -> object:
    """A step begins with the gradients of the one before, which nobody has dropped."""
    loss = backward(model, number)
    opt.step()
    return loss


@loop("uses gradients")
def scales(model: nn.Module, opt: Any, number: int) -> object:
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2))
    scaler.scale(square_loss(model, number) * (1e38 if number == 2 else 1.0)).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return scaler.get_scale()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    with late_weights() as gate:
        yield gate


@pytest.mark.parametrize("place", ["device", "host", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_has_the_bits_of_torch(
    name: str, dtype: torch.dtype, place: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is said to begin in step() or learned. Gradients of bfloat16 are added up as by torch."""
    if name == "scales" and dtype is not torch.float32:
        pytest.skip("a GradScaler finds no gradients in the reference, whose masters have them")
    seen, step = LOOPS[name]

    def run(model: nn.Module, opt: Any) -> object:
        found = [step(model, opt, number) for number in range(STEPS)]
        gate.set()
        return found

    for options in ({"updates": "step", "k": 0.0}, {"overlap": False, "k": 1.0}, {"updates": "auto", "k": 0.5}):
        caplog.clear()
        with caplog.at_level("INFO", logger="hytrain.step.timing"):
            same_as_torch(run, lambda: perceptron(dtype=dtype), accumulate_on=place, **options)
        told = f"this loop {seen} before" if seen else "this loop does nothing between backward and step()"
        assert [told in line for line in caplog.messages] == [True] * (options.get("updates") == "auto")


@pytest.mark.parametrize("name", [name for name, row in practices.ROWS.items() if row.refusal and not row.options])
def test_what_is_refused_in_backward_is_done_in_step(name: str, gate: threading.Event) -> None:
    """By default, too, if it is seen in the first two steps."""
    row = practices.ROWS[name]
    model = row.make()
    reference = Reference(model, row.groups_of(model), lr=LR)
    expected = row.run(model, reference), train(model, reference, range(50, 52), square_loss)
    ours = row.make()
    updates = "step" if name == "lbfgs_between" else "auto"
    with adamw(ours, row.groups_of(ours), k=0.5, updates=updates) as opt:
        try:
            found = row.run(ours, opt), train(ours, opt, range(50, 52), square_loss)
            opt.synchronize()
            assert same(found, expected)
            assert differing(weights(ours), weights(model)) == []
        finally:
            gate.set()


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_gradients_leave_once_and_come_only_if_they_are_read(k: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the CPU's layers leave in backward, for the planes from which the update reads them."""
    model, copied = perceptron(), list[tuple[str, int]]()
    for name in ("gradients_out", "sums_in"):
        before = getattr(HostTransfers, name)

        def count(
            self: HostTransfers, copies: Any, *rest: Any, before: Any = before, name: str = name, **more: Any
        ) -> Any:
            copied.append((name, sum(into.nbytes for into, _ in copies)))
            return before(self, copies, *rest, **more)

        monkeypatch.setattr(HostTransfers, name, count)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def total() -> dict[str, int]:
        of = {name: sum(nbytes for each, nbytes in copied if each == name) for name in ("gradients_out", "sums_in")}
        copied.clear()
        return of

    with adamw(model, k=k, updates="step") as opt:
        backward(model, 0)
        left = total()
        opt.step()
        assert (left, total()) == (
            {"gradients_out": nbytes * (k == 0), "sums_in": 0},
            {"gradients_out": 0, "sums_in": 0},
        )
        opt.zero_grad()
        backward(model, 1)
        total()
        norms = [gradient.norm() for gradient in gradients(model)]
        assert len(norms) > 4 and total() == {"gradients_out": 0, "sums_in": nbytes * (k == 0)}, "asked the first time"
        gradients(model)[0].mul_(0.5)
        written = model[0][0].weight.nbytes * (k == 0)
        assert total() == {"gradients_out": written, "sums_in": written}
        opt.step()
        assert total() == {"gradients_out": 0, "sums_in": 0}
        for number in range(2, 5):
            opt.zero_grad()
            backward(model, number)
            total()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            asked = nbytes * (k == 0 and number == 2)  # by another operator than before
            assert total() == {"gradients_out": 0, "sums_in": asked}


def late(what: Callable[[nn.Module, int], object]) -> Callable[[nn.Module, Any], object]:
    """A loop that does something before every third `step()`, but not in the first steps."""

    def run(model: nn.Module, opt: Any) -> object:
        found = []
        for number in range(9):
            backward(model, number)
            found.append(what(model, number) if number % 3 == 2 else None)
            opt.step()
            opt.zero_grad()
        return found

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_gradients_that_are_read_late(k: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """They are still where their updates read them. From then on, updates begin in `step()`."""

    def reads(model: nn.Module, number: int) -> object:
        given = gradients(model)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        mean = sum(gradient.abs().mean() for gradient in given)
        copied = copy.deepcopy(given[1]).sum().item()
        return (
            total.item(),
            mean.item(),
            given[0].tolist(),
            copied,
            given[0].isnan().any().item(),
            str(given[0].clone()),
        )

    same_as_torch(late(reads), lambda: perceptron(dtype=dtype), k=k)
    told = "this loop uses gradients before step(), for the first time: updates begin in step() from now on"
    assert caplog.messages.count(told) == 1


@pytest.mark.parametrize("what", [lambda g: g.mul_(0.5), lambda g: g.view(-1), lambda g: g.numpy()])
def test_gradients_whose_updates_have_begun_are_only_read(what: Callable[[Tensor], object]) -> None:
    with adamw(perceptron(), k=0.5) as opt:
        train(opt._model, opt, range(2), square_loss)
        backward(opt._model, 2)
        with pytest.raises(UsageError, match="already consumed"):
            what(gradients(opt._model)[0])
        opt.step()
        with pytest.raises(UsageError, match="already consumed"):
            gradients(opt._model)[0].norm()


def test_a_forgotten_zero_grad_is_named() -> None:
    model = perceptron()
    with adamw(model, k=0.5, updates="backward") as opt:
        square_loss(model, 0).backward()
        opt.step()
        with pytest.raises(
            UsageError, match=r"backward would add to it: call opt.zero_grad\(\) after each opt.step\(\)"
        ):
            square_loss(model, 1).backward()


def test_who_reads_gradients_late_may_write_them_in_the_next_step() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        for number in (2, 3):
            backward(model, number)
            read = [gradient.norm() for gradient in gradients(model)]
            if number == 3:
                gradients(model)[0].mul_(0.5)
            opt.step()
            opt.zero_grad()
        assert len(read) > 4


def test_gradients_are_not_found_in_the_backward_that_makes_them() -> None:
    """Their copies to planes have not begun."""
    model = perceptron()
    with adamw(model, k=0.5, updates="backward") as opt:
        *_, last = (parameter for parameter in model.parameters() if parameter.requires_grad)
        first = next(model.parameters())
        first.register_hook(lambda gradient: None if last.grad is None else last.grad.norm() * gradient)
        with pytest.raises(UsageError, match="already consumed"):
            backward(model, 0)
        del opt


def test_gradients_of_the_gpu_without_room_are_gone() -> None:
    """Those of the CPU's layers are not."""
    with adamw(perceptron(), k=0.5) as opt:
        opt._engine._device.late.heed = lambda room: None
        train(opt._model, opt, range(3), square_loss)
        backward(opt._model, 3)
        found = set()
        for known in opt._session.parameters:
            gone = any(layer.life.placement.updates == "gpu" for layer, _ in known.places)
            found.add(gone)
            with pytest.raises(UsageError, match="already consumed") if gone else nullcontext():
                known.parameter.grad.norm()
        assert found == {True, False}
        opt.step()


@pytest.mark.parametrize("has_room", [False, True])
def test_layers_of_the_gpu_are_updated_in_one_go(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When backward is over, if there is room for their gradients until then: not in the first step."""
    made, update = list[list[int]](), DeviceUpdates._update

    def noted(of: DeviceUpdates, *updates: Any) -> Any:
        made.append([one.layer.lid for one in updates])
        return update(of, *updates)

    monkeypatch.setattr(DeviceUpdates, "_update", noted)
    with adamw(perceptron(), k=1.0, updates="backward") as opt:
        if not has_room:
            opt._engine._device.late.heed = lambda room: None
        train(opt._model, opt, range(3), square_loss)
    one_by_one = [[3], [2], [1], [0]]
    assert made == (one_by_one + [[0, 1, 2, 3]] * 2 if has_room else one_by_one * 3)


def test_gradients_are_kept_where_steps_need_no_more_and_there_is_some_beside() -> None:
    """Between two steps there is `now`, and in them they have needed more, by activations for example."""
    with adamw(perceptron(), k=0.5) as opt:
        of_gpu = [layer for layer in opt._session.layers if layer.life.placement.updates == "gpu"]
        nbytes = 4 * sum(layer.spec.numel for layer in of_gpu)
        late = opt._engine._device.late

        def kept(**room: int) -> int:
            late.heed(Room(**room))
            for layer in of_gpu:
                late.keep(layer, {})
            late.end_step()
            return late._kept_bytes

        assert len(of_gpu) > 1
        for layer in of_gpu:
            late.keep(layer, {})
        assert late._kept_bytes == 0, "in the first step, of which nothing is known"
        first = 4 * of_gpu[0].spec.numel
        assert kept(now=100, needed=100 + first, usable=1 << 40) == first, (
            "with all, steps would need more at their end"
        )
        late.heed(Room(now=0, needed=0, usable=0))
        assert kept(now=100, needed=100 + nbytes, usable=100 + nbytes + first) == first, "or beside activations"
        assert kept(now=100, needed=100 + nbytes, usable=100 + 2 * nbytes) == nbytes
        assert kept(now=100, needed=100 + 2 * nbytes, usable=100 + 2 * nbytes) == nbytes, "with what was kept"
        assert kept(now=100, needed=200 + nbytes, usable=100) == 0, "something else needs it"
        late.heed(None)
        assert late._budget == float("inf")


def test_state_that_comes_has_its_memory_before_gradients_are_kept() -> None:
    """It may take all that no step has needed so far."""
    with adamw(perceptron(), policy="random") as opt:
        late, came = opt._engine._device.late, list[int]()
        heed, keep = late.heed, late.keep

        def bounded(room: Room | None) -> None:
            heed(Room(now=0, needed=1 << 30, usable=1 << 31))

        def look(layer: TrainedLayer, gradients: dict[int, torch.Tensor]) -> bool:
            is_first, there = late._left is None, late._owned
            is_kept = keep(layer, gradients)
            holds = {each.lid: each.holds for each in opt._session.layers}
            found = [at.nbytes for lid, at in holds.items() if lid not in there and isinstance(at, DevicePlanes)]
            if is_first:
                assert late._left == late._budget - sum(found) - late._kept_bytes
                came.extend(found)
            return is_kept

        late.heed, late.keep = bounded, look  # type: ignore[method-assign]
        train_until(lambda: len(came) > 3, opt._model, opt, 0, square_loss)


def test_gradients_of_layers_that_come_to_the_gpu_are_found() -> None:
    """Where memory has no bound, a loop may read them in whichever step it likes."""
    with adamw(perceptron(), policy="random", updates="backward") as opt:
        train(opt._model, opt, range(1), square_loss)
        moved, number = set[int](), 1
        while len(moved) <= 3:
            before = owned(opt)
            backward(opt._model, number)
            assert len([gradient.norm() for gradient in gradients(opt._model)]) > 4
            moved |= owned(opt) - before
            opt.step()
            opt.zero_grad()
            number += 1


def owned(opt: hytrain.AdamW) -> set[int]:
    """The layers whose state is on the GPU now."""
    return {layer.lid for layer in opt._session.layers if isinstance(layer.holds, DevicePlanes)}


def test_a_gradient_that_the_loop_has_kept_is_not_the_next_ones() -> None:
    with adamw(perceptron(), k=0.5) as opt:
        train(opt._model, opt, range(2), square_loss)
        backward(opt._model, 2)
        kept = gradients(opt._model)
        opt.step()
        opt.zero_grad()
        backward(opt._model, 3)
        for before, now in zip(kept, gradients(opt._model), strict=True):
            assert now.norm() > 0
            with pytest.raises(UsageError, match="already consumed"):
                before.norm()
        opt.step()


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.1}, {"loss_scale": 4.0}, {"on_nonfinite": "skip"}], ids=str)
def test_gradients_that_await_a_verdict_are_not_shown(options: dict[str, Any]) -> None:
    """The loop's own would be scaled there."""
    with adamw(perceptron(), k=0.0, updates="backward", **options) as opt:
        opt.scale(square_loss(opt._model, 0)).backward()
        with pytest.raises(UsageError, match="already consumed"):
            gradients(opt._model)[0].norm()
        opt.step()


def test_it_is_planned_for_where_updates_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, post = list[TrainerReport](), Link.post

    def note(self: Link, role: str, message: Any, **options: Any) -> None:
        if isinstance(message, TrainerReport):
            reports.append(message)
        post(self, role, message, **options)

    monkeypatch.setattr(Link, "post", note)
    with adamw(perceptron()) as opt:
        table = opt._session._engine._boundary._accumulation.timing.in_step
        train(opt._model, opt, range(4), square_loss)
    assert table and [report.in_step for report in reports] == [True, True, False, False]


@pytest.mark.parametrize(("updates", "waits"), [("step", True), ("backward", False)])
def test_what_the_loop_does_before_step_hides_updates_only_in_backward(updates: str, waits: bool) -> None:
    """So the planner takes this time for that of no layer, nor for the CPU's."""
    model = perceptron()
    with adamw(model, updates=updates, k=0.5) as opt:
        for number in range(3):
            backward(model, number)
            opt.step()
            opt.zero_grad()
            assert (opt._engine._meter.middle_s > 0.0) is waits


def test_a_layer_that_lacks_gradients_is_measured_before_its_update_begins() -> None:
    """If the norm is asked for before `step()`, as Accelerate does, updates begin there, also those of such layers."""
    model = perceptron()
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(4)))
    with adamw(model, updates="step", max_grad_norm=1.0, k=0.5) as opt:
        for number in range(3):
            backward(model, number)
            marked = [lid for lid, _ in opt._engine._meter._now.backward]
            assert opt._engine.norm_before_step() is not None
            assert [lid for lid, _ in opt._engine._meter._now.backward] == marked
            opt.step()
            opt.zero_grad()
            assert len(set(marked)) == len(marked) > 1 and opt._engine._meter.middle_s > 0.0


@pytest.mark.parametrize("synchronizes", [False, True])
def test_gradients_that_stay_over_steps_stay_when_their_layers_move(synchronizes: bool) -> None:
    """With the next gradient, or as soon as somebody wants all updates to be over: who saves, or closes."""

    def train_on(model: nn.Module, opt: Any, step: int) -> None:
        backward(model, step)
        opt.step()
        if synchronizes and isinstance(opt, hytrain.AdamW):
            opt.synchronize()
        if step % 3 == 2:
            opt.zero_grad()

    ours, theirs, steps = perceptron(), perceptron(), 0
    with adamw(ours, updates="step", policy="random") as opt:
        while steps < 12 or opt.statistics().moved <= 4:
            train_on(ours, opt, steps)
            wait_for_coordinator(opt)
            opt._engine._handover.wait()
            steps += 1
        opt.synchronize()
    reference = Reference(theirs, lr=LR)
    for step in range(steps):
        train_on(theirs, reference, step)
    assert differing(weights(ours), weights(theirs)) == []


def test_a_gradient_that_is_written_waits_for_the_update_that_reads_it(gate: threading.Event) -> None:
    """Its values are where the CPU's update reads them."""
    model = perceptron()
    with adamw(model, k=0.0, updates="step") as opt:
        backward(model, 0)
        opt.step()
        layers = opt._session.layers
        assert not any(layer.life.is_current for layer in layers)
        gradients(model)[0].zero_()
        assert [layer.life.is_current for layer in layers] == [index == 0 for index in range(len(layers))]
        gate.set()


def test_ranks_that_wait_for_the_norm_do_not_learn() -> None:
    """One rank might ask for it in backward, another one in `step()`."""
    options = Options.of(ADAMW, {"max_grad_norm": 1.0})
    assert [options.updates_on(ranks) for ranks in (1, 2)] == ["auto", "backward"]
    assert Options.of(ADAMW, {}).updates_on(2) == "auto"


def test_a_second_step_with_sums_of_a_graph_that_is_retained() -> None:
    """Its backwards are never the last ones, but its gradients are kept after `step()`."""

    def run(model: nn.Module, opt: Any) -> None:
        for number in range(4):
            square_loss(model, number).backward(retain_graph=True)
            opt.step()
            if number == 1:  # when it is learned
                opt.step()
            opt.zero_grad()

    same_as_torch(run, perceptron, k=0.0, accumulate_on="host")


@pytest.mark.parametrize("announced", ["by number", "by no_sync", "by retain_graph"])
def test_updates_begin_in_the_last_of_backwards_that_were_announced(
    announced: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Between them, a loop may do what it likes, so that is no reason to begin in `step()`."""
    model = perceptron()
    options = {"grad_accumulation": 2} if announced == "by number" else {}
    with caplog.at_level("INFO", logger="hytrain.step.timing"), adamw(model, k=0.5, **options) as opt:
        for number in range(4):
            loss = square_loss(model, number)
            with opt.no_sync() if announced == "by no_sync" else nullcontext():
                loss.backward(retain_graph=announced == "by retain_graph")
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            (loss if announced == "by retain_graph" else square_loss(model, 9 + number)).backward()
            opt.step()
            opt.zero_grad()
    assert [line for line in caplog.messages if "does nothing between backward and step()" in line]


def test_updates_that_began_before_an_exception_are_made_in_step(gate: threading.Event) -> None:
    """With the gradients that have come, as in torch."""

    def run(model: nn.Module, opt: Any) -> None:
        for number in range(4):
            (fails_in_backward if number % 2 else partial(backward, number=number))(model)
            opt.step()
            opt.zero_grad()
        gate.set()

    for options in ({}, {"grad_accumulation": 2}):
        same_as_torch(run, perceptron, updates="backward", k=0.5, **options)


def test_each_mode_of_the_model_is_learned_by_itself(gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    """Between training steps, the loop computes gradients in evaluation mode, for the input's; later it trains so."""

    def run(model: nn.Module, opt: Any) -> list[Any]:
        found = []
        for number in range(5):
            plain(model, opt, number)
            model.eval()
            for _ in range(2):
                x = vectors(50 + number).requires_grad_()
                model(x).square().mean().backward()
                assert x.grad is not None
                found.append(x.grad.tolist())
            opt.zero_grad()
            model.train()
        model.eval()
        for number in range(3):
            plain(model, opt, number)
        gate.set()
        return found

    with caplog.at_level("INFO", logger="hytrain.step.timing"):
        same_as_torch(run, perceptron, k=0.5)
    assert caplog.messages == [
        "this loop does nothing between backward and step(): updates begin in backward",
        "in evaluation mode, this loop calls backward several times before step(): updates begin in step(); "
        "grad_accumulation, or opt.no_sync(), lets them begin in backward",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "clips", "sums", "evaluates", "logs_weights", "steps_twice"])
def test_the_bits_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever updates, wherever gradients wait, and however far the device is behind the loop."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 1 << 16), nn.Tanh(), nn.Linear(1 << 16, 32)) for _ in range(6)]
        return nn.Sequential(*layers).to("cuda", torch.bfloat16)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        x = vectors(number, dtype=torch.bfloat16).to("cuda")
        loss: Tensor = (model(x) - x.sin()).float().square().mean()
        return loss

    def run(model: nn.Module, opt: Any) -> None:
        for number in range(6):
            LOOPS[name][1](model, opt, number)

    monkeypatch.setattr(sys.modules[__name__], "square_loss", loss_of)
    places = [{"k": k, "accumulate_on": place} for k in (0.0, 0.5) for place in ("auto", "host", "device")]
    choices = [{"updates": "step", **place} for place in ({"k": 1.0}, *places, {"policy": "random"})]
    same_bits(run, make, *choices, {"updates": "auto"}, *([{"updates": "backward"}] if name == "plain" else []))


def test_what_would_use_the_memory_of_a_gradient_that_was_consumed() -> None:
    """It has none. torch would end the process."""
    model = perceptron()
    with adamw(model, updates="backward") as opt:
        square_loss(model, 0).backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            with pytest.raises(UsageError, match="already consumed"):
                gradient.apply_(abs)  # type: ignore[no-untyped-call]
        opt.step()
        opt.synchronize()
        model.share_memory()
        assert all(parameter.is_shared() for parameter in model.parameters())
        opt.zero_grad()
        train(model, opt, range(1, 3), square_loss)


@pytest.mark.parametrize("given", [{"weight_decay": 0}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}], ids=str)
def test_numbers_that_are_no_floats_are_not_set_anew(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    with caplog.at_level("INFO", logger="hytrain.step.timing"), adamw(model, **given) as opt:
        train(model, opt, range(4), square_loss)
    assert ["does nothing between backward and step()" in line for line in caplog.messages] == [True]


def test_who_closes_before_the_step_hears_what_was_updated(caplog: pytest.LogCaptureFixture) -> None:
    for updates in ("backward", "step"):
        model = perceptron()
        with adamw(model, updates=updates) as opt:
            train(model, opt, range(2), square_loss)
            square_loss(model, 2).backward()
            caplog.clear()
        assert ["is closed before step()" in line for line in caplog.messages] == [True] * (updates == "backward")


def test_the_data_of_a_gradient_that_was_consumed_cannot_be_set() -> None:
    model = perceptron()
    with adamw(model, updates="backward") as opt:
        square_loss(model, 0).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            with pytest.raises(
                UsageError, match='data of a gradient that HyTrain has already consumed.*updates="step"'
            ):
                parameter.grad.data = torch.zeros_like(parameter)
        opt.step()
