"""The one door to what torch keeps below a tensor: local data, identity, version counter, storage order.

Nothing else in HyTrain reads `data_ptr`, `_version` or `as_strided`. A tensor class whose data lies elsewhere (a
DTensor's address is 0, and every check of it would pass) has to be understood here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

#: Where a tensor's first element lies: its identity, as long as nobody replaces its storage.
address: Final[Callable[[Tensor], int]] = Tensor.data_ptr
#: Autograd's count of writes in place.
version: Final[Callable[[Tensor], int]] = attrgetter("_version")
#: Tell autograd of a write that it did not see, once for each tensor.
count_write: Final = torch.autograd.graph.increment_version


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor holds its own data: dense storage, and no subclass in between."""
    return type(tensor.data) is Tensor and tensor.layout is torch.strided


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order."""
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
    """`values` with the strides of the dense tensor `like`, whose shape it has; a copy only if they differ."""
    if values.stride() == like.stride():
        return values
    return torch.empty_strided(like.size(), like.stride(), dtype=values.dtype, device=values.device).copy_(values)
