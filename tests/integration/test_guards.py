"""What must not happen in silence: writes that are lost, hooks that read too early, places that are not given back."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import LR, adamw, differing, same_as_torch, train, weights
from small_models import in_parts, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.errors import HyTrainError, UnsupportedError, UsageError
from hytrain.memory.transfer import Copy, HostTransfers, Transfer
from hytrain.model.trained import TrainedLayer
from hytrain.step.engine import Engine
from hytrain.step.gradient import RoundTrip
from hytrain.step.handover import Handover


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_write_is_trained_on_where_the_whole_model_is_never_called(k: float) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(4):
            train(model, opt, [step], in_parts)
            model[0][0].weight.data.clamp_(-0.01, 0.01)
            model[1][0].bias.detach().fill_(5.0)

    same_as_torch(run, k=k)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_write_is_trained_on_after_a_part_was_called_or_has_failed(k: float) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(4):
            train(model, opt, [step], square_loss)
            with torch.no_grad():
                model[0](vectors(9))
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model[1](torch.ones(1, 3))
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)

    same_as_torch(run, k=k)


def recomputed(model: nn.Module, step: int) -> Tensor:
    x = vectors(step)
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


@pytest.mark.parametrize("loss_of", [in_parts, recomputed])
def test_a_use_between_backward_and_step_is_refused_wherever_the_model_was_called(loss_of: Any) -> None:
    """Also within an `except` clause, where whole loops may be."""
    model = perceptron()
    with adamw(model, updates="backward", k=0.0):
        loss_of(model, 0).backward()
        try:
            raise ImportError
        except ImportError:
            for parameter in model.parameters():
                with pytest.raises(UsageError, match="is used between backward and step"):
                    parameter.data.mul_(0.99)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_without_overlap_a_write_between_backward_and_step_is_trained_on(k: float) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(4):
            square_loss(model, step).backward()
            for parameter in model.parameters():
                parameter.data.mul_(0.99)
            opt.step()
            opt.zero_grad()

    same_as_torch(run, k=k, overlap=False)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_model_goes_into_shared_memory_in_the_middle_of_training(k: float) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        model.share_memory()
        train(model, opt, range(2, 4), square_loss)

    same_as_torch(run, k=k)


class Codebook(nn.Module):
    """Writes a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.means = nn.Linear(32, 32), nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.means.data.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.linear(x + self.means.detach())
        return out


def test_a_parameter_without_updates_is_written_in_forward() -> None:
    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(6), square_loss)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Codebook() for _ in range(3)])

    same_as_torch(run, make=make, k=0.0)


def swap(datas: dict[nn.Parameter, Tensor]) -> None:
    for parameter, data in datas.items():
        parameter.data = data


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_storage_is_swapped_for_an_evaluation_or_for_good(k: float) -> None:
    """Also while updates are under way. What is left swapped in is trained on."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        for step in (0, 2):
            train(model, opt, range(step, step + 2), square_loss)
            kept = {parameter: parameter.data for parameter in model.parameters()}
            swap({parameter: torch.zeros_like(parameter.data) for parameter in kept})
            assert not model(vectors(9)).count_nonzero(), "by what was swapped in"
            swap(kept)
            model[1][0].weight.data.mul_(0.5)
        kept = {parameter: parameter.data for parameter in model.parameters()}
        swap({parameter: data / 2 for parameter, data in kept.items()})
        train(model, opt, range(4, 6), square_loss)
        swap({parameter: data + 0.5 * (parameter.data - data) for parameter, data in kept.items()})
        buffer = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(buffer, model.parameters())
        train(model, opt, range(6, 8), square_loss)
        norms = [data.norm().item() for data in kept.values()]
        if isinstance(opt, hytrain.AdamW):
            opt.synchronize()
        norms.append(buffer.norm().item())
        model.double().float()
        train(model, opt, range(8, 10), square_loss)
        return norms

    same_as_torch(run, k=k)


def test_storage_that_cannot_be_trained_on_is_refused_before_anything_is_updated() -> None:
    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        kept = {parameter: parameter.data for parameter in model.parameters()}
        tied = {model[0][0].weight: kept[model[1][0].weight]}
        converted = {parameter: data.bfloat16() for parameter, data in kept.items()}
        for wrong, sentence in ((tied, "shares memory with another"), (converted, "is torch.bfloat16 on cpu now")):
            swap(wrong)
            loss = model(vectors(2).to(model[3][0].bias.dtype)).float().square().mean()
            if isinstance(opt, hytrain.AdamW):
                with pytest.raises(UsageError, match=sentence):
                    loss.backward()
            swap(kept)
        opt.zero_grad()
        train(model, opt, range(2, 4), square_loss)

    same_as_torch(run, k=0.5)


def test_a_write_that_autograd_does_not_count_is_found_and_can_be_announced() -> None:
    """In the next backward, before anything is updated."""

    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        model[0][0].weight.detach().numpy()[...] *= 0.5
        if isinstance(opt, hytrain.AdamW):
            with pytest.raises(UsageError, match=r"0\.0\.weight was written where HyTrain cannot see it"):
                square_loss(model, 2).backward()
            opt.import_weights()
        train(model, opt, range(2, 4), square_loss)

    same_as_torch(run, k=0.0)


def test_replaced_groups_are_read() -> None:
    model = perceptron()
    with adamw(model, k=0.5, lr=0.1) as opt:
        train(model, opt, range(2), square_loss)
        opt.param_groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in opt.param_groups]
        opt.synchronize()
        before = weights(model)
        train(model, opt, range(2, 4), square_loss)
        opt.synchronize()
        assert differing(weights(model), before) == []


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_an_empty_parameter_does_no_harm(k: float) -> None:
    def made() -> nn.Sequential:
        model = perceptron()
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
        return model

    def loss(model: nn.Module, step: int) -> Tensor:
        return square_loss(model, step) + model.nothing.sum()

    same_as_torch(lambda model, opt: train(model, opt, range(4), loss), made, k=k)
    model = made()
    with pytest.raises(UnsupportedError, match="nothing to train"):
        hytrain.AdamW(model, param_groups=[{"params": [model.nothing]}])


def test_the_memory_of_layers_that_left_the_device_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies under way keep their sources, as on a GPU; once they are there, nobody does."""
    left: list[weakref.ref[Tensor]] = []
    begin, move = Handover.begin, HostTransfers._move

    def state_out(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        return replace(move(self, copies), keep=[source for _, source in copies])

    def watched(self: Handover, step: int) -> None:
        assert self._move is not None
        for layer in self._move.leaving:
            left.extend(weakref.ref(plane) for plane in layer.state("exp_avg") if plane is not None)
        begin(self, step)

    monkeypatch.setattr(HostTransfers, "state_out", state_out)
    monkeypatch.setattr(Handover, "begin", watched)
    model = perceptron()
    with adamw(model, policy="random") as opt:
        steps = itertools.count()
        while not left or opt._engine._handover._move is not None:
            train(model, opt, [next(steps)], square_loss)
        monkeypatch.setattr(Handover, "prepare", lambda self, plan: None)  # no further plan
        train(model, opt, [next(steps), next(steps)], square_loss)
        assert all(reference() is None for reference in left)


def test_a_copy_of_a_part_has_new_weights_and_evaluation_leaves_no_marks_behind() -> None:
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        part = copy.deepcopy(model[2])
        opt.synchronize()
        assert torch.equal(part[0].weight, model[2][0].weight)
        with torch.no_grad():
            square_loss(model, 0)
        assert len(opt._engine._meter._now.forward) == 0


def test_an_interrupted_close_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    opt = hytrain.AdamW(model, lr=LR)
    train(model, opt, range(2), square_loss)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "synchronize", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            opt.close()
    with adamw(model) as opt:
        train(model, opt, [2], square_loss)


def test_a_handover_interrupted_before_its_end_ends_training_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two layers is the GPU's already when Ctrl-C comes; the leak check looks for its arena."""
    finish, wait_for = Handover.finish, RoundTrip.wait_for

    def interrupted(self: Handover, step: int) -> Any:
        calls = 0

        def second(trip: RoundTrip, layer: TrainedLayer) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            wait_for(trip, layer)

        with monkeypatch.context() as patch:
            patch.setattr(RoundTrip, "wait_for", second)
            return finish(self, step)

    monkeypatch.setattr(Handover, "finish", interrupted)
    model = perceptron()
    with adamw(model, policy="random") as opt:
        with pytest.raises(KeyboardInterrupt):
            train(model, opt, range(10_000), square_loss)
        with pytest.raises(HyTrainError, match="handover of layers was interrupted"):
            opt.state_dict()
