"""Access to the internals of tensors: local data, identity, version counter, storage order.

No other module of HyTrain uses `data_ptr`, `_version` or `as_strided`. So a tensor class whose data is elsewhere has to
be supported only here. (A DTensor's address is 0, and every check of it would pass.)
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

#: Autograd's count of in-place writes.
version: Final[Callable[[Tensor], int]] = attrgetter("_version")
#: Count one write per tensor that autograd did not see.
count_write: Final = torch.autograd.graph.increment_version


def address(tensor: Tensor) -> int:
    """The address of a tensor's first element. It identifies the tensor until its storage is replaced."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor holds its own data: a strided tensor, and no subclass."""
    return type(tensor.data) is Tensor and tensor.layout is torch.strided


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory, each once, in any order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in storage order, shape (numel,); shares memory and version counter."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(elements: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`: a view of `elements`, shape (numel,), with the shape and strides of `like`."""
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """`values` with the strides of the dense tensor `like`, which has the same shape. Copies only if they differ."""
    if values.stride() == like.stride():
        return values
    return torch.empty_strided(like.size(), like.stride(), dtype=values.dtype, device=values.device).copy_(values)
