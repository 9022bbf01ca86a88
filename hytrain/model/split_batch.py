"""Computes a model block by block in parts of the batch.

    hytrain.split_batch(model, 8)

    all at once            batch of 64 ─▶ block 1 ─▶ block 2 ─▶ …
    in parts               batch of 64 ─▶ block 1: 8, 8, 8, 8, 8, 8, 8, 8 ─▶ block 2: 8, 8, … ─▶ …
    accumulation, instead  8 ─▶ block 1 ─▶ block 2 ─▶ …; then the next 8, from block 1 on

Inside a block, memory is needed for one part. As with the whole batch, weights that rest in host memory come once for
all parts, where accumulation fetches them for each. Backward takes the parts of a block one after another, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
SHARED: Final = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum)


def split_batch(model: nn.Module, parts: int, *, checkpoint: bool = False) -> None:
    """Let each repeated block of the model compute its batch in `parts` parts, one after another. 1: all at once.

    The batch is dimension 0 of the first tensor that a block is given, and of all others of the same size there. A
    batch that `parts` does not divide has a smaller last part. Without gradients, blocks compute all at once.

    With `checkpoint`, blocks keep only the inputs of their parts for backward, which computes the rest again, as
    `torch.utils.checkpoint` does. A model's own checkpoints of whole blocks compute all parts again at once: leave them
    off, unless they are those of Transformers (`gradient_checkpointing_enable`), which are made for each part.

    Call it before the optimizer is made. Raises `UnsupportedError` for a model without repeated blocks, and for one
    whose blocks compute with statistics of the batch (BatchNorm).
    """
    if parts < 1:
        raise UsageError(f"the number of parts is at least 1, not {parts}")
    blocks = find_blocks(model)
    if not blocks:
        raise UnsupportedError("split_batch: the model has no repeated blocks, as children of a ModuleList")
    for norm in [each for block in blocks for each in block.modules()]:
        if isinstance(norm, _BatchNorm) or getattr(norm, "track_running_stats", False):
            raise UnsupportedError(f"split_batch: a {type(norm).__name__} computes with statistics of the whole batch")
    for block in blocks:
        kind: Any = getattr(type(block), "_whole", type(block))
        block.__class__ = kind if parts == 1 else _in_parts(kind, parts, checkpoint)


@cache
def _in_parts(kind: type[nn.Module], parts: int, checkpoint: bool) -> type[nn.Module]:
    """A class of the same name, whose calls are made part by part. One for all blocks: they are compiled once."""

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Callable[..., Any] = super(split, block).__call__
        given, tree = _flat((args, kwargs))

        def compute(part: Sequence[Any]) -> Any:
            args, kwargs = tree_unflatten(list(part), tree)
            return whole(*args, **kwargs)

        batch = next((each for each in given if isinstance(each, Tensor)), None)
        if batch is None or batch.dim() == 0 or len(batch) <= 1 or not torch.is_grad_enabled():
            return whole(*args, **kwargs)
        _check(given, batch, kind.__name__)
        if not (hasattr(block, "_has_rows") or torch.compiler.is_compiling()):
            _check_rows(block, compute, given, batch)
            block._has_rows = True
        sizes = [len(part) for part in batch.chunk(parts)]
        splits = [each.split(sizes) if _has(each, len(batch)) else [each] * len(sizes) for each in given]
        of_part = partial(checkpointed, compute, use_reentrant=False) if checkpoint else compute
        return _joined([of_part(part) for part in zip(*splits, strict=True)], sizes, kind.__name__)

    split: type[nn.Module] = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "_whole": kind}
    )
    return split


def _flat(nested: Any) -> tuple[list[Any], TreeSpec]:
    """What is in tuples, lists and dicts."""
    return tree_flatten(nested, is_leaf=lambda each: type(each) not in (tuple, list, dict))


def _has(each: Any, size: int) -> bool:
    return isinstance(each, Tensor) and each.dim() > 0 and len(each) == size


def _check(given: list[Any], batch: Tensor, name: str) -> None:
    for each in given:
        if not isinstance(each, (Tensor, *SHARED)):
            raise UsageError(
                f"split_batch: {name} is given a {type(each).__name__}, which may hold all of the batch: leave it out "
                "(a cache by use_cache=False)"
            )
        if each is not batch and _has(each, len(batch)) and len(batch) in batch.shape[1:]:
            raise UsageError(
                f"split_batch: {name} is given tensors of {len(batch)} rows, which may be the batch or another "
                f"dimension of {tuple(batch.shape)}: give batches of another size"
            )


def _check_rows(block: nn.Module, compute: Callable[[list[Any]], Any], given: list[Any], batch: Tensor) -> None:
    """Compute two rows, and each of them beside another one: that must make no difference."""
    rows = [each[:2] if _has(each, len(batch)) else each for each in given]
    place = next(place for place, each in enumerate(given) if each is batch)
    modes = [(module, module.training) for module in block.modules()]
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        block.eval()
        with torch.no_grad(), eager:
            both, _ = _flat(compute(rows))
            for row in (0, 1):
                beside = rows[place].clone()
                beside[1 - row].neg_()
                again, _ = _flat(compute([*rows[:place], beside, *rows[place + 1 :]]))
                if not all(_same_row(row, *pair) for pair in zip(both, again, strict=True)):
                    raise UnsupportedError(
                        f"split_batch: {type(block).__name__} computes rows of a batch together: dimension 0 of its "
                        "first tensor must be the batch (batch_first=True)"
                    )
    finally:
        for module, mode in modes:
            module.training = mode


def _same_row(row: int, one: Any, other: Any) -> bool:
    """Within rounding."""
    if not (_has(one, 2) and one.is_floating_point()):
        return True
    error, size = (one[row].float() - other[row].float()).norm(), one[row].float().norm()
    return bool(error <= torch.finfo(one.dtype).eps * size)


def _joined(made: list[Any], sizes: list[int], name: str) -> Any:
    """What the block would have returned for the whole batch."""
    trees = [_flat(each) for each in made]
    joined = list[Any]()
    for parts in zip(*[each for each, _ in trees], strict=True):
        if all(map(_has, parts, sizes)):
            joined.append(torch.cat(parts))
        elif isinstance(parts[0], SHARED):
            joined.append(parts[0])
        else:
            raise UsageError(f"split_batch: {name} returns something that is not split by the batch")
    return tree_unflatten(joined, trees[0][1])
