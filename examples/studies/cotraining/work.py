"""What the CPU trainer is given to do: a model and a loss by their functions' names, and micro-batches as bytes.

    trainer       a function ─ named ─▶ module, name, arguments ─ found ─▶ the same function, CPU trainer
                  a micro-batch ─ Packed ─▶ JSON, then the elements of each tensor ─ unpacked ─▶ the micro-batch

Nothing is pickled: a function is imported where it is called, and a micro-batch is made of tensors and of JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hytrain.errors import ConfigError, UnsupportedError
from hytrain.memory import arena
from hytrain.memory.lending import view
from hytrain.tensors import is_plain, on_device

#: Tensors of a micro-batch begin at multiples of so many bytes.
ALIGN_BYTES: Final = 64


def named(role: str, function: Callable[..., Any]) -> list[Any]:
    """Module, its file, qualified name and arguments of a function, or of a `functools.partial` of one, as JSON.

    `role` is what the user calls it. Raises `ConfigError` if no other process can import it.
    """
    bare, args, keywords = function, (), dict[str, Any]()
    if isinstance(function, partial):
        bare, args, keywords = function.func, function.args, function.keywords
    module, name = getattr(bare, "__module__", None), getattr(bare, "__qualname__", None)
    if module == "__main__":
        raise ConfigError(
            f"{role}={name} is defined in the script itself, which the CPU trainer does not run: move it into a module "
            "that the script imports"
        )
    try:
        file = getattr(sys.modules.get(str(module)), "__file__", None)
        is_there = callable(bare) and found([module, file, name, [], {}]).func is bare
    except (ImportError, AttributeError, TypeError, ValueError):
        is_there = False
    if not is_there:
        raise ConfigError(f"{role} is {bare!r}: a function that can be imported, or a functools.partial of one")
    described: list[Any] = [module, file, name, list(args), keywords]
    try:
        is_same = json.loads(json.dumps(described)) == described
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise ConfigError(
            f"the arguments of {role}={name} in its functools.partial are {args} and {keywords}: only numbers, "
            "strings, lists and dictionaries with strings as keys can be sent to the CPU trainer"
        )
    return described


def found(described: Sequence[Any]) -> partial[Any]:
    """The function that `named` has described. Raises `ConfigError` if its module is another file here."""
    module, file, name, args, keywords = described
    function: Any = importlib.import_module(module)
    if (here := getattr(function, "__file__", None)) != file:
        raise ConfigError(f"module {module} is {file} in the trainer, but {here} in the CPU trainer")
    for part in name.split("."):
        function = getattr(function, part)
    return partial(function, *args, **keywords)


class Packed:
    """A micro-batch as bytes, `data`, of which the first `text_bytes` are JSON. With `nbytes`, the next one begins."""

    def __init__(self, batch: Any) -> None:
        """Raises `UnsupportedError` if it has something else than tensors and JSON's values."""
        tensors = list[Tensor]()
        text = json.dumps(_described(batch, "a micro-batch", tensors)).encode()
        *starts, self.nbytes = _starts(len(text), [each.nbytes for each in tensors])
        self.text_bytes, self.data = len(text), bytearray(self.nbytes)
        self.data[: len(text)] = text
        for start, tensor in zip(starts, tensors, strict=True):
            if tensor.numel():
                into = torch.frombuffer(self.data, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                into.view(tensor.shape).copy_(tensor)


def _described(part: Any, where: str, tensors: list[Tensor]) -> dict[str, Any]:
    """A part of a micro-batch as JSON, but for the tensors' elements."""
    if isinstance(part, Tensor):
        if not is_plain(part):
            raise UnsupportedError(f"{where} is a tensor that is not dense: make it dense for the CPU trainer")
        tensors.append(part.detach())
        return {"tensor": [str(part.dtype).removeprefix("torch."), list(part.shape)]}
    if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
        return {"dict": {key: _described(value, f"{where}[{key!r}]", tensors) for key, value in part.items()}}
    if type(part) in (list, tuple):
        members = [_described(value, f"{where}[{index}]", tensors) for index, value in enumerate(part)]
        return {type(part).__name__: members}
    if part is None or isinstance(part, bool | int | float | str):
        return {"value": part}
    raise UnsupportedError(
        f"{where} is of {type(part).__name__}: only tensors, numbers, strings, and lists, tuples and dictionaries "
        "(with strings as keys) of them can be sent to the CPU trainer"
    )


def unpacked(mapping: arena.Mapping, at: int, text_bytes: int) -> Any:
    """The micro-batch whose `Packed.data` is there. Its tensors are views of the memory."""
    described = json.loads(bytes(mapping.buffer[at : at + text_bytes]))
    place = at + text_bytes

    def made(part: dict[str, Any]) -> Any:
        nonlocal place
        [(kind, value)] = part.items()
        match kind:
            case "tensor":
                name, shape = value
                place = _aligned(place)
                tensor = view(mapping, place, getattr(torch, name), shape)
                place += tensor.nbytes
                return tensor
            case "dict":
                return {key: made(member) for key, member in value.items()}
            case "list" | "tuple":
                members = [made(member) for member in value]
                return members if kind == "list" else tuple(members)
            case _:
                return value

    return made(described)


def _aligned(place: int) -> int:
    return -(-place // ALIGN_BYTES) * ALIGN_BYTES


def _starts(text_bytes: int, sizes: Sequence[int]) -> Iterator[int]:
    """Where each tensor begins, and where the micro-batch ends."""
    place = text_bytes
    for size in sizes:
        place = _aligned(place)
        yield place
        place += size
    yield _aligned(place)


def moved(batch: Any, device: torch.device) -> Any:
    """The micro-batch with its tensors on the device. What the loop writes into them afterwards does no harm."""
    if isinstance(batch, Tensor):
        is_read_later = batch.device.type == "cpu" and batch.is_pinned()  # by a copy that nobody waits for
        return on_device(batch.clone() if is_read_later else batch, device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def seed_of(seed: int, step: int, part: int) -> int:
    """The seed of one part of a step's batch."""
    digest = hashlib.blake2b(f"{seed} {step} {part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
