"""Co-training in a loop of one's own, `cotrain`: whatever the model, its micro-batches and the CPU's share."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from helpers import adamw, differing, opened, state, weights
from small_models import behind_frozen, micro_batches, perceptron, share_of_loss
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.hooks import RemovableHandle

import hytrain
from examples.studies.cotraining import partner, shares
from examples.studies.cotraining.shares import CoTraining, cotrain
from examples.studies.cotraining.told import Told
from examples.studies.cotraining.work import moved
from hytrain.errors import ClusterError, ConfigError, UnsupportedError, UsageError
from hytrain.model.given import give

PARTS = 4
LOSS = partial(share_of_loss, parts=PARTS)
#: The last group of micro-batches is a short one.
GROUPS = (PARTS, PARTS, 2)


def frozen_in_part() -> nn.Sequential:
    """The CPU trainer's model is as `behind_frozen` leaves it. All that is done here, it has to be told."""
    model = behind_frozen()
    model[0].requires_grad_(False)
    model[1].running_mean += torch.arange(32)
    model[1].eval()
    model[2].eval()
    return model


def plainly(opt: Any, model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """What a loop without co-training does."""
    losses = []
    for batch in batches:
        with opt.no_sync() if batch is not batches[-1] else nullcontext():
            losses.append(LOSS(model, batch))
            losses[-1].backward()
    return losses


def results(cpu_parts: int | None, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Weights, state, losses and random numbers after some steps. Without a number, the loop is a plain one."""
    model, found = frozen_in_part().to(device), dict[str, Tensor]()
    with adamw(model, **options) as opt:
        cotraining = None
        if cpu_parts is not None:
            cotraining = cotrain(opt, model, behind_frozen, LOSS, parts=PARTS, cpu_parts=cpu_parts)
            assert (cotraining.pid is not None) is bool(cpu_parts)
        torch.manual_seed(3)
        for step, count in enumerate(GROUPS):
            batches = micro_batches(step, count)
            if cotraining is None:
                losses = torch.stack(plainly(opt, model, moved(batches, torch.device(device)))).detach()
            else:
                losses = cotraining.backward(batches)
            opt.step()
            opt.zero_grad()
            found |= {f"losses.{step}": losses, f"drawn.{step}": torch.rand(1, device=device)}
        return {**found, **state(opt), **weights(model)}


@pytest.mark.spawns
@pytest.mark.parametrize(
    "options", [{"k": 0.4}, {"k": 0.0, "grad_accumulation": PARTS, "max_grad_norm": 0.01}], ids=str
)
def test_the_bits_of_a_plain_loop(options: dict[str, Any]) -> None:
    """With frozen parameters, buffers and modules in evaluation mode, which the CPU trainer is told."""
    expected = results(None, **options)
    for cpu_parts in (0, 1, PARTS - 1):
        assert differing(results(cpu_parts, **options), expected) == [], cpu_parts


@pytest.mark.spawns
def test_the_cpu_trainer_computes_with_the_settings_of_the_trainer() -> None:
    """They change in the middle of training. The gradients are so small that some are denormal."""
    loss = partial(share_of_loss, parts=2e35)

    def trained(cpu_parts: int) -> dict[str, Tensor]:
        model, found = perceptron(), list[Tensor]()
        with adamw(model, k=1.0, eps=2e-38) as opt:
            cotraining = cotrain(opt, model, perceptron, loss, parts=2, cpu_parts=cpu_parts)
            try:
                for step in range(4):
                    torch.set_flush_denormal(step >= 2)
                    cotraining.backward(micro_batches(step, 2))
                    opt.step()
                    opt.zero_grad()
                    found.append(opt.state_dict()["state"][0]["exp_avg"].clone())
            finally:
                torch.set_flush_denormal(False)
            return {**state(opt), **weights(model), **{f"exp_avg after {i}": each for i, each in enumerate(found)}}

    assert differing(trained(cpu_parts=1), trained(cpu_parts=0)) == []


@pytest.mark.spawns
def test_the_thread_that_has_started_the_cpu_trainer_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner, "Popen", subprocess.Popen)
    model, made = perceptron(), list[CoTraining]()
    with adamw(model, k=0.0) as opt:
        loss = partial(share_of_loss, parts=2)
        thread = threading.Thread(
            target=lambda: made.append(cotrain(opt, model, perceptron, loss, parts=2, cpu_parts=1))
        )
        thread.start()
        thread.join()
        for step in range(2):
            made[0].backward(micro_batches(step, 2))
            opt.step()
            opt.zero_grad()
        assert made[0].pid is not None, "it is not lost"


@pytest.mark.gpu
@pytest.mark.spawns
@pytest.mark.parametrize("k", [0.0, 0.4, 1.0])
def test_a_gpu_and_the_cpu_make_the_batch_within_rounding(k: float) -> None:
    expected = results(None, device="cuda", k=k)
    for cpu_parts in (0, 1, PARTS - 1):
        ours = results(cpu_parts, device="cuda", k=k)
        assert ours.keys() == expected.keys()
        for name, values in expected.items():
            assert (ours[name].double() - values.double()).norm() <= 5e-3 * values.double().norm(), name


@pytest.mark.spawns
def test_what_the_cpu_trainer_cannot_know_is_refused_before_it_does_harm() -> None:
    def trained(harm: bool) -> dict[str, Tensor]:
        model = frozen_in_part()
        with adamw(model, k=0.0) as opt:
            cotraining = cotrain(opt, model, behind_frozen, LOSS, parts=PARTS, cpu_parts=1)
            for step in range(3):
                if harm and step == 1:
                    refuse(opt, model, cotraining)
                cotraining.backward(micro_batches(step, PARTS))
                opt.step()
                opt.zero_grad()
            return {**state(opt), **weights(model)}

    def refuse(opt: Any, model: nn.Sequential, cotraining: CoTraining) -> None:
        batches, frozen, norm, bias = micro_batches(1, PARTS), model[0], model[1], model[3][0][0].bias
        mean, hooks = norm.running_mean.clone(), list[RemovableHandle]()
        for sentence, change, undo in (
            ("the mode of 1 has changed since cotrain", norm.train, norm.eval),
            ("requires_grad of 0.weight has changed", *(partial(frozen.requires_grad_, it) for it in (True, False))),
            (
                "the values of 1.running_mean has changed",
                norm.running_mean.zero_,
                lambda: norm.running_mean.copy_(mean),
            ),
            (
                "hooks of 3.0.0.bias has changed",
                lambda: hooks.append(bias.register_hook(print)),
                lambda: hooks[0].remove(),
            ),
            ("requires_grad of 3.0.0.bias has changed", *(partial(bias.requires_grad_, it) for it in (False, True))),
        ):
            change()
            with pytest.raises(UsageError, match=sentence):
                cotraining.backward(batches)
            undo()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="called under autocast"):
            cotraining.backward(batches)
        for count in (0, PARTS + 1):
            with pytest.raises(UsageError, match=f"got {count} micro-batches: from 1 to parts=4"):
                cotraining.backward(micro_batches(1, count))
        for what, sentence in (
            ({1}, r"a micro-batch\['more'\]\[1\] is of set: only tensors, numbers"),
            (torch.eye(2).to_sparse(), r"a micro-batch\['more'\]\[1\] is a tensor that is not dense"),
        ):
            wrong = [*batches[:2], {**batches[2], "more": (1.0, what)}, batches[3]]
            with pytest.raises(UnsupportedError, match=sentence):
                cotraining.backward(wrong)
            opt.zero_grad()

    assert differing(trained(harm=True), trained(harm=False)) == []


@pytest.mark.spawns
def test_after_an_exception_in_a_part_the_step_is_done_again() -> None:
    """While the CPU trainer still computes other parts."""

    def trained(fails: bool) -> dict[str, Tensor]:
        model = frozen_in_part()
        with adamw(model, k=0.0) as opt:
            cotraining = cotrain(opt, model, behind_frozen, LOSS, parts=PARTS, cpu_parts=1)
            for step in range(2):
                if fails:
                    batches = micro_batches(7, PARTS)
                    batches[1]["more"][1]["fails"] = True
                    with pytest.raises(ValueError, match="as it was told to"):
                        cotraining.backward(batches)
                    opt.zero_grad()
                cotraining.backward(micro_batches(step, PARTS))
                opt.step()
                opt.zero_grad()
            assert cotraining.pid is not None, "it is not lost"
            return {**state(opt), **weights(model)}

    assert differing(trained(fails=True), trained(fails=False)) == []


@pytest.mark.spawns
def test_a_forward_that_writes_buffers_is_refused() -> None:
    model = behind_frozen()
    with adamw(model, k=1.0) as opt:
        cotraining = cotrain(opt, model, behind_frozen, LOSS, parts=PARTS, cpu_parts=1)
        cotraining.backward(micro_batches(0, PARTS))
        opt.step()
        with pytest.raises(UsageError, match=r"values of 1.num_batches_tracked has changed.*BatchNorm"):
            cotraining.backward(micro_batches(1, PARTS))


class Keeps(nn.Sequential):
    """A perceptron with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(*perceptron())
        self.kept = torch.ones(1)


@pytest.mark.spawns
def test_a_cpu_trainer_that_cannot_start_says_why() -> None:
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        for build, sentence in (
            (
                partial(perceptron, depth=3),
                r"another model than the one that is trained: its 3\.0\.bias is missing in place of torch",
            ),
            (
                partial(perceptron, width=16),
                r"its 0\.0\.bias is torch.float32 of shape \(16,\) in place of torch.float32 of shape",
            ),
            (Keeps, "kept is a tensor that is no buffer, and has no values if the model is built without memory"),
        ):
            with pytest.raises(ClusterError, match=f"the CPU trainer did not start: ConfigError: .*{sentence}"):
                cotrain(opt, model, build, LOSS, parts=PARTS, cpu_parts=1)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("build", "built", "name", "sentence"),
    [
        (perceptron, partial(perceptron, depth=3), "", "the CPU trains no part: the CPU trainer did not start"),
        (perceptron, perceptron, {"a set"}, r"step 1: a micro-batch\['name'\] is of set.*without the CPU trainer"),
        (behind_frozen, behind_frozen, "", "step 2: the values of 1.num_batches_tracked has changed"),
    ],
    ids=["no start", "not sent", "a buffer was written"],
)
def test_with_auto_training_goes_on_without_a_cpu_trainer(
    build: Any, built: Any, name: Any, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(**share: int) -> dict[str, Tensor]:
        model = build()
        with adamw(model, k=0.4) as opt:
            cotraining = cotrain(opt, model, built, LOSS, parts=PARTS, **share)
            for step in range(3):
                cotraining.backward([{**batch, "name": name} for batch in micro_batches(step, PARTS)])
                opt.step()
                opt.zero_grad()
            assert cotraining.pid is None
            return {**state(opt), **weights(model)}

    ours = trained()
    assert re.search(sentence, caplog.text), caplog.text
    assert differing(ours, trained(cpu_parts=0)) == []


@pytest.mark.spawns
def test_auto_goes_on_with_no_step_that_the_cpu_may_have_got_wrong() -> None:
    """A BatchNorm's statistics lack the CPU's parts."""
    model = behind_frozen()
    with adamw(model, k=1.0) as opt:
        cotraining = cotrain(opt, model, behind_frozen, LOSS, parts=PARTS)
        cotraining._cpu_parts = 1
        cotraining.backward(micro_batches(0, PARTS))
        opt.step()
        with pytest.raises(UsageError, match=r"values of 1.num_batches_tracked has changed"):
            cotraining.backward(micro_batches(1, PARTS))


TRAINS = """
import hytrain
from examples.studies.cotraining.shares import cotrain
from small_models import perceptron

model = perceptron()
cotrain(hytrain.AdamW(model, k=1.0), model, perceptron, perceptron, parts=2)
"""


@pytest.mark.spawns
def test_a_module_that_trains_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each CPU trainer would start another one."""
    (tmp_path / "trains.py").write_text(TRAINS)
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("trains")
    module.loss = FunctionType(LOSS.func.__code__, {}, "loss")  # type: ignore[attr-defined]
    module.loss.__module__, module.loss.__qualname__ = "trains", "loss"
    monkeypatch.setitem(sys.modules, "trains", module)
    model = perceptron()
    with adamw(model, k=1.0) as opt, pytest.raises(ClusterError, match="has imported a script that trains"):
        cotrain(opt, model, perceptron, module.loss, parts=PARTS, cpu_parts=1)


def of_main(model: nn.Module, batch: Any) -> Tensor:
    """Stands for a function of the script itself."""
    raise NotImplementedError


of_main.__module__ = "__main__"


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"loss": lambda model, batch: model(batch)}, ConfigError, "loss is <function <lambda>.* can be imported"),
        ({"build": partial(perceptron, dtype=torch.float32)}, ConfigError, "the arguments of build=perceptron in its"),
        ({"build": partial(perceptron, width=(1, 2))}, ConfigError, "numbers, strings, lists and dictionaries"),
        ({"loss": of_main}, ConfigError, "loss=of_main is defined in the script itself, .* move it into a module"),
        ({"build": 3}, ConfigError, "build is 3: a function that can be imported"),
        ({"cpu_parts": PARTS}, ConfigError, 'cpu_parts is 4: "auto", or from 0 to 3'),
        ({"cpu_parts": "all"}, ConfigError, "cpu_parts is 'all'"),
        ({"parts": 0}, ConfigError, "parts is 0: the number of micro-batches"),
    ],
    ids=["lambda", "dtype", "tuple", "main", "no function", "all parts", "a word", "no parts"],
)
def test_what_cannot_be_asked_for(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    given = {"build": perceptron, "loss": LOSS, "parts": PARTS, "cpu_parts": 1} | change
    with pytest.raises(error, match=sentence):
        shares.check(**given)


@pytest.mark.spawns
def test_what_no_cpu_trainer_can_train() -> None:
    model = perceptron()
    with opened(hytrain.AdamW, [*model], k=1.0) as opt:
        with pytest.raises(UnsupportedError, match="several modules: give the optimizer one module"):
            cotrain(opt, model[0], perceptron, LOSS, parts=PARTS)
    model = perceptron()
    with adamw(model, model[1:].parameters(), k=1.0) as opt:
        with pytest.raises(UnsupportedError, match="0.0.weight needs gradients, but this optimizer does not train it"):
            cotrain(opt, model, perceptron, LOSS, parts=PARTS)
    model[0][0].weight.register_hook(print)
    with adamw(model, k=1.0) as opt, pytest.raises(UnsupportedError, match="0.0.weight has a hook"):
        cotrain(opt, model, perceptron, LOSS, parts=PARTS)
    model = perceptron()
    with adamw(model, k=1.0, loss_scale=8.0) as opt, pytest.raises(UnsupportedError, match="with loss_scale"):
        cotrain(opt, model, perceptron, LOSS, parts=PARTS)


MODULE = """
import small_models


def loss(model, batch):
    return {scale} * small_models.share_of_loss(model, batch, parts=2)
"""


@pytest.mark.spawns
def test_the_cpu_trainer_imports_what_the_script_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an older version of it that is installed, too."""
    for folder, scale in (("installed", 1.0), ("here", 3.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scaled_loss.py").write_text(MODULE.format(scale=scale))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path / "here")
    loss, found = importlib.import_module("scaled_loss").loss, []
    for cpu_parts in (0, 1):
        model = perceptron()
        with adamw(model, k=0.0) as opt:
            losses = cotrain(opt, model, perceptron, loss, parts=2, cpu_parts=cpu_parts).backward(micro_batches(0, 2))
            opt.step()
            found.append({"losses": losses, **state(opt), **weights(model)})
    assert differing(*found) == []


class Turned(nn.Module):
    """Two blocks that have one module in common, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Module()
        common.register_buffer("angles", torch.arange(4.0))
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        for each in self.blocks:
            each.turns = common


def test_what_the_cpu_trainer_is_told() -> None:
    """A module in two places is one; other parameters in a module, and hooks on them, are noticed."""
    model = Turned()
    told = Told(model, dict(model.named_parameters()))
    with torch.device("meta"):
        other = Turned()
    give(other, dict(model.named_parameters()), told.others, who="build()")
    assert other.blocks[1].turns.angles is told.others["blocks.1.turns.angles"]
    told.require({}, torch.device("cpu"))
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(UsageError, match=r"a parameter of blocks\.1 has changed"):
        told.require({}, torch.device("cpu"))
    model = Turned()
    model.blocks[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.weight has a hook"):
        Told(model, dict(model.named_parameters()))


def wrapped() -> nn.Sequential:
    """As `checkpoint_wrapper` leaves blocks: their modules have longer names. In evaluation mode, as a rule."""
    return nn.Sequential(
        *(checkpoint_wrapper(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))) for _ in range(2))
    ).eval()


@pytest.mark.spawns
def test_modes_of_wrapped_modules_are_told() -> None:
    """Or the CPU trainer alone would drop elements."""
    found = []
    for cpu_parts in (0, 1):
        torch.manual_seed(0)
        model = wrapped()
        with adamw(model, k=0.0) as opt:
            losses = cotrain(opt, model, wrapped, LOSS, parts=2, cpu_parts=cpu_parts).backward(micro_batches(0, 2))
            opt.step()
            found.append({"losses": losses, **weights(model)})
    assert differing(*found) == []


@pytest.mark.spawns
def test_gradients_of_no_parameter_and_of_another_shape_are_refused() -> None:
    model = perceptron()
    with adamw(model, k=0.4) as opt:
        assert opt.lend_weights().keys() == {name for name, _ in model.named_parameters()}
        for name, sentence in (("0.0.weights", "no such parameter is trained"), ("0.0.bias", "it is torch.float32 of")):
            with pytest.raises(UsageError, match=rf"got torch.float32 of shape \[1\] for {name}: {sentence}"):
                opt.add_gradients({name: torch.ones(1)})
