"""What HyTrain can't do it refuses with a sentence: at construction, in the middle of training, on the command line.

After a refusal nothing trains on silently, and (the `no_leaks` fixture) nothing is left running.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    LR,
    adamw,
    cluster,
    differing,
    environment,
    perceptron,
    run,
    square_loss,
    train,
    vectors,
    weights,
    write_recipe,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.errors import BackendUnavailable, CapacityError, ConfigError, HyTrainError, UnsupportedError, UsageError

# ---------------------------------------------------------------- at construction


def with_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(dtype))


def complex_parameter() -> nn.Module:
    model = perceptron(width=4, depth=2)
    model[1][0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


def frozen() -> nn.Module:
    return perceptron().requires_grad_(False)


def gapped() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no parameters": (nn.Tanh, "no parameter that needs a gradient"),
    "all frozen": (frozen, "no parameter that needs a gradient"),
    "float64": (with_dtype(torch.float64), r"1\.weight has dtype torch.float64"),
    "complex": (complex_parameter, r"1\.0\.weight has dtype torch.complex64"),
    "sparse gradients": (sparse, "sparse=False"),
    "meta device": (lambda: nn.Linear(4, 4, device="meta"), "meta"),
    "gaps": (gapped, "contiguous"),
    "DataParallel": (lambda: nn.DataParallel(perceptron()), "DataParallel"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str) -> None:
    make, sentence = MODELS[kind]
    model = make()
    with pytest.raises(UnsupportedError, match=sentence) as raised:
        hytrain.AdamW(model)
    one_sentence(raised.value)
    assert not any(module._forward_pre_hooks for module in model.modules())


OPTIONS: dict[str, tuple[dict[str, Any], type[HyTrainError], str]] = {
    "k above 1": ({"k": 1.5}, ConfigError, r"k is 1\.5"),
    "negative k": ({"k": -0.1}, ConfigError, r"k is -0\.1"),
    "k not a number": ({"k": float("nan")}, ConfigError, "k is nan"),
    "another word for k": ({"k": "half"}, ConfigError, '"auto"'),
    "unknown backend": ({"backend": "cuda"}, ConfigError, "backend 'cuda' is unknown: choose auto, native"),
    "unknown policy": ({"policy": "greedy"}, ConfigError, "policy 'greedy' is unknown.*deadline"),
    "gradients in float16": ({"gradient_dtype": torch.float16}, ConfigError, "gradients travel in"),
    "negative lr": ({"lr": -1.0}, ConfigError, "lr"),
    "beta of 1": ({"betas": (0.9, 1.0)}, ConfigError, "betas"),
    "tensor learning rate": ({"lr": torch.tensor(1e-3)}, UnsupportedError, "tensor learning rates"),
    "no such cores": ({"cores": "0-99999"}, ConfigError, "core"),
    "cores in words": ({"cores": "all of them"}, ConfigError, "core"),
    "no threads": ({"threads": 0}, ConfigError, "threads"),
    "k as a truth": ({"k": True}, ConfigError, "k is True"),
    "fixed, but at which k": ({"policy": "fixed"}, ConfigError, 'policy="fixed" needs a k'),
    "speculating in words": ({"max_grad_norm": 1.0, "speculate": "yes"}, ConfigError, "speculate is 'yes': True"),
    "overlap in words": ({"overlap": "no"}, ConfigError, "overlap is 'no': True or False"),
    "a norm in words": ({"max_grad_norm": "1"}, ConfigError, "max_grad_norm is '1': a number"),
    "clipping to nothing": ({"clip": "per_layer"}, ConfigError, "clips nothing without max_grad_norm"),
    "backwards as a truth": ({"grad_accumulation": True}, ConfigError, "grad_accumulation is True"),
    "lr in words": ({"lr": "1e-3"}, ConfigError, "lr is '1e-3': a number"),
    "lr that is none": ({"lr": float("nan")}, ConfigError, "lr is nan"),
    "no weight decay": ({"weight_decay": None}, ConfigError, "weight_decay is None"),
    "one beta": ({"betas": 0.9}, ConfigError, "betas is 0.9: two numbers"),
    "betas in words": ({"betas": (0.9, "0.95")}, ConfigError, r"betas\[1\] is '0.95'"),
    "maximize in words": ({"maximize": "yes"}, ConfigError, "maximize is 'yes'"),
    "lr by position": ({"param_groups": 3e-4}, ConfigError, "the second argument is param_groups: write lr=0.0003"),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options(kind: str) -> None:
    options, error, sentence = OPTIONS[kind]
    with pytest.raises(error, match=sentence) as raised:
        hytrain.AdamW(perceptron(), **options)
    one_sentence(raised.value)


def one_sentence(error: Exception) -> None:
    text = str(error)
    assert text and "\n" not in text and "Traceback" not in text, text


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"amsgrad": True}, "no option 'amsgrad'"),
        ({"differentiable": True}, "no option 'differentiable'"),
        ({"params": [nn.Parameter(torch.zeros(3))]}, "that the model does not have"),
    ],
)
def test_parameter_groups(group: dict[str, Any], sentence: str) -> None:
    model = perceptron()
    with pytest.raises(UnsupportedError, match=sentence):
        hytrain.AdamW(model, [{"params": list(model.parameters()), **group}])


def test_keys_of_others_in_parameter_groups() -> None:
    """Schedulers keep their numbers in groups; torch takes names beside parameters, too."""
    model = perceptron()
    groups = [{"params": list(model[0].named_parameters()), "lr_scale": 0.5, "foreach": None}]
    groups.append({"params": model[1].parameters(), "name": "second"})
    with adamw(model, param_groups=groups) as opt:
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, [LR, LR], total_steps=10)
        train(model, opt, range(2), square_loss)
        schedule.step()
        opt.add_param_group({**opt.param_groups[0], "params": list(model[2].parameters())})
        train(model, opt, range(2, 4), square_loss)
        assert [len(group["params"]) for group in opt.param_groups] == [2, 2, 2]


def test_parameters_in_place_of_the_model() -> None:
    with pytest.raises(UnsupportedError, match="needs the model itself"):
        hytrain.AdamW(perceptron().parameters())  # type: ignore[arg-type]


def test_a_second_hytrain_optimizer_over_the_same_parameters() -> None:
    model = perceptron()
    with adamw(model) as opt:
        for again in (model, model[1], nn.Sequential(model[0], nn.Linear(32, 32))):
            with pytest.raises(UnsupportedError, match="another hytrain.AdamW"):
                hytrain.AdamW(again)
        train(model, opt, range(3), square_loss)
    with adamw(model) as opt:
        train(model, opt, range(3), square_loss)


def test_too_little_host_memory_shows_the_arithmetic() -> None:
    model = perceptron(width=512)
    sentence = (
        r"1\.1 M parameters at k=0\.00 needs 0\.02 GB of host memory \(16\.0 bytes per parameter\), above 0\.01 GB"
    )
    with pytest.raises(CapacityError, match=sentence) as raised:
        hytrain.AdamW(model, k=0.0, host_memory_limit=10_000_000)
    one_sentence(raised.value)
    with adamw(model, k=0.6, host_memory_limit=10_000_000) as opt:
        train(model, opt, [0], lambda model, step: model(vectors(step, 512)).square().mean())
        assert opt.statistics().k >= 0.6


def test_a_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("HYTRAIN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BackendUnavailable, match="no-such-compiler.*torch") as raised:
        hytrain.AdamW(perceptron(), backend="native")
    one_sentence(raised.value)
    model = perceptron()
    with adamw(model, k=0.5, backend="torch"):
        assert not caplog.records, "as asked"
    with adamw(model, k=0.5) as opt:
        assert "updates with torch, which is slower and not bit for bit the same: CXX names" in caplog.text
        train(model, opt, range(3), square_loss)
        assert "torch: native is not available" in (opt.run_dir / "logs" / "optimizer-0.log").read_text()


def test_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match=r"also with one rank: pass model\.module"):
            hytrain.AdamW(nn.parallel.DistributedDataParallel(perceptron()))
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(UnsupportedError, match="more than one rank"):
            hytrain.AdamW(perceptron())
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- in the middle of training


def loss(model: nn.Module, step: int = 0) -> Tensor:
    return square_loss(model, step)


def clip(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_values(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clip_by_one_kernel_each(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)


def look_at_a_gradient(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    model[0][0].weight.grad.square().sum()


def gradient_by_hand(model: Any, opt: hytrain.AdamW) -> None:
    model[0][0].weight.grad = torch.ones(32, 32)
    opt.step()


def two_backwards(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    loss(model, 1).backward()


def two_backwards_with_zero_grad(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    model.zero_grad()
    loss(model, 1).backward()


def hyperparameters_between(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    opt.param_groups[0]["lr"] *= 0.5
    opt.step()


def scheduler_before_step(model: Any, opt: hytrain.AdamW) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    train(model, opt, [0], loss, scheduler)
    loss(model).backward()
    scheduler.step()
    opt.step()


def zeros(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)


def zeros_through_the_model(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    opt.step()
    model.zero_grad(set_to_none=False)


def create_graph(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward(create_graph=True)


def another_optimizer(model: Any, opt: hytrain.AdamW) -> None:
    other = torch.optim.SGD(model.parameters(), lr=LR)
    loss(model).backward()
    other.step()


def another_fused_optimizer(model: Any, opt: hytrain.AdamW) -> None:
    other = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    loss(model).backward()
    other.step()


def scaler(model: Any, opt: hytrain.AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model)).backward()
    scaler.step(opt)
    scaler.update()


def scaler_that_unscales(model: Any, opt: hytrain.AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model)).backward()
    scaler.unscale_(opt)


def moved_storage(model: Any, opt: hytrain.AdamW) -> None:
    model.double().float()
    loss(model).backward()


def other_dtype(model: Any, opt: hytrain.AdamW) -> None:
    model.bfloat16()
    loss(model).backward()


def gradients_that_are_not_wanted(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    opt.zero_grad()


def a_gradient_that_is_not_wanted(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    model[0][0].bias.grad = None
    opt.step()


def two_steps(model: Any, opt: hytrain.AdamW) -> None:
    loss(model).backward()
    opt.step()
    opt.step()


def state_loaded_between(model: Any, opt: hytrain.AdamW) -> None:
    state = opt.state_dict()
    loss(model).backward()
    opt.load_state_dict(state)


def weights_loaded_between(model: Any, opt: hytrain.AdamW) -> None:
    state = model.state_dict()
    loss(model).backward()
    model.load_state_dict(state)


def state_cleared(model: Any, opt: hytrain.AdamW) -> None:
    opt.state.clear()


def state_replaced(model: Any, opt: hytrain.AdamW) -> None:
    opt.state = defaultdict(dict)  # type: ignore[assignment]


def moments_edited(model: Any, opt: hytrain.AdamW) -> None:
    opt.state[model[0][0].weight]["exp_avg"].zero_()


def parameter_taken_out_of_its_group(model: Any, opt: hytrain.AdamW) -> None:
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][1:]
    loss(model).backward()


def momentum_that_goes_to_one(model: Any, opt: hytrain.AdamW) -> None:
    opt.param_groups[0]["betas"] = (1.0, 0.999)
    loss(model).backward()


def reentrant_checkpoint(model: Any, opt: hytrain.AdamW) -> None:
    x = vectors(0).requires_grad_()
    checkpoint(model, x, use_reentrant=True).sum().backward()


def fails_in_backward(model: Any) -> None:
    """Raises between the gradients of the last block and those of the first."""

    def fail(gradient: Tensor) -> Tensor:
        raise MemoryError("out of memory, say")

    x = model[0](vectors(0))
    x.register_hook(fail)
    for block in list(model)[1:]:
        x = block(x)
    with pytest.raises(MemoryError):
        x.square().mean().backward()


def exception_then_step(model: Any, opt: hytrain.AdamW) -> None:
    fails_in_backward(model)
    opt.step()


def exception_then_forward(model: Any, opt: hytrain.AdamW) -> None:
    fails_in_backward(model)
    opt.zero_grad()
    loss(model)


def exception_then_saving(model: Any, opt: hytrain.AdamW) -> None:
    fails_in_backward(model)
    model.state_dict()


#: (what a user does, the words that help)
PRACTICES: list[tuple[Callable[[Any, hytrain.AdamW], None], str]] = [
    (clip, "clip_grad_norm_"),
    (clip_by_one_kernel_each, "clip_grad_norm_"),
    (clip_values, "clip_grad_value_"),
    (look_at_a_gradient, "register_hook"),
    (gradient_by_hand, "set by hand"),
    (two_backwards, "second backward before step.*grad_accumulation=n"),
    (two_backwards_with_zero_grad, "or pass grad_accumulation=n"),
    (gradients_that_are_not_wanted, r"zero_grad\(\) between backward and step\(\) comes too late"),
    (a_gradient_that_is_not_wanted, r"0\.0\.bias was dropped between backward and step\(\)"),
    (two_steps, r"step\(\) was called again without a backward"),
    (state_loaded_between, r"opt\.load_state_dict\(\) between backward and step\(\)"),
    (weights_loaded_between, r"model\.load_state_dict\(\) between backward and step\(\)"),
    (state_cleared, r"opt\.state is empty"),
    (state_replaced, r"opt\.state is empty"),
    (moments_edited, r"opt\.state is empty"),
    (parameter_taken_out_of_its_group, r"requires_grad_\(False\)"),
    (momentum_that_goes_to_one, r"betas in opt\.param_groups are \(1\.0, 0\.999\)"),
    (hyperparameters_between, "hyperparameters changed between backward and step"),
    (scheduler_before_step, r"call the scheduler after opt\.step"),
    (zeros, r"use zero_grad\(\)"),
    (zeros_through_the_model, r"use zero_grad\(\)"),
    (create_graph, "create_graph"),
    (another_optimizer, "give each parameter to one optimizer"),
    (another_fused_optimizer, "give each parameter to one optimizer"),
    (scaler, 'loss_scale="dynamic" .*without a GradScaler'),
    (scaler_that_unscales, 'loss_scale="dynamic" .*without a GradScaler'),
    (moved_storage, "storage of .* was replaced"),
    (other_dtype, "storage of .* was replaced"),
    (reentrant_checkpoint, "use_reentrant=False"),
    (exception_then_step, "last backward ended with an exception"),
    (exception_then_forward, "last backward ended with an exception"),
    (exception_then_saving, "last backward ended with an exception"),
]


@pytest.mark.parametrize(("practice", "sentence"), PRACTICES, ids=[practice.__name__ for practice, _ in PRACTICES])
def test_practices(practice: Callable[[Any, hytrain.AdamW], None], sentence: str) -> None:
    model = perceptron()
    model[3].requires_grad_(False)
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        with pytest.raises(UsageError, match=sentence) as raised:
            practice(model, opt)
        one_sentence(raised.value)


@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_second_backward_through_an_old_graph(stepped: bool, k: float) -> None:
    """Whoever notices first, HyTrain or autograd: the weights that the graph saved are no longer there."""
    model = perceptron()
    with adamw(model, k=k) as opt:
        value = loss(model)
        value.backward(retain_graph=True)
        if stepped:
            opt.step()
        model.zero_grad()
        opt.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation|grad_accumulation=n"):
            value.backward()


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_after_an_exception_in_backward_only_a_checkpoint_helps(k: float, tmp_path: Path) -> None:
    whole = perceptron()
    with adamw(whole, k=k) as opt:
        train(whole, opt, range(10), square_loss)

    model = perceptron()
    with adamw(model, k=k) as opt:
        train(model, opt, range(5), square_loss)
        opt.save(tmp_path / "optimizer")
        torch.save(model.state_dict(), tmp_path / "model.pt")
        fails_in_backward(model)
        for _ in range(2):
            for go_on in (opt.step, opt.synchronize, opt.state_dict, model.state_dict, lambda: loss(model)):
                with pytest.raises(UsageError, match="load a checkpoint"):
                    go_on()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    model.zero_grad()
    with adamw(model, k=k) as opt:
        opt.load(tmp_path / "optimizer")
        train(model, opt, range(5, 10), square_loss)
    assert differing(weights(model), weights(whole)) == []


# ---------------------------------------------------------------- on the command line


RECIPES: dict[str, tuple[list[str], str]] = {
    "unknown key": (["train.stepz=3"], r'unknown key "train\.stepz"; did you mean "train\.steps"\?'),
    "unknown section": (["trian.steps=3"], 'unknown key "trian"; did you mean "train'),
    "override without a value": (["train.steps"], r"not of the form section\.key=value"),
    "k above 1": (["optimizer.k=1.5"], "k, the share of the parameters"),
    "no steps": (["train.steps=0"], r'"train\.steps" is 0'),
    "missing text": (["data.paths=[no-such-file.txt]"], r"no-such-file\.txt"),
    "empty text": (["data.paths=[empty.txt]"], "empty"),
    "batch too long": (["data.sequence_length=64"], "64"),
    "missing GPU": (["train.device=cuda"], "cuda|GPU"),
    "too little memory": (["cluster.host_memory_limit_gib=0.00001", "optimizer.k=0"], "host memory"),
    "no such cores": (["cluster.cores=0-99999"], "core"),
}


def refused(ran: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stdout == ""
    [said] = ran.stderr.splitlines()
    assert re.search(rf"^hytrain.*{sentence}", said)


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes(kind: str, tmp_path: Path) -> None:
    if kind == "missing GPU" and torch.cuda.is_available():
        pytest.skip("it is not missing")
    overrides, sentence = RECIPES[kind]
    (tmp_path / "empty.txt").touch()
    recipe = write_recipe(tmp_path)
    refused(cluster(recipe, *[word for value in overrides for word in ("--set", value)], cwd=tmp_path), sentence)


@pytest.mark.parametrize("name", ["missing.yaml", "missing.py", "missing"])
def test_missing_programs(name: str, tmp_path: Path) -> None:
    refused(cluster(tmp_path / name), re.escape(str(tmp_path / name)))


def test_a_recipe_that_is_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("- a\n- list\n")
    refused(cluster(tmp_path / "recipe.yaml"), "must be a mapping")


def test_a_recipe_without_a_compiler(tmp_path: Path) -> None:
    without = environment(CXX="no-such-compiler", HYTRAIN_CACHE=str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path, optimizer={"backend": "native"})
    refused(cluster(recipe, env=without), "no-such-compiler.*backend='torch'")


def test_what_a_program_says_on_standard_error_stays_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('result'); print('complaint', file=sys.stderr); sys.exit(2)")
    ran = cluster(script)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("result\n", "complaint\n", 2)
    log = (tmp_path / "run" / "logs" / "trainer-0.log").read_text()
    assert sorted(log.splitlines()) == ["complaint", "result"]


def test_settings_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    refused(cluster(tmp_path / "script.py", env=environment(HYTRAIN_THREADS="many")), "threads")


def test_a_plain_script_ends_with_the_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch, hytrain\nhytrain.AdamW(torch.nn.Linear(2, 2), cores='99999')\n")
    ran = run(sys.executable, script)
    assert ran.returncode == 1
    assert re.match(r"hytrain\.errors\.ConfigError: .*core", ran.stderr.splitlines()[-1])
