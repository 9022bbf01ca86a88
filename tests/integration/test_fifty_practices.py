"""Practices that people have around a training loop, each run as with torch's AdamW: the same bits, or a sentence.

A practice is a function of a model and an optimizer, which is HyTrain's or torch's, and knows no difference. No read
of half-updated weights passes by luck: the CPU's updates arrive only while somebody waits for them (`k=0`), the
others are made in backward, before backward goes on (`k=1`).

docs/semantics.md lists every row.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LR, Reference, adamw, differing, late_weights, same, saved_and_loaded, train, weights
from small_models import perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hytrain
from hytrain.errors import UsageError

STEPS = 6

# ---------------------------------------------------------------- the table

Practice = Callable[[Any, Any], object]


@dataclass(frozen=True)
class Row:
    """A practice that gives the same bits as with torch, and goes on doing so.

    With a `refusal`, HyTrain raises this sentence instead, and is then where torch is after `as_if`: nothing is half
    done. `ends`: training cannot go on afterwards, and nobody trains on silently. `options` are HyTrain's, `ignores` is
    a warning of torch's.
    """

    run: Practice
    make: Callable[[], nn.Module] = perceptron
    groups_of: Callable[[nn.Module], Any] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    as_if: Practice | None = None
    ends: bool = False
    ignores: str | None = None


ROWS: dict[str, Row] = {}

USED = r"is (used|called) between backward and step\(\)"
CONSUMED = "a gradient that HyTrain has already consumed"


def practice(**of: Any) -> Callable[[Practice], Practice]:
    def add(run: Any) -> Practice:
        ROWS[run.__name__] = Row(run, **of)
        return run  # type: ignore[no-any-return]

    return add


@contextmanager
def another(opt: Any, model: nn.Module) -> Iterator[Any]:
    """A second optimizer, of the same kind as the first."""
    if not isinstance(opt, hytrain.AdamW):
        yield Reference(model, lr=LR)
        return
    with adamw(model, k=0.0) as other:
        yield other


def step(model: Any, opt: Any, number: int, loss: Tensor | None = None) -> float:
    loss = square_loss(model, number) if loss is None else loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def plain_steps(count: int, model: Any, opt: Any) -> None:
    train(model, opt, range(count), square_loss)


step_0 = partial(plain_steps, 1)


def plain_loop(model: Any, opt: Any) -> object:
    seen = train(model, opt, range(STEPS), square_loss)
    with torch.no_grad():
        return seen, square_loss(model, 99).item()


# ---------------------------------------------------------------- averages of weights


@practice()
def averaged_model(model: Any, opt: Any) -> object:
    """`torch.optim.swa_utils.AveragedModel`, SWA"""
    average = swa_utils.AveragedModel(model)
    for number in range(STEPS):
        step(model, opt, number)
        average.update_parameters(model)
    return weights(average.module), average.module(vectors(99))


@practice()
def averaged_model_ema(model: Any, opt: Any) -> object:
    """`AveragedModel` with `multi_avg_fn=get_ema_multi_avg_fn`"""
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for number in range(STEPS):
        step(model, opt, number)
        average.update_parameters(model)
    return weights(average.module)


@practice()
def averaged_model_avg_fn(model: Any, opt: Any) -> object:
    """`AveragedModel` with `avg_fn`"""
    average = swa_utils.AveragedModel(model, avg_fn=lambda mean, new, count: 0.9 * mean + 0.1 * new)
    for number in range(STEPS):
        step(model, opt, number)
        average.update_parameters(model)
    return weights(average.module)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(3)])


@practice(make=normalized)
def averaged_buffers(model: Any, opt: Any) -> object:
    """`AveragedModel` with `use_buffers`, `update_bn` at the end"""
    average = swa_utils.AveragedModel(model, use_buffers=True)
    for number in range(STEPS):
        step(model, opt, number)
        average.update_parameters(model)
    swa_utils.update_bn([vectors(number) for number in range(4)], average)
    return {name: tensor.clone() for name, tensor in average.state_dict().items()}


@practice()
def ema_by_hand(model: Any, opt: Any) -> object:
    """EMA over `zip(ema.parameters(), model.parameters())`"""
    ema = copy.deepcopy(model)
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    return weights(ema)


@practice()
def ema_of_data(model: Any, opt: Any) -> object:
    """EMA in a dictionary: `shadow[name] = d * shadow[name] + (1 - d) * p.data`"""
    shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
    for number in range(STEPS):
        step(model, opt, number)
        for name, p in model.named_parameters():
            if p.requires_grad:
                shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    return shadow


@practice()
def ema_of_a_kept_list(model: Any, opt: Any) -> object:
    """EMA over a list of parameters kept from before"""
    parameters = list(model.parameters())
    shadow = [p.detach().clone() for p in parameters]
    for number in range(STEPS):
        step(model, opt, number)
        torch._foreach_lerp_(shadow, [p.detach() for p in parameters], 0.1)
    return shadow


@practice()
def ema_of_the_state_dict(model: Any, opt: Any) -> object:
    """EMA over `model.state_dict()`"""
    shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(STEPS):
        step(model, opt, number)
        for name, tensor in model.state_dict().items():
            shadow[name].mul_(0.9).add_(tensor, alpha=0.1)
    return shadow


@practice()
def ema_swapped_in_by_load_state_dict(model: Any, opt: Any) -> object:
    """EMA swapped in for evaluation by `load_state_dict`, and out again"""
    ema, seen = copy.deepcopy(model), []
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            for mean, tensor in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                mean.lerp_(tensor, 0.1)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.state_dict())
        with torch.no_grad():
            seen.append(square_loss(model, 99).item())
        model.load_state_dict(kept)
    return seen


@practice()
def ema_swapped_in_by_data(model: Any, opt: Any) -> object:
    """EMA swapped in for evaluation by `p.data.copy_`, and out again"""
    ema, seen = copy.deepcopy(model), []
    for number in range(STEPS):
        step(model, opt, number)
        kept = [p.data.clone() for p in model.parameters()]
        for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(p.data, alpha=0.1)
            p.data.copy_(mean.data)
        with torch.no_grad():
            seen.append(square_loss(model, 99).item())
        for p, before in zip(model.parameters(), kept, strict=True):
            p.data.copy_(before)
    return seen


@practice()
def ema_swapped_in_by_pointer(model: Any, opt: Any) -> object:
    """EMA swapped in for evaluation by `p.data = ema`, and out again"""
    ema, seen = copy.deepcopy(model), []
    for number in range(STEPS):
        step(model, opt, number)
        kept = [p.data for p in model.parameters()]
        for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(p.data, alpha=0.1)
            p.data = mean.data
        with torch.no_grad():
            seen.append(square_loss(model, 99).item())
        for p, before in zip(model.parameters(), kept, strict=True):
            p.data = before
    return seen


@practice()
def momentum_encoder(model: Any, opt: Any) -> object:
    """a momentum encoder (MoCo, BYOL): a second network that follows, and whose output is a target"""
    follower, seen = copy.deepcopy(model).requires_grad_(False), []
    for number in range(STEPS):
        x = vectors(number)
        seen.append(step(model, opt, number, functional.mse_loss(model(x), follower(x + 0.1))))
        for theirs, ours in zip(follower.parameters(), model.parameters(), strict=True):
            theirs.data = theirs.data * 0.9 + ours.data * 0.1
    return seen


@practice()
def target_network(model: Any, opt: Any) -> object:
    """a target network (DQN), loaded every second step"""
    target, seen = copy.deepcopy(model), []
    for number in range(STEPS):
        with torch.no_grad():
            wanted = target(vectors(number)) * 0.9
        seen.append(step(model, opt, number, functional.smooth_l1_loss(model(vectors(number)), wanted)))
        if number % 2:
            target.load_state_dict(model.state_dict())
    return seen


@practice()
def lookahead(model: Any, opt: Any) -> object:
    """Lookahead: slow weights, written back every second step under `no_grad`"""
    slow = [p.detach().clone() for p in model.parameters()]
    for number in range(STEPS):
        step(model, opt, number)
        if number % 2:
            with torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(p, 0.5)
                    p.copy_(kept)
    return None


@practice()
def swa_swapped_in_at_the_end(model: Any, opt: Any) -> object:
    """SWA with `SWALR`, its weights loaded into the model"""
    average, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(opt, swa_lr=LR / 2, anneal_epochs=2)
    for number in range(STEPS):
        step(model, opt, number)
        if number >= 2:
            average.update_parameters(model)
            schedule.step()
    model.load_state_dict(average.module.state_dict())
    return [step(model, opt, number) for number in range(3)]


# ---------------------------------------------------------------- reading weights


@practice()
def norms_between_steps(model: Any, opt: Any) -> object:
    """logging `p.norm()` over `named_parameters()` after `step()`"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append({name: p.norm().item() for name, p in model.named_parameters()})
    return seen


@practice(refusal=USED, as_if=step_0)
def norms_before_step(model: Any, opt: Any) -> object:
    """logging `p.norm()` over `named_parameters()` between backward and `step()`"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        seen.append({name: p.norm().item() for name, p in model.named_parameters()})
        opt.step()
        opt.zero_grad()
    return seen


@practice()
def norms_of_groups(model: Any, opt: Any) -> object:
    """logging norms over `opt.param_groups`"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append([p.norm().item() for group in opt.param_groups for p in group["params"]])
    return seen


@practice()
def kept_list(model: Any, opt: Any) -> object:
    """a list of parameters kept from before, read after `step()`"""
    parameters, seen = list(model.parameters()), []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append(torch.cat([p.flatten() for p in parameters]).norm().item())
    return seen


@practice()
def l2_penalty(model: Any, opt: Any) -> object:
    """an L2 penalty over `model.parameters()` in the loss"""
    seen = []
    for number in range(STEPS):
        penalty = sum(p.square().sum() for p in model.parameters())
        seen.append(step(model, opt, number, square_loss(model, number) + 1e-3 * penalty))
    return seen


@practice()
def l1_penalty_of_a_kept_list(model: Any, opt: Any) -> object:
    """an L1 penalty over a list of parameters kept from before"""
    parameters, seen = [p for p in model.parameters() if p.dim() > 1], []
    for number in range(STEPS):
        penalty = sum(p.abs().sum() for p in parameters)
        seen.append(step(model, opt, number, square_loss(model, number) + 1e-3 * penalty))
    return seen


@practice()
def parameters_as_a_vector(model: Any, opt: Any) -> object:
    """`nn.utils.parameters_to_vector` after `step()`"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return seen


@practice()
def weights_as_numpy(model: Any, opt: Any) -> object:
    """`p.detach().numpy()` for a histogram after `step()`"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append([np.histogram(p.detach().cpu().numpy(), bins=4)[0].tolist() for p in model.parameters()])
    return seen


@practice()
def weights_by_module(model: Any, opt: Any) -> object:
    """statistics of `module.weight` over `model.modules()` after `step()`"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        seen.append([m.weight.std().item() for m in model.modules() if isinstance(m, nn.Linear)])
    return seen


@practice(refusal=USED, as_if=step_0)
def evaluation_before_step(model: Any, opt: Any) -> object:
    """evaluation under `no_grad` between backward and `step()`"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        with torch.no_grad():
            seen.append(square_loss(model, 99).item())
        opt.step()
        opt.zero_grad()
    return seen


@practice(refusal=USED, as_if=step_0)
def checkpoint_before_step(model: Any, opt: Any) -> object:
    """`model.state_dict()` between backward and `step()`"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        seen.append(saved_and_loaded(model.state_dict()))
        opt.step()
        opt.zero_grad()
    return seen


@practice(refusal=USED, as_if=step_0)
def update_ratios(model: Any, opt: Any) -> object:
    """the size of an update: weights copied before `step()`, compared after it"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        before = [p.detach().clone() for p in model.parameters()]
        opt.step()
        seen.append([(p.detach() - b).norm().item() for p, b in zip(model.parameters(), before, strict=True)])
        opt.zero_grad()
    return seen


# ---------------------------------------------------------------- writing weights


@practice()
def clamped_data(model: Any, opt: Any) -> object:
    """`p.data.clamp_()` after `step()` (WGAN)"""
    for number in range(STEPS):
        step(model, opt, number)
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)
    return None


@practice()
def clamped(model: Any, opt: Any) -> object:
    """`p.clamp_()` under `no_grad` after `step()`"""
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.05, 0.05)
    return None


@practice()
def rows_normalized(model: Any, opt: Any) -> object:
    """rows renormalised under `no_grad` after `step()`"""
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            for block in model:
                block[0].weight.copy_(functional.normalize(block[0].weight, dim=1))
    return None


@practice()
def one_row_zeroed(model: Any, opt: Any) -> object:
    """`module.weight.data[0].zero_()` after `step()` (a padding row)"""
    for number in range(STEPS):
        step(model, opt, number)
        if number % 2:
            model[2][0].weight.data[0].zero_()
    return None


@practice()
def rows_normalized_data(model: Any, opt: Any) -> object:
    """rows renormalised by `weight.data = normalize(weight.data)`"""
    plain_steps(3, model, opt)
    for block in model:
        block[0].weight.data = functional.normalize(block[0].weight.data, dim=1)
    step(model, opt, 3)
    return None


@practice()
def vector_into_parameters(model: Any, opt: Any) -> object:
    """`nn.utils.vector_to_parameters`, which sets `p.data`"""
    plain_steps(3, model, opt)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
    step(model, opt, 3)
    return None


@practice()
def made_half(model: Any, opt: Any) -> object:
    """`model.half()` for an evaluation, `model.float()` after it"""
    plain_steps(3, model, opt)
    model.half()
    with torch.no_grad():
        model(vectors(99).half())
    model.float()
    step(model, opt, 3)
    return None


@practice()
def layer_reset(model: Any, opt: Any) -> object:
    """`reset_parameters()` of a layer during training"""
    for number in range(STEPS):
        step(model, opt, number)
        if number == 2:
            torch.manual_seed(1)
            model[3][0].reset_parameters()
    return None


@practice()
def initialised_again(model: Any, opt: Any) -> object:
    """`model.apply(init)` with `nn.init` after the optimizer was made"""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.fill_(0.01)

    torch.manual_seed(1)
    model.apply(init)
    return [step(model, opt, number) for number in range(STEPS)]


@practice(refusal=USED, as_if=step_0)
def decay_by_hand(model: Any, opt: Any) -> object:
    """weight decay by hand, `p.data.mul_()` between backward and `step()`"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        for p in model.parameters():
            p.data.mul_(0.99)
        opt.step()
        opt.zero_grad()
    return None


def with_noise(model: Any, opt: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.01)
    step(model, opt, 0)


@practice(refusal=USED, as_if=with_noise)
def noise_on_weights(model: Any, opt: Any) -> object:
    """noise added to the weights for forward and backward, removed before `step()`"""
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.01)
    square_loss(model, 0).backward()
    with torch.no_grad():
        for p, before in zip(model.parameters(), kept, strict=True):
            p.copy_(before)
    return None


@practice(refusal=CONSUMED, as_if=partial(plain_steps, 4))
def lbfgs_between(model: Any, opt: Any) -> object:
    """a few steps of `LBFGS` over the same parameters in between"""
    plain_steps(3, model, opt)
    other = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        other.zero_grad()
        loss = square_loss(model, 3)
        loss.backward()
        return loss

    other.step(closure)
    return None


@practice(refusal=f"{CONSUMED}|is used between backward and step", as_if=step_0)
def sam(model: Any, opt: Any) -> object:
    """SAM: weights moved along the gradient, a second backward, weights moved back"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                move = p.grad * 0.05
                p.add_(move)
                moves.append(move)
        opt.zero_grad()
        square_loss(model, number).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        opt.step()
        opt.zero_grad()
    return None


@practice()
def sam_with_autograd_grad(model: Any, opt: Any) -> object:
    """SAM through `torch.autograd.grad` and `functional_call`: no weight is written"""
    seen = []
    for number in range(STEPS):
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(square_loss(model, number), list(parameters.values()))
        moved = {name: p + 0.05 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        x = vectors(number)
        loss = (torch.func.functional_call(model, moved, x) - x.sin()).square().mean()
        seen.append(step(model, opt, number, loss))
    return seen


@practice()
def early_stopping(model: Any, opt: Any) -> object:
    """early stopping: the best `state_dict` is kept by deepcopy and restored"""
    best, kept = math.inf, {}
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            loss = square_loss(model, 99 + number).item()
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best, square_loss(model, 99).item()


@practice()
def learning_rate_finder(model: Any, opt: Any) -> object:
    """learning rate finder: weights and state kept, the rate ramped up, both restored"""
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    seen = []
    for number in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 1e-4 * 2**number
        seen.append(step(model, opt, number))
    model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    return seen, [step(model, opt, number) for number in range(STEPS)]


# ---------------------------------------------------------------- parametrizations, functional calls


def with_spectral_norm() -> nn.Module:
    model = perceptron()
    for block in model:
        parametrizations.spectral_norm(block[0])
    return model


def with_weight_norm() -> nn.Module:
    model = perceptron()
    for block in model:
        parametrizations.weight_norm(block[0])
    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    model = perceptron()
    parametrize.register_parametrization(model[1][0], "weight", Symmetric())
    return model


@practice(make=with_spectral_norm)
def spectral_norm(model: Any, opt: Any) -> object:
    """`nn.utils.parametrizations.spectral_norm`"""
    return plain_loop(model, opt)


@practice(make=with_weight_norm)
def weight_norm(model: Any, opt: Any) -> object:
    """`nn.utils.parametrizations.weight_norm`"""
    return plain_loop(model, opt)


@practice(make=symmetric)
def parametrized(model: Any, opt: Any) -> object:
    """`register_parametrization`, `parametrize.cached()`, and the computed weight read after `step()`"""
    seen = []
    for number in range(STEPS):
        with parametrize.cached():
            step(model, opt, number)
        seen.append(model[1][0].weight.norm().item())
    return seen


@practice()
def parametrized_later(model: Any, opt: Any) -> object:
    """weight norm registered after the optimizer was made"""
    train(model, opt, range(2), square_loss)
    parametrizations.weight_norm(model[1][0])
    return train(model, opt, range(2, 5), square_loss)


@practice()
def functional_call(model: Any, opt: Any) -> object:
    """`torch.func.functional_call` with the model's own parameters"""
    seen = []
    for number in range(STEPS):
        x = vectors(number)
        y = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        seen.append(step(model, opt, number, (y - x.sin()).square().mean()))
    return seen


@practice()
def functional_gradients(model: Any, opt: Any) -> object:
    """`torch.func.grad` for the gradients, set by hand"""
    names = [name for name, _ in model.named_parameters()]

    def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (x,))
        return (y - x.sin()).square().mean()

    for number in range(STEPS):
        gradients = torch.func.grad(loss_of)({n: p.detach() for n, p in model.named_parameters()}, vectors(number))
        for name in names:
            model.get_parameter(name).grad = gradients[name]
        opt.step()
        opt.zero_grad()
    return None


@practice()
def per_sample_gradients(model: Any, opt: Any) -> object:
    """`torch.func.vmap` of grad: norms of per-sample gradients for the log"""

    def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (x,))
        return (y - x.sin()).square().mean()

    seen = []
    for number in range(STEPS):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, vectors(number))
        seen.append([g.flatten(1).norm(dim=1) for g in each.values()])
        step(model, opt, number)
    return seen


@practice()
def inner_loop(model: Any, opt: Any) -> object:
    """MAML: an inner step by `autograd.grad(create_graph=True)` and `functional_call`"""
    seen = []
    for number in range(STEPS):
        parameters, x = dict(model.named_parameters()), vectors(number)
        gradients = torch.autograd.grad(square_loss(model, number), list(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        y = torch.func.functional_call(model, fast, (x,))
        seen.append(step(model, opt, number, (y - x.cos()).square().mean()))
    return seen


@practice(ignores="`torch.jit.script` is deprecated")
def hessian_vector_product(model: Any, opt: Any) -> object:
    """`torch.func.jvp` of grad between steps (curvature for the log)"""

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (vectors(0),))
        return y.square().mean()

    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        _, product = torch.func.jvp(torch.func.grad(loss_of), (parameters,), (parameters,))
        seen.append([t.norm().item() for t in product.values()])
    return seen


# ---------------------------------------------------------------- backward in other ways


@practice()
def two_losses_retained(model: Any, opt: Any) -> object:
    """two losses of one forward, two `backward()` calls with `retain_graph=True`"""
    seen = []
    for number in range(STEPS):
        x = vectors(number)
        y = model(x)
        one, other = (y - x.sin()).square().mean(), y.abs().mean()
        one.backward(retain_graph=True)
        other.backward()
        opt.step()
        opt.zero_grad()
        seen.append((one.item(), other.item()))
    return seen


@practice(options={"grad_accumulation": 2})
def two_losses_accumulated(model: Any, opt: Any) -> object:
    """two losses of one forward with `retain_graph=True` and `grad_accumulation=2`"""
    return two_losses_retained(model, opt)


@practice()
def losses_as_a_list(model: Any, opt: Any) -> object:
    """`torch.autograd.backward([one, other])`"""
    for number in range(STEPS):
        x = vectors(number)
        y = model(x)
        torch.autograd.backward([(y - x.sin()).square().mean(), y.abs().mean()])
        opt.step()
        opt.zero_grad()
    return None


@practice()
def gradients_by_hand(model: Any, opt: Any) -> object:
    """`torch.autograd.grad`, and `p.grad = …` by hand"""
    for number in range(STEPS):
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(square_loss(model, number), parameters), strict=True):
            p.grad = g
        opt.step()
        opt.zero_grad()
    return None


@practice()
def gradients_conflicting(model: Any, opt: Any) -> object:
    """PCGrad: gradients of two losses projected, and set by hand"""
    for number in range(STEPS):
        parameters, x = list(model.parameters()), vectors(number)
        y = model(x)
        one = torch.autograd.grad((y - x.sin()).square().mean(), parameters, retain_graph=True)
        other = torch.autograd.grad(y.abs().mean(), parameters)
        for p, a, b in zip(parameters, one, other, strict=True):
            p.grad = a + b - (a * b).sum().clamp(max=0) / (b * b).sum() * b
        opt.step()
        opt.zero_grad()
    return None


@practice()
def backward_of_some_inputs(model: Any, opt: Any) -> object:
    """`loss.backward(inputs=…)` for a part of the model"""
    seen = []
    for number in range(STEPS):
        loss = square_loss(model, number)
        loss.backward(inputs=list(model[number % 4].parameters()))
        opt.step()
        opt.zero_grad()
        seen.append(loss.item())
    return seen


@practice()
def gradient_penalty(model: Any, opt: Any) -> object:
    """gradient penalty of the input (WGAN-GP): `autograd.grad(create_graph=True)` in the loss"""
    seen = []
    for number in range(STEPS):
        x = vectors(number).requires_grad_()
        y = model(x)
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        seen.append(step(model, opt, number, y.square().mean() + (slope.norm(dim=1) - 1).square().mean()))
    return seen


@practice()
def penalty_of_parameters_gradients(model: Any, opt: Any) -> object:
    """a penalty of the parameters' gradients: `autograd.grad(create_graph=True)` in the loss"""
    seen = []
    for number in range(STEPS):
        loss = square_loss(model, number)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in gradients)
        seen.append(step(model, opt, number, loss + 0.01 * penalty))
    return seen


@practice()
def several_forwards(model: Any, opt: Any) -> object:
    """several forwards (an episode), then one backward over all of them"""
    seen = []
    for number in range(STEPS):
        x, rewards = vectors(number), []
        for _ in range(4):
            x = model(x)
            rewards.append(x.mean())
        seen.append(step(model, opt, number, torch.stack(rewards).square().sum()))
    return seen


@practice()
def accumulated_graph(model: Any, opt: Any) -> object:
    """losses of several micro-batches summed into one backward"""
    seen = []
    for number in range(STEPS):
        loss = sum(square_loss(model, 10 * number + part) for part in range(3))
        seen.append(step(model, opt, number, loss))
    return seen


@practice(options={"grad_accumulation": 4})
def short_last_group(model: Any, opt: Any) -> object:
    """gradient accumulation with a short last group, `grad_accumulation=4`"""
    batches = 10
    for number in range(batches):
        (square_loss(model, number) / 4).backward()
        if number % 4 == 3 or number == batches - 1:
            opt.step()
            opt.zero_grad()
    return None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.cell(x))
        return y


def with_memory() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent()


@practice(make=with_memory)
def truncated_backpropagation(model: Any, opt: Any) -> object:
    """truncated backpropagation through time: the hidden state is detached"""
    hidden, seen = torch.zeros(8, 32), []
    for number in range(STEPS):
        hidden, outputs = hidden.detach(), []
        for part in range(3):
            hidden = model.cell(vectors(10 * number + part), hidden)
            outputs.append(model.head(hidden))
        seen.append(step(model, opt, number, torch.stack(outputs).square().mean()))
    return seen


# ---------------------------------------------------------------- gradients


@practice()
def gradient_noise(model: Any, opt: Any) -> object:
    """gradient noise and scaling in `Tensor.register_hook`"""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.register_hook(lambda g: 0.5 * g + 0.01 * torch.randn(g.shape, generator=generator))
    return plain_loop(model, opt)


@practice()
def gradient_centralisation(model: Any, opt: Any) -> object:
    """gradient centralisation in `Tensor.register_hook`"""
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda g: g - g.mean(dim=1, keepdim=True))
    return plain_loop(model, opt)


@practice(refusal=CONSUMED, as_if=step_0)
def gradient_centralisation_after_backward(model: Any, opt: Any) -> object:
    """gradient centralisation by `p.grad.sub_()` after backward"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        opt.step()
        opt.zero_grad()
    return None


@practice(refusal=CONSUMED, as_if=step_0)
def gradients_as_numpy(model: Any, opt: Any) -> object:
    """`p.grad.numpy()` for a histogram after backward"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        seen.append([np.abs(p.grad.numpy()).mean() for p in model.parameters()])
        opt.step()
        opt.zero_grad()
    return seen


@practice()
def gradients_data(model: Any, opt: Any) -> object:
    """`p.grad.data.norm()` for the log after backward"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        seen.append([p.grad.data.norm(2).item() for p in model.parameters()])
        opt.step()
        opt.zero_grad()
    return seen


@practice()
def gradients_exist(model: Any, opt: Any) -> object:
    """which parameters have a gradient: `p.grad is None`, and its shape"""
    seen = []
    for number in range(STEPS):
        square_loss(model, number).backward()
        seen.append([p.grad is not None and tuple(p.grad.shape) for p in model.parameters()])
        opt.step()
        opt.zero_grad()
    return seen


@practice()
def gradients_nan(model: Any, opt: Any) -> object:
    """`torch.isnan(p.grad).any()` after backward, to skip the step"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        if not any(torch.isnan(p.grad).any() for p in model.parameters()):
            opt.step()
        opt.zero_grad()
    return None


@practice(ignores="Full backward hook is firing")
def backward_hooks(model: Any, opt: Any) -> object:
    """`register_full_backward_hook` that scales gradients and keeps their norms"""
    seen: list[float] = []

    def hook(module: nn.Module, of_input: Any, of_output: Any) -> Any:
        seen.append(of_output[0].norm().item())
        return tuple(g if g is None else 0.5 * g for g in of_input)

    for block in model:
        block.register_full_backward_hook(hook)
    return plain_loop(model, opt), seen


def halved(p: Tensor) -> None:
    p.grad.mul_(0.5)


def observed() -> nn.Module:
    model = perceptron()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halved)
    return model


@practice(make=observed)
def hooks_on_complete_gradients_before(model: Any, opt: Any) -> object:
    """`register_post_accumulate_grad_hook` of the user's own, before the optimizer was made"""
    return plain_loop(model, opt)


@practice(refusal=CONSUMED, ends=True)
def hooks_on_complete_gradients(model: Any, opt: Any) -> object:
    """`register_post_accumulate_grad_hook` of the user's own, after the optimizer was made"""
    seen: list[float] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    return plain_loop(model, opt), seen


@practice()
def masked_gradients(model: Any, opt: Any) -> object:
    """rows of a weight frozen by a mask in `Tensor.register_hook`"""
    mask = torch.ones(32, 1)
    mask[:16] = 0
    model[1][0].weight.register_hook(lambda g: g * mask)
    return plain_loop(model, opt)


@practice()
def clipped_in_a_hook(model: Any, opt: Any) -> object:
    """clipping by value in `Tensor.register_hook`"""
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return plain_loop(model, opt)


@practice()
def scaler_disabled(model: Any, opt: Any) -> object:
    """a `GradScaler` with `enabled=False`"""
    scaler, seen = torch.amp.GradScaler("cpu", enabled=False), []
    for number in range(STEPS):
        loss = square_loss(model, number)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        seen.append(loss.item())
    return seen


# ---------------------------------------------------------------- when things are called


@practice()
def zeroed_first(model: Any, opt: Any) -> object:
    """`opt.zero_grad()` before forward"""
    for number in range(STEPS):
        opt.zero_grad()
        square_loss(model, number).backward()
        opt.step()
    opt.zero_grad()
    return None


@practice()
def zeroed_before_backward(model: Any, opt: Any) -> object:
    """`opt.zero_grad()` between forward and backward"""
    for number in range(STEPS):
        loss = square_loss(model, number)
        opt.zero_grad()
        loss.backward()
        opt.step()
    opt.zero_grad()
    return None


@practice()
def zeroed_by_the_model(model: Any, opt: Any) -> object:
    """`model.zero_grad()`, and `p.grad = None` for each parameter"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        opt.step()
        if number % 2:
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
    return None


@practice()
def batch_skipped_on_its_loss(model: Any, opt: Any) -> object:
    """`continue` before backward if the loss is not finite"""
    seen = []
    for number in range(STEPS):
        loss = square_loss(model, number) * (math.nan if number == 3 else 1.0)
        if not torch.isfinite(loss):
            opt.zero_grad()
            continue
        seen.append(step(model, opt, number, loss))
    return seen


@practice()
def rate_by_hand(model: Any, opt: Any) -> object:
    """the learning rate set in `param_groups` between `zero_grad()` and forward"""
    for number in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = LR / (number + 1)
        step(model, opt, number)
    return None


@practice()
def rate_between_forward_and_backward(model: Any, opt: Any) -> object:
    """the learning rate set in `param_groups` between forward and backward"""
    for number in range(STEPS):
        loss = square_loss(model, number)
        for group in opt.param_groups:
            group["lr"] = LR / (number + 1)
        step(model, opt, number, loss)
    return None


@practice(refusal=r"was set between backward and step\(\)", ends=True)
def rate_after_backward(model: Any, opt: Any) -> object:
    """the learning rate set in `param_groups` between backward and `step()`"""
    for number in range(STEPS):
        square_loss(model, number).backward()
        for group in opt.param_groups:
            group["lr"] = LR / (number + 1)
        opt.step()
        opt.zero_grad()
    return None


@practice()
def warm_restarts(model: Any, opt: Any) -> object:
    """`CosineAnnealingWarmRestarts`, stepped with a fraction of an epoch"""
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2, T_mult=2)
    for number in range(STEPS):
        step(model, opt, number)
        schedule.step(number / 2)
    return schedule.get_last_lr()


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(block.parameters()), "lr": LR * 0.5**depth} for depth, block in enumerate(model.children())]


@practice(groups_of=by_layer)
def rates_by_layer(model: Any, opt: Any) -> object:
    """layer-wise learning rate decay: one group per layer, with a schedule"""
    schedule = lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS)
    for number in range(STEPS):
        step(model, opt, number)
        schedule.step()
    return schedule.get_last_lr()


# ---------------------------------------------------------------- which parameters


@practice()
def frozen_in_turn(model: Any, opt: Any) -> object:
    """`requires_grad_(False)` and (True) in turn for parts of the model"""
    seen = []
    for number in range(STEPS):
        model[0].requires_grad_(number % 2 == 0)
        model[2].requires_grad_(number % 3 == 0)
        seen.append(step(model, opt, number))
    return seen


@practice()
def frozen_for_evaluation(model: Any, opt: Any) -> object:
    """`model.requires_grad_(False)` for an attack on the input, then True"""
    seen = []
    for number in range(STEPS):
        model.requires_grad_(False)
        x = vectors(number).requires_grad_()
        model(x).square().sum().backward()
        model.requires_grad_(True)
        seen.append(step(model, opt, number, model(x.detach() + 0.1 * x.grad.sign()).square().mean()))
    return seen


def trained_on_the_attack(model: Any, opt: Any) -> None:
    step(model, opt, 0, model(vectors(0)).square().sum())


@practice(refusal=r"zero_grad\(\) between backward and step\(\)", as_if=trained_on_the_attack)
def adversarial_training(model: Any, opt: Any) -> object:
    """FGSM: a backward for the input's gradient, then one for the weights, without freezing"""
    x = vectors(0).requires_grad_()
    model(x).square().sum().backward()
    moved = x.detach() + 0.1 * x.grad.sign()
    opt.zero_grad()
    step(model, opt, 0, model(moved).square().mean())
    return None


@practice()
def stochastic_depth(model: Any, opt: Any) -> object:
    """stochastic depth: other blocks are left out in each step"""
    seen = []
    for number in range(STEPS):
        generator, x = torch.Generator().manual_seed(number), vectors(number)
        kept = torch.rand(4, generator=generator) < 0.6
        kept[3] = True
        for block, is_kept in zip(model, kept.tolist(), strict=True):
            x = x + block(x) if is_kept else x
        seen.append(step(model, opt, number, x.square().mean()))
    return seen


@practice()
def tied_later(model: Any, opt: Any) -> object:
    """weights tied after the optimizer was made"""
    train(model, opt, range(2), square_loss)
    model[3][0].weight = model[0][0].weight
    return train(model, opt, range(2, STEPS), square_loss)


@practice()
def module_replaced(model: Any, opt: Any) -> object:
    """a module replaced during training, the optimizer not told"""
    train(model, opt, range(2), square_loss)
    torch.manual_seed(1)
    model[3] = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    return train(model, opt, range(2, STEPS), square_loss)


@practice()
def module_replaced_and_added(model: Any, opt: Any) -> object:
    """a module replaced during training, its parameters added by `add_param_group`"""
    train(model, opt, range(2), square_loss)
    torch.manual_seed(1)
    model[3] = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    opt.add_param_group({"params": list(model[3].parameters())})
    return train(model, opt, range(2, STEPS), square_loss)


@practice()
def parameter_replaced(model: Any, opt: Any) -> object:
    """`module.weight = nn.Parameter(…)` during training, the optimizer not told"""
    train(model, opt, range(2), square_loss)
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach() * 0.5)
    return train(model, opt, range(2, STEPS), square_loss)


def first_two_trained() -> nn.Module:
    model = perceptron()
    model[2:].requires_grad_(False)
    return model


@practice()
def pruned_later(model: Any, opt: Any) -> object:
    """`nn.utils.prune` during training, and `prune.remove` at the end"""
    train(model, opt, range(2), square_loss)
    prune.l1_unstructured(model[1][0], "weight", amount=0.5)
    seen = train(model, opt, range(2, STEPS), square_loss)
    prune.remove(model[1][0], "weight")
    with torch.no_grad():
        return seen, square_loss(model, 99).item()


@practice(make=first_two_trained)
def pruned_then_unfrozen(model: Any, opt: Any) -> object:
    """`nn.utils.prune` during training, which renames a parameter; then others are unfrozen"""
    train(model, opt, range(2), square_loss)
    prune.l1_unstructured(model[1][0], "weight", amount=0.5)
    train(model, opt, range(2, 4), square_loss)
    model.requires_grad_(True)
    return train(model, opt, range(4, STEPS), square_loss)


@practice()
def moved_and_back(model: Any, opt: Any) -> object:
    """`model.to()` the device and dtype that it has"""
    seen = []
    for number in range(STEPS):
        seen.append(step(model, opt, number))
        model.to("cpu").to(torch.float32).float().train()
    return seen


@practice()
def copy_made_half(model: Any, opt: Any) -> object:
    """`copy.deepcopy(model).half()` for an evaluation"""
    seen = []
    for number in range(STEPS):
        step(model, opt, number)
        with torch.no_grad():
            seen.append(copy.deepcopy(model).bfloat16()(vectors(99).bfloat16()).float())
    return seen


# ---------------------------------------------------------------- several models and optimizers


def critic() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def one_round(model: Any, opt: Any) -> None:
    judge = critic()
    other, made = Reference(judge, lr=LR), model(vectors(0))
    step(judge, other, 0, judge(made.detach()).mean() - judge(vectors(0)).mean())
    step(model, opt, 0, -judge(made).mean())


@practice(refusal=r"zero_grad\(\) between backward and step\(\).*freeze", as_if=one_round)
def gan_of_two(model: Any, opt: Any) -> object:
    """a GAN with two `hytrain.AdamW`: the critic gets gradients while the generator learns"""
    judge = critic()
    with another(opt, judge) as other:
        made = model(vectors(0))
        step(judge, other, 0, judge(made.detach()).mean() - judge(vectors(0)).mean())
        (-judge(made).mean()).backward()
        opt.step()
        opt.zero_grad()
        other.zero_grad()
    return None


@practice()
def gan_frozen_critic(model: Any, opt: Any) -> object:
    """a GAN with two `hytrain.AdamW`: the critic is frozen while the generator learns"""
    judge, seen = critic(), []
    with another(opt, judge) as other:
        for number in range(STEPS):
            made = model(vectors(number))
            seen.append(step(judge, other, number, judge(made.detach()).mean() - judge(vectors(number)).mean()))
            judge.requires_grad_(False)
            seen.append(step(model, opt, number, -judge(made).mean()))
            judge.requires_grad_(True)
        return seen, {name: tensor.clone() for name, tensor in judge.state_dict().items()}


@practice()
def gan_with_torchs_critic(model: Any, opt: Any) -> object:
    """a GAN whose critic has one of torch's optimizers"""
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
    other = torch.optim.RMSprop(critic.parameters(), lr=LR)
    seen = []
    for number in range(STEPS):
        made = model(vectors(number))
        seen.append(step(critic, other, number, critic(made.detach()).mean() - critic(vectors(number)).mean()))
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        loss = -critic(made).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        other.zero_grad()
        seen.append(loss.item())
    return seen, weights(critic)


def without_first(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for block in list(model.children())[1:] for p in block.parameters()]}]


@practice(groups_of=without_first)
def second_optimizer_for_a_part(model: Any, opt: Any) -> object:
    """a second optimizer, torch's, for the embeddings of the same model"""
    other = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    seen = []
    for number in range(STEPS):
        loss = square_loss(model, number)
        loss.backward()
        for each in (opt, other):
            each.step()
            each.zero_grad()
        seen.append(loss.item())
    return seen


@practice()
def distillation(model: Any, opt: Any) -> object:
    """distillation from a frozen teacher in the same process"""
    torch.manual_seed(1)
    teacher = perceptron(depth=2).eval().requires_grad_(False)
    seen = []
    for number in range(STEPS):
        x = vectors(number)
        loss = functional.kl_div(model(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        seen.append(step(model, opt, number, loss))
    return seen


@practice()
def reference_model(model: Any, opt: Any) -> object:
    """a copy of the model as frozen reference (DPO, PPO)"""
    frozen, seen = copy.deepcopy(model).requires_grad_(False), []
    for number in range(STEPS):
        x = vectors(number)
        with torch.no_grad():
            ratio = frozen(x).log_softmax(1)
        seen.append(step(model, opt, number, -functional.logsigmoid(model(x).log_softmax(1) - ratio).mean()))
    return seen


# ---------------------------------------------------------------- torch's and others' tools


@practice(ignores=".")  # an error inside its C++ would end the process
def profiled(model: Any, opt: Any) -> object:
    """`torch.profiler` around steps, with a schedule"""
    seen = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        record_shapes=True,
    ) as profiler:
        for number in range(STEPS):
            with torch.profiler.record_function("step"):
                seen.append(step(model, opt, number))
            profiler.step()
    return seen


@practice(ignores="Anomaly Detection has been enabled")
def anomalies_detected(model: Any, opt: Any) -> object:
    """`torch.autograd.detect_anomaly`"""
    seen = []
    for number in range(STEPS):
        with torch.autograd.set_detect_anomaly(True):
            seen.append(step(model, opt, number))
    return seen


@practice()
def autocast(model: Any, opt: Any) -> object:
    """`torch.autocast` in bf16"""
    seen = []
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = square_loss(model, number)
        seen.append(step(model, opt, number, loss))
    return seen


@practice()
def saved_tensors_on_cpu(model: Any, opt: Any) -> object:
    """`torch.autograd.graph.save_on_cpu` around forward"""
    seen = []
    for number in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            loss = square_loss(model, number)
        seen.append(step(model, opt, number, loss))
    return seen


def quantized() -> nn.Module:
    from torch.ao import quantization

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(model)


@practice(make=quantized, ignores=".")
def quantization_aware_training(model: Any, opt: Any) -> object:
    """quantization-aware training with `torch.ao.quantization.prepare_qat`"""
    return plain_loop(model, opt)


def straight_through() -> nn.Module:
    class Rounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(weight, 0.01, 0, -128, 127)

    model = perceptron()
    for block in model:
        parametrize.register_parametrization(block[0], "weight", Rounded())
    return model


@practice(make=straight_through)
def fake_quantization(model: Any, opt: Any) -> object:
    """weights rounded by `fake_quantize` in a parametrization (straight-through)"""
    return plain_loop(model, opt)


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(perceptron(), LoraConfig(r=8, target_modules=["0.0", "2.0"]))


@practice(make=with_lora)
def lora(model: Any, opt: Any) -> object:
    """LoRA with `peft`, the adapters disabled for a reference"""
    seen = []
    for number in range(STEPS):
        seen.append(step(model, opt, number))
        with model.disable_adapter(), torch.no_grad():
            seen.append(square_loss(model, 99).item())
    from peft import get_peft_model_state_dict

    kept = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    return seen, kept


@practice(make=with_lora)
def lora_merged(model: Any, opt: Any) -> object:
    """LoRA adapters merged for an evaluation and unmerged again"""
    seen = []
    for number in range(STEPS):
        seen.append(step(model, opt, number))
        model.merge_adapter()
        with torch.no_grad():
            seen.append(square_loss(model, 99).item())
        model.unmerge_adapter()
    return seen


@practice()
def checkpointed_sequential(model: Any, opt: Any) -> object:
    """`checkpoint_sequential` with `use_reentrant=False`"""
    seen = []
    for number in range(STEPS):
        y = checkpoint_sequential(model, 2, vectors(number), use_reentrant=False)
        seen.append(step(model, opt, number, y.square().mean()))
    return seen


@practice()
def checkpointed_sequential_reentrant(model: Any, opt: Any) -> object:
    """`checkpoint_sequential` with `use_reentrant=True`"""
    seen = []
    for number in range(STEPS):
        y = checkpoint_sequential(model, 2, vectors(number).requires_grad_(), use_reentrant=True)
        seen.append(step(model, opt, number, y.square().mean()))
    return seen


@practice(refusal="use_reentrant=False", as_if=lambda model, opt: None)
def checkpointed_blocks_reentrant(model: Any, opt: Any) -> object:
    """`checkpoint(block, use_reentrant=True)` for every block, the last one too"""
    x = vectors(0).requires_grad_()
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    return step(model, opt, 0, x.square().mean())


@practice()
def one_checkpoint_file(model: Any, opt: Any) -> object:
    """`torch.save({"model": …, "opt": …})`, loaded into the run again"""
    train(model, opt, range(2), square_loss)
    kept = saved_and_loaded({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": 2})
    first = train(model, opt, range(2, 5), square_loss)
    model.load_state_dict(kept["model"])
    opt.load_state_dict(kept["opt"])
    assert train(model, opt, range(2, 5), square_loss) == first
    return first


@practice()
def distributed_state_dict(model: Any, opt: Any) -> object:
    """`torch.distributed.checkpoint.state_dict`: `get_state_dict` and `set_state_dict`"""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    train(model, opt, range(2), square_loss)
    kept = [copy.deepcopy(each) for each in get_state_dict(model, opt)]
    first = train(model, opt, range(2, 5), square_loss)
    set_state_dict(model, opt, model_state_dict=kept[0], optim_state_dict=kept[1])
    assert train(model, opt, range(2, 5), square_loss) == first
    return first


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return vectors(index)[0]


@practice()
def loader_with_workers(model: Any, opt: Any) -> object:
    """a `DataLoader` with forked workers, two epochs"""
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=1, multiprocessing_context="fork")
    seen = []
    for _ in range(2):
        for x in loader:
            seen.append(step(model, opt, 0, (model(x) - x.sin()).square().mean()))
    return seen


@practice()
def exported(model: Any, opt: Any) -> object:
    """`torch.export` of the model in between"""
    seen = []
    for number in range(0, 4, 2):
        train(model, opt, [number, number + 1], square_loss)
        program = torch.export.export(model, (vectors(99),))
        seen.append(program.module()(vectors(99)).detach())
    return seen


@practice()
def evaluated_in_a_thread(model: Any, opt: Any) -> object:
    """a copy evaluated in another thread while training goes on"""
    seen: list[Tensor] = []
    threads = []
    for number in range(STEPS):
        step(model, opt, number)
        twin = copy.deepcopy(model)
        threads.append(threading.Thread(target=lambda twin=twin: seen.append(twin(vectors(99)).detach())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return sorted(seen, key=lambda y: y.sum().item())


@practice()
def averaged_at_the_end(model: Any, opt: Any) -> object:
    """an average of the last checkpoints (model soup), kept as clones of `named_parameters()`"""
    kept = []
    for number in range(STEPS):
        step(model, opt, number)
        kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {name: torch.stack([each[name] for each in kept]).mean(0) for name in kept[0]}


# ---------------------------------------------------------------- how they are run


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    with late_weights() as gate:
        yield gate


def refused(row: Row, model: nn.Module, opt: hytrain.AdamW) -> None:
    """The practice is refused, and the step is ended without it."""
    with pytest.raises(UsageError, match=row.refusal):
        row.run(model, opt)
    if not row.ends:
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.filterwarnings(f"ignore:{row.ignores}")] if row.ignores else []),
            ],
        )
        for name, row in ROWS.items()
    ],
)
def test_a_practice(name: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    if row.refusal:
        monkeypatch.setattr(sys.modules[__name__], "adamw", partial(adamw, updates="backward"))
    model = row.make()
    reference = Reference(model, row.groups_of(model), lr=LR)
    expected = None if row.ends else (row.as_if or row.run)(model, reference)
    expected = expected, train(model, reference, range(50, 52), square_loss)
    for k in (0.0, 1.0):
        ours = row.make()
        with adamw(ours, row.groups_of(ours), k=k, **row.options) as opt:
            try:
                found = refused(row, ours, opt) if row.refusal else row.run(ours, opt)
                if row.ends:
                    for go_on in (opt.step, opt.synchronize, lambda ours=ours: square_loss(ours, 0)):
                        with pytest.raises(UsageError, match="training cannot go on"):
                            go_on()
                    continue
                found = found, train(ours, opt, range(50, 52), square_loss)
                opt.synchronize()
                assert same(found, expected), f"k={k}"
                assert differing(weights(ours), weights(model)) == [], f"k={k}"
            finally:
                gate.set()


def test_the_page_lists_every_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    assert [name for name in ROWS if f"`{name}`" not in page] == []
