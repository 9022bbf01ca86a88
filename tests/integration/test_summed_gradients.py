"""Between a backward that only sums and `step()`, `p.grad` is what it is in torch: read, written, dropped, replaced."""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import OnMasters, adamw, differing, opened, same_as_torch, same_bits, weights
from small_models import perceptron, square_loss, vectors
from torch import Tensor, nn

import hytrain
from hytrain.errors import UsageError
from hytrain.model.summed import summed

STEPS = 4
PLACES: list[dict[str, Any]] = [
    {"k": 0.0},
    {"k": 1.0, "accumulate_on": "device"},
    {"k": 0.5, "accumulate_on": "host"},
    {"k": 0.5, "overlap": False},
]


def retained(model: nn.Module, step: int) -> None:
    square_loss(model, step).backward(retain_graph=True)


def held(model: nn.Module, opt: Any, *seeds: int) -> None:
    """Backwards that only sum: `no_sync` is what the optimizer has besides torch's own interface."""
    for seed in seeds:
        if isinstance(opt, hytrain.AdamW | hytrain.SGD):
            with opt.no_sync():
                square_loss(model, seed).backward()
        else:
            square_loss(model, seed).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def clips(model: nn.Module, opt: Any, step: int) -> Any:
    opt.zero_grad()
    retained(model, step)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    opt.step()
    return float(norm)


def clips_values(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    opt.step()
    opt.zero_grad()


def scales(model: nn.Module, opt: Any, step: int) -> None:
    """By operators in place, out of place, and on what `detach` and `data` return."""
    held(model, opt, step, step + 100)
    for index, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        match index % 4:
            case 0:
                parameter.grad.mul_(0.5)
            case 1:
                parameter.grad = parameter.grad * 0.5
            case 2:
                parameter.grad.detach().div_(2)
            case 3:
                parameter.grad.data.mul_(0.5)
    opt.step()
    opt.zero_grad()


def reads(model: nn.Module, opt: Any, step: int) -> Any:
    retained(model, step)
    flat = torch.cat([gradient.flatten() for gradient in gradients(model)])
    seen = [
        float(flat.norm()),
        flat.tolist()[:3],
        gradients(model)[1].sum().item(),
        copy.deepcopy(gradients(model)[0]).sum().item(),
    ]
    opt.step()
    opt.zero_grad()
    return seen


def reads_after_the_step(model: nn.Module, opt: Any, step: int) -> Any:
    held(model, opt, step)
    opt.step()
    importance = [(p * p.grad).abs().sum().item() for p in model.parameters()]
    opt.zero_grad()
    return importance


def writes_a_view(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    row, array = gradients(model)[0][0], gradients(model)[1].numpy()
    held(model, opt, step + 100)
    row.zero_()
    array[0] = 0.25
    opt.step()
    opt.zero_grad()


def writes_by_address(model: nn.Module, opt: Any, step: int) -> Any:
    """As kernels do that are not torch's."""
    held(model, opt, step)
    gradient = gradients(model)[0]
    memory = (ctypes.c_float * gradient.numel()).from_address(gradient.data_ptr())
    seen = list(memory[:3])
    memory[0] = 0.25
    assert gradient.flatten()[0] == 0.25
    held(model, opt, step + 100)
    memory[1] = 0.5
    opt.step()
    opt.zero_grad()
    return seen


def sets_data(model: nn.Module, opt: Any, step: int) -> None:
    """As older code clamps. One stays as it is, one gets another's values, and one has a graph."""
    held(model, opt, step)
    first, second, third, fourth, *others = gradients(model)
    first.data = first.data
    second.data = third.data.sum() + torch.zeros_like(second)
    third.data = third + 0.1 * next(p for p in model.parameters() if p.shape == third.shape)
    fourth.data = others[1].data if others[1].shape == fourth.shape else fourth.data.clone()
    for gradient in others:
        gradient.data = gradient.data.clamp(min=0.0)
    held(model, opt, step + 100)
    opt.step()
    opt.zero_grad()


def sets_data_to_a_view(model: nn.Module, opt: Any, step: int) -> None:
    """What is written into a buffer later is in the gradients."""
    held(model, opt, step)
    flat = torch.cat([gradient.flatten() for gradient in gradients(model)])
    for gradient, part in zip(gradients(model), flat.split([g.numel() for g in gradients(model)]), strict=True):
        gradient.data = part.view_as(gradient)
    flat.mul_(0.5)
    opt.step()
    opt.zero_grad()


def writes_elements_and_storage(model: nn.Module, opt: Any, step: int) -> Any:
    """In ways that no operator sees."""
    held(model, opt, step)
    first, second, third, fourth = gradients(model)[:4]
    first.apply_(lambda value: 0.5 * value)
    second.map_(second.clone(), lambda mine, other: mine - 0.25 * other)
    third.untyped_storage().copy_((third * 0.5).untyped_storage())
    fourth.share_memory_()[0] = 0.25
    seen = first.untyped_storage().nbytes()
    opt.step()
    opt.zero_grad()
    return seen


def drops_all(model: nn.Module, opt: Any, step: int) -> None:
    retained(model, step)
    if step % 2:
        model.zero_grad()
    opt.step()
    opt.zero_grad()


def drops_some(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    next(model.parameters()).grad = None
    held(model, opt, step + 100)
    list(model.parameters())[1].grad = None
    opt.step()
    opt.zero_grad()


def sets_to_zero(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    model.zero_grad(set_to_none=False)
    held(model, opt, step + 100)
    opt.step()
    opt.zero_grad()


def replaces(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.full_like(parameter, 0.1)
    held(model, opt, step + 100)
    opt.step()
    opt.zero_grad()


def gives_buffers(model: nn.Module) -> Tensor:
    """Gradients in one flat tensor of the loop's own."""
    flat = torch.full([sum(parameter.numel() for parameter in model.parameters())], 0.01)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def fills_buffers(model: nn.Module, opt: Any, step: int) -> Any:
    """They are the loop's on, after each backward and after the step."""
    flat = gives_buffers(model)
    held(model, opt, step)
    flat.mul_(0.5)
    held(model, opt, step + 100)
    norm = float(flat.norm())
    flat.mul_(0.5)
    opt.step()
    flat.zero_()
    held(model, opt, step + 200)
    opt.step()
    opt.zero_grad()
    return norm


def keeps_them_for_later(model: nn.Module, opt: Any, step: int) -> None:
    """Two tasks, whose gradients are projected (PCGrad)."""
    held(model, opt, step)
    first = gradients(model)
    opt.zero_grad()
    held(model, opt, step + 100)
    second = [gradient.clone() for gradient in gradients(model)]
    for parameter, one, other in zip(model.parameters(), first, second, strict=True):
        parameter.grad = one + other - (one * other).sum().clamp(max=0) * other
    opt.step()
    opt.zero_grad()


def adds_noise(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    for index, gradient in enumerate(gradients(model)):
        gradient.add_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(index)), alpha=1e-3)
    opt.step()
    opt.zero_grad()


def steps_twice(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    opt.step()
    opt.step()
    opt.zero_grad()


def never_drops(model: nn.Module, opt: Any, step: int) -> None:
    """Momentum by accumulation, and a part that only some backwards reach."""
    if step == 0:
        held(model, opt, step)
    else:
        with opt.no_sync() if isinstance(opt, hytrain.AdamW) else torch.enable_grad():
            model[0](vectors(step)).square().mean().backward()
    opt.step()


def sets_hyperparameters(model: nn.Module, opt: Any, step: int) -> None:
    held(model, opt, step)
    for group in opt.param_groups:
        group["lr"], group["weight_decay"] = 1e-2 * (step + 1), 0.1 * step
    opt.step()
    opt.zero_grad()


LOOPS = [
    clips,
    clips_values,
    scales,
    reads,
    reads_after_the_step,
    writes_a_view,
    writes_by_address,
    sets_data,
    sets_data_to_a_view,
    writes_elements_and_storage,
    drops_all,
    drops_some,
    sets_to_zero,
    replaces,
    fills_buffers,
    keeps_them_for_later,
    adds_noise,
    steps_twice,
    never_drops,
    sets_hyperparameters,
]


@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_bits_of_torch(loop: Callable[..., Any], options: dict[str, Any]) -> None:
    if loop in (reads_after_the_step, steps_twice, never_drops) and options.get("accumulate_on") == "host":
        pytest.skip("sums are in host memory where the device has no room to keep gradients after the step")

    def run(model: nn.Module, opt: Any) -> list[Any]:
        return [loop(model, opt, step) for step in range(STEPS)]

    same_as_torch(run, **options)


@pytest.mark.parametrize("loop", [clips, drops_some, keeps_them_for_later], ids=lambda loop: loop.__name__)
def test_micro_batches_of_a_last_backward(loop: Callable[..., Any]) -> None:
    """What is dropped between micro-batches is not in the step, whose updates begin in its last backward."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(STEPS):
            for part in range(3):
                square_loss(model, 10 * step + part).backward()
                if (step, part) == (1, 1):
                    model.zero_grad()
                if (step, part) == (2, 0):
                    model[0][0].weight.grad = None
                if (step, part) == (3, 1):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()

    same_as_torch(run, grad_accumulation=3, k=0.5)


def test_the_bits_of_torchs_sgd() -> None:
    results = []
    for kind, options in ((torch.optim.SGD, {}), (hytrain.SGD, {"k": 0.0}), (hytrain.SGD, {"k": 1.0})):
        model = perceptron()
        if kind is torch.optim.SGD:
            opt: Any = kind(model.parameters(), lr=1e-2, momentum=0.9)
            for step in range(STEPS):
                clips(model, opt, step)
        else:
            with opened(kind, model, lr=1e-2, momentum=0.9, **options) as opt:
                for step in range(STEPS):
                    clips(model, opt, step)
                opt.synchronize()
        results.append(weights(model))
    assert [differing(result, results[0]) for result in results] == [[], [], []]


class MasteredAdamW(OnMasters, torch.optim.AdamW):
    pass


@pytest.mark.parametrize("loop", [clips, scales, drops_some, replaces], ids=lambda loop: loop.__name__)
def test_bfloat16_has_the_same_bits_wherever_sums_are(loop: Callable[..., Any]) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(STEPS):
            loop(model, opt, step)

    same_bits(run, functools.partial(perceptron, dtype=torch.bfloat16), *PLACES)


def test_bfloat16_gradients_of_one_backward_are_clipped_as_in_torch() -> None:
    ours, theirs = perceptron(dtype=torch.bfloat16), perceptron(dtype=torch.bfloat16)
    reference = MasteredAdamW(theirs, lr=1e-2, fused=True)
    with adamw(ours, k=0.5) as opt:
        for step in range(STEPS):
            assert clips(ours, opt, step) == clips(theirs, reference, step)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


def test_another_parameters_gradient_is_the_loops_own() -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(STEPS):
            held(model, opt, step)
            one, other = model[0][0].weight, model[1][0].weight
            other.grad = one.grad
            opt.step()
            opt.zero_grad()

    same_as_torch(run, k=0.5)


def test_what_is_refused_as_a_backward_begins_leaves_no_part_of_a_step() -> None:
    """Its first gradient was in one parameter's sum already."""
    model = perceptron()
    with adamw(model, loss_scale=8.0, grad_accumulation=2) as opt:
        opt.scale(square_loss(model, 0)).backward()
        before = weights(model)
        with pytest.raises(UsageError, match="not scaled"):
            square_loss(model, 1).backward()
        opt.step()
        assert differing(weights(model), before) == []


def test_a_tensor_from_before_the_last_backward_is_consumed_with_it() -> None:
    model = perceptron()
    with adamw(model, updates="backward", grad_accumulation=2) as opt:
        square_loss(model, 0).backward()
        kept = gradients(model)
        before = kept[0].clone()
        square_loss(model, 1).backward()
        with pytest.raises(UsageError, match="already consumed"):
            torch._foreach_mul_(kept, 0.5)
        opt.step()
        assert before.norm() > 0.0


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 1.0}, {"k": 0.5, "updates": "backward"}], ids=str)
def test_buffers_of_the_loop_that_a_last_backward_fills(options: dict[str, Any]) -> None:
    """They can be read, and written after the step."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        norms = []
        for step in range(STEPS):
            flat = gives_buffers(model)
            square_loss(model, step).backward()
            norms.append(float(flat.norm()))
            opt.step()
            flat.fill_(torch.nan)
            opt.zero_grad()
        return norms

    same_as_torch(run, **options)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_buffers_that_are_written_when_their_update_has_begun_are_refused(k: float) -> None:
    model = perceptron()
    with adamw(model, updates="backward", k=k) as opt:
        flat = gives_buffers(model)
        square_loss(model, 0).backward()
        flat.mul_(0.5)
        with pytest.raises(UsageError, match="which others have, too, was written when its update had begun.*updates="):
            opt.step()


class Added(nn.Module):
    """Autograd gives both parameters of the sum the same memory for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + (self.first[None] + self.second[None]))


def of_rows(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.sin()).square().mean()


IN_STEP: dict[str, Any] = {"k": 0.5, "updates": "step"}


@pytest.mark.parametrize("options", [*PLACES, IN_STEP, {"k": 0.0, "visit": 1.0}], ids=str)
@pytest.mark.parametrize("what", ["adds", "keeps the graph", "clips", "adds noise", "sets to zero"])
def test_gradients_that_share_their_memory(what: str, options: dict[str, Any]) -> None:
    """Whoever writes one of them in place, as a second backward does, writes both."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(STEPS):
            loss = of_rows(model, step)
            loss.backward(retain_graph=what == "keeps the graph")
            if what == "keeps the graph":
                (0.5 * loss).backward()
            if what == "adds":
                of_rows(model, step + 100).backward()
            for index, gradient in enumerate(gradients(model) if what == "adds noise" else ()):
                gradient.add_(0.1 * index)
            if what == "clips":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            if what == "sets to zero":
                torch._foreach_zero_(gradients(model))
            else:
                opt.zero_grad()

    same_as_torch(run, Added, **options)


class Positions(nn.Module):
    """The gradient of `positions` is what goes on to `line`, too, in the middle of a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.positions, self.last = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.line(x[None]) + self.positions[None]).tanh())


@pytest.mark.parametrize("make", [Added, Positions])
def test_updates_begin_in_backward_although_gradients_share_their_memory(make: Callable[[], nn.Module]) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(STEPS):
            of_rows(model, step).backward()
            opt.step()
            opt.zero_grad()
        if isinstance(opt, hytrain.AdamW):
            assert not opt._accumulation.timing.in_step

    same_as_torch(run, make, k=0.5)


def test_what_autograd_alone_had_in_use_becomes_sums_of_their_own() -> None:
    model = Positions()
    with adamw(model, updates="step", k=0.5) as opt:
        for step in range(2):
            of_rows(model, step).backward()
            assert all(summed(gradient) is not None for gradient in gradients(model))
            opt.step()
            opt.zero_grad()


def test_shared_gradients_are_consumed_with_the_others_where_hytrain_clips() -> None:
    model = Added()
    with adamw(model, max_grad_norm=0.05, updates="step", k=0.5) as opt:
        of_rows(model, 0).backward()
        opt.step()
        for gradient in gradients(model):
            with pytest.raises(UsageError, match="already consumed"):
                gradient.norm()


class Term(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self) -> Tensor:
        return self.weight[None]


class Terms(nn.Module):
    """The same in layers of their own. A hook of each halves its gradient, and so the other's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.terms, self.line = nn.ModuleList(Term() for _ in range(2)), nn.Linear(8, 8)
        for term in self.terms:
            term.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + (self.terms[0]() + self.terms[1]()))


@pytest.mark.parametrize("does", ["drops", "replaces", "writes_in_backward"])
def test_what_the_loop_does_with_shared_gradients_is_learned(does: str) -> None:
    def run(model: Any, opt: Any) -> None:
        for step in range(STEPS):
            of_rows(model, step).backward()
            if does == "drops":
                model.first.grad = None
            if does == "replaces":
                model.first.grad = model.first.grad * 1.0
            opt.step()
            opt.zero_grad()

    same_as_torch(run, Terms if does == "writes_in_backward" else Added, k=0.5)


VIEWS = {"view": lambda g: g.view(-1), "detach": Tensor.detach, "data": lambda g: g.data, "numpy": Tensor.numpy}


@pytest.mark.parametrize("how", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 1.0}, IN_STEP], ids=str)
def test_a_hook_keeps_views_that_the_loop_writes(how: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        model: Any = perceptron()
        model.views = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: model.views.append(how(p.grad)))
        return model

    def run(model: Any, opt: Any) -> None:
        for step in range(STEPS):
            model.views.clear()
            square_loss(model, step).backward()
            for view in model.views:
                view *= 0.1
            opt.step()
            opt.zero_grad()

    same_as_torch(run, make, **options)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_view_that_is_written_when_its_update_has_begun_is_refused(k: float) -> None:
    model, views = perceptron(), list[Tensor]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: views.append(p.grad.view(-1)))
    with adamw(model, updates="backward", k=k) as opt:
        square_loss(model, 0).backward()
        torch._foreach_mul_(views, 0.5)
        with pytest.raises(UsageError, match="which others have, too, was written when its update had begun.*updates="):
            opt.step()


def test_what_is_left_in_grad_belongs_to_no_optimizer() -> None:
    """After the end, another optimizer goes on with it."""
    model, twin = perceptron(), perceptron()
    with adamw(model) as opt:
        held(model, opt, 0)
    square_loss(twin, 0).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(parameter.grad) is Tensor and other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


def test_a_step_with_the_last_ones_gradients_is_refused_before_harm() -> None:
    """torch would use them again; they are gone."""
    model = perceptron()
    with adamw(model, updates="backward") as opt:
        square_loss(model, 0).backward()
        opt.step()
        for parameter in model[0].parameters():
            parameter.grad = None
        before = weights(model)
        with pytest.raises(UsageError, match=r"still the last step's.*zero_grad\(\) after each opt\.step"):
            model[0](vectors(0)).square().mean().backward()
        assert differing(weights(model), before) == []
        opt.zero_grad()
        square_loss(model, 1).backward()
        opt.step()


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_hyperparameters_set_after_backward_are_refused(k: float) -> None:
    """Not if they are what they were, and not where updates begin in `step()`."""
    model = perceptron()
    with adamw(model, updates="backward", k=k) as opt:
        square_loss(model, 0).backward()
        opt.param_groups[0]["lr"] = float(str(opt.param_groups[0]["lr"]))
        opt.step()
        opt.zero_grad()
        square_loss(model, 1).backward()
        opt.param_groups[0]["lr"] *= 0.5
        with pytest.raises(UsageError, match=r"between backward and step.*updates="):
            opt.step()


@pytest.mark.parametrize("by", ["loop", "hook"])
def test_without_overlap_step_has_the_last_word(by: str) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        step = 0

        def warm(*_: Any) -> None:  # torch calls it twice, if the class of the reference's base was used before
            opt.param_groups[0]["lr"] = 1e-2 * 1.5**step

        if by == "hook":
            opt.register_step_pre_hook(warm)
        for step in range(STEPS):
            square_loss(model, step).backward()
            if by == "loop":
                warm()
            opt.step()
            opt.zero_grad()

    same_as_torch(run, overlap=False, k=0.5)


def test_a_compilation_between_backwards_leaves_sums_where_they_are() -> None:
    """It asks for the storage of each parameter's gradient. Settled, a sum in float32 would be rounded."""
    model = perceptron(dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with adamw(model, k=0.0) as opt:
        for rows in (8, 4):
            with opt.no_sync():
                compiled(vectors(0, dtype=torch.bfloat16)[:rows]).square().mean().backward()
        sums = [summed(parameter.grad) for parameter in model.parameters()]
        assert all(total is not None and total.own is None for total in sums)
        opt.step()
