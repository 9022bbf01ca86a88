"""Models that are built without memory train with the bits of those that are built at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import adamw, differing, state, train, weights
from safetensors.torch import save_file
from small_models import language_loss, llama, perceptron, square_loss
from torch import Tensor, nn

import hytrain
from hytrain.errors import CapacityError, UnsupportedError, UsageError
from hytrain.model.blueprint import Blueprint, Planned
from hytrain.model.deferred import recording
from hytrain.step import offload
from hytrain.step.handover import Handover
from hytrain.step.masters import Masters
from hytrain.tensors import has_memory

PLACEMENTS: list[dict[str, Any]] = [
    {"k": 0.0},
    {"k": 1.0},
    {"k": 0.0, "visit": 1.0},
    {"k": 0.4, "offload_weights": 0.5},
    {"k": 0.0, "offload_weights": 1.0},
    {"k": 0.0, "visit": 1.0, "offload_weights": 1.0},
]


class Odd(nn.Module):
    """Tied weights, a frozen parameter, buffers, a plain attribute, a weight in another order, and two seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.register_buffer("noise", torch.randn(32))
        self.table = torch.arange(32.0)
        halves = torch.rand(2, 32)
        self.register_buffer("low", halves[0])
        self.register_buffer("high", halves[1])
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.first.weight = self.last.weight
        self.turned = nn.Parameter(torch.rand(32, 32).t())
        self.body[1][0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.to(x.dtype)
        y: Tensor = self.last(self.first(self.body(x + self.noise)).tanh() @ self.turned) + table / 32
        y = y * self.low + self.high
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
def test_a_deferred_model_trains_as_one_built_at_once(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also if it is converted, and weights are frozen, before it has values. Random numbers go on as they would."""
    results = []
    for deferred in (False, True):
        torch.manual_seed(3)
        model = (hytrain.deferred_init(Odd) if deferred else Odd()).to(dtype)
        model.last.bias.requires_grad_(False)
        groups = [{"params": [p for p in model.parameters() if p is not model.body[2][0].bias]}]
        assert all(parameter.is_meta == deferred for parameter in model.parameters())
        with adamw(model, groups, **options) as opt:
            drawn = torch.rand(8)
            first = {f"first {name}": value for name, value in weights(model).items()}
            assert model.first.weight is model.last.weight
            train(model, opt, range(3), square_loss)
            results.append(state(opt) | weights(model) | dict(model.named_buffers()) | first | {"drawn": drawn})
    assert differing(*results) == []


def test_values_do_not_depend_on_what_is_drawn_before_they_are_made() -> None:
    """And what is drawn after that does not depend on them."""
    torch.manual_seed(3)
    expected = weights(nn.Linear(32, 32))
    torch.manual_seed(3)
    model = hytrain.deferred_init(lambda: nn.Linear(32, 32))
    torch.manual_seed(5)
    drawn = [torch.rand(4)]
    with adamw(model):
        drawn.append(torch.rand(4))
    assert differing(weights(model), expected) == []
    torch.manual_seed(5)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(4), torch.rand(4)]))


def test_a_generator_of_ones_own() -> None:
    """It may be used in between, too."""
    results = []
    for deferred in (False, True):
        generator = torch.Generator().manual_seed(3)

        def make(generator: torch.Generator = generator) -> nn.Module:
            model = nn.Linear(32, 32)
            for parameter in model.parameters():
                nn.init.normal_(parameter, generator=generator)
            return model

        model = hytrain.deferred_init(make) if deferred else make()
        generator.manual_seed(4)
        drawn = [torch.rand(4, generator=generator)]
        with adamw(model):
            drawn.append(torch.rand(4, generator=generator))
            results.append(weights(model) | {"drawn": torch.cat(drawn)})
    assert differing(*results) == []


def test_a_module_that_is_replaced_before_there_are_values() -> None:
    model = hytrain.deferred_init(perceptron)
    model[3] = nn.Linear(32, 32)
    expected = {**weights(perceptron()), **{f"3.{name}": p.detach().clone() for name, p in model[3].named_parameters()}}
    with adamw(model, k=0.0) as opt:
        found = weights(model)
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
        train(model, opt, range(2), square_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
def test_a_part_of_a_block_that_is_replaced_before_there_are_values(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Its layer has values that are there, and values that are made later."""
    results = []
    for deferred in (False, True):
        model = (hytrain.deferred_init(pairs) if deferred else pairs()).to(dtype)
        torch.manual_seed(5)
        model[1][1] = nn.Linear(32, 32).to(dtype)
        with adamw(model, **options) as opt:
            train(model, opt, range(3), square_loss)
            results.append(state(opt) | weights(model))
    assert differing(*results) == []


def pairs() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4)])


def test_parameters_over_one_memory_are_refused() -> None:
    def make() -> nn.Module:
        model, memory = nn.Linear(4, 4), torch.rand(8, 4)
        model.weight, model.other = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
        return model

    with pytest.raises(UnsupportedError, match="weight and other share memory"):
        hytrain.deferred_init(make)


@pytest.mark.parametrize("options", PLACEMENTS[-2:], ids=str)
def test_no_more_than_one_value_is_on_its_way(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded weights do not pass through the device's memory."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    begin_with, seen = Masters.begin_with, list[int]()

    def noted(masters: Masters, known: Any, values: Tensor) -> None:
        seen.append(sum(has_memory(other.own) for other in masters._parameters))
        begin_with(masters, known, values)

    monkeypatch.setattr(Masters, "begin_with", noted)
    with adamw(hytrain.deferred_init(perceptron), **options):
        assert seen == [0] * 8


@pytest.mark.parametrize("files", [1, 2])
def test_values_from_a_folder(files: int, tmp_path: Path) -> None:
    """By name, in the parameters' own dtype. Buffers are those of the construction."""
    trained = llama()
    save(trained, tmp_path, files)
    results = []
    for model in (trained, hytrain.deferred_init(llama, weights=tmp_path)):
        with adamw(model, k=0.0, offload_weights=1.0) as opt:
            train(model, opt, range(2), language_loss)
            results.append(state(opt) | weights(model) | dict(model.named_buffers()))
    assert differing(*results) == []


def save(model: nn.Module, folder: Path, files: int) -> None:
    """Other values than the model had, as Transformers would write them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    names = [name for name, _ in model.named_parameters()]
    file_of = {name: f"model-{index % files}.safetensors" for index, name in enumerate(names)}
    if files == 1:
        save_file({name: model.get_parameter(name).detach() for name in names}, folder / "model.safetensors")
        return
    for file in set(file_of.values()):
        save_file({n: model.get_parameter(n).detach() for n in names if file_of[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


class Running(nn.BatchNorm1d):
    """With a buffer that is drawn, between others, and is not saved."""

    def __init__(self) -> None:
        super().__init__(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("noise", torch.rand(4), persistent=False)


@pytest.mark.parametrize("prefix", ["", "other."], ids=repr)
def test_buffers_of_a_folder(prefix: str, tmp_path: Path) -> None:
    """Those that are saved are read, the others made; also where the folder has other names."""
    torch.manual_seed(3)
    expected = Running()
    assert expected.running_mean is not None
    expected.running_mean.fill_(5)
    save_file({prefix + name: value for name, value in expected.state_dict().items()}, tmp_path / "model.safetensors")
    torch.manual_seed(3)
    with recording() as calls:
        model = Running()
    Blueprint(model, calls, tmp_path, lambda: expected).wait()
    with adamw(model):
        assert differing(dict(model.named_buffers()), dict(expected.named_buffers())) == []
        assert differing(weights(model), weights(expected)) == []


def test_a_folder_without_a_parameter_is_refused(tmp_path: Path) -> None:
    save_file({"0.0.weight": torch.zeros(32, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"lacks tensor '0\.0\.bias' and 6 others"):
        hytrain.deferred_init(perceptron, weights=tmp_path)


def test_a_folder_with_another_shape_is_refused(tmp_path: Path) -> None:
    """Before more than a part of it would be read."""
    state = perceptron().state_dict()
    save_file(state | {"3.0.weight": torch.zeros(33, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"3\.0\.weight has shape \(33, 32\) in .*, but \(32, 32\)"):
        hytrain.deferred_init(perceptron, weights=tmp_path)


FAILING = [(Handover, "start", 0), (Masters, "begin_with", 0), (Masters, "begin_with", 2), (Planned, "embody", 0)]


@pytest.mark.parametrize(("owner", "name", "successes"), FAILING, ids=str)
def test_a_failed_start_leaves_the_model_without_memory(
    owner: type, name: str, successes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be tried again, whatever has failed."""
    torch.manual_seed(3)
    model = hytrain.deferred_init(lambda: Made(with_gaps))
    parameters, before = list(model.parameters()), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then_refuse(getattr(owner, name), successes))
        with pytest.raises(CapacityError, match="no room"):
            hytrain.AdamW(model, k=0.0)
    assert all(parameter.is_meta or not parameter.numel() for parameter in parameters), "so it cannot compute"
    assert torch.equal(torch.get_rng_state(), before)
    with adamw(model, k=0.0):
        found = model.state_dict()
    torch.manual_seed(3)
    assert differing(found, Made(with_gaps).state_dict()) == []
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


def then_refuse(function: Callable[..., Any], successes: int) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        nonlocal successes
        successes -= 1
        if successes < 0:
            raise CapacityError("no room")
        return function(*args)

    return counted


class Made(nn.Linear):
    """`then` goes on with the construction."""

    def __init__(self, then: Callable[[Made], Any]) -> None:
        super().__init__(4, 4)
        self.then = then(self)


def returns_to_a_state(model: nn.Module) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.rand(3)
    torch.rand(3)


REFUSED: dict[str, tuple[Callable[[Made], Any], str]] = {
    "reads a value": (lambda _: int(torch.rand(3).sum().item()), "reads a tensor's value"),
    "depends on values": (lambda _: len(torch.rand(3).nonzero()), "reads a tensor's value"),
    "goes back to a state": (returns_to_a_state, "restores an earlier state of a random generator"),
    "a parameter under another name": (
        lambda model: vars(model).update(other=model.weight),
        "shares memory with other",
    ),
    "a view of a parameter": (lambda model: model.weight.detach()[0], "weight shares memory with then"),
    "tensors in a list": (lambda _: [torch.rand(3)], "has tensors in then"),
    "a hook": (lambda model: model.weight.register_hook(torch.neg) and None, "weight has hooks"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_construction_that_cannot_be_repeated_exactly_is_refused(kind: str) -> None:
    then, words = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=words):
        hytrain.deferred_init(lambda: Made(then))


def test_two_models_do_not_draw_the_same_numbers() -> None:
    """Nor does what is drawn while one waits."""
    torch.manual_seed(3)
    first = hytrain.deferred_init(lambda: nn.Linear(4, 4))
    with pytest.raises(UsageError, match="another model without memory has to draw"):
        hytrain.deferred_init(lambda: nn.Linear(4, 4))
    between = nn.Linear(4, 4)
    torch.manual_seed(4)
    second = hytrain.deferred_init(lambda: nn.Linear(4, 4))
    with adamw(nn.ModuleList([first, second])):
        found = [model.weight.detach().clone() for model in (first, second, between)]
    assert not any(torch.equal(one, other) for one, other in zip(found, [*found[1:], found[0]], strict=True))
    for seed, weight in zip((3, 4), found, strict=False):
        torch.manual_seed(seed)
        assert torch.equal(nn.Linear(4, 4).weight, weight)


def with_gaps(model: Made) -> None:
    constant = torch.tensor([1.0, 2.0])
    model.register_buffer("constant", constant.mul_(2))
    model.scale = nn.Parameter(torch.rand(4))
    model.gaps = nn.Parameter(torch.rand(64, 64)[:, :4], requires_grad=False)
    model.weight.has_no_decay = True  # type: ignore[attr-defined]


def test_what_else_a_construction_makes() -> None:
    """A frozen parameter with gaps, an attribute of a parameter, and a constant that is written in place."""
    torch.manual_seed(3)
    model = hytrain.deferred_init(lambda: Made(with_gaps))
    torch.manual_seed(3)
    expected = Made(with_gaps)
    assert model.weight.has_no_decay
    with adamw(model):
        assert differing(model.state_dict(), expected.state_dict()) == [] and model.weight.has_no_decay


def test_a_model_that_is_converted_twice_is_rounded_twice() -> None:
    models = [make().bfloat16().float() for make in (Odd, lambda: hytrain.deferred_init(Odd))]  # seeded in the middle
    for model in models:
        with adamw(model):
            pass
    first, second = ({n: t for n, t in m.state_dict().items() if not n.startswith("body.")} for m in models)
    names = ["first.weight", "last.bias", "turned"]
    assert [name for name in names if not torch.equal(first[name], second[name])] == []


WRITES: dict[str, Callable[[Odd], Any]] = {
    "an initialisation": lambda model: nn.init.normal_(model.last.weight),
    "as Transformers writes it": lambda model: model.last.weight.data.normal_(),
    "a view": lambda model: model.last.weight.detach()[0].fill_(1),
    "elements": lambda model: model.last.bias.data.__setitem__(0, 1.0),
    "an operation with a result": lambda model: torch.add(model.turned, 1, out=model.turned.data),
    "rows": lambda model: [row.zero_() for row in model.last.weight],
    "chunks": lambda model: [nn.init.ones_(chunk) for chunk in model.last.weight.chunk(2)],
    "a hook": lambda model: model.last.weight.register_hook(torch.neg),
    "a buffer": lambda model: model.noise.zero_(),
    "a converted buffer": lambda model: model.double().noise.__iadd__(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_would_be_lost_is_refused(write: str) -> None:
    """Values are made later, so nothing can be written into them now."""
    model = hytrain.deferred_init(Odd)
    with torch.no_grad(), pytest.raises(UsageError, match="that you give to hytrain.deferred_init"):
        WRITES[write](model)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
def test_a_state_cannot_be_loaded_before_there_are_values() -> None:
    with pytest.raises(RuntimeError, match="copy_ would be lost"):
        hytrain.deferred_init(perceptron).load_state_dict(perceptron().state_dict())
