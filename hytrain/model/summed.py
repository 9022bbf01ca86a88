"""What `p.grad` is while a step's backwards only sum gradients: a tensor whose values are kept elsewhere.

    backward      autograd adds a gradient       ─▶ to the float32 sum
    the loop      print, clone()                 ─▶ the sum, rounded to the gradient's dtype
                  norm()                         ─▶ known since the gradient came, if the loop has asked before
                  mul_(factor), as clipping does ─▶ kept beside the sum, for whoever reads that
                  add_(), copy_(), …             ─▶ the same, and what was written is the sum from then on
                  view(), numpy(), data = …, …   ─▶ a tensor of its own from then on, as in torch
                  p.grad = None                  ─▶ the sum is dropped

So between such a backward and `step()`, gradients are what a loop finds there in torch. Where the sums are is known to
`step.accumulation`, which makes one of these for each.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_flatten, tree_map

from hytrain.model.consumed import shows, written
from hytrain.tensors import local
from hytrain.uncompiled import uncompiled

_aten = torch.ops.aten
_NORMS: Final = (_aten._foreach_norm.Scalar, _aten.linalg_vector_norm.default)
_TAKEN_AS_LISTS: list[type[Tensor]] = _foreach_supported_types
_DATA: Final[Any] = Tensor.data
_PRODUCTS: Final = (_aten._foreach_mul_.Tensor, _aten.mul_.Tensor)


class Sum(Protocol):
    """The sum of one parameter's gradients on this rank. `own` is the tensor that has it, after `settle`."""

    own: Tensor | None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, in the parameter's shape."""

    def value(self) -> Tensor:
        """The sum in the gradient's dtype, in the parameter's shape: to be read, or to be written and given back."""

    def write(self, value: Tensor) -> None:
        """Take what `value` returned, and others have written, as the sum."""

    def settle(self) -> Tensor:
        """The same, from now on kept in this tensor, which may have views."""

    def norm(self, operator: Any) -> Tensor:
        """What this operator of torch's finds for its value: `norm_of`."""

    def multiply(self, factor: Tensor) -> None:
        """Multiply it in place by this number, of its dtype and on its device, now or when it is read."""


def _settled(name: str) -> Any:
    """A method whose result has the tensor's memory."""
    return lambda self, *args, **options: getattr(self._total.settle(), name)(*args, **options)


class SummedGradient(Tensor):
    """A gradient with the values of a sum."""

    _total: Sum
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, total: Sum, like: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, strides=like.stride()
        )
        made._total = total
        return made

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]
        if func in _NORMS and not kwargs and args[1:] in ((), (2.0,)):
            norms = [
                norm_of(func, one) if (total := summed(one)) is None else total.norm(func) for one in _all(args[0])
            ]
            return norms if func is _aten._foreach_norm.Scalar else norms[0]
        if func in _PRODUCTS and _is_factor(args[1], _all(args[0])):
            for one in _all(args[0]):
                (one.mul_ if (total := summed(one)) is None else total.multiply)(args[1])
            return args[0] if func is _aten.mul_.Tensor else None
        if "_foreach_" in func.__name__ and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        if func is _aten.add_.Tensor and isinstance(args[0], cls) and not kwargs:
            gradient, more = args
            if isinstance(more, Tensor) and not isinstance(more, cls) and more.shape == gradient.shape:
                gradient._total.add(more)
                return gradient
        found = {id(each): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)}
        is_shown, changed = shows(func), written(func, args, kwargs, cls)
        settles = {id(each) for each in changed if each._total.own is not None}  # after the update that reads it
        values = {
            key: each._total.settle() if is_shown or key in settles else each._total.value()
            for key, each in found.items()
        }

        def value(each: Any) -> Any:
            return values[id(each)] if isinstance(each, cls) else each

        result = func(*tree_map(value, args), **tree_map(value, kwargs))
        for each in changed:
            each._total.write(values[id(each)])
        own = {id(values[key]): each for key, each in found.items()}  # an operation in place returns what it got
        return tree_map(lambda made: own.get(id(made), made), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._total.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._total.value().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._total.value().clone().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self._total.value().tolist()

    numpy, data_ptr, __array__, __dlpack__ = map(_settled, ("numpy", "data_ptr", "__array__", "__dlpack__"))
    apply_, map_, share_memory_, storage = map(_settled, ("apply_", "map_", "share_memory_", "storage"))

    def untyped_storage(self) -> torch.UntypedStorage:
        """The compiler asks for it, too, when it makes a likeness of a parameter, and writes nothing there."""
        is_compiling = torch._guards.TracingContext.try_get() is not None
        return super().untyped_storage() if is_compiling else self._total.settle().untyped_storage()

    @property
    def data(self) -> Tensor:
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """As in torch, this memory is the gradient's from now on; a conversion of the model converts the gradient."""
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            _DATA.__set__(self, value)
        elif value is not self:
            other = summed(value)
            _DATA.__set__(self._total.settle(), value if other is None else other.settle())


#: Of these types, torch clips gradients with operators for lists, whose norms have bits of their own on a GPU.
_TAKEN_AS_LISTS.append(SummedGradient)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on lists of tensors, one after the other: all values at once might have no room on the device."""
    count = len(args[0])

    def of(index: int, given: Any) -> Any:
        return [given[index]] if isinstance(given, list | tuple) and len(given) == count else given

    made = [func(*(of(i, each) for each in args), **{k: of(i, v) for k, v in kwargs.items()}) for i in range(count)]
    return None if made[0] is None else [one for each in made for one in each]


def _all(given: Tensor | list[Tensor]) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else given


def norm_of(operator: Any, value: Tensor) -> Tensor:
    """The 2-norm, in the bits of this operator: for lists of tensors, or for one."""
    found: Tensor = operator([value])[0] if operator is _aten._foreach_norm.Scalar else operator(value)
    return found


def _is_factor(given: Any, of: list[Tensor]) -> bool:
    """Whether it is one number in the gradients' dtype, on their device, as clipping makes it."""
    if not isinstance(given, Tensor) or isinstance(given, SummedGradient) or given.ndim:
        return False
    return all((each.dtype, each.device) == (given.dtype, given.device) for each in of)


def summed(gradient: Tensor | None) -> Sum | None:
    """The sum that is this gradient's values; None of another one."""
    if gradient is None or type(gradient) is Tensor:
        return None
    part = local(gradient)
    return part._total if isinstance(part, SummedGradient) else None
