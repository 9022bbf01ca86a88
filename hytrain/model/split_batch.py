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
from hytrain.model.fsdp import is_sharded
from hytrain.model.layers import find_blocks
from hytrain.tensors import version

#: torch's own blocks, whose attention says where the batch is.
TORCHS: Final = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: What a block may be given besides tensors, and tuples, lists and dicts of them: it is the same for all parts.
SHARED: Final = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device, Enum)


def split_batch(model: nn.Module, parts: int, *, checkpoint: bool = False) -> None:
    """Let each repeated block of the model compute its batch in `parts` parts, one after another. 1: all at once.

    The batch is dimension 0 of the first tensor that a block is given, (batch, tokens, …). Its rows must not depend on
    each other, as for `nn.DataParallel`. Other tensors of as many rows are split with it if they have its shape, or
    whole numbers for its tokens in dimension 1, or four dimensions, as masks do. Where something else is as large as
    the batch, nobody knows whether it has rows of it, and the block computes all at once: a bias of shape (heads,
    tokens, tokens) with as many heads, or a tensor with several rows for each of the batch. So it does in evaluation
    mode. A batch that `parts` does not divide has a smaller last part. A block that returns a vector or
    a number is refused, and so is one that writes into what it is given, or puts something into a list or dict of it.
    Whatever watches calls of a block, a hook for example, sees each part.

    With `checkpoint`, blocks keep only the inputs of their parts for backward, which computes the rest again, as
    `torch.utils.checkpoint` does. A model's own checkpoints of whole blocks compute all parts again at once: leave them
    off, unless they are those of Transformers (`gradient_checkpointing_enable`), which are made for each part.

    Call it before the optimizer is made. Copies of the model, and files, have blocks that compute all at once. Raises
    `UnsupportedError` for a model without repeated blocks, for blocks that compute with statistics of the batch
    (BatchNorm), and for torch's own layers with `batch_first=False`.
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
    for block in blocks:
        attention = block.self_attn if isinstance(block, TORCHS) else block
        if getattr(attention, "batch_first", True) is False:
            raise UnsupportedError(
                f"split_batch: a {type(block).__name__} has batch_first=False, so dimension 0 is not the batch: make "
                "it with batch_first=True"
            )
    for block in blocks:
        kind: Any = vars(type(block)).get("_whole", type(block))
        block.__class__ = kind if parts == 1 else _in_parts(kind, parts, checkpoint)


@cache
def _in_parts(kind: type[nn.Module], parts: int, checkpoint: bool) -> type[nn.Module]:
    """A class of the same name, whose calls are made part by part. One for all blocks: they are compiled once."""

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Callable[..., Any] = super(split, block).__call__
        if not block.training:
            return whole(*args, **kwargs)
        given, tree = _flat((args, kwargs))
        _check(block, given)
        batch = next((each for each in given if isinstance(each, Tensor)), None)
        if batch is None or batch.dim() == 0 or len(batch) <= 1 or not all(_is_told(each, batch) for each in given):
            return whole(*args, **kwargs)

        def compute(*part: Any) -> Any:
            args, kwargs = tree_unflatten(list(part), tree)
            before = _known(part)
            result = whole(*args, **kwargs)
            if before != _known(_flat((args, kwargs))[0]):
                raise UsageError(
                    f"split_batch: {kind.__name__} writes into what it is given: let it return that instead"
                )
            return result

        sizes = [len(part) for part in batch.chunk(parts)]
        splits = [_split(each, batch, sizes) for each in given]
        of_part = partial(checkpointed, compute, use_reentrant=False) if checkpoint else compute
        made = [of_part(*part) for part in zip(*splits, strict=True)]
        return _joined(made, sizes, kind.__name__)

    def reduce(block: Any, protocol: Any) -> Any:
        """For copies and pickles, whose class is to be found by its name."""
        return copyreg._reconstructor, (kind, object, None), block.__getstate__()  # type: ignore[attr-defined]

    named = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__, "_whole": kind}
    split: type[nn.Module] = type(kind.__name__, (kind,), named)
    return split


def _flat(nested: Any) -> tuple[list[Any], TreeSpec]:
    """What is in tuples, lists and dicts."""
    return tree_flatten(nested, is_leaf=lambda each: type(each) not in (tuple, list, dict))


def _known(given: Sequence[Any]) -> list[tuple[int, int]]:
    """What is another one after somebody has written into it, or has put something else in its place."""
    if torch.compiler.is_compiling():
        return []
    return [(id(each), version(each) if isinstance(each, Tensor) and not each.is_inference() else 0) for each in given]


def _has(each: Any, size: int) -> bool:
    return isinstance(each, Tensor) and each.dim() > 0 and len(each) == size


def _has_rows(each: Any, batch: Tensor) -> bool:
    """Whether the tensor has rows of the batch."""
    if each is batch:
        return True
    if not _has(each, len(batch)):
        return False
    is_counted = not each.is_floating_point() and each.shape[1:2] == batch.shape[1:2] != ()
    return each.dim() == 4 or each.shape == batch.shape or is_counted


def _is_told(each: Any, batch: Tensor) -> bool:
    """Whether it is known if this has rows of the batch."""
    size = len(batch)
    if isinstance(each, Tensor):
        if each is batch or each.dim() == 0 or len(each) % size:
            return True
        if len(each) > size:
            return each.dim() < 3 and each.shape[:1] == batch.shape[1:2]  # a table of tokens; or it has some for each
        is_square = each.dim() == 3 and each.shape[1] == each.shape[2]  # for each head, perhaps
        return _has_rows(each, batch) and not is_square and size not in batch.shape[1:]
    return size not in each if isinstance(each, torch.Size) else isinstance(each, bool | Enum) or each != size


def _check(block: nn.Module, given: Sequence[Any]) -> None:
    name = type(block).__name__
    if is_sharded(block):
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
    return each.split(sizes) if _has_rows(each, batch) else [each] * len(sizes)


def _counts(each: Any) -> bool:
    """Whether it may be made of a part's number of rows: the whole batch's is another one."""
    return isinstance(each, int | float | torch.Size) and not isinstance(each, bool) and bool(each)


def _joined(made: list[Any], sizes: list[int], name: str) -> Any:
    """What the block would have returned for the whole batch."""
    trees = [_flat(each) for each in made]
    if any(tree != trees[0][1] for _, tree in trees):
        raise UsageError(f"split_batch: {name} returns other things for one part of the batch than for another")
    joined = list[Any]()
    for parts in zip(*[each for each, _ in trees], strict=True):
        is_vector = isinstance(parts[0], Tensor) and parts[0].dim() == 1
        if all(map(_has, parts, sizes)) and not (is_vector and len({*sizes}) == 1):  # of anything as long as a part
            joined.append(torch.cat(parts))
        elif isinstance(parts[0], SHARED) and all(part == parts[0] for part in parts) and not _counts(parts[0]):
            joined.append(parts[0])
        else:
            what = (
                f"a tensor of shape {tuple(parts[0].shape)}"
                if isinstance(parts[0], Tensor)
                else type(parts[0]).__name__
            )
            raise UsageError(f"split_batch: {name} returns something that is not split by the batch: {what}")
    return tree_unflatten(joined, trees[0][1])
