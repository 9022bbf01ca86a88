"""Weights that rest in host memory: few are on the device at once, all who read them find them, and no bit differs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    LR,
    Reference,
    adamw,
    differing,
    same_as_torch,
    same_bits,
    seed,
    state,
    train,
    wait_for,
    wait_for_coordinator,
    weights,
)
from small_models import gpt2, language_loss, llama, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain import session
from hytrain.errors import CapacityError, ConfigError, UsageError
from hytrain.memory import transfer
from hytrain.memory.capacity import GpuMemory
from hytrain.memory.visits import Visits
from hytrain.model import layers
from hytrain.model.block_life import Pin, State
from hytrain.model.trained import TrainedParameter
from hytrain.model.watched import unwatched
from hytrain.step import device, offload
from hytrain.step.gradient import RoundTrip
from hytrain.step.handover import Handover
from hytrain.tensors import allocate, free

#: All weights of blocks, whoever updates them.
OFFLOADED: list[dict[str, Any]] = [{"k": 0.0, "offload_weights": 1.0}, {"k": 0.0, "visit": 1.0, "offload_weights": 1.0}]


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLOTS", 1)


def present(opt: hytrain.AdamW) -> set[str]:
    """The names of the parameters that have memory."""
    return {known.name for known in opt._session.parameters if known.own.untyped_storage().nbytes()}


def checkpointed(model: nn.Module, step: int) -> Tensor:
    """As `square_loss`."""
    x = vectors(step)
    for block in model.children():
        x = checkpoint(block, x, use_reentrant=False)
    return (x - vectors(step).sin()).square().mean()


@pytest.mark.parametrize("loss_of", [square_loss, checkpointed])
@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_no_more_than_the_window_is_on_the_device(
    options: dict[str, Any], loss_of: Callable[[nn.Module, int], Tensor]
) -> None:
    """In forward, in backward and in evaluation."""
    model, seen = perceptron(), list[set[str]]()
    with adamw(model, **options) as opt:
        look = lambda *_: seen.append(present(opt))  # noqa: E731
        for block in model:
            block[0].register_forward_pre_hook(look)
            block[0].weight.register_hook(look)
        train(model, opt, range(4), loss_of)
        with torch.no_grad():
            loss_of(model, 4)
        assert len(seen) >= 36
        assert {frozenset(names) for names in seen} == {frozenset({f"{i}.0.weight", f"{i}.0.bias"}) for i in range(4)}
        assert opt.statistics().offloaded_layers == (0, 1, 2, 3)
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "most"), [({"visit": 0.0}, 1), ({"visit": 1.0}, 3), ({"visit": 1.0, "max_grad_norm": 1.0}, 1)]
)
@pytest.mark.parametrize("room", [2, 9])
def test_blocks_that_wait_for_visits_widen_the_window(
    options: dict[str, Any], most: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what has room in half of the memory that is for this. Visits that await a verdict are made after backward."""
    model, seen, waited = perceptron(), list[int](), list[int]()
    block_bytes = sum(parameter.nbytes for parameter in model[0].parameters())
    monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda memory: 2 * room * block_bytes + 2)
    end_step = Visits.end_step
    monkeypatch.setattr(Visits, "end_step", lambda visits: waited.append(end_step(visits)) or waited[-1])
    with adamw(model, updates="backward", k=0.0, offload_weights=1.0, **options) as opt:
        for block in model:
            block[0].weight.register_hook(lambda *_: seen.append(len({name[0] for name in present(opt)})))
        train(model, opt, range(4), square_loss)
        most = min(len(model), most - 1 + room - 1) if most > 1 else most
        assert max(seen) == most
        lent_bytes = opt._engine._visits.lent_bytes
        assert lent_bytes == (most - 1) * block_bytes
        assert waited == [waited[0], *[waited[0] + lent_bytes] * 3], "the first step does not have it"


def test_weights_whose_visit_is_put_off_stay_until_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as half of the memory for waiting has room for them and their gradients."""
    model, later = perceptron(), [1, 2]
    nbytes = [sum(parameter.nbytes for parameter in block.parameters()) for block in model]
    monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda memory: 4 * max(nbytes[1:3]))
    monkeypatch.setattr(offload, "wider_by_bytes", lambda *_: 0)
    monkeypatch.setattr(device, "put_off", lambda turns: later)
    with adamw(model, k=0.0, visit=1.0, offload_weights=1.0) as opt:

        def put_off() -> list[int]:
            return [
                lid
                for lid, layer in enumerate(opt._session.layers)
                if layer.block and Pin.VISIT in layer.block.life.pins
            ]

        train(model, opt, range(3), square_loss)
        assert put_off() == [2] and {"2.0.weight", "2.0.bias"} <= present(opt), "the first has no room"
        seen = list[bool]()
        model[2][0].register_forward_pre_hook(lambda *_: seen.append("2.0.weight" in present(opt)))
        later.clear()
        train(model, opt, [3], lambda model, step: square_loss(model[:2], step))
        assert put_off() == [] and not seen, "which does not come"
        later.append(2)
        model[0][0].weight.register_hook(lambda *_: seen.append("2.0.weight" in present(opt)))
        train(model, opt, [4, 5], square_loss)
        assert put_off() == [2] and seen == [True] * 4


def test_some_blocks_are_offloaded_and_others_stay() -> None:
    model = perceptron(depth=8)
    with adamw(model, k=0.0, offload_weights=0.5) as opt:
        train(model, opt, range(2), square_loss)
        assert opt.statistics().offloaded_layers == (0, 2, 4, 6)
        assert {f"{i}.0.weight" for i in (1, 3, 5, 7)} < present(opt)


def looks_around(model: nn.Module, opt: Any) -> list[float]:
    """A loop that reads and writes weights in all the ways that it likes."""
    numbers: list[float] = []
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(8):
        loss = square_loss(model, step) + 1e-3 * model[1][0].weight.square().sum()  # read outside of its module
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(mean, list(model.parameters()), 0.1)
            numbers.append(square_loss(model, 100).item())
        numbers.append(sum(parameter.norm().item() for parameter in model.parameters()))
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        twin = copy.deepcopy(model)
        numbers.append(square_loss(twin, 101).item())
        if step == 3:
            model[0][0].weight.data.mul_(0.5)
        if step == 5:
            model.load_state_dict({name: 0.9 * tensor for name, tensor in saved.items()})
    return numbers + [tensor.sum().item() for tensor in mean]


@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_all_readers_and_writers_find_the_weights(options: dict[str, Any]) -> None:
    same_as_torch(looks_around, **options)


class Reused(nn.Module):
    """A block that is called twice, one that is left out in some steps, and one that stops a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.step % 3:
            x = self.blocks[2](x)
        if self.step < 0:
            raise ValueError("stopped")
        out: Tensor = self.blocks[0](self.blocks[3](x))
        return out


@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_forwards_take_other_ways(options: dict[str, Any]) -> None:
    def run(model: Any, opt: Any) -> list[float]:
        losses = []
        for step in range(9):
            model.step = -1
            with pytest.raises(ValueError, match="stopped"):
                model(vectors(step))
            model.step = step
            losses += train(model, opt, [step], square_loss)
        return losses

    same_as_torch(run, Reused, **options)


@pytest.mark.parametrize("numbers", [{"max_grad_norm": 0.5}, {"max_grad_norm": 0.5, "speculate": False}, {}], ids=str)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_sums_and_verdicts(make: Callable[[], nn.Module], numbers: dict[str, Any]) -> None:
    """Updates long after backward, and several backwards in a step; embeddings are tied, or not."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(6):
            seed(step)
            for part in range(2):
                (language_loss(model, 2 * step + part) / 2).backward()
            opt.step()
            opt.zero_grad()

    offloaded = [
        {**options, **numbers} for options in (*OFFLOADED, {**OFFLOADED[0], "overlap": False}) if numbers != {}
    ]
    offloaded = [one for one in offloaded if not (one.get("speculate") and one.get("overlap") is False)]
    host = [{**OFFLOADED[0], "accumulate_on": "host"}, {**OFFLOADED[1], "overlap": False}]
    common: dict[str, Any] = {"grad_accumulation": 2}
    same_bits(run, make, *({**common, **one} for one in ({"k": 1.0, **numbers}, *(offloaded or host))))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_function_of_the_model_is_transformed(transform: Callable[..., Any]) -> None:
    """Blocks come and leave while torch.func's tensors, which have no memory to copy, go through them."""

    def run(model: nn.Module, opt: Any) -> list[Any]:
        found = []
        for step in range(3):
            found.append(transform(lambda x: model(x).square().sum())(vectors(step)[:1]).tolist())
            square_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        return found

    same_as_torch(run, k=0.0, offload_weights=1.0)


def test_a_view_that_somebody_keeps_stays_valid() -> None:
    model, expected = perceptron(), perceptron()
    with adamw(model, **OFFLOADED[0]) as opt, adamw(expected, k=1.0) as other:
        train(model, opt, range(2), square_loss)
        view, array = model[1][0].weight.data, model[2][0].weight.detach().numpy()
        train(model, opt, range(2, 5), square_loss)
        train(expected, other, range(5), square_loss)
        opt.synchronize()
        same = torch.equal(view, expected[1][0].weight), torch.equal(torch.from_numpy(array), expected[2][0].weight)
        assert same == (True, True)
        assert {"1.0.weight", "2.0.weight"} < present(opt)
        del view, array
        train(model, opt, range(5, 7), square_loss)
        assert present(opt) == {f"{i}.0.{name}" for i in (0, 2) for name in ("weight", "bias")}, (
            "NumPy fixed 2's storage"
        )


def test_a_parameter_that_is_read_where_nobody_sees_it_stays() -> None:
    """It has to be there when it is read: here its block has just computed."""

    def unseen(model: nn.Module, step: int) -> Tensor:
        x = vectors(step)
        for index, block in enumerate(model.children()):
            x = block(x)
            if index == 3:
                with unwatched():
                    x = x + 0.1 * block[0].bias
        return (x - vectors(step).sin()).square().mean()

    same_as_torch(lambda model, opt: train(model, opt, range(6), unseen), **OFFLOADED[0])


def test_a_state_dict_brings_nothing_to_the_device() -> None:
    model = perceptron()
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(3), square_loss)
        before = present(opt)
        saved = model.state_dict()
        assert present(opt) == before and len(before) < len(saved)
        twin = perceptron()
        twin.load_state_dict(saved)
        train(model, opt, range(3, 5), square_loss)
        resumed = perceptron()
        resumed.load_state_dict(saved)
        assert differing(weights(resumed), weights(twin)) == [], "what was saved does not change"
        assert differing(weights(copy.deepcopy(model)), weights(twin)) != []


def test_a_state_dict_has_what_the_loop_has_swapped_in() -> None:
    """The mean of weights for an evaluation, say. They are no copies of what is offloaded."""
    model = perceptron()
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(3), square_loss)
        own = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.full(parameter.shape, 0.5)
        saved = model.state_dict()
        assert all(bool((value == 0.5).all()) for value in saved.values())
        for parameter, before in zip(model.parameters(), own, strict=True):
            parameter.data = before
        train(model, opt, range(3, 5), square_loss)
    expected = perceptron()
    with adamw(expected, k=0.0) as opt:
        train(expected, opt, range(5), square_loss)
        assert differing(weights(model), weights(expected)) == []


class Full:
    """A device with room for so many parameters' memory."""

    def __init__(self, opt: hytrain.AdamW, room: int, patch: pytest.MonkeyPatch) -> None:
        self._opt, self._room, self.refused = opt, room, 0
        patch.setattr(transfer, "allocate", self._allocate)

    def _allocate(self, *tensors: Tensor) -> None:
        for index, tensor in enumerate(tensors):
            if len(present(self._opt)) >= self._room:
                self.refused += 1
                free(*tensors[:index])
                raise torch.OutOfMemoryError
            allocate(tensor)


def test_what_is_refused_between_backward_and_step_ends_nothing() -> None:
    model, expected = perceptron(), perceptron()
    with adamw(model, **OFFLOADED[0]) as opt, adamw(expected, k=1.0) as other:
        train(model, opt, range(2), square_loss)
        first, second = square_loss(model, 2), square_loss(model, 2)
        first.backward()
        with pytest.raises(UsageError, match=r"reached the model's output before step\(\)"):
            second.backward()
        with pytest.raises(UsageError, match=r"is used between backward and step\(\)"):
            model.state_dict()
        opt.step()
        opt.zero_grad()
        train(model, opt, range(3, 5), square_loss)
        train(expected, other, range(5), square_loss)
        opt.synchronize()
        assert differing(weights(model), weights(expected)) == []


def test_without_room_nothing_is_fetched_ahead_and_what_is_not_needed_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLOTS", 4)

    def run(model: nn.Module, opt: Any) -> list[float]:
        full = Full(opt, 4, monkeypatch) if isinstance(opt, hytrain.AdamW) else None
        if full is not None:
            opt._engine._offload._free(
                [*dict.fromkeys(layer.block for layer in opt._session.layers if layer.block)][1:]
            )
        losses = train(model, opt, range(4), square_loss)
        losses += [parameter.norm().item() for parameter in model.parameters()]
        model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})
        losses += train(model, opt, range(4, 6), square_loss)
        assert full is None or full.refused > 10
        monkeypatch.setattr(transfer, "allocate", allocate)
        return losses

    same_as_torch(run, **OFFLOADED[0])


def test_on_a_full_device_weights_whose_visit_is_put_off_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come again for it."""
    model, expected = perceptron(), perceptron()
    with adamw(expected, k=1.0) as other:
        train(expected, other, range(6), square_loss)
    monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda memory: 1 << 20)
    monkeypatch.setattr(offload, "wider_by_bytes", lambda *_: 0)
    monkeypatch.setattr(device, "put_off", lambda turns: {turn.lid for turn in turns})
    with adamw(model, k=0.0, visit=1.0, offload_weights=1.0) as opt:
        train(model, opt, range(3), square_loss)
        full = Full(opt, 4, monkeypatch)
        train(model, opt, range(3, 6), square_loss)
        assert full.refused
        opt.synchronize()
        assert differing(weights(model), weights(expected)) == []


def test_what_has_no_room_at_the_end_stays_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = perceptron(), perceptron()
    with adamw(model, **OFFLOADED[0]) as opt, adamw(expected, k=1.0) as other:
        train(model, opt, range(3), square_loss)
        train(expected, other, range(3), square_loss)
        Full(opt, 0, monkeypatch)
    assert differing(weights(model), weights(expected)) == []
    assert len([message for message in caplog.messages if "stay in host memory: the GPU is full" in message]) >= 3


def test_parameters_join_in_the_middle() -> None:
    def make() -> nn.Module:
        model = perceptron()
        model[2].requires_grad_(False)
        return model

    def run(model: nn.Module, opt: Any) -> list[float]:
        losses = train(model, opt, range(3), square_loss)
        model[2].requires_grad_(True)
        return losses + train(model, opt, range(3, 6), square_loss)

    same_as_torch(run, make, groups_of=lambda model: [{"params": list(model.parameters())}], **OFFLOADED[0])


def test_blocks_begin_and_end_to_be_offloaded_as_plans_say() -> None:
    """Whoever updates them then, and whoever has read them before."""
    seen = set[tuple[int, ...]]()

    def run(model: nn.Module, opt: Any) -> list[float]:
        numbers = []
        for step in range(20):
            numbers += train(model, opt, [step], square_loss)
            numbers.append(sum(parameter.norm().item() for parameter in model.parameters()))
            if isinstance(opt, hytrain.AdamW):
                seen.add(opt.statistics().offloaded_layers)
                wait_for_coordinator(opt)
                opt._engine._handover.wait()
        return numbers

    same_as_torch(run, partial(perceptron, depth=8), policy="random", offload_weights="auto")
    assert len(seen) > 2


def test_a_block_begins_to_be_offloaded_before_a_graph_of_the_step_has_its_weights() -> None:
    """Or that graph's backward would find no memory."""

    def penalty(model: nn.Module) -> Tensor:
        return torch.stack([parameter.pow(3).sum() for parameter in model.parameters()]).sum()

    def run(model: nn.Module, opt: Any) -> list[float]:
        def plan(lids: set[int]) -> None:
            if isinstance(opt, hytrain.AdamW):
                opt._engine._offload.plan(lids)

        losses = []
        for step in range(9):
            if step % 3 == 0:
                plan(set())  # they stay from this forward on
            loss = 1e-3 * penalty(model)
            if step % 3 == 1:
                plan({*range(6)})  # as when a handover is finished in the middle of a step
            loss = loss + square_loss(model, step)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    same_as_torch(run, partial(perceptron, depth=6), k=0.0, offload_weights=1.0)


def test_a_write_that_would_be_lost_is_refused() -> None:
    def shift(module: nn.Module, args: Any) -> None:
        module.bias.data.add_(0.1)

    def written(model: nn.Module, step: int) -> Tensor:
        handle = model[0][0].register_forward_pre_hook(shift)
        loss = square_loss(model, step)
        handle.remove()
        return loss

    model = perceptron()
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(2), square_loss)
        with pytest.raises(UsageError, match=r"0\.0\.bias was written where.*or keep them on the GPU"):
            train(model, opt, range(2, 12), written)


@pytest.mark.parametrize("share", ["some", -0.1, 1.5, True])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="offload_weights is .*: a fraction in"):
        hytrain.AdamW(perceptron(), k=0.0, offload_weights=share)


# ---------------------------------------------------------------- models that are still elsewhere


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model seem to be on another device than that to train on."""
    monkeypatch.setattr(session, "check_model", lambda model: torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [*OFFLOADED, {"k": 0.4, "offload_weights": 0.5}, {"k": 0.0}], ids=str)
def test_a_model_is_brought_to_the_device(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the weights that are offloaded. A frozen parameter comes along, and one that nobody trains."""

    def make() -> nn.Module:
        model = perceptron(dtype=dtype)
        model[1][0].bias.requires_grad_(False)
        model.register_buffer("numbers", torch.arange(3.0))
        return model

    results = []
    for moved in (False, True):
        if moved:
            elsewhere(monkeypatch)
        model = make()
        groups = [{"params": [p for p in model.parameters() if p is not model[2][0].bias]}]
        with adamw(model, groups, **options, device="cpu") as opt:
            if options.get("offload_weights") == 1.0:
                assert len(present(opt)) <= 2
            train(model, opt, range(4), square_loss)
            results.append(state(opt) | weights(model))
    assert differing(*results) == []


def test_a_model_is_where_it_was_if_it_cannot_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    model, expected = perceptron(), weights(perceptron())
    monkeypatch.setattr(Handover, "start", refuse)
    with pytest.raises(CapacityError, match="no room"):
        hytrain.AdamW(model, **OFFLOADED[0], device="cpu")
    assert differing(weights(model), expected) == []


def refuse(*_: Any) -> None:
    raise CapacityError("no room")


@pytest.mark.parametrize("device", ["mps", "cuda:99", "nowhere", 3.0])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match="device is "):
        hytrain.AdamW(perceptron(), device=device)


# ---------------------------------------------------------------- backwards that begin elsewhere


@dataclass
class Held:
    """What no hook can look into."""

    value: Tensor


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.other, self.way = nn.Linear(32, 32), nn.Linear(32, 32), way
        self.scale, self.seen = nn.Parameter(torch.ones(32)), Held(torch.empty(0))

    def forward(self, x: Any, bias: Any = None) -> Any:
        x = x.value if isinstance(x, Held) else x
        self.seen = Held(torch.tanh(self.linear(x)))
        if self.way == "passed on":
            bias = self.other(x) if bias is None else bias
            return self.seen.value + bias, bias
        out = self.other(x) if self.way == "in place" else self.seen.value
        if self.way == "queries":
            return (out * self.scale, self.scale.expand(32))
        return Held(out * self.scale) if self.way == "a dataclass" else out


class Ways(nn.Module):
    """Blocks of which backward does not begin with their output, or whose output is no tensor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.blocks = way, nn.ModuleList(Block(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias, out, total = None, x[None], torch.zeros(())
        for block in self.blocks:
            if self.way == "passed on":
                out, bias = block(out, bias)
            elif self.way == "in place":
                out = block(out)
                out += 1.0
            elif self.way == "inside":
                block(out)
                total = total + block.seen.value.square().mean()
            elif self.way == "queries":
                out, queries = block(out)
                total = total + (queries * out).mean()
            elif self.way == "outside":
                out = out + block(out) * block.scale * self.blocks[0].scale
            else:
                out = block(out)
        result: Tensor = (out.value if isinstance(out, Held) else out)[0] + total
        return result


@pytest.mark.parametrize("way", ["passed on", "in place", "inside", "queries", "outside", "a dataclass"])
@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_backward_finds_the_weights_wherever_it_begins(options: dict[str, Any], way: str) -> None:
    def run(model: nn.Module, opt: Any) -> list[float]:
        losses = []
        for step in range(4):
            both = [square_loss(model, 2 * step + part) for part in range(2)]
            with torch.no_grad():
                losses.append(square_loss(model, 100).item())
            sum(both).backward()
            opt.step()
            opt.zero_grad()
            losses += [loss.item() for loss in both]
        return losses

    same_as_torch(run, lambda: Ways(way), **options)


class Again(torch.autograd.Function):
    """What runs without a graph, and again in backward."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor) -> Any:
        ctx.run, ctx.x = run, x
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, *gradients)
        return None, x.grad


@pytest.mark.parametrize(
    "again", [partial(checkpoint, use_reentrant=True), Again.apply], ids=["checkpoint", "Function"]
)
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_blocks_that_backward_runs_again_together(options: dict[str, Any], activations: bool, again: Any) -> None:
    """More than there is room for at once."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        first, *others, last = model.children()
        x: Tensor = last(again(nn.Sequential(*others), first(vectors(step))))
        return (x - vectors(step).sin()).square().mean()

    options = {**options, "offload_activations": activations}
    same_as_torch(lambda model, opt: train(model, opt, range(4), loss_of), partial(perceptron, depth=8), **options)


def test_gradients_of_inputs_alone_bring_few_blocks_at_once() -> None:
    model = perceptron(depth=8)
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(2), square_loss)
        x = vectors(0).requires_grad_()
        torch.autograd.grad(model(x).square().sum(), x)
        assert len(present(opt)) <= 2 * 3


def test_a_gradient_penalty() -> None:
    def penalized(model: nn.Module, step: int) -> Tensor:
        x = vectors(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with torch.no_grad():
            square_loss(model, 100)
        return square_loss(model, step) + gradient.square().mean()

    same_as_torch(lambda model, opt: train(model, opt, range(6), penalized), **OFFLOADED[0])


def test_what_is_written_into_a_state_dict_has_to_be_loaded() -> None:
    model, expected = perceptron(), perceptron()
    with adamw(model, **OFFLOADED[0]) as opt, adamw(expected, k=1.0) as other:
        for one, optimizer in ((model, opt), (expected, other)):
            train(one, optimizer, range(2), square_loss)
            saved = one.state_dict()
            for tensor in saved.values():
                tensor.mul_(0.5)
            one.load_state_dict(saved)
            train(one, optimizer, range(2, 4), square_loss)
        assert differing(weights(model), weights(expected)) == []
        saved = model.state_dict()
        saved["0.0.weight"].mul_(0.5)
        with pytest.raises(UsageError, match=r"0\.0\.weight of model\.state_dict\(\) was written.*load_state_dict"):
            train(model, opt, [4], square_loss)


def test_a_layer_stays_if_there_is_no_room_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    model, expected = perceptron(), perceptron()
    with adamw(model, policy="random", offload_weights=1.0) as opt, adamw(expected, k=1.0) as other:
        opt.synchronize()
        monkeypatch.setattr(offload.Offload, "settle", refuse)
        for step in range(30):
            train(model, opt, [step], square_loss)
            wait_for_coordinator(opt)
            opt._engine._handover.wait()
        train(expected, other, range(30), square_loss)
        assert opt.statistics().k == 0.0
        assert differing(state(opt) | weights(model), state(other) | weights(expected)) == []


def test_a_forked_child_is_told() -> None:
    model = perceptron()
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(2), square_loss)
        opt.synchronize()
        if (child := os.fork()) == 0:
            try:
                model[3][0].weight.norm()
            except UsageError as error:
                os._exit(0 if "so are offloaded weights: give the child model.state_dict()" in str(error) else 2)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(model, opt, range(2, 4), square_loss)


def test_closing_where_the_device_is_full_needs_no_more_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that have no room on the device take the place of the state that training no longer needs."""
    values, taken = TrainedParameter.values, list[int]()

    def arenas_bytes() -> int:
        return sum(512 * os.fstat(layer.arena.file.descriptor).st_blocks for layer in opt._session.layers)

    model, expected = perceptron(), perceptron()
    with adamw(model, **OFFLOADED[0]) as opt, adamw(expected, k=1.0) as other:
        for one, optimizer in ((model, opt), (expected, other)):
            train(one, optimizer, range(3), square_loss)
            optimizer.synchronize()
        before, full = arenas_bytes(), Full(opt, room=1, patch=monkeypatch)
        monkeypatch.setattr(TrainedParameter, "values", lambda one: (taken.append(arenas_bytes()), values(one))[1])
    assert full.refused and taken and max(taken) < 0.7 * before
    assert differing(weights(model), weights(expected)) == []


def test_state_that_was_read_outlives_the_optimizer() -> None:
    model = perceptron()
    with adamw(model, **OFFLOADED[0]) as opt:
        train(model, opt, range(3), square_loss)
        read, expected = opt.state_dict()["state"], state(opt)
    found = {f"{plane}.{index}": value for index, entry in read.items() for plane, value in entry.items()}
    assert differing(found, expected) == []


def test_a_block_that_is_fetched_in_the_middle_of_an_update_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its layers is read outside of the model while another one's update is still under way."""
    monkeypatch.setattr(layers, "MIN_PIECE_NUMEL", 1)
    monkeypatch.setattr(layers, "MAX_PIECE_NUMEL", 100)
    arrive, held = RoundTrip.on_weights_ready, list[tuple[Any, Any]]()

    def arrives(of: RoundTrip, done: Any) -> None:
        held.append((of, done)) if done.lid in late else arrive(of, done)

    monkeypatch.setattr(RoundTrip, "on_weights_ready", arrives)
    late = set[int]()
    ours, theirs = perceptron(), perceptron()
    reference = Reference(theirs, lr=LR)
    with adamw(ours, k=0.0, offload_weights=1.0) as opt:
        block = opt._session.layers[-1].block
        assert block is not None and len(block.layers) > 1
        first, last = block.layers[0], block.layers[-1]
        late.add(last.lid)
        for model, one in ((ours, opt), (theirs, reference)):
            square_loss(model, 0).backward()
            one.step()
            one.zero_grad()
        try:
            assert first.segments[0].owner.parameter.norm() > 0
            assert block.life.state is State.STALE
            wait_for(lambda: held)
        finally:
            late.clear()
            for each in held:
                arrive(*each)
        assert square_loss(ours, 1).item() == square_loss(theirs, 1).item()
