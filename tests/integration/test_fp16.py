"""float16 parameters and scaled losses: the training of torch.amp.GradScaler over fp32 masters, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LR, adamw, differing, keep, same_bits, saved_and_loaded, state, train, wait_for_coordinator, weights
from small_models import Poisoned, llama, perceptron, square_loss
from torch import Tensor, nn

import hytrain
from hytrain.errors import ConfigError, NonFiniteGradients, UsageError
from hytrain.step import scaling

GROWTH_STEPS = 4
#: step -> the parameter whose gradient is not finite there, and what it is made
POISON = {2: (2, math.inf), 9: (2, math.nan), 10: (2, -math.inf), 21: (2, math.inf)}


@pytest.fixture(autouse=True)
def grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROWTH_STEPS", GROWTH_STEPS)


def make(dtype: torch.dtype = torch.float16, poison: dict[int, tuple[int, float]] = POISON) -> Poisoned:
    return Poisoned(perceptron(dtype=dtype), poison)


class Reference:
    """torch's own way: GradScaler and fused AdamW over fp32 masters; the weights are the masters, rounded."""

    def __init__(self, model: nn.Module, max_norm: float | None = None, **options: Any) -> None:
        self.model, self.max_norm = model, max_norm
        self.master_of = {parameter: nn.Parameter(parameter.detach().float()) for parameter in model.parameters()}
        self.opt = torch.optim.AdamW(self.master_of.values(), lr=LR, fused=True, **options)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_STEPS)
        self.skipped = 0
        self.norm = torch.tensor(0.0)

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @property
    def loss_scale(self) -> Tensor:
        return torch.tensor(self.scaler.get_scale())

    def step(self) -> None:
        for parameter, master in self.master_of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        before = self.scaler.get_scale()
        self.scaler.unscale_(self.opt)
        gradients = [master.grad for master in self.master_of.values() if master.grad is not None]
        self.norm = nn.utils.get_total_norm(gradients)
        if self.max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.master_of.values(), self.max_norm, self.norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        with torch.no_grad():
            for parameter, master in self.master_of.items():
                parameter.copy_(master)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """As the helpers' `state`: the master has the name that HyTrain gives it."""
        found = {}
        for index, (parameter, master) in enumerate(self.master_of.items()):
            if entry := self.opt.state.get(master):
                found |= {f"{key}.{index}": value for key, value in entry.items()}
                if parameter.dtype is torch.float16:
                    found[f"remainder.{index}"] = master.detach()
        return found


def train_scaled(
    model: nn.Module,
    opt: Any,
    steps: Iterable[int],
    loss_of: Callable[[nn.Module, int], Tensor] = square_loss,
    backwards: int = 1,
) -> list[float]:
    """The loop of a user; the scale after each step."""
    scales = []
    for step in steps:
        model.step = step  # type: ignore[assignment]
        for part in range(backwards):
            opt.scale(loss_of(model, step + 1000 * part)).backward()
        opt.step()
        opt.zero_grad()
        scales.append(float(opt.loss_scale))
    return scales


def test_the_numbers_are_gradscalers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ours = {"scale": scaling.INITIAL, "growth_factor": scaling.GROWTH, "backoff_factor": scaling.BACKOFF}
    ours["growth_interval"] = scaling.GROWTH_STEPS
    assert ours.items() <= torch.amp.GradScaler("cpu").state_dict().items()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_bits_and_the_scales_of_torchs_gradscaler(max_norm: float | None, dtype: torch.dtype) -> None:
    ours, theirs = make(dtype), make(dtype)
    reference = Reference(theirs, max_norm)
    with adamw(ours, loss_scale="dynamic", max_grad_norm=max_norm, k=0.5) as opt:
        assert opt.loss_scale is not None and float(opt.loss_scale) == 2.0**16
        assert {layer.layout.banks for layer in opt._session.layers} == {1}, "nothing is updated ahead of its verdict"
        for step in range(30):
            assert train_scaled(ours, opt, [step]) == train_scaled(theirs, reference, [step])
            assert opt.grad_norm is not None
            assert math.isfinite(opt.grad_norm) is math.isfinite(reference.norm)
            if math.isfinite(reference.norm):
                assert torch.equal(opt.grad_norm, reference.norm)
        found = state(opt) | weights(ours)
        assert opt.skipped_steps == reference.skipped >= len(POISON)
        assert {float(step) for name, step in found.items() if name.startswith("step")} == {30.0 - reference.skipped}
    assert differing(found, reference.state() | weights(theirs)) == []


CHOICES: dict[str, dict[str, Any]] = {
    "all on the CPU": {"k": 0.0},
    "all on the GPU": {"k": 1.0},
    "moving": {"policy": "random"},
    "by torch": {"k": 0.0, "backend": "torch"},
}


class Mixed(nn.Module):
    """A block of all three dtypes: a layer whose segments differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 32).half(), nn.LayerNorm(32)
        self.last = nn.Linear(32, 32).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x.half()).tanh().float()).bfloat16())
        return y.float()


def make_mixed() -> Poisoned:
    torch.manual_seed(0)
    return Poisoned(nn.Sequential(*[Mixed() for _ in range(4)]), POISON)


@pytest.mark.parametrize(("make", "max_norm"), [(make, None), (make_mixed, 0.05)], ids=["float16", "mixed"])
def test_bits_and_scales_do_not_depend_on_who_owns_a_layer(
    make: Callable[[], Poisoned], max_norm: float | None
) -> None:
    results, scales, moved = [], [], 0
    for options in ({"k": 0.0, "overlap": False}, *CHOICES.values()):
        model = make()
        with adamw(model, loss_scale="dynamic", max_grad_norm=max_norm, **options) as opt:
            scales.append([])
            for step in range(40):
                scales[-1] += train_scaled(model, opt, [step])
                wait_for_coordinator(opt)
                opt._engine._handover.wait()
            results.append(state(opt) | weights(model))
            moved = max(moved, opt.statistics().moved)
            assert opt.skipped_steps >= len(POISON)
    assert moved > 0
    assert all(other == scales[0] for other in scales[1:]) and len(set(scales[0])) > 3
    for name, other in zip(CHOICES, results[1:], strict=True):
        assert differing(other, results[0]) == [], name


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_a_real_model_without_a_scale(max_norm: float | None) -> None:
    """As torch allows it: with whatever is lost. Ahead of verdicts as behind them."""

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        assert opt.loss_scale is None
        train(model, opt, range(12))
        assert any(name.startswith("remainder") for name in state(opt))
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    speculate = None if max_norm is None else True
    choices = ({"overlap": False, "k": 0.0}, {"speculate": speculate, "k": 0.3}, {"policy": "random"})
    same_bits(run, lambda: llama(torch.float16), *({**choice, "max_grad_norm": max_norm} for choice in choices))


@pytest.mark.parametrize("clip", ["global", "per_layer"])
def test_a_fixed_scale_changes_no_bit_of_float32(clip: str) -> None:
    """A power of two is exact there, and norms are those of the gradients that are not scaled."""
    results = []
    for scale in (1.0, 2.0**12, 2.0**-5):
        model = make(torch.float32, poison={})
        with adamw(model, loss_scale=scale, max_grad_norm=0.05, clip=clip, k=0.5) as opt:
            assert train_scaled(model, opt, range(20)) == [scale] * 20
            assert opt.grad_norm is not None
            results.append(state(opt) | weights(model) | {"norm": opt.grad_norm.clone()})
    assert all(differing(other, results[0]) == [] for other in results[1:])


@pytest.mark.parametrize("on_nonfinite", [None, "raise"])
def test_a_fixed_scale_stays_and_such_steps_are_skipped(on_nonfinite: str | None) -> None:
    model = make(poison={1: (2, math.inf)})
    with adamw(model, loss_scale=256.0, on_nonfinite=on_nonfinite, k=0.5) as opt:
        train_scaled(model, opt, [0])
        before = state(opt) | weights(model)
        other = opt.state_dict()
        other["param_groups"][0]["loss_scale"] = {"scale": 2.0**16, "good_steps": 3}
        opt.load_state_dict(other)
        assert train_scaled(model, opt, [1]) == [256.0]
        if on_nonfinite is not None:
            with pytest.raises(NonFiniteGradients, match="step 1"):
                opt.synchronize()
        assert differing(state(opt) | weights(model), before) == [] and opt.skipped_steps == 1


@pytest.mark.parametrize("options", [{"k": 0.5}, {"k": 0.5, "overlap": False}])
def test_accumulated_gradients_have_one_scale(options: dict[str, Any]) -> None:
    """In float32, with backwards over which the scale could change."""
    ours, theirs = make(torch.float32), make(torch.float32)
    reference = Reference(theirs)
    with adamw(ours, loss_scale="dynamic", grad_accumulation=3, **options) as opt:
        scales = train_scaled(ours, opt, range(15), backwards=3)
        assert scales == train_scaled(theirs, reference, range(15), backwards=3) and len(set(scales)) > 2
        assert differing(state(opt) | weights(ours), reference.state() | weights(theirs)) == []


# ---------------------------------------------------------------- masters that come and go


@pytest.mark.parametrize("form", ["files", "dictionary"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_saved_and_resumed_at_another_k(form: str, first: str, tmp_path: Path) -> None:
    """Scale, count of good steps and masters among the rest, in whatever order they are loaded."""
    whole = make()
    with adamw(whole, loss_scale="dynamic", k=0.3) as opt:
        train_scaled(whole, opt, range(15))
        saved, kept, load = saved_and_loaded(whole.state_dict()), state(opt), keep(opt, form, tmp_path)
        scales = train_scaled(whole, opt, range(15, 30))
        expected = state(opt) | weights(whole)

    second = make()
    with adamw(second, loss_scale="dynamic", k=0.8) as opt:
        train_scaled(second, opt, range(100, 103))
        parts: list[Callable[[], object]] = [lambda: second.load_state_dict(saved), lambda: load(opt)]
        for part in parts if first == "model" else reversed(parts):
            part()
        assert differing(state(opt), kept) == []
        found = train_scaled(second, opt, range(15, 20))
        opt._session.rebuild(opt._session.model)  # as where parameters are frozen or unfrozen
        assert found + train_scaled(second, opt, range(20, 30)) == scales
        assert differing(state(opt) | weights(second), expected) == []


def test_torchs_adamw_takes_the_state_and_gives_it() -> None:
    """The scale's key is ignored there, the masters are extra; without them the weights are the masters."""
    first, second = make(poison={}), make(poison={})
    with adamw(first, loss_scale="dynamic", k=0.5) as opt:
        train_scaled(first, opt, range(3))
        saved = opt.state_dict()
        assert saved["param_groups"][0]["loss_scale"] == {"scale": 2.0**16, "good_steps": 3}
        reference = torch.optim.AdamW(second.parameters(), lr=LR, fused=True)
        reference.load_state_dict({**saved, "param_groups": reference.state_dict()["param_groups"]})
    second.load_state_dict(first.state_dict())
    theirs = reference.state_dict()
    for entry in theirs["state"].values():
        del entry["remainder"]
    with adamw(second, loss_scale="dynamic", k=0.5) as opt:
        opt.load_state_dict(theirs)
        assert masters_are_weights(second, opt)


def test_the_masters_of_another_dtype_are_refused() -> None:
    first, second = perceptron(dtype=torch.bfloat16), perceptron(dtype=torch.float16)
    with adamw(first, k=0.5) as opt:
        train(first, opt, range(2), square_loss)
        saved = saved_and_loaded(opt.state_dict())
    with adamw(second, k=0.5) as opt, pytest.raises(ConfigError, match="remainder of .* has dtype"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_weights_that_are_written_are_the_masters(k: float, tmp_path: Path) -> None:
    """By hand, by load_state_dict; and where a state was loaded to which they do not belong."""
    model = perceptron(dtype=torch.float16)
    with adamw(model, k=k) as opt:
        train(model, opt, range(3), square_loss)
        opt.save(tmp_path)
        opt.synchronize()
        assert not masters_are_weights(model, opt)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        opt.import_weights()
        assert masters_are_weights(model, opt)
        train(model, opt, range(3, 6), square_loss)
        model.load_state_dict({name: tensor * 1.25 for name, tensor in model.state_dict().items()})
        loss = square_loss(model, 6)
        assert masters_are_weights(model, opt)
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.load(tmp_path)  # and not the weights
        for group in opt.param_groups:
            group.update(lr=0.0)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        train(model, opt, [7], square_loss)
        assert differing({n: t.clone() for n, t in model.state_dict().items()}, before) == []


def masters_are_weights(model: nn.Module, opt: hytrain.AdamW) -> bool:
    found = state(opt)
    return all(torch.equal(found[f"remainder.{i}"], p.detach().float()) for i, p in enumerate(model.parameters()))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_loss_that_was_not_scaled_is_refused(backwards: int) -> None:
    """Also if it is the second of a step. What was scaled before the last step does not count."""
    model = make()
    with adamw(model, loss_scale="dynamic", grad_accumulation=backwards, k=0.5) as opt:
        train_scaled(model, opt, [0], backwards=backwards)
        unused = square_loss(model, 2)
        opt.scale(square_loss(model, 1)).backward()
        if backwards == 1:
            opt.scale(unused)
            opt.step()
            opt.zero_grad()
        with pytest.raises(UsageError, match=r"not scaled since step\(\): opt\.scale\(loss\)\.backward\(\)"):
            square_loss(model, 2).backward()
