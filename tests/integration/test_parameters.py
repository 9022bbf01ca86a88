"""`hytrain.AdamW(model.parameters(), …)`: an optimizer like torch's, until its model is called.

It has the bits of torch's fused one, whatever happens to the model and to the optimizer before that.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded_models
import test_fsdp2
import torch
from helpers import LR, adamw, differing, late_weights, same, saved_and_loaded, seed, state, train, train_until, weights
from ranks import RankGroup
from small_models import in_parts, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hytrain
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.memory.capacity import GpuMemory
from hytrain.model.hooks import BeforeForward
from hytrain.model.trained import TrainedLayer
from hytrain.optim import Optimizer
from hytrain.session import Session
from hytrain.step.engine import Engine
from protocol.messages import PlanAck
from protocol.placement import CPU

STEPS = 3

#: The optimizer's maker gets torch's class or HyTrain's, and the model.
Make = Callable[[Any, Any], Any]


def by_default(kind: Any, model: nn.Module) -> Any:
    return kind(model.parameters(), LR)


def plain(model: nn.Module, opt: Any) -> object:
    return train(model, opt, range(STEPS), square_loss)


def compared(
    run: Callable[[Any, Any], object],
    make: Make = by_default,
    model_of: Callable[[], Any] = perceptron,
    kinds: tuple[Any, type[Optimizer]] = (torch.optim.AdamW, hytrain.AdamW),
    **options: Any,
) -> None:
    """`run(model, opt)` returns the same as with torch's optimizer, and leaves the same weights."""
    theirs, ours = model_of(), model_of()
    expected = run(theirs, make(partial(kinds[0], fused=True), theirs))
    opt = make(partial(kinds[1], **options), ours)
    for each in opt if isinstance(opt, tuple) else (opt,):
        assert each._started is None
    try:
        assert same(run(ours, opt), expected)
        for each in opt if isinstance(opt, tuple) else (opt,):
            each.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
    finally:
        for each in opt if isinstance(opt, tuple) else (opt,):
            each.close()


# ---------------------------------------------------------------- torch's signature


def positional(kind: Any, model: nn.Module) -> Any:
    return kind(model.parameters(), 0.02, (0.8, 0.9), 1e-6, 0.1, False)


def groups(kind: Any, model: Any) -> Any:
    decays = [{"params": model[:2].parameters(), "lr": 0.03}, {"params": list(model[2:].parameters())}]
    return kind(decays, lr=LR, weight_decay=0.0)


def names(kind: Any, model: nn.Module) -> Any:
    return kind(model.named_parameters(), lr=LR)


def one_tensor_in_a_group(kind: Any, model: Any) -> Any:
    return kind([{"params": model[0][0].weight}], lr=LR)


def without_frozen_ones(kind: Any, model: Any) -> Any:
    model[0].requires_grad_(False)
    return kind(filter(lambda p: p.requires_grad, model.parameters()), LR)


def with_frozen_ones(kind: Any, model: Any) -> Any:
    model[0].requires_grad_(False)
    return kind(model.parameters(), LR)


def added(kind: Any, model: Any) -> Any:
    opt = kind(model[0].parameters(), LR)
    opt.add_param_group({"params": model[1:].parameters(), "weight_decay": 0.5})
    return opt


def changed(kind: Any, model: Any) -> Any:
    opt = kind(model.parameters(), 1.0)
    for group in opt.param_groups:
        group["lr"] = LR
    return opt


@pytest.mark.parametrize(
    "make", [positional, groups, names, one_tensor_in_a_group, without_frozen_ones, with_frozen_ones, added, changed]
)
def test_what_torch_takes(make: Make) -> None:
    compared(plain, make)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_other_optimizers(name: str) -> None:
    arguments: tuple[Any, ...] = (0.05, 0.9, 0.1, 0.01) if name == "SGD" else (LR, (0.8, 0.99), 1e-7, 0.1)
    compared(
        plain,
        lambda kind, model: kind(model.parameters(), *arguments),
        kinds=(getattr(torch.optim, name), getattr(hytrain, name)),
    )


def test_lion_and_muon_have_the_bits_that_they_have_of_a_model() -> None:
    def lion(params: Any, **options: Any) -> Any:
        return hytrain.Lion(params, 1e-3, (0.9, 0.95), 0.1, **options)

    def muon(params: Any, **options: Any) -> Any:
        return hytrain.Muon(params, 0.02, **options)

    for make in (lion, muon):
        whole, found = perceptron(), perceptron()
        matrices = [p for p in found.parameters() if p.dim() == 2]
        biases = {"params": [p for p in found.parameters() if p.dim() == 1], "use_muon": False}
        given = [{"params": matrices}, biases] if make is muon else found.parameters()
        with make(whole) as opt, make(given) as other:
            assert plain(whole, opt) == plain(found, other)
            opt.synchronize()
            other.synchronize()
            assert differing(weights(found), weights(whole)) == []


def test_what_torch_refuses() -> None:
    model = perceptron()
    for params in ([], model[0][0].weight, None, [1.0], [model[0][0].weight * 2], {"params": []}):
        with pytest.raises((TypeError, ValueError)) as theirs:
            torch.optim.AdamW(params)  # type: ignore[arg-type]
        with pytest.raises(type(theirs.value)):
            hytrain.AdamW(params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="param_groups are of a model"):
        hytrain.AdamW(model.parameters(), param_groups=[])
    with pytest.raises(ConfigError, match="lr is 'fast': a number"):
        hytrain.AdamW(model.parameters(), "fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------- before the model is called


def scheduled(model: nn.Module, opt: Any) -> object:
    schedule = OneCycleLR(opt, 0.1, total_steps=10)
    losses = train(model, opt, range(STEPS), square_loss, schedule)
    return losses, schedule.get_last_lr()


def steps_without_gradients(model: nn.Module, opt: Any) -> object:
    opt.zero_grad()
    opt.step()
    opt.zero_grad()
    assert opt.step(lambda: 3.0) == 3.0
    return plain(model, opt)


def evaluates_first(model: Any, opt: Any) -> object:
    with torch.no_grad():
        seen = model(vectors(9)), model[0](vectors(9))
    return seen, plain(model, opt)


def moves_and_loads(model: nn.Module, opt: Any) -> object:
    model.double()
    model.float()
    model.load_state_dict({name: value * 0.5 for name, value in perceptron().state_dict().items()})
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return plain(model, opt)


def wraps(model: nn.Module, opt: Any) -> object:
    """The module that is entered is made after the optimizer."""
    outer = nn.Sequential(nn.Sequential(model), nn.Tanh())
    return train(outer, opt, range(STEPS), square_loss)


def closure(model: nn.Module, opt: Any) -> object:
    def loss() -> Tensor:
        opt.zero_grad()
        value = square_loss(model, 0)
        value.backward()
        return value

    return [opt.step(loss).item() for _ in range(STEPS)]


def from_a_loader(model: nn.Module, opt: Any) -> object:
    data = torch.utils.data.TensorDataset(torch.cat([vectors(step) for step in range(4)]))
    losses = []
    for epoch in range(2):
        seed(epoch)
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=1 if epoch else 0):
            loss = model(batch).square().mean()
            losses.append(loss.item())
            loss.backward()
            opt.step()
            opt.zero_grad()
    return losses


def in_a_region_of_autocast(model: nn.Module, opt: Any) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = square_loss(model, 7)
    first.backward()
    opt.step()
    opt.zero_grad()
    return first.item(), plain(model, opt)


@pytest.mark.parametrize(
    "run",
    [
        scheduled,
        steps_without_gradients,
        evaluates_first,
        moves_and_loads,
        wraps,
        closure,
        from_a_loader,
        in_a_region_of_autocast,
    ],
)
def test_a_loop(run: Callable[[Any, Any], object]) -> None:
    compared(run)


def test_random_numbers_go_on_as_without_it() -> None:
    """The session starts between what the loop draws and what dropout does."""

    def noisy() -> nn.Module:
        model = perceptron()
        model.append(nn.Dropout(0.5))
        return model

    compared(plain, model_of=noisy)


def test_the_outermost_module_is_the_model() -> None:
    model = perceptron()
    outer = nn.Sequential(nn.Sequential(model), nn.Tanh())
    gc.collect()
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    with hytrain.AdamW(model.parameters(), LR) as opt:
        with torch.no_grad():
            outer(vectors(0))
        assert opt._model is None
        outer(vectors(0))
        assert opt._model is outer
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == before


def test_the_first_forward_waits_as_all_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks are called, although torch has looked up before which there are."""
    entered = list[str]()
    for owner, name in ((Engine, "before_root"), (BeforeForward, "_enter")):
        plain_call = getattr(owner, name)

        def told(self: Any, *args: Any, call: Any = plain_call, name: str = name) -> None:
            entered.append(name)
            call(self, *args)

        monkeypatch.setattr(owner, name, told)
    model = nn.Linear(32, 32)
    with hytrain.AdamW(model.parameters(), LR):
        model(vectors(0))
        first = len(entered)
        model(vectors(0))
        assert entered == 2 * ["before_root", "_enter"] and first == 2


def test_a_session_starts_alone() -> None:
    """What the loop has entered for its own computations does not reach it."""
    model, seen = perceptron(), list[Any]()

    class Heard(hytrain.AdamW):
        def _start(self, ranks: Any) -> None:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            super()._start(ranks)

    with Heard(model.parameters(), LR) as opt, torch.autocast("cpu", dtype=torch.bfloat16):
        model(vectors(0))
        assert seen == [(False, True)] and opt._model is model


# ---------------------------------------------------------------- no module has all parameters


def temperature(kind: Any, model: Any) -> Any:
    """A parameter and a tensor that are in no module."""
    torch.manual_seed(3)
    model.loose = [nn.Parameter(torch.randn(5)), torch.randn(3, requires_grad=True)]
    return kind([*model.parameters(), *model.loose], LR)


def with_loose_ones(model: Any, opt: Any) -> object:
    def loss_of(model: Any, step: int) -> Tensor:
        first, second = model.loose
        return square_loss(model, step) * first.exp().sum() + (second - step).square().sum()

    losses = train(model, opt, range(STEPS), loss_of)
    if isinstance(opt, hytrain.AdamW):
        opt.synchronize()
    return losses, [each.detach().clone() for each in model.loose]


def by_hand(model: nn.Module, opt: Any) -> object:
    """As with torch.func: no module is ever entered."""
    for step in range(STEPS):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1))
        opt.step()
        opt.zero_grad()
    return STEPS


def functional(model: nn.Module, opt: Any, detached: bool = True) -> object:
    losses = []
    for step in range(STEPS):
        own = dict(model.named_parameters())
        loss, found = torch.func.grad_and_value(
            lambda given, step=step: torch.func.functional_call(model, given, (vectors(step),)).square().mean()
        )({name: parameter.detach() if detached else parameter for name, parameter in own.items()})[::-1]
        for name, parameter in own.items():
            parameter.grad = found[name]
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def stacked(kind: Any, model: Any) -> Any:
    """Three of them as one, of which no module has the parameters."""
    models = [perceptron() for _ in range(3)]
    for number, each in enumerate(models):
        nn.init.constant_(each[0][0].weight, 0.1 * number)
    model.stack, model.rest = torch.func.stack_module_state(models)
    return kind([*model.stack.values()], LR)


def ensemble(model: Any, opt: Any) -> object:
    """Trained, and then evaluated, all at once."""

    def called(own: Any, rest: Any, x: Tensor) -> Any:
        return torch.func.functional_call(model, (own, rest), (x,))

    losses = []
    for step in range(STEPS):
        torch.func.vmap(called, (0, 0, None))(model.stack, model.rest, vectors(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            losses.append(torch.func.vmap(called, (0, 0, None))(model.stack, model.rest, vectors(9)).sum().item())
    return losses


@pytest.mark.parametrize("updates", ["backward", "step"])
@pytest.mark.parametrize(
    ("run", "make"),
    [
        (lambda model, opt: train(model, opt, range(STEPS), in_parts), by_default),
        (with_loose_ones, temperature),
        (by_hand, by_default),
        (functional, by_default),
        (partial(functional, detached=False), by_default),
        (ensemble, stacked),
    ],
    ids=["parts", "loose ones", "by hand", "torch.func", "torch.func of parameters", "ensemble"],
)
def test_a_model_of_parts(run: Callable[[Any, Any], object], make: Make, updates: str) -> None:
    with late_weights():
        compared(run, make, updates=updates, k=0.0)


def test_gradients_that_are_set_may_have_a_graph() -> None:
    def run(model: nn.Module, opt: Any) -> object:
        for step in range(STEPS):
            loss = square_loss(model, step)
            found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
            opt.step()
            opt.zero_grad()
        return STEPS

    compared(run)


def head_alone(kind: Any, model: Any) -> Any:
    model.requires_grad_(False)[2].requires_grad_(True)
    return kind(model[2].parameters(), LR)


@pytest.mark.parametrize("loss_of", [square_loss, in_parts])
def test_groups_of_modules_that_were_no_part_of_the_model(loss_of: Callable[[Any, int], Tensor]) -> None:
    """A head is trained at first, and what is below it is added, once and again. Where it fails, nothing changes."""

    def run(model: Any, opt: Any) -> object:
        seen = [train(model, opt, range(STEPS), loss_of)]
        for index in (1, 0):
            below = model[index].requires_grad_(True)
            with pytest.raises(ValueError):
                opt.add_param_group({"params": [*below.parameters(), *model[2].parameters()]})
            opt.add_param_group({"params": below.parameters(), "lr": LR / 2})
            seen.append(train(model, opt, range(STEPS), loss_of))
        return seen, state(opt)

    compared(run, head_alone)


def test_updates_of_parts_begin_in_backward_if_the_loop_does_nothing_there(caplog: pytest.LogCaptureFixture) -> None:
    """The first step's gradients were there before the session."""
    model = perceptron()
    with caplog.at_level("INFO", logger="hytrain.step.timing"), hytrain.AdamW(model.parameters(), LR) as opt:
        train(model, opt, range(4), in_parts)
    assert [line for line in caplog.messages if "does nothing between backward and step()" in line]


def test_a_module_that_is_inside_of_a_part_is_none() -> None:
    model: Any = perceptron()
    with hytrain.AdamW(model.parameters(), LR) as opt:
        (model[0](vectors(0)).sum() + model[:2](vectors(0)).sum() + model[2](vectors(0)).sum()).backward()
        opt.step()
        assert [len(list(part.parameters())) for part in opt._model.children()] == [4, 2, 2]


def decayed(kind: Any, model: nn.Module) -> Any:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=LR, betas=(0.9, 0.95))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_loop_like_nanogpts(compiles: bool) -> None:
    """It compiles, evaluates, accumulates without a word, clips, and has a scaler that is switched off."""

    def run(model: nn.Module, opt: Any) -> object:
        torch._dynamo.reset()
        used: Any = torch.compile(model, backend="aot_eager") if compiles else model
        scaler, seen = torch.amp.GradScaler("cpu", enabled=False), []
        for step in range(STEPS):
            for group in opt.param_groups:
                group["lr"] = LR * (step + 1) / STEPS
            if step % 2 == 0:
                used.eval()
                with torch.no_grad():
                    seen.append(square_loss(used, 99).item())
                used.train()
            for part in range(3):
                scaler.scale(square_loss(used, 3 * step + part) / 3).backward()
            scaler.unscale_(opt)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        return seen

    compared(run, decayed)


# ---------------------------------------------------------------- several optimizers


def of_two(kind: Any, model: Any) -> Any:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return kind(matrices, LR), kind([parameter for parameter in model.parameters() if parameter.dim() == 1], 0.1)


def both(model: nn.Module, opts: tuple[Any, Any]) -> object:
    losses = []
    for step in range(STEPS):
        loss = square_loss(model, step)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


def test_two_over_one_model() -> None:
    """Each block has parameters of both."""
    compared(both, of_two)


def test_two_over_one_model_that_is_given() -> None:
    def given(kind: Any, model: Any) -> Any:
        if kind.func is torch.optim.AdamW:
            return of_two(kind, model)
        return tuple(
            kind(model, param_groups=[p for p in model.parameters() if p.dim() == dim], lr=lr)
            for dim, lr in ((2, LR), (1, 0.1))
        )

    theirs, ours = perceptron(), perceptron()
    expected = both(theirs, given(partial(torch.optim.AdamW, fused=True), theirs))
    first, second = given(partial(hytrain.AdamW), ours)
    with first, second:
        assert both(ours, (first, second)) == expected
        first.synchronize()
        second.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


def test_generator_and_discriminator() -> None:
    def pair() -> nn.Module:
        return nn.ModuleDict({"generator": perceptron(depth=2), "discriminator": perceptron(depth=2)})

    def of_each(kind: Any, model: Any) -> Any:
        return kind(model["generator"].parameters(), LR), kind(model["discriminator"].parameters(), LR)

    def duel(model: Any, opts: tuple[Any, Any]) -> object:
        generator, discriminator = model["generator"], model["discriminator"]
        losses = []
        for step in range(STEPS):
            opts[1].zero_grad()
            fake = generator(vectors(step))
            against = discriminator(vectors(step + 50)).mean() - discriminator(fake.detach()).mean()
            against.backward()
            opts[1].step()
            discriminator.requires_grad_(False)
            opts[0].zero_grad()
            own = discriminator(fake).mean()
            own.backward()
            opts[0].step()
            discriminator.requires_grad_(True)
            losses += [against.item(), own.item()]
        return losses

    compared(duel, of_each, model_of=pair)


def test_one_brings_no_state_to_the_gpu_while_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is refused, since both may have been made with the same memory; but not for ever."""
    monkeypatch.setattr(GpuMemory, "is_bounded", True)
    prepares, may_end, answers = threading.Event(), threading.Event(), list[PlanAck]()
    with adamw(perceptron(), policy="random") as one, adamw(perceptron(), policy="random") as other:
        handover, link = one._engine._handover, other._session._link
        prepare, post = handover._prepare, link.post

        def held(move: Any) -> None:
            prepares.set()
            assert may_end.wait(60.0)
            prepare(move)

        def listen(to: str, message: Any, **conditions: Any) -> None:
            answers.extend([message] if isinstance(message, PlanAck) else [])
            post(to, message, **conditions)

        monkeypatch.setattr(handover, "_prepare", held)
        monkeypatch.setattr(link, "post", listen)
        places = [other.statistics().gpu_layers]

        def brings() -> bool:
            places.append(other.statistics().gpu_layers)
            return not {*places[-2]} >= {*places[-1]}

        train_until(prepares.is_set, one._model, one, 0, square_loss)
        train_until(lambda: any(not ack.accepted for ack in answers) or brings(), other._model, other, 0, square_loss)
        assert any("another optimizer" in ack.reason for ack in answers)
        may_end.set()
        handover.wait()
        train_until(brings, other._model, other, 100, square_loss)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nobody_waits_for_one_that_parks(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was agreed on brings nothing until it resumes."""
    monkeypatch.setattr(GpuMemory, "is_bounded", True)
    with adamw(perceptron(), k=1.0) as opt:
        train(opt._model, opt, range(1), square_loss)
        handover, plan = opt._engine._handover, opt._engine._boundary._plans.plan
        plan = replace(plan, plan_id=plan.plan_id + 1, places=plan.places.moved({0}, CPU))
        assert handover.arrivals.claim() and opt._session.memory.arriving
        with monkeypatch.context() as patch:
            patch.setattr(handover, "is_parked", when == "before")
            patch.setattr(TrainedLayer, "take_back", lambda layer: setattr(handover, "is_parked", True))
            handover.prepare(plan)
        handover.is_parked = False
        assert not opt._session.memory.arriving and handover._move is None


def test_the_one_that_steps_is_meant() -> None:
    """A program may make all that it could use."""

    def first_of_two(kind: Any, model: Any) -> Any:
        used = kind(model.parameters(), LR)
        model.unused = [kind(model.parameters(), 1.0)]
        return used

    compared(plain, first_of_two)


# ---------------------------------------------------------------- state before the model is called


def test_a_state_that_is_loaded_before() -> None:
    theirs, reference = perceptron(), None
    reference = torch.optim.AdamW(theirs.parameters(), 0.5, fused=True)
    for group in reference.param_groups:
        group["lr"] = LR
    plain(theirs, reference)
    ours = copy.deepcopy(theirs)
    saved = saved_and_loaded(reference.state_dict())
    with hytrain.AdamW(ours.parameters(), 0.5) as opt:
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == LR
        loaded = opt.state_dict()
        assert loaded["steps"] == STEPS and same(loaded["state"], saved["state"])
        schedules = [LambdaLR(each, lambda step: 0.9**step) for each in (opt, reference)]
        expected = train(theirs, reference, range(3, 6), square_loss, schedules[1])
        assert train(ours, opt, range(3, 6), square_loss, schedules[0]) == expected
        assert opt.statistics().step == opt.state_dict()["steps"] == 6
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
        assert same(opt.state_dict()["state"], reference.state_dict()["state"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["dictionary", "folder", "torch's checkpoints"])
def test_a_run_goes_on(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Masters that the weights do not show are kept."""
    whole, first = (perceptron(dtype=dtype) for _ in range(2))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(vectors(step).to(dtype)).square().mean()

    with hytrain.AdamW(whole.parameters(), LR) as opt:
        train(whole, opt, range(6), loss_of)
        expected = state(opt) | weights(whole)
    with hytrain.AdamW(first.parameters(), LR) as opt:
        train(first, opt, range(3), loss_of)
        opt.save(tmp_path)
        saved = saved_and_loaded(opt.state_dict())
        for_torch = get_optimizer_state_dict(first, opt)
        opt.synchronize()
    second = copy.deepcopy(first)
    with hytrain.AdamW(second.parameters(), 1.0) as opt:
        if form == "folder":
            opt.load(tmp_path)
        elif form == "dictionary":
            opt.load_state_dict(saved)
        else:
            into = get_optimizer_state_dict(second, opt)
            assert into["state"].keys() == for_torch["state"].keys()
            set_optimizer_state_dict(second, opt, for_torch)
        train(second, opt, range(3, 6), loss_of)
        assert differing(state(opt) | weights(second), expected) == []


def test_the_state_of_a_fresh_one_is_that_before_the_first_step() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = perceptron(dtype=dtype)
        model[0].requires_grad_(False)
        with hytrain.AdamW(model.parameters(), LR) as found:
            assert found.state_dict()["state"] == {}, "as with torch"
            assert found.state, "so do torch's distributed checkpoints ask before they load into a state"
            before = found.state_dict()
            assert len(before["state"]) == len(list(model.parameters())) - len(list(model[0].parameters()))
        with hytrain.AdamW(model, LR) as opt:
            assert opt.state_dict()["state"] == {}
            assert opt.state and same(opt.state_dict(), before)
            assert all((parameter in opt.state) is parameter.requires_grad for parameter in model.parameters())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = perceptron()
    reference = torch.optim.AdamW(perceptron(width=16).parameters(), LR)
    opt = hytrain.AdamW(model.parameters(), LR)
    train(perceptron(width=16), reference, [0], lambda model, step: model(vectors(0)[:, :16]).sum())
    with pytest.raises(ConfigError, match="groups are not those of this optimizer"):
        opt.load_state_dict(torch.optim.AdamW(model[0].parameters()).state_dict())
    assert opt.state_dict()["steps"] == 0 and [*opt._resting] == []
    opt.close()


def test_a_folder_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    model = perceptron()
    with hytrain.AdamW(model.parameters(), LR) as opt:
        with pytest.raises(ConfigError, match="no optimizer state in .*: there is no folder .*nothing"):
            opt.load(tmp_path / "nothing")
        plain(model, opt)


def test_a_folder_that_is_saved_anew_before_the_first_forward_is_told(tmp_path: Path) -> None:
    """The next forward tries it again: nothing trains on without the state."""
    model, again = perceptron(), perceptron()
    with hytrain.AdamW(model, LR) as opt, hytrain.AdamW(again.parameters(), LR) as other:
        plain(model, opt)
        opt.save(tmp_path)
        other.load(tmp_path)
        plain(model, opt)
        opt.save(tmp_path)
        for _ in range(2):
            with pytest.raises(ConfigError, match="another state was saved in .* since opt.load was called"):
                square_loss(again, 0)
        other.load(tmp_path)
        square_loss(again, 0)
        assert other.state_dict()["steps"] == opt.state_dict()["steps"]


@pytest.mark.parametrize("grouped", [False, True])
def test_parts_have_their_state_whichever_is_called_first(grouped: bool, tmp_path: Path) -> None:
    """They have the same names of parameters."""
    one, other = nn.Linear(32, 32), nn.Linear(32, 32)
    given: list[Any] = [{"params": [*each.parameters()]} if grouped else [*each.parameters()] for each in (one, other)]
    groups_of = given if grouped else [p for each in given for p in each]

    def step(first: nn.Module, second: nn.Module, opt: Any) -> None:
        (first(vectors(0)).square().mean() + 9 * second(vectors(1)).square().mean()).backward()
        opt.step()
        opt.zero_grad()

    with hytrain.AdamW(groups_of, LR) as opt:
        step(one, other, opt)
        opt.save(tmp_path)
        saved = copy.deepcopy(opt.state_dict()["state"])
    with hytrain.AdamW(groups_of, LR) as again:
        step(other, one, again)
        again.load(tmp_path)
        assert same(again.state_dict()["state"], saved)


def test_a_copy_of_one_that_has_a_folder_loads_it_too(tmp_path: Path) -> None:
    model, other = perceptron(), perceptron()
    with hytrain.AdamW(model, LR) as opt:
        plain(model, opt)
        opt.save(tmp_path)
        saved = copy.deepcopy(opt.state_dict()["state"])
    first = hytrain.AdamW(other.parameters(), LR)
    first.load(tmp_path)
    copied, again = copy.deepcopy((other, first))
    with again:
        square_loss(copied, 0)
        assert same(again.state_dict()["state"], saved)
    first.close()


@pytest.mark.parametrize("as_model", [False, True])
def test_what_the_program_sets_after_a_load_stays(
    as_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate, or the first one of a schedule. The folder is meant as it was called then."""
    monkeypatch.chdir(tmp_path)
    with hytrain.AdamW(perceptron(), lr=0.03, betas=(0.8, 0.9)) as opt:
        plain(opt._model, opt)  # type: ignore[arg-type]
        opt.save("state")
    for sets in (True, False):
        model = perceptron()
        with hytrain.AdamW(model if as_model else model.parameters(), LR) as opt:
            monkeypatch.chdir(tmp_path)
            opt.load("state")
            monkeypatch.chdir("/")
            [group] = opt.param_groups
            assert (group["lr"], group["betas"]) == (0.03, (0.8, 0.9))
            if sets:
                group["lr"] = 0.005
            schedule = LambdaLR(opt, lambda step: 0.5**step)
            square_loss(model, 0).backward()
            assert opt.param_groups[0]["lr"] == (0.005 if sets else 0.03), "also after the first forward"
            opt.step()
            schedule.step()
            assert (opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]) == (0.0025 if sets else 0.015, (0.8, 0.9))
            assert opt.state_dict()["state"][0]["step"] == STEPS + 1


def test_a_start_that_is_interrupted_between_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded has been given in part. Training does not begin without the rest."""
    model = perceptron()
    opt = hytrain.AdamW(model.parameters(), LR)
    reference = torch.optim.AdamW(perceptron().parameters())
    for parameter in reference.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    reference.step()
    opt.load_state_dict(reference.state_dict())

    def interrupted(self: Session, steps: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "restored", interrupted)
        with pytest.raises(KeyboardInterrupt):
            square_loss(model, 0)
    square_loss(model, 0).backward()
    with pytest.raises(UsageError, match="this hytrain.AdamW is closed"):
        opt.step()


# ---------------------------------------------------------------- several ranks


def of_shards() -> None:
    """Trained, and trained on from a state that is loaded before the first forward."""
    theirs, ours = test_fsdp2.plain(), test_fsdp2.plain()
    reference, saved = sharded_models.fused(theirs), None
    for _ in range(2):
        expected = sharded_models.trained(test_fsdp2.loop, theirs, reference)
        with adamw(ours.parameters()) as opt:
            if saved is not None:
                opt.load_state_dict(saved)
            found = sharded_models.trained(test_fsdp2.loop, ours, opt)
            saved = copy.deepcopy(opt.state_dict())
        assert differing(found, expected) == []


def test_shards(two_ranks: RankGroup) -> None:
    two_ranks.run(of_shards)


def of_added_shards() -> None:
    """No module is known that reads them. Training goes on without them."""
    below, head = test_fsdp2.plain(), test_fsdp2.plain()
    with adamw(below.parameters()) as opt:
        sharded_models.trained(test_fsdp2.loop, below, opt)
        with pytest.raises(UnsupportedError, match="add_param_group has shards of a module that is no part"):
            opt.add_param_group({"params": [*head.parameters()]})
        sharded_models.trained(test_fsdp2.loop, below, opt)
        assert len(opt.param_groups) == 1


def test_shards_that_are_added(two_ranks: RankGroup) -> None:
    two_ranks.run(of_added_shards)


# ---------------------------------------------------------------- what it is until then


def test_what_needs_the_model_says_so(tmp_path: Path) -> None:
    model = perceptron()
    opt = hytrain.AdamW(model.parameters(), LR)
    opt.synchronize()
    opt.import_weights()
    assert (opt.grad_norm, opt.skipped_steps, opt.checkpoint_requested(), opt.statistics().step) == (None, 0, False, 0)
    for ask in (opt.processes, lambda: opt.run_dir, partial(opt.save, tmp_path), opt.lend_weights):
        with pytest.raises(UsageError, match="HyTrain finds the model of model.parameters") as raised:
            ask()
        assert "\n" not in str(raised.value)
    opt.close()
    with pytest.raises(UsageError, match="this hytrain.AdamW is closed"):
        opt.step()
    square_loss(model, 0)
    assert opt._model is None


@pytest.mark.parametrize("end", ["close", "collect"])
def test_one_that_ends_before_leaves_nothing(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hytrain import session

    def start(*_: Any) -> Any:
        raise AssertionError("a process is started")

    monkeypatch.setattr(session, "find_or_start", start)
    gc.collect()
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    model = perceptron()
    opt = hytrain.AdamW(model.parameters(), LR)
    schedule = LambdaLR(opt, lambda step: 1.0)
    gone = weakref.ref(opt)
    opt.log(1, loss=2.0)
    if end == "close":
        opt.close()
    del opt, schedule
    gc.collect()
    assert gone() is None and len(torch.nn.modules.module._global_forward_pre_hooks) == before
    square_loss(model, 0).backward()


def test_copies_of_one_that_has_no_session() -> None:
    """With its model: as in torch, the copy trains the copy's parameters."""
    expected = perceptron()
    losses = plain(expected, torch.optim.AdamW(expected.parameters(), LR, fused=True))
    made = perceptron()
    first = hytrain.AdamW(made.parameters(), LR, updates="step")
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        model, opt = copied((made, first))
        assert plain(model, opt) == losses and opt._options.updates == "step"
        opt.synchronize()
        assert differing(weights(model), weights(expected)) == []
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copy.deepcopy(opt)
        opt.close()
    assert first._model is None
    first.close()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_have_their_shapes_after_the_first_forward() -> None:
    def train(make: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(32))
        opt = make(model.parameters())
        for step in range(4):
            square_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        return model, opt

    theirs, _ = train(lambda given: torch.optim.AdamW(given, LR, fused=True))
    ours, opt = train(lambda given: hytrain.AdamW(given, LR, k=0.5))
    opt.close()
    assert differing(weights(ours), weights(theirs)) == []
    with pytest.raises(UnsupportedError, match="lazy modules"):
        hytrain.AdamW(nn.Sequential(nn.LazyLinear(8)))


def test_what_a_model_cannot_be_is_told_in_the_first_forward() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    opt = hytrain.AdamW(model.parameters(), LR)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="sparse=False"):
            model(torch.zeros(1, dtype=torch.int64))
    assert not model._forward_pre_hooks and all(type(p) is nn.Parameter for p in model.parameters())
    opt.close()


def test_numbers_that_are_logged_before_are_in_the_records(own_run: None) -> None:
    model = perceptron()
    with hytrain.AdamW(model.parameters(), LR) as opt:
        opt.log(1, accuracy=0.25)
        plain(model, opt)
        folder = opt.run_dir
    assert '"accuracy":0.25' in (folder / "metrics.jsonl").read_text().replace(" ", "")


def test_a_scaled_loss() -> None:
    """`opt.scale` comes after the forward, which has begun what it needs."""
    model, twin = perceptron(), perceptron()
    with hytrain.AdamW(model.parameters(), LR, loss_scale=8.0) as opt:
        for step in range(STEPS):
            opt.scale(in_parts(model, step)).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
    train(twin, torch.optim.AdamW(twin.parameters(), LR, fused=True), range(STEPS), in_parts)
    assert differing(weights(model), weights(twin)) == []


def test_sums_without_steps() -> None:
    """`opt.no_sync()` and `grad_accumulation` count from the first backward."""
    for options in ({"grad_accumulation": 2}, {}):
        model, twin = perceptron(), perceptron()
        theirs = torch.optim.AdamW(twin.parameters(), LR, fused=True)
        with hytrain.AdamW(model.parameters(), LR, **options) as opt:
            for step in range(STEPS):
                if options:
                    square_loss(model, 2 * step).backward()
                else:
                    with opt.no_sync():
                        square_loss(model, 2 * step).backward()
                square_loss(model, 2 * step + 1).backward()
                opt.step()
                opt.zero_grad()
                for part in range(2):
                    square_loss(twin, 2 * step + part).backward()
                theirs.step()
                theirs.zero_grad()
            opt.synchronize()
        assert differing(weights(model), weights(twin)) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks
@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_compiled_model(how: str) -> None:
    def run(model: Any, opt: Any) -> object:
        torch._dynamo.reset()
        if how == "module.compile":
            model.compile(backend="eager")
            return plain(model, opt)
        return plain(torch.compile(model, backend="eager"), opt)

    compared(run)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_modules_called_in_another_order_have_the_norm_of_their_parameters(k: float, is_tied: bool) -> None:
    """Norms of many parameters are added up in the order in which the optimizer got them."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last = nn.Linear(16, 4)
            self.first = nn.Linear(32, 16)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3))
            self.head = nn.Linear(16, 4)
            if is_tied:
                self.head.weight = self.last.weight

    def run(clips: bool, make: Callable[[Any], Any]) -> tuple[list[float], dict[str, Tensor]]:
        model, norms = Blocks(), list[float]()
        opt = make(model.parameters())
        for step in range(30):
            x = model.first(vectors(step))
            for block in model.blocks:
                x = x + block(x)
            (model.last(x).square() + model.head(x).square()).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05) if clips else None
            opt.step()
            norms.append(float(opt.grad_norm if norm is None else norm))
            opt.zero_grad()
        if not clips:
            opt.close()
        return norms, weights(model)

    theirs = run(True, lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True))
    ours = run(False, lambda given: hytrain.AdamW(given, lr=1e-2, k=k, max_grad_norm=0.05))
    assert ours[0] == theirs[0] and differing(ours[1], theirs[1]) == []


def test_modules_that_are_not_called_at_first_have_their_place_in_the_norm() -> None:
    def run(clips: bool, make: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(12))
        opt, norms, chance = make(blocks.parameters()), list[float](), random.Random(1)
        for step in range(20):
            x = vectors(step)
            for block in blocks:
                x = x + block(x) if chance.random() < 0.6 else x
            x.square().mean().backward()
            norm = nn.utils.clip_grad_norm_(blocks.parameters(), 0.05) if clips else None
            opt.step()
            norms.append(float(opt.grad_norm if norm is None else norm))
            opt.zero_grad()
        if not clips:
            opt.close()
        return norms

    theirs = run(True, lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True))
    assert run(False, lambda given: hytrain.AdamW(given, lr=1e-2, max_grad_norm=0.05)) == theirs


def test_state_that_is_moved_elsewhere_is_left_as_it_is() -> None:
    """As Lightning does it."""
    with hytrain.AdamW(perceptron().parameters(), LR) as opt:
        for parameter, entry in opt.state.items():
            opt.state[parameter] = entry
        assert set(opt.state.keys()) == set(opt.param_groups[0]["params"])
        one, other, *_ = opt.param_groups[0]["params"]
        for write in (
            lambda: opt.state.__setitem__(one, {}),
            lambda: opt.state.__setitem__(one, opt.state[other]),
            lambda: opt.state.__ior__({one: {}}),
            lambda: copy.copy(opt.state),
        ):
            with pytest.raises(UsageError, match="has no values"):
                write()


@pytest.mark.parametrize("updates", ["backward", "step"])
def test_a_loop_that_changes_to_another_optimizer(updates: Any) -> None:
    """Both were made for the same parameters. If the first one has updated them in backward, the second one says so."""
    theirs, ours = perceptron(), perceptron()
    torchs = [torch.optim.AdamW(theirs.parameters(), lr, fused=True) for lr in (1e-2, 3e-3)]
    opts = [hytrain.AdamW(ours.parameters(), lr, updates=updates) for lr in (1e-2, 3e-3)]
    try:
        for step in range(6):
            train(theirs, torchs[step > 2], [step], square_loss)
            if updates == "backward" and step > 2:
                with pytest.raises(UsageError, match="another optimizer of HyTrain has updated"):
                    train(ours, opts[1], [step], square_loss)
                break
            train(ours, opts[step > 2], [step], square_loss)
            assert differing(weights(ours), weights(theirs)) == []
    finally:
        for opt in opts:
            opt.close()
