"""Watched parameters: between two forwards, every use of a parameter's value comes through here first.

    AdamW is made                ─▶ watch    all parameters
    a module enters its forward  ─▶ unwatch  its parameters: forward pays nothing
    it leaves its forward        ─▶ watch    them again, also in a backward that recomputes it

HyTrain writes parameters in the background. A watched parameter has a subclass of its own class, whose
`__torch_function__` calls `Uses.use` before the operation runs: in a list kept from before, in `model.parameters()`,
in `torch._foreach_` operations. Metadata, gradients and hooks are not its value. If other types of tensors take part
that have a `__torch_function__`, the operation then runs with parameters of their own classes, as torch would do it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from hytrain.tensors import count_write, is_distributed, local
from hytrain.uncompiled import uncompiled

#: A context in which watched parameters are used without waiting.
unwatched: Final = torch._C.DisableTorchFunctionSubclass

_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]
#: Attributes of a tensor that do not show its value.
_ATTRIBUTES: Final = """
    _backward_hooks _base _grad _grad_fn _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu is_cuda
    is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize layout name nbytes
    ndim output_nr requires_grad retains_grad shape volatile
""".split()
_METHODS: Final = """
    __len__ _is_view dim dim_order element_size get_device is_complex is_conj is_contiguous
    is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed nelement ndimension
    numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride
""".split()
_HARMLESS: Final = {
    *(getattr(getattr(Tensor, name), kind) for name in _ATTRIBUTES for kind in ("__get__", "__set__", "__delete__")),
    *(getattr(Tensor, name) for name in _METHODS),
    torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.numel,
    torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like,
}  # fmt: skip


def _of_plain(name: str) -> Any:
    """A method that looks at the parameter's class, too."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        _note_use(self)
        with _of_plain_classes([self]):
            return getattr(self, name)(*args, **options)

    return method


def _undispatched(name: str) -> Any:
    """A method of a tensor for which torch does not call `__torch_function__`."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        _note_use(self)
        kind = type(self)
        plain = kind.plain if issubclass(kind, Watched) else kind
        return getattr(plain, name)(self, *args, **options)

    return method


def _uses_of(parameter: Any) -> Any:
    """Who is told of a use of it: None, once a forward on another thread has unwatched it."""
    return getattr(type(parameter), "uses", lambda: None)()


def _note_use(parameter: Any) -> None:
    if (uses := _uses_of(parameter)) is not None:
        uses.use(parameter)


class Watched:
    """The base of the classes that watched parameters have. `uses` is a weak reference to their `step.uses.Uses`."""

    uses: ClassVar[Callable[[], Any]]
    plain: ClassVar[type]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched(), ExitStack() as around:
            others_answer = any(map(_answers, types))
            if others_answer or func not in _HARMLESS:
                found = list(_found_in((*args, *kwargs.values()) if kwargs else args))
                if func not in _HARMLESS:
                    for parameter in found:  # a forward on another thread may unwatch it any time
                        if (uses := getattr(type(parameter), "uses", cls.uses)()) is not None:
                            around.enter_context(uses.around(parameter))
                            uses.use(parameter)
                if others_answer:
                    around.enter_context(_of_plain_classes(found))
                    around.enter_context(torch._C._EnableTorchFunction())
                if func == _DATA:
                    return args[0].detach()  # the same tensor, but autograd counts what is written to it
            result = func(*args, **(kwargs or {}))
            name: str = getattr(func, "__name__", "")
            if name.startswith("_foreach_") and name.endswith("_"):
                for parameter in filter(is_distributed, _found_in(args[:1])):
                    count_write(parameter)  # torch does not, of DTensors
            return result

    def detach(self) -> Tensor:
        caller = sys._getframe(1).f_code
        if (away := Watched._away(self, caller)) is not None:
            return away
        detached = Tensor.detach(cast(Tensor, self))
        if caller is nn.Parameter.__new__.__code__:  # nn.Parameter(p) insists on p's class
            detached.__class__ = type(self)  # type: ignore[assignment]
        return detached

    as_subclass, set_ = map(_undispatched, ("as_subclass", "set_"))

    def _away(self, caller: CodeType) -> Tensor | None:
        """What `model.state_dict()` has of offloaded weights: it takes no GPU memory."""
        saves = caller is nn.Module._save_to_state_dict.__code__
        uses = _uses_of(self) if saves else None
        return None if uses is None else cast(Tensor | None, uses.away(self))

    __deepcopy__, __reduce_ex__, __repr__ = map(_of_plain, ("__deepcopy__", "__reduce_ex__", "__repr__"))


class _WatchedDTensor(Watched):
    """A DTensor has methods that show its value and that `__torch_function__` does not see."""

    def detach(self) -> Tensor:
        if (away := Watched._away(self, sys._getframe(1).f_code)) is not None:
            return away
        detached: Any = super().detach()
        # Writes to this rank's part count for the parameter, too. And it is one more tensor with its storage.
        detached._local_tensor = local(cast(Tensor, self)).detach()
        return cast(Tensor, detached)

    to_local, full_tensor, redistribute = map(_of_plain, ("to_local", "full_tensor", "redistribute"))


def watched_class(plain: type, uses: Any) -> type:
    """A subclass of `plain`, with its name, for parameters of whose uses `uses` is told first."""
    name_space = {"uses": weakref.ref(uses), "plain": plain, "__module__": plain.__module__}
    base = _WatchedDTensor if hasattr(plain, "to_local") else Watched
    return type(plain)(plain.__name__, (base, plain), name_space)


@contextmanager
def _of_plain_classes(parameters: Iterable[Any]) -> Iterator[None]:
    """Nobody sees that they are watched: not by their classes, and nothing comes by `__torch_function__`."""
    classes = [(parameter, kind) for parameter in parameters if issubclass(kind := type(parameter), Watched)]
    for parameter, watched in classes:
        parameter.__class__ = watched.plain
    try:
        yield
    finally:
        for parameter, watched in classes:
            parameter.__class__ = watched


def _answers(kind: Any) -> bool:
    """Whether torch would ask this class: of a watched one, the parameter's own."""
    own = kind.plain if issubclass(kind, Watched) else kind
    return own.__torch_function__ is not torch._C._disabled_torch_function_impl


def _found_in(values: Iterable[Any]) -> Iterator[Any]:
    """The watched parameters."""
    for value in values:
        if isinstance(value, Watched):
            yield value
        elif isinstance(value, list | tuple):
            yield from _found_in(value)
        elif isinstance(value, dict):
            yield from _found_in(value.values())
