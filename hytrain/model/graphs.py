"""What HyTrain has to know of CUDA graphs that the user has made of parts of the model: a replay runs no hook inside.

torch.cuda.make_graphed_callables       of modules, before the optimizer is made: hooks of the module itself still
                                        run. A graph reads weights where they were, so they cannot be offloaded
torch.compile(mode="reduce-overhead")   graphs of compiled code, one for each forward and backward, which write
                                        gradients into memory that later graphs use again
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

#: What each thread that trains has of the compiler's CUDA graphs, by device.
_OF_GRAPHS: Final = "tree_manager_containers"


def replays(outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a graph that `make_graphed_callables` has made with one of `parameters` is among what made `outputs`."""
    own = {id(parameter) for parameter in parameters}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = set[Any]()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        before = [other for other, _ in function.next_functions]
        if function.name() == "GraphedBackward" and any(id(getattr(leaf, "variable", None)) in own for leaf in before):
            return True
        waiting += before
    return False


def may_write_again(gradient: Tensor) -> bool:
    """Whether a replay may write a gradient's memory on a GPU while it is still read, as the compiler's graphs do.

    This is `torch._inductor.cudagraph_trees.get_manager`, which takes a lock: hooks ask for each gradient.
    """
    if not torch._C._is_key_in_tls(_OF_GRAPHS):
        return False
    of_device = torch._C._get_obj_in_tls(_OF_GRAPHS).get(gradient.device.index)
    return of_device is not None and of_device.tree_manager is not None


def is_captured(tensor: Tensor) -> bool:
    """Whether a graph is being made of what the current stream of a tensor's device does."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
