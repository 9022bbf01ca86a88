"""A model's construction, recorded without memory and made up later, one tensor at a time.

    with recording() as calls: model = build()    fake tensors; every call of an operator is noted
    shard the model, on the meta device
    replay(calls, …)                               the same calls in the same order: the same random numbers

`sharded` calls this where a model has several ranks: each has a whole tensor only until it has taken its shard. Every
rank makes all calls, so values are those of one rank, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Storage = int  # the address of a fake tensor's storage, which is the same for all its views
#: Methods that write their tensor without reading it.
OVERWRITES: Final = ("copy_", "fill_", "normal_", "uniform_", "zero_")


@dataclass(frozen=True, slots=True)
class Call:
    """An operator, its arguments and results with fake tensors in them, and torch's default dtype at that time."""

    operator: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[FakeTensor, ...]
    default: torch.dtype

    @property
    def writes(self) -> bool:
        return bool(self.operator._schema.is_mutable)

    @property
    def arguments(self) -> list[FakeTensor]:
        return _fakes((self.args, self.kwargs))

    @property
    def touched(self) -> set[Storage]:
        return {storage_of(fake) for fake in (*self.arguments, *self.results)}

    def overwrites(self, storage: Storage) -> bool:
        """Whether none of the storage's former content matters after this call."""
        fakes = self.arguments
        if not self.writes or not fakes or self.operator.overloadpacket.__name__ not in OVERWRITES:
            return False
        target, *others = fakes
        whole = target.numel() * target.itemsize == target.untyped_storage().nbytes()
        return whole and storage_of(target) == storage and storage not in map(storage_of, others)


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Tensors that are made in this context have shapes, dtypes and devices, but no memory. Yields their calls."""
    with FakeTensorMode(), _Recorder() as recorder:
        yield recorder.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, kwargs or {}, tuple(_fakes(results)), torch.get_default_dtype()))
        return results


def calls_for(calls: Sequence[Call], wanted: Iterable[Storage]) -> list[Call]:
    """Those of the calls that the wanted storages' content comes from."""
    needed, chosen = set(wanted), list[Call]()
    for call in reversed(calls):
        written = [*call.results, *(call.arguments if call.writes else ())]
        if needed & set(map(storage_of, written)):
            needed |= set(map(storage_of, call.arguments))
            chosen.append(call)
    return chosen[::-1]


def replay(
    calls: Sequence[Call], wanted: Mapping[Storage, FakeTensor], deliver: Callable[[Storage, Tensor], None]
) -> None:
    """Makes the calls for real, and delivers each wanted tensor once it is complete.

    A storage is freed after its last call, and before a call that overwrites all of it.
    """
    lives = _Lives(calls)
    real: dict[Storage, torch.UntypedStorage] = {}

    def realized(fake: FakeTensor) -> Tensor:
        storage = storage_of(fake)
        if storage not in real:
            real[storage] = torch.UntypedStorage(fake.untyped_storage().nbytes(), device=fake.device)
        view = torch.empty(0, dtype=fake.dtype, device=fake.device)
        return view.set_(real[storage], int(fake.storage_offset()), fake.shape, fake.stride())

    with torch.no_grad():
        for number, call in enumerate(calls):
            known = set(map(storage_of, call.arguments))
            if call.writes or any(storage_of(fake) not in known for fake in call.results):
                args, kwargs = tree_map_only(FakeTensor, realized, (call.args, call.kwargs))
                with _default_dtype(call.default):
                    made = [leaf for leaf in tree_leaves(call.operator(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for fake, tensor in zip(call.results, made, strict=True):
                    real.setdefault(storage_of(fake), tensor.untyped_storage())
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


def storage_of(fake: Tensor) -> Storage:
    return int(fake.untyped_storage()._cdata)


def _fakes(tree: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)]
