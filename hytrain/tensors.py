"""Access to the internals of tensors: local data, identity, version counter, storage order.

No other module of HyTrain uses `data_ptr`, `_version`, `as_strided` or DTensors' own parts. So a tensor class whose
data is elsewhere has to be supported only here. (A DTensor's address is 0, and every check of it would pass.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: By the names that the protocol has. float8 is codes, which only `kernels.float8` reads as numbers.
DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int16": torch.int16,
    "float8": torch.uint8,
}
#: Those that parameters may have.
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if dtype.is_floating_point}
#: As torch's allocator on a GPU aligns what it gives.
PART_ALIGN_BYTES: Final = 512
#: For each dimension, a beginning and an end.
Spans = tuple[tuple[int, int], ...]

#: Count one write per tensor that autograd did not see.
count_write: Final[Callable[[Any], None]] = torch.autograd.graph.increment_version


#: A context after which the versions of a tuple of tensors are what they were before.
keeping_versions: Final[Callable[[Any], AbstractContextManager[None]]] = _unsafe_preserve_version_counter


@contextmanager
def untraced() -> Iterator[None]:
    """What runs inside has real memory, also while `torch.export` traces a model with tensors that have none.

    And under `torch.func`'s transforms, of which `_tensor_str` of torch steps out in this way.
    """
    outside: Any = torch._C._DisableFuncTorch()
    with _disable_current_modes():
        yield
    del outside


#: Their module takes a second to import: without it, there are none.
_OF_DTENSORS: Final = "torch.distributed.tensor"


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return type(tensor) is not Tensor and isinstance(tensor, getattr(sys.modules.get(_OF_DTENSORS), "DTensor", ()))


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds: a DTensor's shard or replica, or else the tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def local_like(values: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `values`, distributed as `like` is. Waits for a collective if they are distributed otherwise.

    Gradients of tensor-parallel modules may come as sums that are still to be reduced.
    """
    if is_distributed(values) and is_distributed(like):
        if values.placements != like.placements:
            values = values.redistribute(like.device_mesh, like.placements)
        values = values._local_tensor
        values = getattr(values, "wait", lambda done=values: done)()  # of an AsyncCollectiveTensor
    return values


def distributed(part: Tensor, like: Tensor) -> Tensor:
    """This rank's `part` as a tensor that is distributed as `like` is: a DTensor, unless `like` is none.

    `part` may be in host memory although the mesh is one of GPUs, so this is no `DTensor.from_local`, which copies it.
    """
    if not is_distributed(like):
        return part
    from torch.distributed.tensor import DTensor

    assert like._spec.tensor_meta is not None, "it has a shape"
    meta = like._spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, replace(like._spec, tensor_meta=meta), requires_grad=False)


def spans(like: Tensor) -> Spans:
    """Where this rank's part of a tensor begins and ends, in each dimension of the whole."""
    if not is_distributed(like):
        return tuple((0, size) for size in like.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    assert tuple(shape) == tuple(local(like).shape), "a DTensor's local part is what its placements say"
    return tuple((at, at + size) for at, size in zip(offsets, shape, strict=True))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """A view of what this rank has of a `whole` tensor that is distributed as `like` is."""
    return whole[tuple(slice(*span) for span in spans(like))]


def version(tensor: Tensor) -> int:
    """Autograd's count of in-place writes. A write to a DTensor counts there, a write to its local part counts here."""
    return tensor._version + tensor._local_tensor._version if is_distributed(tensor) else tensor._version


def address(tensor: Tensor) -> int:
    """The address of this rank's first element. It identifies the tensor until its storage is replaced."""
    with torch._C.DisableTorchFunctionSubclass():
        return local(tensor).data_ptr()


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. From host memory it comes by way of pinned memory, so this waits for no GPU."""
    if device.type == "cpu" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor.to(device)


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor holds its own data, or its rank's part of it: a strided tensor, and no other subclass."""
    return type(local(tensor).data) is Tensor and tensor.layout is torch.strided


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory, each once, in any order."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in storage order, shape (numel,); shares memory and version counter."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def has_own_storage(*tensors: Tensor) -> bool:
    """Whether each one's storage has its elements and no others, and memory that can be freed and allocated again."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_shared = storage.device.type == "cpu" and storage.is_shared()  # with other processes
        if storage.nbytes() not in (0, tensor.nbytes) or not storage.resizable() or is_shared:
            return False
    return True


def in_one_piece(wanted: Sequence[tuple[int, torch.dtype]], device: torch.device, *, fresh: bool) -> list[Tensor]:
    """Tensors of so many elements each, 1 or more, shape (numel,), zeros if `fresh`, in one piece of memory.

    Each has a storage of its own; the memory is free once none is left. torch's allocator rounds a piece up by as much
    as 2 MiB, of which nobody else gets the rest: for planes of 42.5 MiB one by one, 1.5 MiB each. It does not know the
    parts: `record_stream` does nothing for them.
    """
    sizes = [numel * dtype.itemsize for numel, dtype in wanted]
    starts = list(accumulate((-(-size // PART_ALIGN_BYTES) * PART_ALIGN_BYTES for size in sizes), initial=0))

    with untraced():
        whole = (torch.zeros if fresh else torch.empty)(starts[-1], dtype=torch.uint8, device=device)
        parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        # By a capsule: of a tensor itself, from_dlpack takes only one of the thread's current GPU.
        return [from_dlpack(to_dlpack(part)).view(dtype) for part, (_, dtype) in zip(parts, wanted, strict=True)]


def storage_of(tensor: Tensor) -> int:
    """What identifies the tensor's storage, as long as it exists."""
    return int(tensor.untyped_storage()._cdata)


def impl_of(tensor: Tensor) -> int:
    """The address of torch's own object, c10::TensorImpl. It makes no object of the storage, as `storage_of` does."""
    return int(tensor._cdata)


def distinct(*tensors: Tensor) -> int:
    """How many tensors these are, together with those of which they are views."""
    return len({impl_of(each) for tensor in tensors for each in (tensor, tensor._base) if each is not None})


def storage_bytes(tensor: Tensor) -> Tensor:
    """All of the tensor's storage: uint8, shape (nbytes,), with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """What `in_form` needs to know of a tensor."""
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def in_form(whole: Tensor, form: tuple[Any, ...]) -> Tensor:
    """A view of `whole`, a copy of all of a tensor's storage, with that tensor's dtype, place, shape and strides."""
    dtype, *place = form
    return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *place)


def saves_with_other_hooks() -> bool:
    """Whether autograd hands what it saves to hooks already, as under a checkpoint, or may not use any."""
    autograd: Any = torch._C._autograd
    is_enabled, top = autograd._saved_tensors_hooks_is_enabled, autograd._top_saved_tensors_default_hooks
    return not is_enabled() or top(False) is not None


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    kind = getattr(sys.modules.get(_OF_DTENSORS), "DTensor", ())
    with torch._C.DisableTorchFunctionSubclass():
        return [(tensor._local_tensor if isinstance(tensor, kind) else tensor).data_ptr() for tensor in tensors]


def versions(tensors: Iterable[Tensor]) -> list[int]:
    kind = getattr(sys.modules.get(_OF_DTENSORS), "DTensor", ())
    with torch._C.DisableTorchFunctionSubclass():
        return [version(tensor) if isinstance(tensor, kind) else tensor._version for tensor in tensors]


def has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def holders(tensor: Tensor) -> int:
    """How many tensors have its storage, also views that autograd has saved, and arrays of NumPy."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the one just made


def _references(parameter: Tensor) -> tuple[int, int]:
    """How many references Python has to a parameter's gradient, and to what that is a view of."""
    gradient = parameter.grad
    base = None if gradient is None else gradient._base
    return sys.getrefcount(gradient), 0 if base is None else sys.getrefcount(base)


def _alone() -> tuple[int, int]:
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(2, device="cpu")[1:]
    return _references(parameter)


_ALONE: Final = _alone()


def has_kept_gradient(parameter: Tensor) -> bool:
    """Whether somebody else has its gradient, or what that is a view of: the loop, which has put it into `p.grad`.

    What a framework makes of DTensors' gradients, it may keep.
    """
    if is_distributed(parameter):
        return False
    of_gradient, of_base = _references(parameter)
    return of_gradient > _ALONE[0] or of_base > _ALONE[1]


def has_shared_gradient(parameter: Tensor) -> bool:
    """Whether another tensor has memory of its gradient: a view that a hook keeps, or another parameter's gradient.

    In backward, that may also be what autograd is about to use.
    """
    gradient = parameter.grad
    if gradient is None or is_distributed(parameter):
        return False
    return holders(gradient) > 1


def with_gradients_of_others(parameters: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Those, by number, whose gradient somebody else may have, too, or that lack the memory of their second tensor.

    To be called where parameters are not watched. Hooks ask for each gradient, so this calls nothing of Python's.
    """
    found = []
    for number, (parameter, own) in enumerate(parameters):
        gradient = parameter.grad
        if type(gradient) is Tensor and parameter.data_ptr() == own.data_ptr():
            storage = gradient.untyped_storage()
            if sys.getrefcount(gradient) <= _ALONE[0] and torch._C._storage_Use_Count(storage._cdata) == 2:
                continue  # it has the memory, and so has what was just made to count
        found.append(number)
    return found


def allocate(*tensors: Tensor) -> None:
    """Give their storages memory again, from the current stream's pool.

    All of them, or none: raises `torch.OutOfMemoryError`.
    """
    for index, tensor in enumerate(tensors):
        try:
            tensor.untyped_storage().resize_(tensor.nbytes)
        except torch.OutOfMemoryError:
            free(*tensors[:index])
            raise


def free(*tensors: Tensor) -> None:
    """Free their storages' memory. All who share a storage lose it, and have it again after `allocate`."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@contextmanager
def with_memory(tensor: Tensor) -> Iterator[None]:
    """Give its storage memory for a moment, if it has none: views can only be made of one that has."""
    is_there = has_memory(tensor)
    if not is_there:
        allocate(tensor)
    yield
    if not is_there:
        free(tensor)


def shaped(elements: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`: a view of `elements`, shape (numel,), with the shape and strides of `like`."""
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """`values` with the strides of the dense tensor `like`, which has the same shape. Copies only if they differ."""
    if values.stride() == like.stride():
        return values
    return torch.empty_strided(like.size(), like.stride(), dtype=values.dtype, device=values.device).copy_(values)
