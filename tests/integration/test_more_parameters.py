"""Parameters that come later: unfrozen ones, and new groups. What was trained before goes on as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    LR,
    adamw,
    differing,
    keep,
    records,
    same_as_torch,
    state,
    train,
    train_until,
    wait_for_coordinator,
    weights,
)
from small_models import llama, perceptron, square_loss
from torch import nn

import hytrain
from hytrain.errors import CapacityError, ConfigError, UnsupportedError, UsageError
from workers.watch import monitor


def half_frozen(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = perceptron(dtype=dtype)
    model[2:].requires_grad_(False)
    return model


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 0.5}, {"k": 1.0}, {"policy": "random"}])
def test_unfrozen_parameters_are_trained_from_then_on(options: dict[str, Any]) -> None:
    def run(model: Any, optimizer: Any) -> Any:
        for stage in (slice(2, 2), slice(2, 3), slice(3, 4)):
            model[stage].requires_grad_(True)
            train(model, optimizer, range(stage.start, stage.start + 5), square_loss)
        saved = optimizer.state_dict()
        counts = {index: int(entry["step"]) for index, entry in saved["state"].items()}
        assert set(counts.values()) == {15, 10, 5}
        return saved["param_groups"][0]["params"], counts

    same_as_torch(run, half_frozen, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_beginning_anew_changes_no_bit(dtype: torch.dtype) -> None:
    results = []
    for again in (False, True):
        model = llama(dtype)
        with adamw(model, k=0.4, max_grad_norm=0.5, on_nonfinite="skip") as opt:
            train(model, opt, range(6))
            if again:
                opt._session.rebuild(opt._session.model)
            results.append(state(opt) | weights(model))
            train(model, opt, range(6, 12))
            results.append(state(opt) | weights(model))
    assert differing(results[0], results[2]) == differing(results[1], results[3]) == []


@pytest.mark.usefixtures("own_run")
def test_commands_outlive_a_new_beginning() -> None:
    """What a monitor asked for still holds when parameters have come."""
    model = half_frozen()
    with adamw(model, k=0.0, threads=2) as opt:
        train(model, opt, range(6), square_loss)
        wait_for_coordinator(opt)  # or the sixth record may be made after the command
        for command, value in (("--set-threads", "1"), ("--set-k", "0.2")):
            assert monitor.main([str(opt.run_dir), command, value]) == 0
        model[2:].requires_grad_(True)
        train(model, opt, range(6, 12), square_loss)
        wait_for_coordinator(opt)

        def both_hold() -> bool:
            return records(opt)[-1]["threads"] is not None and opt.statistics().k > 0.0

        steps = train_until(both_hold, model, opt, 12, square_loss)  # the optimizer may report late
    threads = [record["threads"] for record in records(opt, steps)]
    assert set(threads[:6]) <= {None, 2} and set(threads[6:]) <= {None, 1} and threads[-1] == 1


@pytest.mark.usefixtures("own_run")
def test_a_command_stays_within_the_hosts_memory() -> None:
    """With a k of its own, only the rest of the layers had to fit when training began."""
    model = perceptron()
    room = 16 * sum(parameter.numel() for parameter in model.parameters()) // 2
    with adamw(model, k=0.8, host_memory_limit=room) as opt:
        train(model, opt, range(4), square_loss)
        assert monitor.main([str(opt.run_dir), "--set-k", "0"]) == 0
        train_until(lambda: opt.statistics().k < 0.8, model, opt, 4, square_loss)
        assert 0.4 < opt.statistics().k < 0.8


def test_a_group_that_is_added_later() -> None:
    """With its own learning rate; the run and its records go on."""
    known = list[hytrain.AdamW]()

    def run(model: Any, optimizer: Any) -> None:
        model[2:].requires_grad_(False)
        train(model, optimizer, range(4), square_loss)
        model[2:].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": LR / 4})
        train(model, optimizer, range(4, 9), square_loss)
        if isinstance(optimizer, hytrain.AdamW):
            optimizer.log(9, loss=1.0)
            known.append(optimizer)

    same_as_torch(run, groups_of=lambda model: [{"params": list(model[:2].parameters())}], k=0.5)
    assert [record["step"] for record in records(known[0], 9) if "step_s" in record] == list(range(1, 10))


def test_a_module_that_is_added_later() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron()
            self.head: nn.Module = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.body(x))
            return y

    def run(model: Any, optimizer: Any) -> None:
        train(model, optimizer, range(3), square_loss)
        torch.manual_seed(7)
        model.head = nn.Linear(32, 32)
        optimizer.add_param_group({"params": model.head.parameters()})
        train(model, optimizer, range(3, 6), square_loss)

    same_as_torch(run, Grown, k=0.5)


def test_not_in_a_functional_call() -> None:
    """Others stand in the place of the model's parameters then."""

    def run(model: Any, optimizer: Any) -> None:
        train(model, optimizer, range(2), square_loss)
        model.requires_grad_(True)
        for given in ("0.", ""):
            stand_ins = {name: p.detach() * 0.9 for name, p in model.named_parameters() if name.startswith(given)}
            torch.func.functional_call(model, stand_ins, torch.ones(2, 32))
        train(model, optimizer, range(2, 4), square_loss)

    same_as_torch(run, half_frozen, k=0.0)


def test_refused_groups_change_nothing() -> None:
    def run(model: Any, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        if isinstance(opt, hytrain.AdamW):
            head = model.head = nn.Linear(32, 32)
            for group, error, sentence in (
                ({"params": [nn.Parameter(torch.zeros(3))]}, UnsupportedError, "does not have"),
                ({"params": list(model[2:4].parameters())}, ValueError, "more than one parameter group"),
                ({"params": head.parameters(), "lr": -1.0}, ConfigError, "must not be negative"),
                ({"params": head.parameters(), "amsgrad": True}, UnsupportedError, "no option 'amsgrad'"),
            ):
                with pytest.raises(error, match=sentence):
                    opt.add_param_group(group)
            del model.head
            assert len(opt.param_groups) == 1
        square_loss(model, 2).backward()
        if isinstance(opt, hytrain.AdamW):
            with pytest.raises(UsageError, match="add_param_group between backward and step"):
                opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        opt.step()
        opt.zero_grad()

    same_as_torch(run, half_frozen, k=0.5)


def test_only_where_the_model_is_called() -> None:
    model = half_frozen()
    with adamw(model) as opt:
        model[2:].requires_grad_(True)
        model[2](torch.ones(32)).sum().backward()
        with pytest.raises(UsageError, match="the model itself has not been called"):
            opt.step()


def test_too_little_memory_is_known_before_anything_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half_frozen()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)

        def refuse(*given: Any, **options: Any) -> None:
            raise CapacityError("too much")

        monkeypatch.setattr("hytrain.build.require_host_memory", refuse)
        model[2:].requires_grad_(True)
        with pytest.raises(CapacityError, match="too much"):
            square_loss(model, 2)
        model[2:].requires_grad_(False)
        train(model, opt, range(2, 4), square_loss)


def test_what_was_written_while_it_was_frozen_is_the_master() -> None:
    """The remainder that it was kept with belongs to other weights."""
    model = perceptron(dtype=torch.bfloat16)
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), square_loss)
        model[0].requires_grad_(False)
        opt._session.rebuild(opt._session.model)
        with torch.no_grad():
            model[0][0].weight.mul_(0.5)
        model[0].requires_grad_(True)
        square_loss(model, 3)
        assert not state(opt)["remainder.0"].any() and state(opt)["remainder.1"].any()


def test_frozen_again_is_left_alone() -> None:
    """Its moments and its step count wait, also in state_dict() and in what is saved."""

    def run(model: Any, optimizer: Any) -> list[Any]:
        train(model, optimizer, range(3), square_loss)
        model[1].requires_grad_(False)
        model[0].requires_grad_(True)
        train(model, optimizer, range(3, 6), square_loss)
        saved = optimizer.state_dict()["state"].items()
        kept = sorted((index, name, entry[name].tolist()) for index, entry in saved for name in ("step", "exp_avg_sq"))
        model[1].requires_grad_(True)
        train(model, optimizer, range(6, 9), square_loss)
        return kept

    def make() -> nn.Module:
        model = perceptron()
        model[0].requires_grad_(False)
        return model

    same_as_torch(run, make, k=0.5)


@pytest.mark.parametrize("form", ["dictionary", "files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_of_frozen_parameters_is_saved_and_loaded(dtype: torch.dtype, form: str, tmp_path: Any) -> None:
    """Trained, frozen while others go on, saved, loaded into another optimizer, unfrozen there."""
    first = perceptron(dtype=dtype)
    first[0].requires_grad_(False)
    second = perceptron(dtype=dtype)
    second[1].requires_grad_(False)
    with adamw(first, k=0.5) as opt:
        train(first, opt, range(3), square_loss)
        first[1].requires_grad_(False)
        first[0].requires_grad_(True)
        train(first, opt, range(3, 5), square_loss)
        with adamw(second, k=0.2) as other:
            second.load_state_dict(first.state_dict())
            keep(opt, form, tmp_path)(other)
            second.load_state_dict(first.state_dict())
            for model, optimizer in ((first, opt), (second, other)):
                train(model, optimizer, range(5, 7), square_loss)
                model[1].requires_grad_(True)
                train(model, optimizer, range(7, 9), square_loss)
            assert differing(state(other) | weights(second), state(opt) | weights(first)) == []


def test_what_another_optimizer_trains_is_left_to_it() -> None:
    def run(model: Any, optimizer: Any) -> None:
        train(model, optimizer, range(2), square_loss)
        model[2:].requires_grad_(True)
        if not isinstance(optimizer, hytrain.AdamW):
            train(model, optimizer, range(2, 4), square_loss)
            return
        with adamw(model[2:], k=0.5) as other:
            for step in range(2, 4):
                square_loss(model, step).backward()
                other.step()
                optimizer.step()
                optimizer.zero_grad()

    same_as_torch(run, half_frozen, k=0.5)
