"""Which optimizers end, and when: with their user's last reference, at the exit, after a start that failed.

What an optimizer of HyTrain has registered anywhere does not keep it: neither threads, nor finalizers, nor hooks.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import LR, Reference, adamw, differing, late_weights, train, wait_for, weights
from programs import run
from small_models import perceptron, share_of_loss, square_loss
from torch import Tensor, nn

import hytrain
from examples.studies.cotraining.shares import cotrain
from hytrain import build, session
from hytrain.errors import UnsupportedError, UsageError
from hytrain.memory.transfer import Copy, HostTransfers, Transfer
from hytrain.model import hooks
from hytrain.run import link as links
from hytrain.run.link import Link
from hytrain.step.engine import Engine


def part_of_itself(model: nn.Module, opt: Any) -> None:
    model.optimizer = opt


def hook_of_a_module(model: nn.Module, opt: Any) -> None:
    model[1].register_forward_hook(lambda *_: opt and None)


def hook_of_a_gradient(model: nn.Module, opt: Any) -> None:
    model[0][0].weight.register_hook(lambda gradient: None if opt else gradient)


def scheduler(model: nn.Module, opt: Any) -> None:
    model.scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)


def frames_of_an_error(model: nn.Module, opt: Any) -> None:
    """What a caught exception has come through refers to the model, as this function does."""
    with pytest.raises(UsageError, match="was set by hand"):
        training_goes_wrong(model, opt)


def training_goes_wrong(model: nn.Module, opt: Any) -> None:
    square_loss(model, 0).backward()
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    opt.step()


def loss_that_was_kept(model: nn.Module, opt: Any) -> None:
    model.loss = square_loss(model, 0)


LINKS: tuple[Callable[[nn.Module, Any], None], ...] = (
    part_of_itself,
    hook_of_a_module,
    hook_of_a_gradient,
    scheduler,
    loss_that_was_kept,
)


def trained(refer: Callable[[nn.Module, Any], None], **options: Any) -> tuple[list[weakref.ref[Any]], nn.Module, int]:
    """A model and its optimizer that nobody refers to any more: references, a part of the model, the launcher."""
    model = perceptron()
    opt = hytrain.AdamW(model, lr=LR, **options)
    train(model, opt, range(2), square_loss)
    refer(model, opt)
    return [weakref.ref(opt), weakref.ref(model)], model[2], opt._session.place.cluster.launcher_pid


def gone(references: Sequence[weakref.ref[Any]]) -> bool:
    gc.collect()
    return not any(reference() is not None for reference in references)


@pytest.mark.parametrize("refer", LINKS)
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_model_that_refers_to_its_optimizer_is_freed(k: float, refer: Callable[[nn.Module, Any], None]) -> None:
    references, _, _ = trained(refer, k=k)
    assert gone(references)


def test_an_error_that_was_caught_keeps_nothing() -> None:
    references, _, _ = trained(frames_of_an_error, k=0.0)
    assert gone(references)


@pytest.mark.parametrize("options", [{"k": 1.0}, {"k": 0.0}, {"k": 0.0, "offload_weights": 1.0}], ids=str)
def test_a_closed_optimizer_is_part_of_no_cycle(options: dict[str, Any]) -> None:
    """So a GPU has the memory of both when nobody refers to them, and not when Python next looks for cycles."""

    def closed() -> list[weakref.ref[Any]]:
        model = perceptron()
        with hytrain.AdamW(model, lr=LR, **options) as opt:
            train(model, opt, range(2), square_loss)
            opt.state_dict()
        return [weakref.ref(opt), weakref.ref(model), *map(weakref.ref, model.parameters())]

    closed()  # what is imported meanwhile may fail inside, and such an error keeps all frames
    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in closed() if reference() is not None] == []
    finally:
        gc.enable()


def test_their_processes_end(own_run: None) -> None:
    references, _, launcher = trained(part_of_itself)
    assert gone(references) and not psutil.pid_exists(launcher)


def test_a_part_that_is_kept_has_all_updates_and_is_an_ordinary_one() -> None:
    """The last updates are under way when the garbage collector finds the rest."""
    with late_weights():
        references, part, _ = trained(part_of_itself, k=0.0)
        assert gone(references)
    expected = perceptron()
    train(expected, Reference(expected, lr=LR), range(2), square_loss)
    assert differing(weights(part), weights(expected[2])) == []
    assert not part._forward_pre_hooks and all(type(p) is nn.Parameter and p.grad is None for p in part.parameters())


def test_co_training_that_nobody_refers_to_ends_too() -> None:
    def refer(model: nn.Module, opt: Any) -> None:
        model.shares = cotrain(opt, model, perceptron, share_of_loss, parts=2, cpu_parts=1)
        model.optimizer = opt
        pids.append(model.shares.pid)

    pids: list[int] = []
    references, _, _ = trained(refer)
    assert gone(references)
    wait_for(lambda: not psutil.pid_exists(pids[0]))


@pytest.mark.parametrize("refer", ["model.opt = opt", "pass"])
def test_it_closes_in_order_at_the_exit(refer: str, tmp_path: Path) -> None:
    """All records are written, and nothing is said."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hytrain, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))\n"
        f"opt = hytrain.AdamW(model, run_dir={str(tmp_path / 'own')!r})\n"
        f"{refer}\n"
        "for step in range(3):\n"
        "    model(torch.ones(2, 16)).sum().backward(); opt.step(); opt.zero_grad()\n"
    )
    done = run(sys.executable, script)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (tmp_path / "own" / "metrics.jsonl").read_text().count("\n") == 3


# ---------------------------------------------------------------- close()


def test_a_thread_that_is_busy_closes_its_sockets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waits no longer for it. The garbage collector must not wait for it either."""
    busy, go_on, fast = threading.Event(), threading.Event(), HostTransfers.weights_in

    def slow(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        busy.set()
        go_on.wait()
        return fast(self, copies)

    model = perceptron()
    opt = hytrain.AdamW(model, lr=LR, k=0.0)
    train(model, opt, range(2), square_loss)
    opt.synchronize()
    monkeypatch.setattr(HostTransfers, "weights_in", slow)
    monkeypatch.setattr(links, "CLOSE_TIMEOUT_S", 0.0)
    model[0][0].weight.register_hook(lambda gradient: stop_it())

    def stop_it() -> Tensor:
        assert busy.wait(60)
        raise torch.OutOfMemoryError("made up")

    with pytest.raises(torch.OutOfMemoryError):
        square_loss(model, 2).backward()
    network, threads = opt._session._link._network, list(opt._session._link._threads.values())
    opt.close()
    assert not network.context.closed
    del opt
    gc.collect()
    go_on.set()
    wait_for(lambda: not any(thread.is_alive() for thread in threads))
    assert network.context.closed


# ---------------------------------------------------------------- a start that fails


def seen(model: nn.Module) -> list[Any]:
    """All of a model that a start could change, but for what it holds open."""
    found: list[Any] = []
    for module in model.modules():
        found += [len(value) for name, value in vars(module).items() if "hooks" in name]
        found += [name for name in vars(module) if name.startswith("__")]
    for p in model.parameters():
        found += [type(p), p.requires_grad, p.data_ptr(), p._version, id(p.grad), p.detach().clone().tolist()]
        found += [len(p._backward_hooks or {}), len(p._post_accumulate_grad_hooks or {})]
    return found


def fails(*_: Any, **__: Any) -> Any:
    raise MadeUp


class MadeUp(Exception):
    pass


#: Where the start is made to fail, one stage after the other.
STAGES: dict[str, tuple[Any, str]] = {
    "layers": (build, "build_layers"),
    "gates": (build, "build_gates"),
    "memory": (build, "host_bound"),
    "the link": (links, "Address"),
    "its inbox": (links, "Inbox"),
    "the engine": (build, "Engine"),
    "joining": (Link, "join"),
    "agreeing": (Link, "agree"),
    "threads": (Link, "start"),
    "the first placement": (Engine, "start"),
    "hooks of modules": (nn.Module, "register_forward_hook"),
    "hooks of parameters": (Tensor, "register_post_accumulate_grad_hook"),
    "classes of parameters": (hooks, "watched_class"),
    "hooks of state": (nn.Module, "register_load_state_dict_pre_hook"),
    "copies": (hooks, "_leave_out"),
    "saying so": (Link, "ready"),
    "the environment's file": (session.environment, "write"),
    "trackers": (session, "Trackers"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_start_leaves_the_model_as_it_was(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that waits for its backward is as it was, too."""
    model = perceptron()
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    loss, before = square_loss(model, 0), seen(model)
    with monkeypatch.context() as patch:
        patch.setattr(*STAGES[stage], fails)
        with pytest.raises(MadeUp):
            hytrain.AdamW(model, lr=LR)
    assert seen(model) == before
    loss.backward()
    with adamw(model) as opt:
        model.zero_grad()
        train(model, opt, range(2), square_loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused_before_harm_and_frozen_no_hindrance() -> None:
    model = nn.Sequential(nn.Linear(16, 16), torch.jit.script(nn.Linear(16, 16)))
    before = seen(model)
    with pytest.raises(UnsupportedError, match=r"^1 is TorchScript.*train the module that it was made of"):
        hytrain.AdamW(model)
    assert seen(model) == before
    model(torch.ones(2, 16)).sum().backward()
    model.zero_grad()
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    with adamw(model) as opt:
        model(torch.ones(2, 16)).sum().backward()
        opt.step()
        model.state_dict()


@pytest.mark.parametrize("stage", ["layers", "the link", "agreeing", "hooks of parameters"])
def test_a_group_that_fails_to_be_added(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is given up, training goes on without it. After that, the model is an ordinary one."""
    model = perceptron()
    model[1].requires_grad_(False)
    before = seen(model)
    with adamw(model, [{"params": [*model[0].parameters(), *model[2].parameters()]}]) as opt:
        train(model, opt, range(2), square_loss)
        model[1].requires_grad_(True)
        with monkeypatch.context() as patch:
            patch.setattr(*STAGES[stage], fails)
            with pytest.raises(MadeUp):
                opt.add_param_group({"params": list(model[1].parameters())})
        if stage == "layers":
            train(model, opt, [2], square_loss)
        else:
            with pytest.raises(UsageError, match="is closed|beginning anew was interrupted by MadeUp"):
                train(model, opt, [2], square_loss)
                opt.step()
    assert [size for size in seen(model) if isinstance(size, int)][:3] == [
        size for size in before if isinstance(size, int)
    ][:3]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    square_loss(model, 3).backward()
