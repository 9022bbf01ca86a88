"""The option `check`: torch's own updates beside HyTrain's, in runs with torch's bits, and in runs with others."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import adamw, opened, train
from programs import CLUSTER, SCRIPTS, environment, run
from small_models import Poisoned, perceptron, square_loss
from test_algorithms import CASES, DTYPES, WIDTH, Case, of_width
from torch import nn
from variants import every_second

import hytrain
from hytrain.errors import ConfigError
from hytrain.kernels.scalars import Scalars, scalars
from hytrain.memory import visits
from hytrain.memory.transfer import Copy, HostTransfers, Transfer
from hytrain.step import check, device
from hytrain.step.check import CheckedTrip
from hytrain.step.gradient import RoundTrip
from protocol.messages import WeightsReady
from protocol.rules import Hyper

ADAMW = Case(hytrain.AdamW, torch.optim.AdamW, {"lr": 1e-2})  # type: ignore[arg-type]
#: What is said of runs without a fault.
SAME = "check: 8 parameters in 3 steps: the same bits as torch.optim.AdamW"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the check has said, and how: INFO if all is the same, else WARNING."""

    def found() -> list[str]:
        own = [record for record in caplog.records if record.name == check.__name__]
        for record in own:
            assert record.levelno == (logging.INFO if "the same bits" in record.message else logging.WARNING)
        return [record.message for record in own]

    return found


@every_second(k=[0.0, 0.5, 1.0], dtype=DTYPES, case={"adamw": ADAMW, **CASES})
def test_the_same_bits(case: Case, dtype: torch.dtype, k: float, said: Callable[[], list[str]]) -> None:
    """Of an odd width, most tensors do not fill torch's vectors."""
    model = perceptron(WIDTH, dtype=dtype)
    with opened(case.kind, model, k=k, check=3, **case.options) as opt:
        train(model, opt, range(5), of_width)
    by = "Lion in plain torch" if case.kind is hytrain.Lion else f"torch.optim.{case.kind.__name__}"
    assert said() == [f"check: 8 parameters in 3 steps: the same bits as {by}"]


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["one by one", "together"])
@pytest.mark.parametrize(
    "options",
    [
        {"k": 0.5, "max_grad_norm": 0.1},
        {"k": 0.0, "max_grad_norm": 1e-6, "speculate": True},
        {"k": 0.5, "grad_accumulation": 2, "loss_scale": 64.0, "dtype": torch.float16},
        {"k": 0.5, "updates": "step"},
        {"k": 0.5, "overlap": False, "max_grad_norm": 0.1},
        {"k": 0.2, "visit": 0.5, "dtype": torch.bfloat16},
        {"k": 0.0, "visit": 0.5, "offload_weights": 1.0},
        {"policy": "random", "offload_weights": "auto"},
        {"k": 0.5, "gradient_dtype": torch.bfloat16, "backend": "torch"},
    ],
    ids=lambda options: "-".join(options),
)
def test_whatever_is_asked_for(
    options: dict[str, Any], held: int, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are compared within backward, or when the step ends. The learning rate changes from step to step."""
    monkeypatch.setattr(check, "HELD_BYTES", held)
    monkeypatch.setattr(visits, "SLOT_NUMEL", 640)
    options = dict(options)
    model = perceptron(dtype=options.pop("dtype", torch.float32))
    *first, last = model.parameters()
    groups = [{"params": first, "lr": 1e-2}, {"params": [last], "weight_decay": 0.3}]
    with adamw(model, groups, check=3, **options) as opt:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for step in range(4):
            for part in range(options.get("grad_accumulation", 1)):
                opt.scale(square_loss(model, 2 * step + part)).backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()
    assert said() == [SAME]


def test_skipped_steps_and_nan(said: Callable[[], list[str]]) -> None:
    """A skipped step changes nothing, in HyTrain and beside it; without that, NaNs are the same."""
    for more in ({"on_nonfinite": "skip"}, {}):
        model = Poisoned(perceptron(), {1: (0, math.nan)})
        with adamw(model, k=0.5, check=3, **more) as opt:
            for model.step in range(3):
                train(model, opt, [model.step], square_loss)
        assert said()[-1] == SAME


def test_a_parameter_that_joins_later(said: Callable[[], list[str]]) -> None:
    """The engine is another one then, and the check goes on. A gradient that is lacking leaves a parameter as it is."""
    model = perceptron()
    first = next(model.parameters()).requires_grad_(False)
    with adamw(model, k=0.5, check=3) as opt:
        train(model, opt, range(2), square_loss)
        first.requires_grad_(True)
        train(model, opt, range(2, 4), square_loss)
    assert said() == [SAME]


def test_training_that_ends_before(said: Callable[[], list[str]]) -> None:
    for steps in (2, 0):
        model = perceptron()
        with adamw(model, k=0.5, check=3) as opt:
            train(model, opt, range(steps), square_loss)
    assert said()[0] == SAME.replace("3 steps", "2 steps")
    assert said()[1:] == ["check: nothing was compared"]


@pytest.mark.parametrize("option", [{"state_dtype": "bfloat16"}, {"master_dtype": "bfloat16"}, {"clip": "per_layer"}])
def test_what_torch_lacks_is_told(option: dict[str, Any], said: Callable[[], list[str]]) -> None:
    model = perceptron(dtype=torch.bfloat16)
    with adamw(model, k=0.5, check=3, max_grad_norm=1.0, **option) as opt:
        train(model, opt, range(4), square_loss)
    [[name, value]] = option.items()
    assert said() == [f"check: nothing is compared, as torch has nothing like {name}={value}"]


@pytest.mark.parametrize("steps", [-1, 1.5, True, "3"])
def test_what_is_no_number_of_steps(steps: Any) -> None:
    with pytest.raises(ConfigError, match="check is .*: a whole number of steps, from 0 on"):
        hytrain.AdamW(perceptron(), check=steps)


def test_without_the_option_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYTRAIN_CHECK", "2")
    for options, kind in (({"check": 0}, RoundTrip), ({}, CheckedTrip)):
        with adamw(perceptron(), **options) as opt:
            assert type(opt._engine._trip) is kind


# ---------------------------------------------------------------- faults


def scale_wrongly(hyper: Hyper, count: int, scale: float) -> Scalars:
    return scalars(replace(hyper, lr=2 * hyper.lr), count, scale)


def count_wrongly(hyper: Hyper, count: int, scale: float) -> Scalars:
    return scalars(hyper, count + 1, scale)


@pytest.mark.parametrize("wrongly", [scale_wrongly, count_wrongly])
def test_another_kernel_is_noticed(
    wrongly: Callable[..., Scalars], said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all parameters and steps, of which some are told."""
    monkeypatch.setattr(device, "scalars", wrongly)
    model = perceptron()
    with adamw(model, k=1.0, check=3) as opt:
        train(model, opt, range(4), square_loss)
    *some, last = said()
    assert len(some) == check.TOLD
    names = {f"check: step 1 of 3: {name}" for name, _ in model.named_parameters()}
    assert {text.partition(" is not what ")[0] for text in some[:8]} == names
    assert all("elements of its weights differ" in text for text in some)
    assert last == "check: 8 parameters in 3 steps: 8 of them are not what torch.optim.AdamW makes of them"


def one_step(model: nn.Module, **options: Any) -> None:
    """Later ones might refuse what has become of the weights."""
    with adamw(model, check=3, **options) as opt:
        train(model, opt, [0], square_loss)


def test_weights_that_arrive_damaged(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    weights_in = HostTransfers.weights_in

    def damaged(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        done = weights_in(self, copies)
        copies[0][0].data[3:5] += 0.5
        return done

    monkeypatch.setattr(HostTransfers, "weights_in", damaged)
    one_step(perceptron(), k=0.0)
    told = (
        "0.weight is not what torch.optim.AdamW makes of it: 2 of 1024 elements of its weights differ, by 0.5 at most"
    )
    assert sorted(said()[:4]) == [f"check: step 1 of 3: {block}.{told}" for block in range(4)]
    assert said()[4:] == ["check: 8 parameters in 1 step: 4 of them are not what torch.optim.AdamW makes of them"]


def test_a_piece_of_a_parameter(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without repeated blocks is divided into pieces of its parameters."""
    one_step(perceptron(depth=1), k=0.5)
    monkeypatch.setattr(device, "scalars", scale_wrongly)
    one_step(perceptron(depth=1), k=1.0)
    same, *some, last = said()
    assert same == "check: 2 parameters in 1 step: the same bits as torch.optim.AdamW"
    assert any("0.0.weight, from its element 128 on, is not what" in text for text in some)
    assert last == "check: 2 parameters in 1 step: 2 of them are not what torch.optim.AdamW makes of them"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_moment_that_is_damaged(
    dtype: torch.dtype, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_weights_ready = RoundTrip.on_weights_ready

    def damaged(self: RoundTrip, done: WeightsReady) -> None:
        moment = self._layers[done.lid].part("exp_avg_sq", 0)
        assert moment is not None
        moment[7] = 2.0
        on_weights_ready(self, done)

    monkeypatch.setattr(RoundTrip, "on_weights_ready", damaged)
    one_step(perceptron(dtype=dtype), k=0.0)
    assert ".0.weight is" in said()[0] and "1 of 1024 elements of its exp_avg_sq differ, by 2 at most" in said()[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_damaged_on_its_way(
    dtype: torch.dtype, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients_out = HostTransfers.gradients_out

    def damaged(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        done = gradients_out(self, copies)
        copies[0][0][0] += 1.0
        return done

    monkeypatch.setattr(HostTransfers, "gradients_out", damaged)
    one_step(perceptron(dtype=dtype), k=0.0, updates="backward")
    arrays = ["weights", "exp_avg", "exp_avg_sq"] if dtype is torch.float32 else ["exp_avg", "exp_avg_sq"]
    for kind in arrays:
        assert f"1 of 1024 elements of its {kind} differ" in said()[0]


# ---------------------------------------------------------------- the command


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize("how", ["command", "variable"])
def test_a_script_as_it_is(how: str) -> None:
    """Its log goes nowhere, but the result is told."""
    words = (SCRIPTS / "plain.py", "hytrain", "4")
    if how == "command":
        ran = run(sys.executable, CLUSTER, "check", "--threads", "1", *words, how=subprocess.Popen)
        steps = 3
    else:
        ran, steps = run(sys.executable, *words, env=environment(HYTRAIN_CHECK="2")), 2
    assert ran.returncode == 0, ran.stderr
    told = [line for line in ran.stderr.splitlines() if not line.startswith("hytrain-cluster: starting")]
    assert told == [SAME.replace("3 steps", f"{steps} steps")]
    assert ran.stdout.splitlines()[-1].startswith("weights")


@pytest.mark.usefixtures("own_run")
def test_check_needs_a_program() -> None:
    ran = run(sys.executable, CLUSTER, "check")
    assert ran.returncode == 2
    assert "name a recipe (.yaml), a Python program (.py) or -m and a module" in ran.stderr
