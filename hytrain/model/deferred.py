"""A model's construction, recorded without memory and made up later, one tensor at a time.

    with recording() as calls: model = build()    fake tensors; every call of an operator is noted
    replay(calls, …)                              the same calls in the same order, from the same states of generators

So values are those of a model that is built at once, bit for bit. `blueprint` gives them to parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hytrain.errors import UnsupportedError
from hytrain.tensors import untraced

Storage = int  # the address of a fake tensor's storage, which is the same for all its views
#: Methods that write their tensor without reading it.
OVERWRITES: Final = ("copy_", "fill_", "normal_", "uniform_", "zero_")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What a fake tensor is made of. It keeps no tensor, since a module's `to` exchanges parameters' contents."""

    memory: torch.UntypedStorage
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, fake: Tensor) -> Piece:
        offset = int(fake.storage_offset())
        return cls(fake.untyped_storage(), fake.dtype, fake.device, offset, fake.shape, fake.stride())

    @property
    def storage(self) -> Storage:
        return int(self.memory._cdata)

    @property
    def is_whole(self) -> bool:
        return self.shape.numel() * self.dtype.itemsize == self.memory.nbytes()

    def is_same(self, other: Piece) -> bool:
        """Whether it has the same elements of its storage, in the same order."""
        ours, theirs = ((one.dtype, one.offset, one.shape, one.stride) for one in (self, other))
        return self.storage == other.storage and ours == theirs

    def within(self, memory: torch.UntypedStorage) -> Tensor:
        view = torch.empty(0, dtype=self.dtype, device=self.device)
        return view.set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator, its arguments and results with pieces in place of tensors, and torch's default dtype at that time.

    `state` is that of its generator, if it draws from that for the first time, or after others have used it. `left` is
    the state that the recording has left there, which is not the one that a real draw leaves.
    """

    operator: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[Piece, ...]
    default: torch.dtype
    state: Tensor | None = None
    left: Tensor | None = None

    @property
    def draws(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operator.tags

    @property
    def generator(self) -> torch.Generator:
        """The one that was given, or its device's."""
        given: torch.Generator | None = self.kwargs.get("generator")
        if given is not None:
            return given
        device = next(iter((*self.results, *self.arguments))).device
        if device.type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        return torch.default_generator

    @property
    def writes(self) -> bool:
        return bool(self.operator._schema.is_mutable)

    @property
    def arguments(self) -> list[Piece]:
        return _pieces((self.args, self.kwargs))

    @property
    def touched(self) -> set[Storage]:
        return {piece.storage for piece in (*self.arguments, *self.results)}

    def overwrites(self, storage: Storage) -> bool:
        """Whether none of the storage's former content matters after this call."""
        pieces = self.arguments
        if not self.writes or not pieces or self.operator.overloadpacket.__name__ not in OVERWRITES:
            return False
        target, *others = pieces
        return target.is_whole and target.storage == storage and all(other.storage != storage for other in others)


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Tensors that are made in this context have shapes, dtypes and devices, but no memory. Yields their calls.

    Generators that would draw go on from other states afterwards, so that nobody draws the same numbers.
    """
    mode = FakeTensorMode()
    recorder = _Recorder(mode)
    try:
        with mode, recorder:
            yield recorder.calls
        recorder.generators.check()
    except BaseException:
        recorder.generators.take_back()
        raise


class _Recorder(TorchDispatchMode):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memo = mode.fake_tensor_converter.meta_converter.tensor_memo
        self.calls: list[Call] = []
        self.generators = _Generators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._memo.clear()  # it has weak references to parameters
        with untraced():  # constants, which others may write
            args, kwargs = tree_map_only(Tensor, _constant, (args, kwargs or {}))
        args, kwargs, found = tree_map_only(FakeTensor, Piece.of, (args, kwargs, results))
        call = Call(func, args, kwargs, tuple(_pieces(found)), torch.get_default_dtype())
        if call.draws:
            with untraced():
                state, left = self.generators.draw(call.generator)
                call = replace(call, state=state, left=left)
        self.calls.append(call)
        return results


class _Generators:
    """The states of generators during a recording, in which nothing real is drawn.

    A number is drawn for each call that would draw. So it shows if somebody else has used the generator between two.
    """

    def __init__(self) -> None:
        self._first: dict[torch.Generator, Tensor] = {}
        self._left: dict[torch.Generator, list[bytes]] = {}

    def draw(self, generator: torch.Generator) -> tuple[Tensor | None, Tensor]:
        """The state from which the call would draw, unless it is the one that the last call left; and what it leaves.

        Raises `UnsupportedError` if the generator was set back to what an earlier call has left.
        """
        found, left = generator.get_state(), self._left.setdefault(generator, [])
        self._first.setdefault(generator, found)
        self._require_no_return(found, left)
        torch.rand(1, device=generator.device, generator=generator)
        after = generator.get_state()
        is_expected = bool(left) and _bytes(found) == left[-1]
        left.append(_bytes(after))
        return None if is_expected else found, after

    def check(self) -> None:
        for generator, left in self._left.items():
            self._require_no_return(generator.get_state(), left)

    def take_back(self) -> None:
        for generator, first in self._first.items():
            generator.set_state(first)

    def _require_no_return(self, state: Tensor, left: list[bytes]) -> None:
        if _bytes(state) in left[:-1]:
            raise UnsupportedError(
                "the construction restores an earlier state of a random generator (as fork_rng does), but its numbers "
                "are drawn later: seed the generator before and after instead"
            )


def _bytes(state: Tensor) -> bytes:
    return hashlib.sha256(state.numpy().tobytes()).digest()


def first_states(calls: Iterable[Call]) -> dict[torch.Generator, Tensor]:
    """The states in which the recording has found the generators."""
    found: dict[torch.Generator, Tensor] = {}
    for call in calls:
        if call.state is not None:
            found.setdefault(call.generator, call.state)
    return found


def last_states(calls: Iterable[Call]) -> dict[torch.Generator, Tensor]:
    """The states in which the recording has left the generators."""
    return {call.generator: call.left for call in calls if call.left is not None}


def calls_for(calls: Sequence[Call], wanted: Iterable[Storage]) -> list[Call]:
    """Those of the calls that the wanted storages' content comes from."""
    needed, chosen = set(wanted), list[Call]()
    for call in reversed(calls):
        written = [*call.results, *(call.arguments if call.writes else ())]
        if any(piece.storage in needed for piece in written):
            needed.update(piece.storage for piece in call.arguments)
            chosen.append(call)
    if any(call.draws for call in chosen):
        return list(calls)  # the numbers that others draw come in between
    return chosen[::-1]


def replay(calls: Sequence[Call], wanted: Mapping[Storage, Piece], deliver: Callable[[Storage, Tensor], None]) -> None:
    """Makes the calls for real, and delivers each wanted tensor once it is complete.

    A storage is freed after its last call, and before a call that overwrites all of it.
    """
    lives = _Lives(calls)
    real: dict[Storage, torch.UntypedStorage] = {}

    def realized(piece: Piece) -> Tensor:
        if piece.storage not in real:
            real[piece.storage] = torch.UntypedStorage(piece.memory.nbytes(), device=piece.device)
        return piece.within(real[piece.storage])

    with torch.no_grad():
        for number, call in enumerate(calls):
            known = {piece.storage for piece in call.arguments}
            if call.writes or any(piece.storage not in known for piece in call.results):
                args, kwargs = tree_map_only(Tensor, Tensor.clone, (call.args, call.kwargs))  # constants
                args, kwargs = tree_map_only(Piece, realized, (args, kwargs))
                if call.state is not None:
                    call.generator.set_state(call.state)
                with _default_dtype(call.default):
                    made = [leaf for leaf in tree_leaves(call.operator(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for piece, tensor in zip(call.results, made, strict=True):
                    real.setdefault(piece.storage, tensor.untyped_storage())
            for storage in lives.ended(number):
                if storage in wanted and lives.last[storage] == number:
                    deliver(storage, realized(wanted[storage]))
                real.pop(storage, None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Lives:
    """When a storage's content is needed for the last time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.last: dict[Storage, int] = {}
        self._ends: dict[int, list[Storage]] = {}
        for number, call in enumerate(calls):
            for storage in call.touched:
                if storage in self.last and call.overwrites(storage):
                    self._ends.setdefault(self.last[storage], []).append(storage)
                self.last[storage] = number
        for storage, number in self.last.items():
            self._ends.setdefault(number, []).append(storage)

    def ended(self, number: int) -> list[Storage]:
        """The storages whose content no later call needs."""
        return self._ends.get(number, [])


def _constant(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else tensor.clone()


def _pieces(tree: Any) -> list[Piece]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Piece)]
