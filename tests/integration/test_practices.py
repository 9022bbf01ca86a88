"""What people do around a training loop, each as with torch: the same bits, or a sentence."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Reference, adamw, differing, opened, same_as_torch, train, weights
from small_models import llama, perceptron, square_loss, vectors
from torch import nn

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.options import TorchsOptions

#: What HyTrain has no counterpart of.
NOT_OFFERED = {"amsgrad", "capturable", "differentiable"}


def test_arguments_and_defaults_are_torchs() -> None:
    theirs = dict(inspect.signature(torch.optim.AdamW).parameters)
    ours = inspect.signature(hytrain.AdamW).parameters
    assert theirs.keys() - {"params"} - ours.keys() - TorchsOptions.__annotations__.keys() == set()
    for name in theirs.keys() & ours.keys():
        assert ours[name].default == theirs[name].default, name


def test_what_is_not_offered_is_refused() -> None:
    for option in NOT_OFFERED:
        with pytest.raises(UnsupportedError, match=option):
            hytrain.AdamW(perceptron(), **{option: True})
    with pytest.raises(TypeError, match="no option 'nesterov'"):
        hytrain.AdamW(perceptron(), nesterov=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_torchs_own_options_are_taken(kind: str) -> None:
    """At all of torch's own defaults, and with what chooses among torch's implementations; in groups, too."""
    theirs, ours = perceptron(), perceptron()
    parameters = inspect.signature(getattr(torch.optim, kind)).parameters.values()
    defaults = {known.name: known.default for known in parameters if known.default is not inspect.Parameter.empty}
    defaults.pop("decoupled_weight_decay", None)
    train(theirs, getattr(torch.optim, kind)(theirs.parameters(), fused=kind != "SGD"), range(3), square_loss)
    for options in (defaults, {"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}):
        ours = perceptron()
        groups = [{"params": ours[:2].parameters(), **options}, {"params": ours[2:].parameters()}]
        with opened(getattr(hytrain, kind), ours, groups, k=0.5, **options) as opt:
            train(ours, opt, range(3), square_loss)
            opt.synchronize()
            assert differing(weights(ours), weights(theirs)) == [], options


def test_an_empty_group_stays(tmp_path: Path) -> None:
    """As with torch, whose schedulers have one function for each group, and whose state has it, too."""

    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": [], "lr": 0.3},
            {"params": list(model[:2].parameters())},
            {"params": [], "weight_decay": 0.0},
            {"params": list(model[2:].parameters()), "lr": 3e-3},
        ]

    def run(model: Any, opt: Any, first: int = 0) -> list[float]:
        rates = [lambda step, index=index: 0.9 ** (step * index) for index in range(4)]
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, rates)
        train(model, opt, range(first, first + 4), square_loss, scheduler=schedule)
        return [group["lr"] for group in opt.param_groups]

    theirs, ours, again = (perceptron() for _ in range(3))
    reference = Reference(theirs, groups(theirs), lr=1e-2)
    rates = run(theirs, reference)
    with adamw(ours, groups(ours), k=0.5) as opt:
        assert run(ours, opt) == rates
        opt.save(tmp_path)
        opt.load(tmp_path)
        reference.load_state_dict(opt.state_dict())
        opt.add_param_group({"params": []})
        train(ours, opt, [9], square_loss)
    again.load_state_dict(theirs.state_dict())
    with adamw(again, groups(again), k=0.5) as opt:
        opt.load_state_dict(reference.state_dict())
        train(again, opt, [9], square_loss)
        opt.synchronize()
        assert differing(weights(again), weights(ours)) == []


def test_processes_that_are_forked_after_the_import_can_use_cuda() -> None:
    """In those of a process that has asked CUDA for its devices, torch refuses to use it."""
    code = """if True:
        import torch
        asked = []
        torch.cuda.is_available = torch.cuda.device_count = lambda: asked.append("asked") or 0
        import hytrain
        assert all(getattr(hytrain, name) for name in hytrain.__all__)
        raise SystemExit(len(asked))
        """
    subprocess.run([sys.executable, "-c", code], check=True)


#: What torch's `params` takes, of a perceptron.
GROUPS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda model: list(model.parameters()),
    "an iterator": lambda model: model.parameters(),
    "a part": lambda model: filter(lambda parameter: parameter.dim() == 2, model.parameters()),
    "names": lambda model: list(model.named_parameters()),
    "an iterator of names": lambda model: model.named_parameters(),
    "groups of names": lambda model: [
        {"params": model[0].named_parameters(), "lr": 0.5},
        {"params": list(model[1:].named_parameters())},
    ],
    "an iterator of groups": lambda model: iter([{"params": model[0].parameters()}, {"params": model[1][0].bias}]),
}


@pytest.mark.parametrize("form", GROUPS)
def test_groups_are_given_as_to_torch(form: str) -> None:
    model = perceptron()
    expected = torch.optim.AdamW(GROUPS[form](model), lr=1e-2).param_groups
    with hytrain.AdamW(model, param_groups=GROUPS[form](model), lr=1e-2) as opt:
        for group, theirs in zip(opt.param_groups, expected, strict=True):
            assert list(map(id, group["params"])) == list(map(id, theirs["params"]))
            assert all(group[name] == theirs[name] for name in group.keys() - {"params"})
            assert group.get("param_names") == theirs.get("param_names")
        train(model, opt, range(2), square_loss)
    mixed = [*model[0].named_parameters(), *model[1].parameters()]
    of_model = partial(hytrain.AdamW, model, param_groups=mixed)
    for kind in (partial(torch.optim.AdamW, mixed), of_model, partial(hytrain.AdamW, mixed)):
        with pytest.raises(ValueError, match="with/without names"):
            kind()


def test_a_with_block_closes_it_also_after_an_exception() -> None:
    model = perceptron()
    with pytest.raises(ZeroDivisionError), hytrain.AdamW(model) as opt:
        train(model, opt, [0], square_loss)
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="^this hytrain.AdamW is closed\n"):
        opt.step()
    assert type(model._parameters) is dict, "no hook is left"


#: A notebook's cell: when it runs again, `opt` still has its name, and so has the scheduler that holds it.
CELL = """
opt = make(model)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1))
outputs.append(opt)
train(model, opt, range(3), square_loss, schedule)
"""


@pytest.mark.parametrize("k", [0.0, 0.5])
def test_a_notebooks_cell_that_makes_the_optimizer_anew(k: float) -> None:
    """It begins anew, as with torch; who still has the old one cannot use it."""

    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
        names = {"model": perceptron(), "make": make, "outputs": [], **globals()}
        for _ in range(3):
            exec(CELL, names)
        return names

    expected = run(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    found = run(lambda model: hytrain.AdamW(model, lr=1e-2, k=k))
    *old, newest = found["outputs"]
    for opt in old:
        for use in (opt.step, opt.state_dict, opt.synchronize):
            with pytest.raises(UsageError, match="closed, because a newer one was made for parameters that it trained"):
                use()
    newest.close()
    assert differing(weights(found["model"]), weights(expected["model"])) == []


def test_a_newer_optimizer_for_some_of_the_parameters() -> None:
    """Say, of the head, for the next phase; the frozen ones need not be among them."""
    model, twin = perceptron(), perceptron()
    outputs = []
    for part in (slice(0, 4), slice(2, 4), slice(0, 2)):
        for each in (model, twin):
            each.requires_grad_(False)
            each[part].requires_grad_(True)
        outputs.append(hytrain.AdamW(model, lr=1e-2))
        train(model, outputs[-1], range(3), square_loss)
        train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True), range(3), square_loss)
    for opt in outputs[:2]:
        with pytest.raises(UsageError, match="closed, because a newer one"):
            opt.step()
    outputs[2].close()
    assert differing(weights(model), weights(twin)) == []


def test_an_optimizer_that_nobody_can_reach_is_not_in_the_way() -> None:
    """It trains parameters that the new one does not, and only a reference cycle holds it."""
    model = perceptron()
    gc.disable()
    try:
        first = hytrain.AdamW(model[:2], lr=1e-2)
        first.itself = first
        del first
        with adamw(model, model[2:].parameters()) as opt:
            train(model[2:], opt, [0], square_loss)
    finally:
        gc.enable()


def test_two_models_have_two_optimizers() -> None:
    """As a GAN has them: each has gradients from both losses, and each loss goes through both."""

    def run(makers: list[Callable[[nn.Module], Any]]) -> dict[str, Any]:
        model = perceptron()
        parts = [model[:2], model[2:]]
        opts = [make(part) for make, part in zip(makers, parts, strict=True)]
        for step in range(8):
            mine, other = step % 2, 1 - step % 2
            parts[mine].requires_grad_(True)
            parts[other].requires_grad_(False)
            square_loss(model, step).backward()
            opts[mine].step()
            opts[mine].zero_grad()
        for opt in opts:
            getattr(opt, "close", lambda: None)()
        return weights(model)

    expected = run([partial(Reference, lr=1e-2), partial(Reference, lr=3e-3)])
    found = run([partial(hytrain.AdamW, lr=1e-2, k=0.5), partial(hytrain.AdamW, lr=3e-3, k=0.0)])
    assert differing(found, expected) == []


@pytest.mark.parametrize("k", [0.0, 0.5])
def test_a_closure_is_called_once_in_a_step_as_with_torch(k: float) -> None:
    """Under `no_grad`, too; what it returns comes back, what it raises goes through, and the step was none."""

    def run(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        def closure() -> float:
            opt.zero_grad()
            loss = square_loss(model, len(losses))
            loss.backward()
            return float(loss.detach())

        losses = list[float]()
        for _ in range(6):
            with torch.no_grad():
                losses.append(opt.step(closure))  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            opt.step(lambda: 1 / 0)
        losses.append(opt.step(closure))  # type: ignore[arg-type]
        opt.zero_grad()
        assert opt.step() is None
        return losses

    same_as_torch(run, k=k)


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 0.5}, {"k": 1.0}, {"k": 0.5, "max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("hooks_are_called", [True, False])
def test_gradients_that_are_set_outside_of_any_backward(hooks_are_called: bool, options: dict[str, Any]) -> None:
    """Pipelines reduce them and call the hooks; others leave them for `step()`."""

    def run(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        parameters = list(model.parameters())
        for step in range(6):
            gradients = torch.autograd.grad(square_loss(model, step), parameters)
            for parameter, gradient in zip(reversed(parameters), reversed(gradients)):
                parameter.grad = gradient
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
                for hook in hooks.values() if hooks_are_called else ():
                    hook(parameter)
            if "max_grad_norm" in options and not isinstance(opt, hytrain.AdamW):
                torch.nn.utils.clip_grad_norm_(parameters, options["max_grad_norm"])
            opt.step()
            opt.zero_grad()

    same_as_torch(run, **options)


@pytest.mark.parametrize("k", [0.0, 0.5])
def test_text_is_generated_in_the_middle_of_training(k: float) -> None:
    """By the weights of the last step, and without harm to the next."""

    def run(model: Any, opt: Any) -> list[list[int]]:
        written = []
        for start in (0, 4, 8):
            train(model, opt, range(start, start + 4))
            model.eval()
            prompt, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            written.append(model.generate(prompt, use_cache=True, **options).tolist())
            model.train()
        return written

    same_as_torch(run, llama, k=k)


def test_an_interrupted_forward_does_no_harm() -> None:
    """Ctrl-C in forward, any exception there, or one between two steps, leaves nothing half done."""

    def run(model: Any, opt: Any) -> None:
        train(model, opt, range(3), square_loss)
        handle = model[2].register_forward_hook(interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                square_loss(model, 3)
        handle.remove()
        train(model, opt, range(3, 6), square_loss)

    same_as_torch(run, k=0.5)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("schedule", ["OneCycleLR", "ReduceLROnPlateau", "SequentialLR", "LambdaLR"])
def test_schedulers(schedule: str) -> None:
    """lr (and betas, which OneCycleLR moves, too) are read in each step."""
    of = torch.optim.lr_scheduler
    made: dict[str, Callable[[Any], Any]] = {
        "OneCycleLR": lambda opt: of.OneCycleLR(opt, max_lr=1e-2, total_steps=12),
        "ReduceLROnPlateau": lambda opt: of.ReduceLROnPlateau(opt, patience=0),
        "SequentialLR": lambda opt: of.SequentialLR(
            opt, [of.LinearLR(opt, total_iters=4), of.CosineAnnealingLR(opt, T_max=6)], milestones=[4]
        ),
        "LambdaLR": lambda opt: of.LambdaLR(opt, lambda step: 1 / (step + 1)),
    }

    def run(model: nn.Module, opt: torch.optim.Optimizer) -> float:
        scheduler = made[schedule](opt)
        for step in range(10):
            [loss] = train(model, opt, [step])
            scheduler.step(*([loss] if schedule == "ReduceLROnPlateau" else []))
        assert opt.param_groups[0]["lr"] != 1e-2
        return float(opt.param_groups[0]["lr"])

    same_as_torch(run, llama, k=0.5)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_learning_rate_that_is_a_tensor(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Set in place by its owner or by a scheduler, and loaded: a copy is, which changes nothing that was saved."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        scheduler, found = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6), []
        for step in range(8):
            rate = opt.param_groups[0]["lr"]
            if step == 4:
                saved = opt.state_dict()
                opt.load_state_dict(saved)
                rate.fill_(1.0)
                rate = opt.param_groups[0]["lr"]
            if step == 6 and hasattr(opt, "save"):
                opt.save(tmp_path / "saved")
                rate.mul_(3.0)
                opt.load(tmp_path / "saved")
                rate = opt.param_groups[0]["lr"]
            train(model, opt, [step])
            rate.mul_(0.5) if step % 3 == 0 else scheduler.step()
            assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)
            found.append(float(rate))
        return found

    models, results = [llama(), llama()], []
    caplog.set_level("INFO", logger="hytrain.step.timing")
    for model, of in zip(models, (torch.optim, hytrain), strict=True):
        lr: Any = torch.tensor(1e-2)
        options: Any = {"fused": True} if of is torch.optim else {"k": 0.5}
        opt = getattr(of, kind)(model.parameters(), lr=lr, **options)
        results.append(run(model, opt))
        if of is hytrain:
            opt.close()
    assert results[0] == results[1]
    assert differing(weights(models[0]), weights(models[1])) == []
    assert ["does nothing between backward and step()" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize(
    ("accumulated", "sentence"),
    [
        (1, "last backward ended with an exception"),
        (2, "the update of layers was interrupted by OutOfMemoryError"),
    ],
)
def test_an_exception_at_the_end_of_backward_or_in_a_step_that_updates_ends_training(
    k: float, accumulated: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say, no memory for the norm: what waits for the verdict must not be taken for another step's."""
    model = perceptron()
    with adamw(model, k=k, max_grad_norm=1.0, grad_accumulation=accumulated) as opt:
        train(model, opt, range(3), square_loss)
        monkeypatch.setattr("hytrain.step.verdict.Verdicts.judge", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            square_loss(model, 3).backward()
            opt.step()
        for go_on in (opt.step, opt.synchronize, lambda: square_loss(model, 4)):
            with pytest.raises(UsageError, match=sentence):
                go_on()


def without_memory(*args: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 0.5}, {"k": 1.0}, {"k": 0.5, "max_grad_norm": 0.1}], ids=str)
def test_two_losses_of_one_graph(options: dict[str, Any]) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(4):
            output = model(vectors(step))
            output.square().mean().backward(retain_graph=True)
            if step % 2:
                output.sin().mean().backward()
            if "max_grad_norm" in options and not isinstance(opt, hytrain.AdamW):
                nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
            opt.step()
            opt.zero_grad()

    same_as_torch(run, **options)
