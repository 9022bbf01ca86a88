"""Collectives that write weights in place, as `dist.all_reduce(p.data)` does: here their writes are counted.

    dist.all_reduce, broadcast, recv ─▶ an operator of c10d ─▶ here ─▶ the collective
                                                                └─ one more version of the parameter ─▶ `masters`

Autograd counts what other operators write, but not what collectives do. So these are followed on their way to their own
kernels, from the first optimizer on. As with any use of a parameter, who got at its memory has waited for its update.
`hooks` watches the parameters of each model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hytrain.tensors import count_write

if TYPE_CHECKING:
    from hytrain.step.uses import Uses

#: Those whose first argument is a list of the tensors that they write.
WRITING: Final = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "scatter_",
)

_watched = weakref.WeakSet["Uses"]()


def watch(uses: Uses) -> Callable[[], None]:
    """Count what collectives write into these parameters. Returns the way back."""
    _follow()
    _watched.add(uses)
    known = weakref.ref(uses)
    return lambda: _watched.discard(found) if (found := known()) is not None else None


@cache
def _follow() -> torch.library.Library:
    """Put a kernel before those that communicate, where other operators' writes are counted. It stays there."""
    library = torch.library.Library("c10d", "IMPL")
    for name in WRITING:
        library.impl(name, _before(getattr(torch.ops.c10d, name).default), "ADInplaceOrView")
    return library


def _before(operator: Any) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

    def kernel(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        written = [parameter for uses in list(_watched) for parameter in uses.with_memory_of(tensors)]
        with torch._C._ExcludeDispatchKeyGuard(below):
            result = operator(tensors, *args, **kwargs)
        count_write(written)
        return result

    return kernel
