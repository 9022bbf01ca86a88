"""What HyTrain can't do it refuses with a sentence: at construction, in the middle of training, on the command line.

After a refusal nothing trains on silently, and (the `no_leaks` fixture) nothing is left running.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import LR, adamw, differing, same_as_torch, train, weights
from programs import cluster, environment, train_recipe, write_recipe
from small_models import fails_in_backward, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.errors import BackendUnavailable, CapacityError, ConfigError, HyTrainError, UnsupportedError, UsageError

# ---------------------------------------------------------------- at construction


def with_weight(weight: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    """A perceptron one of whose weights is another tensor."""

    def made() -> nn.Module:
        model = perceptron(width=4, depth=2)
        model[1][0].weight = nn.Parameter(weight())
        return model

    return made


def over_one_memory() -> nn.Module:
    model = perceptron()
    model[1][0].weight = nn.Parameter(model[0][0].weight.data)
    return model


#: kind: (the model, the words that help)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no parameters": (nn.Tanh, "no parameter that needs a gradient"),
    "float64": (with_weight(lambda: torch.zeros(4, 4).double()), r"1\.0\.weight has dtype torch.float64"),
    "sparse gradients": (lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), "sparse=False"),
    "meta device": (lambda: nn.Linear(4, 4, device="meta"), "meta"),
    "gaps": (with_weight(lambda: torch.zeros(4, 8)[:, ::2]), "contiguous"),
    "one memory for two": (over_one_memory, "share memory"),
    "DataParallel": (lambda: nn.DataParallel(perceptron()), "DataParallel"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str) -> None:
    make, sentence = MODELS[kind]
    model = make()
    with pytest.raises(UnsupportedError, match=sentence) as raised:
        hytrain.AdamW(model)
    one_sentence(raised.value)
    assert not (isinstance(model, nn.Module) and any(module._forward_pre_hooks for module in model.modules()))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match=r"with one rank, pass model\.module"):
            hytrain.AdamW(nn.parallel.DistributedDataParallel(perceptron()))
    finally:
        torch.distributed.destroy_process_group()


#: (options, the words that help)
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"k": 1.5}, r"k is 1\.5"),
    ({"k": 0.5, "visit": "0.5"}, r"visit is '0\.5': a fraction"),
    ({"visit": 0.5}, r"visit is 0\.5 with k=auto: give a number for k too"),
    ({"k": 0.7, "visit": 0.5}, r"visit is 0\.5 with k=0\.7: .*both 1 at most"),
    ({"k": 0.7, "visit": "auto"}, 'visit="auto" needs k="auto" and policy="deadline"'),
    ({"policy": "random", "visit": "auto"}, 'visit="auto" needs k="auto" and policy="deadline"'),
    ({"k": "half"}, '"auto"'),
    ({"k": True}, "k is True"),
    ({"policy": "fixed"}, 'policy="fixed" needs a k'),
    ({"policy": "greedy"}, "policy 'greedy' is unknown.*deadline"),
    ({"backend": "cuda"}, "backend 'cuda' is unknown: choose auto, native"),
    ({"gradient_dtype": torch.float16}, "gradients travel in"),
    ({"state_dtype": torch.float16}, "choose one of float32, bfloat16, float8"),
    ({"state_dtype": torch.float8_e5m2}, "state_dtype is float8_e5m2: choose one of"),
    ({"cores": "0-99999"}, "core"),
    ({"threads": 0}, "threads is 0: it should be greater than or equal to 1"),
    ({"threads": "x"}, "threads is 'x': it should be a valid integer"),
    ({"gpu_memory_limit": "24"}, "gpu_memory_limit is '24': a size has a unit"),
    ({"overlap": "no"}, "overlap is 'no': True or False"),
    ({"lr": -1.0}, "lr"),
    ({"lr": "1e-3"}, "lr is '1e-3': a number"),
    ({"lr": Fraction(1, 1000)}, r"lr is Fraction\(1, 1000\): a number"),
    ({"lr": np.array(1e-3)}, r"lr is array\(0\.001\): a number"),
    ({"betas": (0.9, 0.99, 0.999)}, r"betas is \(0\.9, 0\.99, 0\.999\): two numbers"),
    ({"fused": True, "foreach": True}, "fused and foreach cannot be True together"),
    ({"fused": "yes"}, "fused is 'yes': True, False or None"),
    ({"betas": (0.9, 1.0)}, "betas"),
    ({"maximize": "yes"}, "maximize is 'yes'"),
    ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ({"clip": "value"}, "clip is 'value'"),
    ({"clip": "per_layer"}, "clips nothing without max_grad_norm"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'"),
    ({"speculate": True}, "speculate is True, but no step waits"),
    ({"speculate": "yes", "max_grad_norm": 1.0}, "speculate is 'yes': True"),
    ({"speculate": True, "max_grad_norm": 1.0, "overlap": False}, "speculate=True with overlap=False"),
    ({"speculate": True, "loss_scale": 2.0}, "speculate=True with loss_scale"),
    ({"loss_scale": "static"}, 'loss_scale is .static.: "dynamic", a number'),
    ({"loss_scale": 0.0}, "loss_scale is 0.0"),
    ({"loss_scale": "dynamic", "on_nonfinite": "raise"}, "leave on_nonfinite out"),
    ({"accumulate_on": "gpu"}, "accumulate_on is 'gpu'"),
    ({"grad_accumulation": 0}, "grad_accumulation is 0"),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        hytrain.AdamW(perceptron(), **options)
    one_sentence(raised.value)


def one_sentence(error: Exception) -> None:
    text = str(error)
    assert text and "\n" not in text and "Traceback" not in text, text


def test_parameter_groups() -> None:
    model = perceptron()
    parameters = list(model.parameters())
    for group, sentence in (
        ({"amsgrad": True}, "no option 'amsgrad'"),
        ({"capturable": True}, "no option 'capturable'"),
        ({"params": [*parameters, nn.Parameter(torch.zeros(3))]}, "that the model does not have"),
    ):
        with pytest.raises(UnsupportedError, match=sentence):
            hytrain.AdamW(model, param_groups=[{"params": parameters, **group}])
    for kind, name in ((hytrain.AdamW, "amsgrad"), (hytrain.Adam, "decoupled_weight_decay"), (hytrain.SGD, "fused")):
        sentence = f"hytrain.{kind.__name__} has no option '{name}'"
        with pytest.raises(UnsupportedError, match=sentence) if name != "fused" else nullcontext():
            kind(model, **{name: True}).close()
    for kind in (hytrain.Lion, hytrain.Muon):
        with pytest.raises(TypeError, match=f"hytrain.{kind.__name__} has no option 'foreach'"):
            kind(model, foreach=True)


def test_what_is_meant_by_a_misspelt_option_is_said() -> None:
    for wrong, meant in (("max_gradnorm", "max_grad_norm"), ("weightdecay", "weight_decay")):
        with pytest.raises(TypeError, match=f"hytrain.AdamW has no option '{wrong}'; did you mean '{meant}'?"):
            hytrain.AdamW(perceptron(), **{wrong: 1.0})


def test_the_text_of_an_optimizer_says_what_hytrain_does() -> None:
    model = perceptron()
    opt = hytrain.AdamW(model.parameters(), k=0.0)
    assert repr(opt).startswith("hytrain.AdamW: waits for its model to be called\nAdamW (\nParameter Group 0\n")
    square_loss(model, 0).backward()
    opt.step()
    assert repr(opt).startswith(f"hytrain.AdamW: step 1, k=0.000, run in {opt.run_dir}\n")
    opt.close()
    assert repr(opt).startswith("hytrain.AdamW: closed\n")


def test_keys_of_others_in_parameter_groups() -> None:
    """Schedulers keep their numbers in groups."""
    model = perceptron()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr_scale": 0.5, "foreach": None, "fused": True}]
    groups.append({"params": model[1].parameters(), "name": "second"})
    with adamw(model, param_groups=groups) as opt:
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, [LR, LR], total_steps=10)
        train(model, opt, range(2), square_loss)
        schedule.step()
        opt.add_param_group({**opt.param_groups[0], "params": list(model[2].parameters())})
        train(model, opt, range(2, 4), square_loss)
        assert [len(group["params"]) for group in opt.param_groups] == [2, 2, 2]


def test_too_little_host_memory_shows_the_arithmetic() -> None:
    model = perceptron(width=512)
    sentence = (
        r"1\.1 M parameters at k=0\.00 needs 16\.1 MiB of host memory \(16\.0 bytes per parameter\), above 9\.5 MiB"
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


# ---------------------------------------------------------------- in the middle of training

Practice = Callable[[Any, hytrain.AdamW], object]


def use_a_scaler(model: Any, opt: hytrain.AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(square_loss(model, 0)).backward()
    scaler.step(opt)


def gradient_by_hand(model: Any, opt: hytrain.AdamW) -> None:
    model[0][0].weight.grad = torch.ones(32, 32)
    opt.step()


def gradient_set_by_a_later_hook(model: Any, opt: hytrain.AdamW) -> None:
    """Without reading the one before."""
    model[0][0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.ones(32, 32)))
    square_loss(model, 0).backward()


def one_gradient_dropped(model: Any, opt: hytrain.AdamW) -> None:
    model[0][0].bias.grad = None
    opt.step()


@torch.no_grad()
def evaluated(model: Any) -> None:
    model(vectors(0))


def parameter_taken_out_of_its_group(model: Any, opt: hytrain.AdamW) -> None:
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][1:]
    square_loss(model, 0).backward()


def channels_last(model: Any, opt: hytrain.AdamW) -> None:
    """What `model.to(memory_format=torch.channels_last)` does to a convolution, here to a matrix."""
    model[0][0].weight.data = model[0][0].weight.data.t().contiguous().t()
    square_loss(model, 0).backward()


def a_group_too_many(model: Any, opt: hytrain.AdamW) -> None:
    opt.param_groups = [*opt.param_groups, {**opt.param_groups[0], "params": []}]
    square_loss(model, 0).backward()


USED = r"is used between backward and step\(\)"

#: What users do between a backward and step(): (a name, what they do, the words that help)
AFTER_BACKWARD: list[tuple[str, Practice, str]] = [
    ("clip", lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), "clip_grad_norm_"),
    ("clip values", lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 1.0), "pass updates="),
    ("noise", lambda model, opt: model[0][0].weight.grad.add_(0.1), "add_ on .*change gradients in a hook of your own"),
    ("numpy", lambda model, opt: model[0][0].weight.grad.numpy(), "register_hook"),
    ("data_ptr", lambda model, opt: model[0][0].weight.grad.data_ptr(), "register_hook"),
    ("two backwards", lambda model, opt: square_loss(model, 1).backward(), "is called between.*grad_accumulation=n"),
    ("evaluation", lambda model, opt: evaluated(model), r"is called between backward and step\(\).*Evaluate before"),
    ("norms", lambda model, opt: [p.norm() for p in model.parameters()], r"is used between backward and step\(\)"),
    ("projection", lambda model, opt: model[0][0].weight.data.clamp_(0), r"is used between backward and step\(\)"),
    ("save a state", lambda model, opt: opt.state_dict(), r"opt\.state_dict\(\) between backward and step"),
    ("save weights", lambda model, opt: model.state_dict(), r"is used between backward and step\(\)"),
    ("gradient by hand", gradient_by_hand, "set by hand"),
    ("zero_grad", lambda model, opt: opt.zero_grad(), r"zero_grad\(\) between backward and step\(\) comes too late"),
    ("one gradient dropped", one_gradient_dropped, r"0\.0\.bias was dropped between backward and step\(\)"),
    ("load a state", lambda model, opt: opt.load_state_dict({}), r"opt\.load_state_dict\(\) between backward and step"),
    ("load weights", lambda model, opt: model.load_state_dict({}), r"model\.load_state_dict\(\) between backward"),
    ("two steps", lambda model, opt: (opt.step(), opt.step()), r"step\(\) was called again without a backward"),
    ("zeros", lambda model, opt: (opt.step(), opt.zero_grad(set_to_none=False)), r"use zero_grad\(\)"),
    (
        "another optimizer",
        lambda model, opt: torch.optim.SGD(model.parameters(), lr=LR).step(),
        USED,
    ),
    (
        "another AdamW",
        lambda model, opt: torch.optim.AdamW(model.parameters(), fused=True).step(),
        USED,
    ),
]


def resets_moments(model: nn.Module, opt: Any) -> None:
    for entry in opt.state.values():
        entry["exp_avg"].zero_()


def resets_moments_of_some(model: nn.Module, opt: Any) -> None:
    for parameter in model.parameters():
        if (entry := opt.state.get(parameter)) is not None:
            entry["step"].fill_(0)


#: And at other times.
PRACTICES: list[tuple[str, Practice, str]] = [
    ("state cleared", lambda model, opt: opt.state.clear(), r"opt\.state has no values"),
    ("moments reset in a loop", resets_moments, r"opt\.state has no values"),
    ("moments reset where there are some", resets_moments_of_some, r"opt\.state has no values"),
    (
        "moments edited",
        lambda model, opt: opt.state[model[0][0].weight]["exp_avg"].zero_(),
        r"opt\.state has no values",
    ),
    ("parameter taken out of its group", parameter_taken_out_of_its_group, r"requires_grad_\(False\)"),
    ("a group too many", a_group_too_many, "use add_param_group"),
    ("channels_last", channels_last, r"other strides now: .*call model\.to\(memory_format=…\) before"),
    (
        "momentum that goes to one",
        lambda model, opt: (opt.param_groups[0].update(betas=(1.0, 0.999)), square_loss(model, 0).backward()),
        r"betas in opt\.param_groups are \(1\.0, 0\.999\)",
    ),
    *(
        (
            f"{name} that is {value!r}",
            lambda model, opt, name=name, value=value: (
                opt.param_groups[0].update({name: value}),
                square_loss(model, 0).backward(),
            ),
            sentence,
        )
        for name, value, sentence in (
            ("lr", "1e-3", r"in opt\.param_groups, lr is '1e-3': a number"),
            ("lr", Fraction(1, 1000), r"in opt\.param_groups, lr is Fraction"),
            ("lr", np.array(1e-3), r"in opt\.param_groups, lr is array\(0\.001\): a number"),
            ("lr", torch.tensor([1e-3, 1e-3]), r"in opt\.param_groups, lr is tensor.*: a number"),
            ("betas", (0.9, 0.99, 0.999), r"in opt\.param_groups, betas is .*two numbers"),
            ("maximize", "no", r"in opt\.param_groups, maximize is 'no'"),
        )
    ),
    ("gradient set by a later hook", gradient_set_by_a_later_hook, "by a hook that ran after HyTrain's"),
    ("create_graph", lambda model, opt: square_loss(model, 0).backward(create_graph=True), "create_graph"),
    ("scaler", use_a_scaler, 'updates="step".*without a GradScaler'),
    (
        "reentrant checkpoint",
        lambda model, opt: checkpoint(model, vectors(0).requires_grad_(), use_reentrant=True).sum().backward(),
        "use_reentrant=False",
    ),
]


@pytest.mark.parametrize(
    ("backward_first", "practice", "sentence"),
    [
        pytest.param(first, *row, id=name)
        for first, rows in ((True, AFTER_BACKWARD), (False, PRACTICES))
        for name, *row in rows
    ],
)
def test_practices(backward_first: bool, practice: Practice, sentence: str) -> None:
    model = perceptron()
    model[3].requires_grad_(False)
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        if backward_first:
            square_loss(model, 0).backward()
        with pytest.raises(UsageError, match=sentence) as raised:
            practice(model, opt)
        one_sentence(raised.value)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_second_backward_through_an_old_graph(k: float) -> None:
    """As with torch, autograd notices: the weights that the graph saved are no longer there."""
    model = perceptron()
    with adamw(model, k=k) as opt:
        value = square_loss(model, 0)
        value.backward(retain_graph=True)
        opt.step()
        opt.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_second_loss_whose_forward_came_before_the_first_backward(k: float) -> None:
    """It is refused before it begins, and training goes on with the first one."""

    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        first, second = square_loss(model, 2), square_loss(model, 3)
        first.backward()
        if isinstance(opt, hytrain.AdamW):
            with pytest.raises(UsageError, match=r"reached the model's output before step\(\).*add the losses"):
                second.backward()
        opt.step()
        opt.zero_grad()
        train(model, opt, range(4, 6), square_loss)

    same_as_torch(run, k=k)


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_after_an_exception_in_backward_its_updates_are_not_dropped(k: float, tmp_path: Path) -> None:
    """Where updates begin in backward. As in torch, `step()` would make them with the gradients that have come."""
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
            for go_on in (opt.zero_grad, opt.state_dict, model.state_dict, lambda: square_loss(model, 0)):
                with pytest.raises(UsageError, match=r"between backward and step\(\)"):
                    go_on()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    with adamw(model, k=k) as opt:
        opt.load(tmp_path / "optimizer")
        train(model, opt, range(5, 10), square_loss)
    assert differing(weights(model), weights(whole)) == []


# ---------------------------------------------------------------- recipes, and the command line


def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file alone decides, and the text, are in tests/test_recipe_config.py and tests/test_recipe_data.py."""
    monkeypatch.setenv("HYTRAIN_HOST_MEMORY_LIMIT", "10kB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for override, sentence in (
        ("data.sequence_length=64", "64"),
        ("train.device=cuda", "cuda|GPU"),
        ("optimizer.k=0", "host memory"),
    ):
        with pytest.raises(HyTrainError, match=sentence) as raised:
            train_recipe(write_recipe(tmp_path), tmp_path / "run", override)
        one_sentence(raised.value)


def refused(ran: subprocess.CompletedProcess[str], sentence: str, *, starts: bool = False) -> None:
    """In one sentence, which comes below the first words of a run that `starts`."""
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stdout == ""
    *first, said = ran.stderr.splitlines()
    assert bool(first) is starts and "Traceback" not in ran.stderr
    assert re.search(rf"^hytrain.*{sentence}", said)


def test_the_launcher_refuses_with_a_sentence(tmp_path: Path) -> None:
    """Recipes, programs and settings; before it starts anything, and when its processes do."""
    recipe, script, listed = write_recipe(tmp_path), tmp_path / "script.py", tmp_path / "list.yaml"
    places = {"HYTRAIN_CACHE": str(tmp_path / "cache"), "HYTRAIN_RUN_DIR": str(tmp_path / "without-compiler")}
    without_compiler = environment(CXX="no-such-compiler", **places)
    refused(
        cluster(recipe, "--set=optimizer.backend=native", env=without_compiler),
        "no-such-compiler.*='torch'",
        starts=True,
    )
    script.touch()
    listed.write_text("- a\n- list\n")
    refused(cluster(recipe, "--set", "train.stepz=3"), r'unknown key "train\.stepz"; did you mean "train\.steps"\?')
    refused(cluster(recipe, "--set", "cluster.cores=0-99999"), "core")
    refused(cluster(listed), "must be a mapping")
    refused(cluster(script, env=environment(HYTRAIN_THREADS="many")), "threads")
    refused(cluster(tmp_path / "missing.yaml"), re.escape(str(tmp_path / "missing.yaml")))
    refused(cluster("--dry-run", script), "is for recipes")


class Once(nn.Module):
    """A block in a reentrant checkpoint, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = perceptron(depth=2)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        inputs = x + torch.zeros_like(x, requires_grad=True)
        return cast(Tensor, self.head(checkpoint(self.block, inputs, use_reentrant=True)))


def test_reentrant_checkpoints_of_before_another_backward_and_after_it_are_told_the_cure() -> None:
    model = Once()
    with adamw(model, updates="backward", k=0.0) as opt:
        early = square_loss(model, 0)
        with opt.no_sync():
            square_loss(model, 1).backward()
        late = square_loss(model, 2)
        with pytest.raises(UsageError, match="already updated it: reentrant .* use_reentrant=False"):
            ((early + late) * model.scale.mean()).backward()
