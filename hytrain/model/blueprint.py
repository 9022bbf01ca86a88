"""A model that was built without memory, and the values that its parameters get later, one at a time.

    deferred_init ─▶ recording ─▶ Blueprint: parameters on the meta device, the rest as fake tensors
    AdamW         ─▶ take_to   ─▶ each parameter on the device, without memory where it will be offloaded
                  ─▶ first plan ─▶ make ─▶ each value, into wherever its parameter's weights rest

Nothing holds the whole model on the way. Recipes of several ranks shard it before `make`.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from hytrain.errors import UnsupportedError, UsageError
from hytrain.model.deferred import (
    Call,
    Piece,
    Storage,
    calls_for,
    first_states,
    last_states,
    recording,
    replay,
)

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"

_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
#: The part of a value that slices cut out, one for each dimension.
Read = Callable[[tuple[slice, ...]], Tensor]

_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
#: Names of methods that write a tensor, or attach something to it, without an underscore at the end; and of some that
#: have one and write none.
_WRITES: Final = {
    *(f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()),
    *("register_hook", "register_post_accumulate_grad_hook"),
}
_NO_WRITES: Final = {"requires_grad_", "detach_", "share_memory_", "rename_"}
#: Attributes that each module has.
_OF_MODULES: Final = {*vars(nn.Module())}

#: Of models that wait for their values.
_waiting: Final[weakref.WeakKeyDictionary[nn.Module, Blueprint]] = weakref.WeakKeyDictionary()


def deferred_init(make: Callable[[], Model], weights: str | os.PathLike[str] | None = None) -> Model:
    """Construct a model without memory; `hytrain.AdamW(model, …)` makes its values, one parameter at a time.

    Each value goes to where the first plan has it, in GPU or host memory, so nothing ever holds the whole model. It is
    the value that `make()` would have made now, bit for bit, on the device for which that makes it. Until `AdamW` is
    made, the model cannot compute.

    Args:
        make: Returns the model, as in `lambda: LlamaForCausalLM(config)`. It cannot read a tensor's value.
        weights: A folder with `model.safetensors`, or with several files and their index, as Transformers writes it.
            The values of parameters, and those of persistent buffers that are there, are read by their names.

    Raises:
        UnsupportedError: `make` reads a tensor's value, or does what could not be repeated exactly; the message says
            what.
        UsageError: The folder lacks a parameter or has it in another shape, or another model waits for its draws.
    """
    try:
        with recording() as calls:
            model = make()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(f"the construction reads a tensor's value, but none is made yet: {error}") from None
    blueprint = Blueprint(model, calls, None if weights is None else Path(weights))
    blueprint.wait()
    return model


@cache
def _of_fakes() -> Set[str]:
    """The attributes that each fake parameter has.

    To make one asks CUDA for its devices, after which processes that are forked could use none.
    """
    with FakeTensorMode():
        return {*vars(nn.Parameter(torch.empty(0)))}


def blueprints_of(model: nn.Module) -> list[Blueprint]:
    """Those of models within this one that wait for their values."""
    return [_waiting[module] for module in model.modules() if module in _waiting]


class Unmade(Tensor):
    """A tensor on the meta device that waits for its values, or a view of it. Writes would be lost: it refuses them.

    `through`: the dtypes to which it was converted since it was built, each of which may round its values.
    """

    through: tuple[torch.dtype, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        in_place = name.endswith("_") and not name.endswith("__")
        if name in _WRITES or (in_place and name not in _NO_WRITES) or kwargs.get("out") is not None:
            raise UsageError(
                f"{name} would be lost, because the tensor has no values yet: do it in the function that you give to "
                "hytrain.deferred_init, or after hytrain.AdamW is made"
            )
        with torch._C.DisableTorchFunctionSubclass():
            results = func(*args, **kwargs)
            source = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unmade)), None)
            if func == _SET_DATA and isinstance(args[1], Unmade):
                args[0].through = args[1].through
            return tree_map_only(Tensor, partial(_waiting_too, source), results)


def _waiting_too(source: Unmade | None, result: Tensor) -> Tensor:
    """A result of `source` that waits for values, too."""
    if type(result) is not Tensor or not result.is_meta:
        return result
    made = result.as_subclass(Unmade)
    if source is not None:
        made.through = source.through if made.dtype is source.dtype else (*source.through, made.dtype)
    return made


def converted(values: Tensor, through: Sequence[torch.dtype]) -> Tensor:
    for dtype in through:
        values = values.to(dtype)
    return values


class UnmadeParameter(Unmade, nn.Parameter):
    """Becomes an ordinary parameter when `AdamW` gives it memory."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A parameter on the meta device, made of `piece`. Tied ones have several names.

    `through`: the dtypes to which it was converted before it had memory.
    """

    parameter: nn.Parameter
    piece: Piece
    names: list[str] = field(default_factory=list)
    through: list[torch.dtype] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.piece.device

    def meta(self) -> Tensor:
        """Its shape and strides, in the dtype that it has by now."""
        return self._empty(torch.device("meta"))

    def embody(self, device: torch.device) -> None:
        """Give the parameter memory on the device. It stays the same Python object."""
        if not self.parameter.is_meta:  # after a start that failed
            self.parameter.data = self._empty(device)
            return
        other = nn.Parameter(self._empty(device), self.parameter.requires_grad)
        self.through[:] = self.parameter.__dict__.pop("through", ())
        other.__dict__.update(self.parameter.__dict__)
        torch.utils.swap_tensors(self.parameter, other)

    def _empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.piece.shape, self.piece.stride, dtype=self.parameter.dtype, device=device)


class Blueprint:
    """A recorded model whose parameters are on the meta device, and where their values come from.

    `whole` returns the model of `folder` in host memory, for a folder whose tensors have other names than the model's.
    """

    def __init__(
        self, model: Any, calls: list[Call], folder: Path | None, whole: Callable[[], nn.Module] | None = None
    ) -> None:
        self._model, self._calls, self._folder, self._whole = weakref.ref(model), calls, folder, whole
        self._waits = False
        self._pieces: dict[Storage, Piece] = {}
        self._planned: dict[Storage, Planned] = {}
        # Buffers, and tensors that are plain attributes. Several may be pieces of one storage.
        self._others: dict[Storage, list[tuple[nn.Module, str, Piece]]] = {}
        for prefix, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, FakeTensor):
                    full = f"{prefix}.{name}" if prefix else name
                    planned = self._plan(parameter, full)
                    planned.names.append(full)
                    module._parameters[name] = planned.parameter
            for name, value in [*module._buffers.items(), *vars(module).items()]:
                if isinstance(value, FakeTensor):
                    piece = Piece.of(value)
                    self._pieces.setdefault(piece.storage, piece)
                    self._others.setdefault(piece.storage, []).append((module, name, piece))
                    setattr(module, name, _meta(value))
            for name, value in vars(module).items():  # no value would reach what is inside
                if name not in _OF_MODULES and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
                    raise UnsupportedError(
                        f"{prefix or type(module).__name__} has tensors in {name}: make them buffers"
                    )
        for storage in self._planned.keys() & self._others.keys():
            name = self._planned[storage].names[0]
            raise UnsupportedError(f"{name} shares memory with {self._others[storage][0][1]}, which is no parameter")

    def _plan(self, fake: FakeTensor, name: str) -> Planned:
        piece = Piece.of(fake)
        if piece.storage not in self._planned:
            if fake._backward_hooks or getattr(fake, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(f"{name} has hooks: register them after hytrain.AdamW is made")
            parameter = nn.Parameter(_meta(fake), requires_grad=fake.requires_grad)
            parameter.__dict__.update((key, value) for key, value in vars(fake).items() if key not in _of_fakes())
            self._planned[piece.storage] = Planned(parameter, piece)
            self._pieces.setdefault(piece.storage, piece)
        planned = self._planned[piece.storage]
        if not planned.piece.is_same(piece):
            raise UnsupportedError(f"{planned.names[0]} and {name} share memory: tie them as one Parameter")
        return planned

    @property
    def planned(self) -> list[Planned]:
        return list(self._planned.values())

    def wait(self) -> None:
        """Let the model wait for `AdamW`.

        Raises `UsageError` if the folder lacks a parameter, or if another model waits to draw before this one does.
        """
        first = first_states(self._calls)
        for other in _waiting.values():
            for generator, left in last_states(other._calls).items():
                if generator in first and torch.equal(first[generator], left):
                    raise UsageError(
                        "another model without memory has to draw its random values before this one, and has not drawn "
                        "them yet: build both in one deferred_init (nn.ModuleList), or call torch.manual_seed between "
                        "the two"
                    )
        if self._folder is not None:
            self._find(self._folder)
        for planned in self.planned:
            planned.parameter.__class__ = UnmadeParameter
        for module, name, _ in (place for places in self._others.values() for place in places):
            getattr(module, name).__class__ = Unmade
        self._waits = True
        if (model := self._model()) is not None:
            _waiting[model] = self

    def _find(self, folder: Path) -> dict[Storage, tuple[Path, str]] | None:
        """The folder's file of each parameter, and its name there. None if a name is missing, and `whole` has it."""
        from safetensors import safe_open

        files = _files(folder)
        found = {s: next((name for name in one.names if name in files), None) for s, one in self._planned.items()}
        for storage, name in found.items():
            if name is not None:
                with safe_open(files[name], framework="pt") as file:
                    shape = file.get_slice(name).get_shape()
                _require_shape(name, shape, self._planned[storage].piece.shape, files[name])
        missing = [self._planned[storage].names[0] for storage, name in found.items() if name is None]
        if missing and self._whole is None:
            raise UsageError(f"{folder} lacks tensor {missing[0]!r} and {len(missing) - 1} others of the model")
        return None if missing else {storage: (files[name], name) for storage, name in found.items() if name}

    def make(self, deliver: Callable[[Planned, Read], None], device: torch.device | None = None) -> None:
        """Make all values, in the order in which the construction completes them.

        Buffers are set in the model, on the `device`, or where the construction has them.
        """

        def made(storage: Storage, value: Tensor) -> None:
            memory = value.untyped_storage()
            for module, name, piece in self._others.get(storage, ()):
                if not self._waits or isinstance(getattr(module, name, None), Unmade):  # or else it has another by now
                    _set(module, name, piece.within(memory), device)
            if self._folder is None and storage in self._planned:
                planned = self._planned[storage]
                deliver(planned, planned.piece.within(memory).__getitem__)

        buffers = {storage: self._pieces[storage] for storage in self._others}
        with _drawing(self._calls):
            if self._folder is None:
                replay(self._calls, self._pieces, made)
            else:
                replay(calls_for(self._calls, buffers), buffers, made)
                self._read(self._folder, deliver)
        if (model := self._model()) is not None:
            _waiting.pop(model, None)

    def _read(self, folder: Path, deliver: Callable[[Planned, Read], None]) -> None:
        from safetensors import safe_open

        found = self._find(folder)
        if found is None:
            assert self._whole is not None
            _log.warning("the tensors in %s have other names than the model's, so all are loaded", folder)
            state: Mapping[str, Tensor] = self._whole().state_dict()
            for planned in self.planned:
                deliver(planned, state[planned.names[0]].__getitem__)
            self._fill_buffers(state.get)
            return
        for storage, (path, name) in found.items():
            with safe_open(path, framework="pt") as file:
                deliver(self._planned[storage], file.get_slice(name).__getitem__)
        files = _files(folder)

        def read(name: str) -> Tensor | None:
            if name not in files:
                return None
            with safe_open(files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor

        self._fill_buffers(read)

    def _fill_buffers(self, read: Callable[[str], Tensor | None]) -> None:
        """Give the persistent buffers the values that were saved under their names, as `load_state_dict` does."""
        model = self._model()
        for prefix, module in () if model is None else model.named_modules():
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                if (saved := read(full)) is not None:
                    _require_shape(full, saved.shape, buffer.shape, self._folder)
                    buffer.data.copy_(saved)


def _set(module: nn.Module, name: str, value: Tensor, device: torch.device | None) -> None:
    """Give a module its tensor, converted as that was since.

    Like `to`, this moves buffers to the device, and no other tensors.
    """
    present = getattr(module, name)
    value = converted(value, present.through if isinstance(present, Unmade) else ())
    setattr(module, name, value.to(device) if name in module._buffers else value)


def _require_shape(name: str, found: Sequence[int], shape: torch.Size, place: Path | None) -> None:
    if tuple(found) != tuple(shape):
        raise UsageError(f"{name} has shape {tuple(found)} in {place}, but {tuple(shape)} in the model")


def _meta(fake: FakeTensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


@contextmanager
def _drawing(calls: Sequence[Call]) -> Iterator[None]:
    """Draw as recorded. Generators that were used since then go on from where they are now, and all after an error."""
    left = last_states(calls)
    now = {generator: generator.get_state() for generator in left}
    try:
        yield
    except BaseException:
        left.clear()
        raise
    finally:
        for generator, state in now.items():
            if generator not in left or not torch.equal(state, left[generator]):
                generator.set_state(state)


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor in a Hugging Face folder."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    if not (folder / WEIGHTS).is_file():
        return {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)
