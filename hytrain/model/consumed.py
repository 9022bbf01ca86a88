"""The placeholder in `p.grad` after HyTrain has consumed the gradient.

It is a tensor of the parameter's shape without storage. Setting `p.grad` to None works as usual (`zero_grad()`).
What reads the gradient gets it as long as it is still somewhere. Anything else raises, and the message says what to do
instead. So nothing trains silently on a gradient that is gone: `clip_grad_norm_`, a second backward, another optimizer
or a gradient scaler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, ClassVar, Final, NoReturn, Self, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_map

from hytrain.errors import UsageError

T = TypeVar("T")

_aten = torch.ops.aten
_DATA: Final[Any] = torch.Tensor.data

SCALER: Final = (
    'a GradScaler unscales gradients after backward, when HyTrain\'s are gone: pass updates="step" to hytrain.AdamW; '
    'or loss_scale="dynamic", and call opt.scale(loss).backward(), without a GradScaler'
)

ADVICE: Final = {
    "change": 'pass updates="step" to hytrain.AdamW, or change gradients in a hook of your own (Tensor.register_hook) '
    "while backward runs; for a sum over n backwards, pass grad_accumulation=n",
    "clip": "gradient clipping after backward comes too late for HyTrain, which updates while backward runs: "
    "pass max_grad_norm to hytrain.AdamW in place of clip_grad_norm_, and the norm of all is opt.grad_norm; or pass "
    'updates="step"',
    "scale": SCALER,
    "divide": "divide the loss instead; a schedule of torch.distributed.pipelining divides gradients after backward "
    "unless it has scale_grads=False: pass that, and divide in its loss_fn by the number of micro-batches",
    "zero": "zero_grad(set_to_none=False) needs the gradient: use zero_grad(), which sets it to None",
    "reduce": "to reduce a gradient over ranks, return the reduced one from a hook of your own (Tensor.register_hook), "
    "which runs in backward",
    "add": "backward would add to it: call opt.zero_grad() after each opt.step(); for a sum over n backwards, pass "
    'grad_accumulation=n, or updates="step"',
    "read": 'pass updates="step" to hytrain.AdamW, or read gradients in a hook of your own (Tensor.register_hook) '
    "while backward runs",
}

#: The key of the advice for an operation, by a part of the operation's name.
_WORDS: Final = (
    ("scale", "_amp_"),
    ("clip", "norm"),
    ("clip", "clamp"),
    ("clip", "mul"),
    ("divide", "div"),
    ("zero", "zero_"),
    ("reduce", "reduce"),
)


#: What reading it says where no operation sees it.
CONSUMED: Final = f"a gradient that HyTrain has already consumed was read: {ADVICE['read']}"


def _advice(operation: str, into_gradient: bool) -> str:
    """The advice for an operation. `into_gradient`: the operation would change the consumed gradient."""
    for key, word in _WORDS:
        if word in operation:
            return ADVICE[key]
    if operation.startswith("add") and torch._C._current_graph_task_id() != -1:
        return ADVICE["add"]
    return ADVICE["change" if into_gradient else "read"]


def refuse(sentence: str) -> NoReturn:
    """Raise `UsageError`. If that ends a backward, torch's would have gone on."""
    if (task := torch._C._current_graph_task_id()) != -1:
        ConsumedGradient.refused_in = task
    raise UsageError(sentence)


class ConsumedGradient(torch.Tensor):
    """A gradient that HyTrain has consumed. `find` returns a copy of what this stands for, or None if it is gone.

    `refused_in`: the last backward in which something was refused, by autograd's number; -1 if there was none.
    """

    refused_in: ClassVar[int] = -1
    find: Callable[[ConsumedGradient], torch.Tensor | None]

    @staticmethod
    def __new__(
        cls, parameter: torch.Tensor, find: Callable[[ConsumedGradient], torch.Tensor | None], **options: Any
    ) -> Self:
        options = {"dtype": parameter.dtype, "device": parameter.device, "strides": parameter.stride(), **options}
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, **options)
        made.find = find
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        if func is _aten.mul_.Tensor and isinstance(args[1], torch.Tensor) and args[1].ndim == 0 and args[1] == 1.0:
            return args[0]  # clipped by a norm that is below its limit
        found = {id(each): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)}
        if not shows(func) and not written(func, args, kwargs or {}, cls):
            values = {key: each.find(each) for key, each in found.items()}
            if all(value is not None for value in values.values()):
                args, kwargs = tree_map(lambda each: values.get(id(each), each), (args, kwargs or {}))
                return func(*args, **kwargs)
        if func is _aten._to_copy.default:  # as `model.half()` does it, which sets it as the `.data` of this one
            options = {name: (kwargs or {}).get(name) or getattr(args[0], name) for name in ("dtype", "device")}
            return cls(args[0], args[0].find, **options)
        operation = func.overloadpacket.__name__
        advice = _advice(operation, into_gradient=bool(args) and isinstance(args[0], cls))
        refuse(f"{operation} on a gradient that HyTrain has already consumed: {advice}")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        refuse(CONSUMED)

    numpy = data_ptr = apply_ = map2_ = __array__ = __dlpack__ = __reduce_ex__ = _refuse

    def share_memory_(self) -> Self:
        """It has none. `model.share_memory()` calls this."""
        return self

    @property
    def data(self) -> torch.Tensor:
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, ConsumedGradient):  # not what `model.half()` makes of it
            refuse(f"data of a gradient that HyTrain has already consumed was set: {ADVICE['change']}")
        _DATA.__set__(self, value)

    def _read(self) -> torch.Tensor:
        if (value := self.find(self)) is None:
            refuse(CONSUMED)
        return value

    def tolist(self) -> Any:
        return self._read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def shows(func: Any) -> bool:
    """Whether an operation returns views, or is not torch's own.

    Those may keep what they get, or write it without saying so, as collectives do.
    """
    if func.namespace not in ("aten", "prims"):
        return True
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def written(func: Any, args: Any, kwargs: Any, kind: type[T]) -> list[T]:
    """Those of an operation's arguments, of this kind, that it writes."""
    given = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [each for each in tree_flatten(given)[0] if isinstance(each, kind)]


NO_STATE: Final = (
    "opt.state has no values, because HyTrain keeps moments in memory of its own: read them with opt.state_dict(), "
    "change them with opt.load_state_dict(), reset them by making the optimizer anew, and keep your own entries in a "
    "dictionary of your own"
)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise UsageError(NO_STATE)


class NoEntry:
    """The value of `opt.state[parameter]`: names only, which torch's distributed checkpoints read."""

    def __init__(self, parameter: torch.Tensor, planes: Iterable[str]) -> None:
        self._parameter, self._names = parameter, ("step", *planes)

    def is_of(self, parameter: torch.Tensor) -> bool:
        return self._parameter is parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    __getitem__ = __setitem__ = __delitem__ = __getattr__ = _refuse


class NoState(defaultdict[torch.Tensor, Any]):
    """The value of `opt.state`: an entry for each trained parameter. Reading or writing a value in one raises.

    So who looks there for what to load, as torchtitan does, finds all that is trained; and who resets moments in a loop
    is told. `parameters` are all of the groups'; `planes` is the state of each one, by
    its identity. `was_asked`: somebody wants the state to exist.
    """

    parameters: Sequence[torch.Tensor] = ()
    planes: Mapping[int, Iterable[str]] = {}
    was_asked = False

    def __bool__(self) -> bool:
        """True: else `torch.distributed.checkpoint` would call `step()` with gradients of zero, to create the state."""
        self.was_asked = True
        return True

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and parameter.requires_grad and id(parameter) in self.planes

    def __missing__(self, parameter: torch.Tensor) -> NoEntry:
        return NoEntry(parameter, self.planes.get(id(parameter), ()))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self.parameters if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def __setitem__(self, parameter: torch.Tensor, entry: Any) -> None:
        if not (isinstance(entry, NoEntry) and entry.is_of(parameter)):  # Lightning puts back what it has moved
            _refuse()

    def keys(self) -> KeysView[torch.Tensor]:  # type: ignore[override]
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView[torch.Tensor, Any]:  # type: ignore[override]
        return ItemsView(self)

    __delitem__ = clear = pop = popitem = update = setdefault = _refuse
    __ior__ = __or__ = copy = __copy__ = __deepcopy__ = __reversed__ = _refuse
