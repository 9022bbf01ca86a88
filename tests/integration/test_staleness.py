"""Forward waits for exactly the updates that it reads (I1); a stale read, planted on purpose, does not go unseen.

step 0: gradients ─▶ optimizer ─▶ WeightsReady ─▶ weights_in: held back here, until the test lets go
step 1: forward ─ has to wait ─▶ or read what was there before
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import DEADLINE_S, LR, Reference, adamw, differing, on_waiting, process, train, weights
from small_models import perceptron, square_loss

from hytrain.memory.transfer import Copy, HostTransfers, Transfer
from hytrain.model.lifecycle import InvalidTransition
from hytrain.step.gradient import RoundTrip
from protocol.messages import WeightsReady

STEPS = 6


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = perceptron()
    train(model, Reference(model, lr=LR), range(STEPS), square_loss)
    return weights(model)


def hold_back(patch: pytest.MonkeyPatch) -> threading.Event:
    """New weights arrive only once the event that is returned has been set."""
    let_go, weights_in = threading.Event(), HostTransfers.weights_in

    def late(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        assert let_go.wait(DEADLINE_S)
        return weights_in(self, copies)

    patch.setattr(HostTransfers, "weights_in", late)
    return let_go


@pytest.mark.parametrize("is_read", [False, True])
def test_forward_and_whoever_reads_a_weight_wait_for_a_stopped_optimizer(
    is_read: bool, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each update, wherever it is read, and for no other layer's."""
    model, waits = perceptron(), []
    with adamw(model, k=0.0) as opt:
        optimizer = process(opt, "optimizer")

        def resume(what: str) -> None:
            waits.append(what)
            optimizer.resume()

        on_waiting(monkeypatch, resume)
        for step in range(STEPS):
            optimizer.suspend()
            train(model, opt, [step], square_loss)
            if not is_read:
                assert len(waits) == 4 * step, "each forward but the first has waited for each of the four blocks"
                continue
            waits.clear()
            read = [model[2][0].weight.sum().item() for _ in range(3)]
            assert waits == ["the update of layer 2"] and len(set(read)) == 1
            optimizer.resume()
            opt.synchronize()
            assert model[2][0].weight.sum().item() == read[0]
        opt.synchronize()
    assert differing(weights(model), expected) == []


def test_forward_waits_for_nothing_that_it_does_not_read_yet(
    expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block's WeightsReady is kept back until its own pre-hook asks for it."""
    model = perceptron()
    entered: list[int] = []
    entered_before: list[int] = []
    kept: queue.Queue[Callable[[], None]] = queue.Queue()
    ready = RoundTrip.on_weights_ready

    def keep(self: RoundTrip, done: WeightsReady) -> None:
        if done.lid == 3 and done.step == 0:
            kept.put(lambda: ready(self, done))
        else:
            ready(self, done)

    def release(what: str) -> None:
        if what == "the update of layer 3" and not entered_before:
            entered_before.extend(entered)
            kept.get(timeout=DEADLINE_S)()

    monkeypatch.setattr(RoundTrip, "on_weights_ready", keep)
    on_waiting(monkeypatch, release)
    with adamw(model, k=0.0) as opt:
        train(model, opt, [0], square_loss)
        for index, block in enumerate(model):
            block.register_forward_pre_hook(lambda module, args, index=index: entered.append(index))
        train(model, opt, range(1, STEPS), square_loss)
    assert entered_before == [0, 1, 2]
    assert differing(weights(model), expected) == []


def test_a_stopped_coordinator_holds_nothing_up(expected: dict[str, torch.Tensor]) -> None:
    model = perceptron()
    with adamw(model, k="auto") as opt:
        process(opt, "coordinator").suspend()
        train(model, opt, range(STEPS), square_loss)
        opt.synchronize()
        assert differing(weights(model), expected) == []
        process(opt, "coordinator").resume()


# ---------------------------------------------------------------- faults, planted


def test_a_forward_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer gets a gradient while the update before is still under way."""
    monkeypatch.setattr(RoundTrip, "wait_for", lambda *arguments, **options: None)
    let_go = hold_back(monkeypatch)
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, [0], square_loss)
        with pytest.raises(InvalidTransition, match="FILLED of step 1 while"):
            train(model, opt, [1], square_loss)
        let_go.set()
