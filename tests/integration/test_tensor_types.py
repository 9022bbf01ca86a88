"""Parameters beside tensors of other types, which have a `__torch_function__`, or `__torch_dispatch__`, of their own.

Each use is run as with torch: the same calls reach the other type, with the same classes and the step's weights, and
the same comes back, an exception too. The CPU's updates arrive only while somebody waits for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LR, Reference, adamw, differing, late_weights, same, train, weights
from small_models import perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Doubling(Tensor):
    """Its products are doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func in (Tensor.mul, torch.mul) else result


class Named(Tensor):
    """torch's own handler; its results have its class."""


class Telling(Tensor):
    """Returns what it was asked, and in what order."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            parameters = [a for a in args if type(a) is nn.Parameter]
            seen = [float(p.detach().sum()) for p in parameters], torch.overrides.has_torch_function(parameters)
        return func.__name__, cls.__name__, [kind.__name__ for kind in types], list(kwargs or {}), seen


class TellingMore(Telling):
    pass


class PassingOn(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class NoTensor:
    """Has a value only when it is asked, as a checkpoint that is read lazily."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.value if isinstance(a, NoTensor) else a for a in args), **(kwargs or {}))


class Wrapper(Tensor):
    """A tensor around another one, of those that only dispatch."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {})) + 1


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Computes with another type of tensor meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), as_type(Named, 1)[0, 0].item()))
        return func(*args, **(kwargs or {}))


def as_type(kind: type[Tensor], rows: int = 32) -> Any:
    return vectors(7)[:1].expand(rows, 32).clone().as_subclass(kind)


USES: dict[str, Callable[[Any], object]] = {}


def use(run: Callable[[Any], object]) -> Callable[[Any], object]:
    USES[run.__name__] = run
    return run


@use
def product(p: Any) -> object:
    return (p * as_type(Doubling)).sum(), torch.mul(p, as_type(Doubling)), torch.mul(input=p, other=as_type(Doubling))


@use
def products_of_types_that_look_at_others(p: Any) -> object:
    return as_type(Named) * p, p * as_type(Named), torch.mul(as_type(Named), other=p)


@use
def lists(p: Any) -> object:
    return (
        torch.cat([p, as_type(Named)]),
        torch.stack((p, as_type(Named), p)),
        torch._foreach_mul([p], [as_type(Named)]),
        torch.einsum("ij,kj->ik", p, as_type(Named)),
        torch.block_diag(p, as_type(Named)),
    )


@use
def written_into(p: Any) -> object:
    out = as_type(Named)
    with torch.no_grad():
        return torch.mul(p, 2, out=out), out, torch.add(p, p, out=torch.empty(32, 32))


@use
def order_and_classes(p: Any) -> object:
    one, more = as_type(Telling), as_type(TellingMore)
    return [
        p * one,
        torch.add(p, other=one, alpha=2),
        torch.addcmul(p, one, more),
        torch.addcmul(p, more, one),
        torch.nn.functional.linear(p, one),
        p.is_same_size(one),
    ]


@use
def passed_on(p: Any) -> object:
    return p * as_type(PassingOn)


@use
def passed_on_to_another(p: Any) -> object:
    return torch.addcmul(p, as_type(PassingOn), as_type(Telling))


@use
def no_tensor(p: Any) -> object:
    with torch.no_grad():
        p.copy_(NoTensor(torch.full((32, 32), 0.25)))
    return p + NoTensor(torch.ones(32)), torch.nn.functional.mse_loss(p, NoTensor(p * 2))


@use
def wrapped(p: Any) -> object:
    return p * Wrapper(torch.ones(32, 32)), Wrapper(torch.ones(32, 32)) + p


@use
def under_a_mode(p: Any) -> object:
    with Calls() as calls:
        found = p * 2, p * as_type(Named), torch.cat([p, p]), p.shape
    with Operators() as operators:
        found = *found, p * 3
    return found, calls.names, operators.seen


@use
def weights_and_gradients_of_another_type(p: Any) -> object:
    p.grad = as_type(Named)
    seen, p.grad = (type(p.grad).__name__, p.grad), None
    return seen, torch.zeros_like(p), p.new_zeros(2)


@use
def a_loss_through_it(p: Any) -> object:
    return torch.autograd.grad((p * as_type(Doubling)).square().sum(), p)


@use
def in_a_functional_call(p: Any) -> object:
    return torch.func.functional_call(nn.Linear(32, 32, bias=False), {"weight": p}, as_type(Named))


class OfOnesOwn(nn.Parameter):
    """A user's class of parameters, with a handler of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result + 1 if func in (Tensor.mul, torch.mul) else result


def with_ones_own() -> nn.Module:
    model = perceptron()
    model[1][0].weight = OfOnesOwn(model[1][0].weight.detach())
    return model


def ones_own(p: Any) -> object:
    return p * 2, type(p * 2).__name__, p.norm(), p.detach(), copy.deepcopy(p), type(copy.deepcopy(p)).__name__, repr(p)


@pytest.fixture
def gate() -> Iterator[Any]:
    with late_weights() as gate:
        yield gate


def outcome(run: Callable[[], object]) -> object:
    try:
        return described(run())
    except TypeError as error:
        return str(error)


def described(value: object) -> object:
    """With the classes of its tensors."""
    if isinstance(value, Tensor):
        return type(value).__name__, value.detach().as_subclass(Tensor).clone()
    return [described(part) for part in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize("name", USES)
def test_as_with_torch(name: str, k: float, gate: Any) -> None:
    same_after_steps(USES[name], perceptron, k, gate)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_parameters_of_a_class_of_ones_own(k: float, gate: Any) -> None:
    same_after_steps(ones_own, with_ones_own, k, gate)


def same_after_steps(run: Callable[[Any], object], make: Callable[[], nn.Module], k: float, gate: Any) -> None:
    def alternate(model: Any, opt: Any) -> object:
        parameter, seen = model[1][0].weight, []
        for step in range(3):
            train(model, opt, [step], square_loss)
            seen.append(outcome(lambda: run(parameter)))
        return seen

    ours, theirs = make(), make()
    expected = alternate(theirs, Reference(theirs, lr=LR))
    with adamw(ours, k=k) as opt:
        try:
            assert same(alternate(ours, opt), expected)
            opt.synchronize()
            assert differing(weights(ours), weights(theirs)) == []
        finally:
            gate.set()


def test_a_checkpoint_that_is_loaded_lazily(tmp_path: Path) -> None:
    """As litgpt loads its own: what the file has is read while it is copied into the parameters."""
    load = pytest.importorskip("lightning.fabric.utilities.load")
    kept = perceptron(depth=4)
    train(kept, Reference(kept, lr=LR), range(3), square_loss)
    torch.save(kept.state_dict(), tmp_path / "kept.pth")

    def run(model: Any, opt: Any) -> object:
        train(model, opt, range(2), square_loss)
        model.load_state_dict(load._lazy_load(tmp_path / "kept.pth"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(load._lazy_load(tmp_path / "kept.pth")[name])
        return train(model, opt, range(2, 4), square_loss)

    ours, theirs = perceptron(), perceptron()
    expected = run(theirs, Reference(theirs, lr=LR))
    with adamw(ours) as opt:
        assert run(ours, opt) == expected
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
