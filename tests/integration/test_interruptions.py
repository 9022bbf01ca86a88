"""What comes in between: Ctrl-C in a construction, other threads, forks, readers that nobody announced."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    DEADLINE_S,
    LR,
    Reference,
    adamw,
    differing,
    late_weights,
    process,
    same_as_torch,
    same_bits,
    train,
    wait_for,
    wait_for_coordinator,
    weights,
)
from small_models import perceptron, square_loss, vectors
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.config import CLUSTER_VARIABLE, ClusterConfig
from hytrain.errors import NonFiniteGradients, StaleReadError, UsageError
from hytrain.memory.arena import arena_socket
from hytrain.model.consumed import ConsumedGradient
from hytrain.model.watched import unwatched
from hytrain.run.cluster import PrivateCluster
from hytrain.run.link import Link
from hytrain.step.commit import Commit
from hytrain.step.device import DeviceUpdates
from hytrain.step.handover import Handover
from hytrain.step.reads import Reads
from protocol.channel import Network, Outbox


def test_a_construction_that_was_interrupted_leaves_no_connection_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both optimizers are of one run, and arenas go to the one that has sent its table."""

    def interrupt(self: Link, *arguments: Any) -> NoReturn:
        self._arenas.connect(arena_socket(self._cluster.socket_dir, self.address.rank))
        raise KeyboardInterrupt

    run = PrivateCluster(ClusterConfig.resolve())
    try:
        monkeypatch.setenv(CLUSTER_VARIABLE, run.cluster.socket_dir)
        with monkeypatch.context() as patch:
            patch.setattr(Link, "agree", interrupt)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    hytrain.AdamW(perceptron())
        model = perceptron()
        with adamw(model, k=0.0) as opt:
            train(model, opt, range(2), square_loss)
            assert opt.statistics().step == 2
    finally:
        run.close()


def test_a_construction_that_was_interrupted_between_two_connections_closes_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else ZeroMQ waits for the first one for ever, whenever Python frees its context."""
    networks, connect = list[Network](), Network.outbox

    def interrupt(self: Network, *arguments: Any, **options: Any) -> Outbox:
        networks.append(self)
        if len(networks) == 2:
            raise KeyboardInterrupt
        return connect(self, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Network, "outbox", interrupt)
        hytrain.AdamW(perceptron())
    assert networks[0] is networks[1] and networks[0].context.closed
    with adamw(perceptron()) as opt:
        assert opt.statistics().step == 0


def test_ctrl_c_comes_after_what_it_must_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `step()`, and while layers move: the loop may catch it, and goes on as if nothing had been."""
    model, numbers, caught, ends_s = perceptron(), itertools.count(), list[str](), time.monotonic() + DEADLINE_S
    with adamw(model, k="auto", policy="random") as opt:
        for kind, name in ((Commit, "commit"), (Handover, "finish")):
            before = getattr(kind, name)

            def interrupted(self: Any, *given: Any, name: str = name, before: Callable[..., Any] = before) -> Any:
                signal.raise_signal(signal.SIGINT)
                caught.append(name)
                return before(self, *given)

            with monkeypatch.context() as patch:
                patch.setattr(kind, name, interrupted)
                while name not in caught:
                    square_loss(model, next(numbers)).backward()
                    try:
                        opt.step()
                        opt.synchronize()  # what has begun to move is there
                    except KeyboardInterrupt:
                        caught.append("caught")
                    opt.zero_grad()
                    assert time.monotonic() < ends_s, "no layer moves"
        steps = next(numbers)
        train(model, opt, range(steps, steps + 3), square_loss)
        opt.synchronize()
        assert opt.statistics().step == steps + 3
    assert caught == ["commit", "caught", "finish", "caught"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected = perceptron()
    train(expected, Reference(expected, lr=LR), range(steps + 3), square_loss)
    assert differing(weights(model), weights(expected)) == []


def test_two_threads_that_wait_for_all_updates_finish_a_handover_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits until the first is through."""

    class Lock:
        def __init__(self, lock: Any) -> None:
            self.lock, self.asked = lock, set[int]()

        def __enter__(self) -> None:
            self.asked.add(threading.get_ident())
            self.lock.__enter__()

        def __exit__(self, *error: object) -> None:
            self.lock.__exit__(*error)

    model, finish, finished = perceptron(), Handover.finish, list[threading.Thread]()
    with adamw(model, k="auto", policy="random") as opt:
        lock = opt._engine._boundary._moves = Lock(opt._engine._boundary._moves)  # type: ignore[assignment]
        other = threading.Thread(target=opt.synchronize)

        def finishing(self: Handover, step: int) -> Any:
            finished.append(threading.current_thread())
            if len(finished) == 1:
                other.start()
                wait_for(lambda: other.ident in lock.asked)
            return finish(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(Handover, "finish", finishing)
            numbers = itertools.count()
            while not finished:
                train(model, opt, [next(numbers)], square_loss)
                opt.synchronize()
            other.join()
        assert finished == [threading.current_thread()]
        train(model, opt, [next(numbers)], square_loss)


def test_ctrl_c_twice_ends_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: Commit) -> bool:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("nothing holds back the second one")

    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        with monkeypatch.context() as patch:
            patch.setattr(Commit, "commit", hang)
            with pytest.raises(KeyboardInterrupt):
                train(model, opt, [2], square_loss)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---------------------------------------------------------------- threads and processes


def test_another_thread_is_refused_in_backward_and_harms_nothing() -> None:
    said = list[BaseException]()

    def run(model: Any, opt: Any) -> None:
        def read() -> None:
            try:
                model.state_dict()
            except UsageError as error:
                said.append(error)

        def meanwhile(*args: object) -> None:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

        handle = model[0][0].weight.register_hook(meanwhile)
        train(model, opt, range(4), square_loss)
        handle.remove()

    same_as_torch(run, k=0.5)
    assert len(said) == 4 and "still running in another thread" in str(said[0])


def test_waiting_in_backward_for_what_comes_after_it_is_refused() -> None:
    model = perceptron()
    with adamw(model, k=0.0, max_grad_norm=1.0) as opt:
        train(model, opt, range(2), square_loss)
        model[0][0].weight.register_hook(lambda gradient: opt.synchronize())
        with pytest.raises(UsageError, match="wait for the norm: call it after"):
            square_loss(model, 2).backward()


def test_a_step_in_its_own_backward_is_refused() -> None:
    """As where each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = perceptron()
    with adamw(model) as opt:
        model[0][0].weight.register_post_accumulate_grad_hook(lambda parameter: opt.step())
        with pytest.raises(UsageError, match="in a backward of its own model"):
            square_loss(model, 0).backward()


def in_a_fork(check: Callable[[], None]) -> None:
    """Call `check` in a child process, whose failed assertions fail this test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_an_ordinary_model() -> None:
    """Its gradients are its own: those of the process that trains lie in memory that both map."""
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        opt.synchronize()
        planes = [plane for layer in opt._session.layers for plane in layer.arena.grads if plane is not None]
        before = [plane.clone() for plane in planes]

        def train_alone() -> None:
            square_loss(model, 17).backward()
            assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
            with pytest.raises(UsageError, match="the optimizer is its parent's"):
                opt.step()

        in_a_fork(train_alone)
        assert all(map(torch.equal, planes, before))
        train(model, opt, range(3, 5), square_loss)
        assert {type(parameter.grad) for parameter in model.parameters()} == {type(None)}
        square_loss(model, 5).backward()
        assert {type(parameter.grad) for parameter in model.parameters()} == {ConsumedGradient}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_gets_the_last_steps_weights() -> None:
    """A fork waits for updates that are under way."""
    model, expected = perceptron(), perceptron()
    train(expected, Reference(expected, lr=LR), range(2), square_loss)
    with late_weights(), adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)

        def evaluate() -> None:
            assert torch.equal(model(vectors(0)), expected(vectors(0)))
            assert differing(weights(model), weights(expected)) == []

        in_a_fork(evaluate)
        opt.synchronize()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_hides_neither_errors_nor_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    with adamw(model, k=0.0, on_nonfinite="raise") as opt:
        train(model, opt, range(2), square_loss)
        (square_loss(model, 2) * float("inf")).backward()
        opt.step()
        in_a_fork(lambda: None)
        with pytest.raises(NonFiniteGradients):
            opt.synchronize()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Reads, "before_fork", Mock(side_effect=KeyboardInterrupt))
            in_a_fork(lambda: None)
            wait_for(lambda: False)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_amid_updates_is_told_so_at_once() -> None:
    """By another thread, which does not wait for them."""
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        opt.synchronize()
        process(opt, "optimizer").suspend()
        square_loss(model, 2).backward()
        opt.step()

        def read() -> None:
            for read in (lambda: model(vectors(0)), model.state_dict, opt.synchronize):
                with pytest.raises(UsageError, match=r"synchronize\(\) before forking"):
                    read()

        with ThreadPoolExecutor() as thread:
            thread.submit(in_a_fork, read).result()
        process(opt, "optimizer").resume()
        opt.synchronize()


@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_before_the_step_does_not_see_its_updates(k: float) -> None:
    """They are made, and in torch the weights are still those of before."""
    model = perceptron()
    with adamw(model, k=k, updates="backward") as opt:
        train(model, opt, range(2), square_loss)
        square_loss(model, 2).backward()
        wait_for(lambda: all(layer.life.is_current or layer.landing for layer in opt._session.layers))
        for layer in opt._session.layers:
            opt._engine._trip.wait_for(layer)

        def read() -> None:
            with pytest.raises(UsageError, match=r"synchronize\(\) before forking"):
                model.state_dict()

        in_a_fork(read)
        opt.step()


# ---------------------------------------------------------------- reads


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_checkpointed_region_that_reads_an_updated_block_is_refused(k: float) -> None:
    """Its recomputation comes after the block's own gradient."""

    model = perceptron(depth=2)
    before, block = model

    def early(x: torch.Tensor) -> torch.Tensor:
        x = before(x)
        with torch.no_grad():
            target = block(x)
        return x * target.sigmoid()

    refused = pytest.raises(UsageError, match="is used again in the backward that has")
    with adamw(model, updates="backward", k=k), refused:
        block(checkpoint(early, vectors(0), use_reentrant=False)).sum().backward()


@pytest.mark.parametrize("again", [False, True])
def test_what_was_compiled_before_waits_too(again: bool) -> None:
    model = perceptron()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(vectors(0))
    with adamw(model, k=0.0) as opt:
        for step in range(4):
            loss = (compiled(vectors(step)) - 1.0).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                seen = compiled(vectors(99))
            opt.synchronize()
            with torch.no_grad():
                assert seen.equal(model(vectors(99)))
            if again:
                opt._session.rebuild(opt._session.model)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_compiler_is_reset_only_where_it_has_compiled(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, a reset imports all of Inductor: as long as the rest of a start."""
    torch._dynamo.reset()
    model, resets = perceptron(), list[str]()
    if compiles:
        torch.compile(model, backend="eager")(vectors(0))
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append("reset"))
    with adamw(model, k=1.0):
        assert bool(resets) is compiles


# ---------------------------------------------------------------- defaults


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, k: float) -> None:
    batches, defaults = [vectors(step) for step in range(4)], [torch.float32, dtype]

    def make() -> nn.Module:
        model = perceptron()
        torch.set_default_dtype(defaults.pop(0))
        return model

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train(model, opt, range(4), lambda model, step: model(batches[step]).square().mean())
        assert all(entry["step"].dtype is torch.float32 for entry in opt.state_dict()["state"].values())

    options = {"k": k, "max_grad_norm": 0.05, "on_nonfinite": "skip"}
    try:
        same_bits(run, make, options, options)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_detached_weight_is_read_as_it_was_or_not_at_all(k: float) -> None:
    """Backward reads a weight after that weight's own gradient is complete."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        first, second = model
        return second(functional.linear(first(vectors(step)), second[0].weight.detach())).square().mean()

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(4):
            train(model, opt, [step], loss_of)
            if isinstance(opt, hytrain.AdamW):
                opt.synchronize()  # the next forward reads the weight before its module is called

    model = perceptron(depth=2)
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with adamw(model, updates="backward", k=k), refused:
        loss_of(model, 0).backward()
    same_as_torch(run, lambda: perceptron(depth=2), k=k, max_grad_norm=1e9)  # updates wait for the end of backward


def test_a_stale_read_of_a_layer_that_is_leaving_the_cpu_is_noticed() -> None:
    """A read that Python does not see. The owner changes between it and the gradient that tells of it."""
    model, found = perceptron(depth=5), list[int]()
    with adamw(model, policy="random") as opt:
        optimizer, engine = process(opt, "optimizer"), opt._engine
        steps = itertools.count()

        def one_step() -> None:
            step = next(steps)
            loss = square_loss(model, step)
            optimizer.suspend()
            loss.backward()
            opt.step()
            opt.zero_grad()
            move = engine._handover._move
            coming = [] if move is None or not move.begun else [x for x in move.coming if not x.life.is_current]
            if coming and step > 3:
                direct = opt._session.layers[coming[0].lid].segments[0].owner.parameter
                with unwatched():
                    read = direct.sum()  # autograd keeps nothing of it whose version it could look at
                optimizer.resume()
                others = [block for block in model if direct not in set(block.parameters())]
                with pytest.raises(StaleReadError, match="was read without its module being called"):
                    (nn.Sequential(*others)(vectors(step)).square().mean() + read).backward()
                found.append(step)
                return
            optimizer.resume()
            wait_for_coordinator(opt)

        wait_for(lambda: found, one_step)


def test_an_exception_in_a_backward_that_step_ends_makes_no_update_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that were reduced outside of autograd, as pipelines do. `step()` raises, and the loop tries again."""
    model, tries = perceptron(), list[int]()

    def update_held(self: DeviceUpdates) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with adamw(model, k=1.0, updates="backward") as opt:
        train(model, opt, range(2), square_loss)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceUpdates, "update_held", update_held)
            for known in opt._session.parameters:
                known.parameter.grad = torch.ones_like(known.parameter)
                opt._engine.backward.on_gradient(known, known.parameter)
            with pytest.raises(torch.OutOfMemoryError):
                opt.step()
            with pytest.raises(UsageError, match="the last backward ended with an exception"):
                opt.step()
        assert len(tries) == 1
