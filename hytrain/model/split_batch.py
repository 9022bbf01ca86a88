"""Computes a model block by block in parts of the batch.

    hytrain.split_batch(model, 8)

    all at once            batch of 64 ─▶ block 1 ─▶ block 2 ─▶ …
    in parts               batch of 64 ─▶ block 1: 8, 8, 8, 8, 8, 8, 8, 8 ─▶ block 2: 8, 8, … ─▶ …
    accumulation, instead  8 ─▶ block 1 ─▶ block 2 ─▶ …; then the next 8, from block 1 on

Inside a block, memory is needed for one part. As with the whole batch, weights that rest in host memory come once for
all parts, where accumulation fetches them for each. Backward takes the parts of a block one after another, too.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as checkpointed

from hytrain.errors import UnsupportedError, UsageError
from hytrain.model.layers import find_blocks

#: What a block may be given besides tensors, and tuples, lists and dicts of them: it is the same for all parts.
SHARED: Final = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device, Enum)


def split_batch(model: nn.Module, parts: int, *, checkpoint: bool = False) -> None:
    """Let each repeated block of the model compute its batch in `parts` parts, one after another. 1: all at once.

    The batch is dimension 0 of the first tensor that a block is given, and of all others of the same size there. Its
    rows must not depend on each other, as for `nn.DataParallel`. A batch that `parts` does not divide has a smaller
    last part. In evaluation mode, blocks compute all at once, and so they do where another dimension of their first
    tensor is as large as the batch: then nobody knows which of the other tensors have its rows. Whatever watches calls
    of a block, a hook for example, sees each part.

    With `checkpoint`, blocks keep only the inputs of their parts for backward, which computes the rest again, as
    `torch.utils.checkpoint` does. A model's own checkpoints of whole blocks compute all parts again at once: leave them
    off, unless they are those of Transformers (`gradient_checkpointing_enable`), which are made for each part.

    Call it before the optimizer is made. Copies of the model, and files, have blocks that compute all at once. Raises
    `UnsupportedError` for a model without repeated blocks, and for one whose blocks compute rows together: with
    statistics of the batch (BatchNorm), or with the batch in another dimension (`batch_first=False`).
    """
    if parts < 1:
        raise UsageError(f"the number of parts is at least 1, not {parts}")
    blocks = find_blocks(model)
    if not blocks:
        raise UnsupportedError("split_batch: the model has no repeated blocks, as children of a ModuleList")
    for module in [each for block in blocks for each in block.modules()]:
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False):
            raise UnsupportedError(
                f"split_batch: a {type(module).__name__} computes with statistics of the whole batch"
            )
        if getattr(module, "batch_first", True) is False:
            raise UnsupportedError(
                f"split_batch: dimension 0 of a {type(module).__name__} is the batch with batch_first=True"
            )
    for block in blocks:
        kind: Any = vars(type(block)).get("_whole", type(block))
        block.__class__ = kind if parts == 1 else _in_parts(kind, parts, checkpoint)


@cache
def _in_parts(kind: type[nn.Module], parts: int, checkpoint: bool) -> type[nn.Module]:
    """A class of the same name, whose calls are made part by part. One for all blocks: they are compiled once."""

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Callable[..., Any] = super(split, block).__call__
        given, tree = _flat((args, kwargs))
        batch = next((each for each in given if isinstance(each, Tensor)), None)
        if not block.training or batch is None or batch.dim() == 0 or len(batch) <= 1 or not _is_told(given, batch):
            return whole(*args, **kwargs)
        _check(block, given)

        def compute(*part: Any) -> Any:
            args, kwargs = tree_unflatten(list(part), tree)
            return whole(*args, **kwargs)

        sizes = [len(part) for part in batch.chunk(parts)]
        splits = [_split(each, batch, sizes) for each in given]
        of_part = partial(checkpointed, compute, use_reentrant=False) if checkpoint else compute
        return _joined([of_part(*part) for part in zip(*splits, strict=True)], sizes, kind.__name__)

    def reduce(block: Any, protocol: Any) -> Any:
        """For copies and pickles, whose class is to be found by its name."""
        return copyreg._reconstructor, (kind, object, None), block.__getstate__()  # type: ignore[attr-defined]

    named = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__, "_whole": kind}
    split: type[nn.Module] = type(kind.__name__, (kind,), named)
    return split


def _flat(nested: Any) -> tuple[list[Any], TreeSpec]:
    """What is in tuples, lists and dicts."""
    return tree_flatten(nested, is_leaf=lambda each: type(each) not in (tuple, list, dict))


def _has(each: Any, size: int) -> bool:
    return isinstance(each, Tensor) and each.dim() > 0 and len(each) == size


def _is_told(given: Sequence[Any], batch: Tensor) -> bool:
    """Whether it can be told which tensors have the batch."""
    return len(batch) not in batch.shape[1:] or not any(each is not batch and _has(each, len(batch)) for each in given)


def _check(block: nn.Module, given: Sequence[Any]) -> None:
    name = type(block).__name__
    if hasattr(block, "_get_fsdp_state"):
        raise UnsupportedError(
            f"split_batch: {name} is sharded by fully_shard, which would gather its weights for each part: accumulate "
            "gradients in its place"
        )
    for each in given:
        if not isinstance(each, (Tensor, *SHARED)):
            raise UsageError(
                f"split_batch: {name} is given a {type(each).__name__}, which may hold all of the batch: leave it out "
                "(a cache by use_cache=False)"
            )


def _split(each: Any, batch: Tensor, sizes: list[int]) -> Sequence[Any]:
    """A part for each size. What backward needs of the batch's parts does not keep all of it."""
    if each is batch:
        return [part.clone() for part in batch.split(sizes)]
    return each.split(sizes) if _has(each, len(batch)) else [each] * len(sizes)


def _joined(made: list[Any], sizes: list[int], name: str) -> Any:
    """What the block would have returned for the whole batch."""
    trees = [_flat(each) for each in made]
    joined = list[Any]()
    for parts in zip(*[each for each, _ in trees], strict=True):
        if all(map(_has, parts, sizes)):
            joined.append(torch.cat(parts))
        elif isinstance(parts[0], SHARED) and all(part == parts[0] for part in parts):
            joined.append(parts[0])
        else:
            raise UsageError(f"split_batch: {name} returns something that is not split by the batch")
    return tree_unflatten(joined, trees[0][1])
