"""Splits any `nn.Module` into layers: the units that are scheduled and moved.

    model ─▶ blocks (children of the largest ModuleList or Sequential)     one layer each
          ─▶ parameters before and after the blocks                        bucketed, in registration order
          ─▶ of hundreds of tiny blocks, several together                  one layer
          ─▶ anything above the size bound                                 cut into layers with their own IDs, or, if
                                                                           it is updated as a whole, a layer

A layer knows its segments and its readers: the modules whose forward reads it, or FSDP2's parameter groups, whose
all-gathers do. torch's attention reads its children's parameters by itself. A tied parameter belongs to the first
module that has it, and all modules that have it wait for it. Frozen parameters are in no layer. Of a sharded parameter,
a layer has this rank's shard.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from hytrain.errors import UnsupportedError
from hytrain.kernels.rounding import key_of
from hytrain.kernels.torch_backend import vectors
from hytrain.model import fsdp
from hytrain.model.parts import roots
from hytrain.tensors import DTYPE_NAMES, is_dense, is_plain, local
from protocol import messages
from protocol.handles import ALIGN_ELEMENTS, Precision
from protocol.rules import ON_DEVICE

MIN_PIECE_NUMEL: Final = 1 << 22
MAX_PIECE_NUMEL: Final = 1 << 27
#: A model without blocks is cut into about this many layers.
FALLBACK_LAYERS: Final = 16
#: Each layer costs messages in each step. So of more blocks than this, small ones share layers.
MANY_BLOCKS: Final = 256

#: Modules whose forward may read the parameters of their children without calling these.
READ_CHILDREN: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: What wrappers of modules add to names, and torch's distributed checkpoints remove.
WRAPPERS: Final = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def clean(name: str) -> str:
    """A parameter's name whatever wraps its modules, as in checkpoints."""
    return WRAPPERS.sub("", name)


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a layer: a range of one parameter's elements, in storage order."""

    parameter: nn.Parameter
    name: str
    start: int
    numel: int

    @property
    def is_whole(self) -> bool:
        return self.numel == local(self.parameter).numel()


@dataclass(slots=True)
class ModelLayer:
    """One layer: its pieces, and who must wait for its weights: modules before forward, `FSDPParamGroup`s."""

    lid: int
    name: str
    pieces: tuple[Piece, ...]
    readers: list[Any] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def describe(
        self,
        group_of: dict[int, int],
        rules: Sequence[str],
        grad_dtype: torch.dtype | None,
        precision: Precision,
    ) -> messages.Layer:
        """The layer's description for the other processes. `group_of` maps id(parameter) to its group's index.

        `rules[i]` updates group i.

        `grad_dtype` applies to float32 parameters. Other gradients are copied in their own dtype. The
        state is of this `precision`.
        """

        def segment(piece: Piece) -> messages.Segment:
            parameter, group = piece.parameter, group_of[id(piece.parameter)]
            is_matrix = rules[group] in ON_DEVICE
            sent = grad_dtype if grad_dtype is not None and parameter.dtype is torch.float32 else parameter.dtype
            return messages.Segment(
                name=piece.name if piece.is_whole else f"{piece.name}[{piece.start}]",
                numel=piece.numel,
                dtype=DTYPE_NAMES[parameter.dtype],
                grads_dtype=DTYPE_NAMES[sent],
                group=group,
                state_dtype=precision.state_dtype,
                master_dtype=precision.master_dtype if parameter.dtype is torch.bfloat16 else "float32",
                key=key_of(clean(piece.name)),
                start=piece.start,
                rule=rules[group],
                shape=tuple(parameter.shape) if is_matrix else (),
                by_columns=is_matrix and not local(parameter).is_contiguous(),
                **vectors()._asdict(),
            )

        return messages.Layer(
            lid=self.lid, position=self.lid, name=self.name, segments=tuple(map(segment, self.pieces))
        )


def split_layers(
    model: nn.Module, managed: set[int], *, whole: Collection[int] = (), piece_numel: int | None = None
) -> list[ModelLayer]:
    """Split the parameters whose ids are in `managed` into layers, in registration order.

    `piece_numel` bounds a layer's number of elements. By default, the bound is the size of the largest block, within
    limits. Parameters whose ids are in `whole` are not cut. Raises `UnsupportedError` for a parameter
    that HyTrain cannot train.
    """
    blocks = find_blocks(model)
    names = {id(block): "" for block in blocks}
    names.update((id(module), name) for name, module in model.named_modules() if id(module) in names)
    waiters = _waiters(model, names)
    seen: set[int] = set()
    runs: list[tuple[nn.Module | None, str, list[Piece]]] = []
    for module_name, module in model.named_modules():
        waiter = waiters[id(module)][0]
        block = waiter if id(waiter) in names else None
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if id(parameter) not in managed or id(parameter) in seen or local(parameter).numel() == 0:
                continue
            seen.add(id(parameter))
            _refuse(name, parameter)
            if not runs or runs[-1][0] is not block:
                run_name = name.rpartition(".")[0] or name if block is None else names[id(block)]
                runs.append((block, run_name, []))
            runs[-1][2].append(Piece(parameter, name, 0, local(parameter).numel()))
    total = sum(piece.numel for _, _, pieces in runs for piece in pieces)
    bound = piece_numel or _default_bound(total, [pieces for block, _, pieces in runs if block is not None])
    least = total // MANY_BLOCKS if len(runs) > MANY_BLOCKS else 0
    layers: list[ModelLayer] = []
    for run_name, pieces in _joined([(name, pieces) for _, name, pieces in runs], least):
        buckets = list(_buckets(pieces, bound, whole))
        for index, bucket in enumerate(buckets):
            name = run_name if len(buckets) == 1 else f"{run_name}#{index}"
            layers.append(ModelLayer(len(layers), name, tuple(bucket)))
    _attach_readers(model, layers, waiters)
    return layers


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, or of each of its parts."""
    return [block for root in roots(model) for block in _blocks_of(root)]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The children of the ModuleList or Sequential that splits a model best.

    The best split leaves the most parameters outside its largest child. An outer Sequential(embedding, blocks, head)
    has more parameters than the list inside it, but splits fewer of them off.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    cut_off: dict[int, int] = {}
    for module in lists:
        sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in module.children()]
        cut_off[id(module)] = sum(sizes) - max(sizes, default=0)
    largest = max(lists, key=lambda module: cut_off[id(module)], default=None)
    if largest is None or cut_off[id(largest)] == 0:
        return []
    return [child for child in largest.children() if any(True for _ in child.parameters())]


def _refuse(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype not in DTYPE_NAMES:
        raise UnsupportedError(
            f"parameter {name} has dtype {parameter.dtype}: HyTrain trains float32, bfloat16 and float16 parameters; "
            "convert the model with model.to(torch.bfloat16) first"
        )
    if not is_plain(parameter):
        raise UnsupportedError(
            f"parameter {name} is a {type(parameter.data).__name__}: HyTrain trains plain tensors, and DTensors of them"
        )
    if not is_dense(local(parameter)):
        raise UnsupportedError(f"parameter {name} overlaps itself or has gaps: replace it by its .contiguous() copy")


def _joined(runs: list[tuple[str, list[Piece]]], least: int) -> Iterator[tuple[str, list[Piece]]]:
    """The runs, of which neighbours are one until they have `least` elements."""
    names, pieces, numel = list[str](), list[Piece](), 0
    for index, (name, more) in enumerate(runs, 1):
        names.append(name)
        pieces += more
        numel += sum(piece.numel for piece in more)
        if numel >= least or index == len(runs):
            yield names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", pieces
            names, pieces, numel = [], [], 0


def _default_bound(total: int, blocks: list[list[Piece]]) -> int:
    if blocks:
        largest = max(sum(piece.numel for piece in pieces) for pieces in blocks)
        return min(max(largest, MIN_PIECE_NUMEL), MAX_PIECE_NUMEL)
    return min(max(total // FALLBACK_LAYERS, ALIGN_ELEMENTS), MAX_PIECE_NUMEL)


def _buckets(pieces: list[Piece], bound: int, whole: Collection[int]) -> Iterator[list[Piece]]:
    """Group pieces up to `bound` elements. A single piece above it is cut into nearly equal parts, if it may be."""
    bucket, numel = list[Piece](), 0
    for piece in pieces:
        if bucket and numel + piece.numel > bound:
            yield bucket
            bucket, numel = [], 0
        if piece.numel > bound and id(piece.parameter) not in whole:
            yield from ([part] for part in _cut(piece, bound))
        else:
            bucket.append(piece)
            numel += piece.numel
    if bucket:
        yield bucket


def _cut(piece: Piece, bound: int) -> Iterator[Piece]:
    parts = -(-piece.numel // bound)
    size = -(-piece.numel // (parts * ALIGN_ELEMENTS)) * ALIGN_ELEMENTS
    for start in range(0, piece.numel, size):
        yield Piece(piece.parameter, piece.name, start, min(size, piece.numel - start))


def _waiters(model: nn.Module, blocks: Collection[int]) -> dict[int, list[nn.Module]]:
    """By module id, the modules that wait for its parameters: each block or reader of children that contains it.

    Without one, it is the module itself.
    """
    waiters: dict[int, list[nn.Module]] = {}
    below: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while below:
        module, block = below.pop()
        block = module if id(module) in blocks else block
        if block is None and isinstance(module, READ_CHILDREN):
            block = module
        waiting = waiters.setdefault(id(module), [])
        reader = module if block is None else block  # not `or`: a compiled module has no truth value
        if all(waiter is not reader for waiter in waiting):
            waiting.append(reader)
            below.extend((child, block) for child in reversed(list(module.children())))
    return waiters


def _attach_readers(model: nn.Module, layers: list[ModelLayer], waiters: dict[int, list[nn.Module]]) -> None:
    gathers = fsdp.readers(model)
    layers_of: dict[int, list[ModelLayer]] = {}
    for layer in layers:
        for piece in layer.pieces:
            layers_of.setdefault(id(piece.parameter), []).append(layer)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            for layer in layers_of.get(id(parameter), ()):
                gather = gathers.get(id(parameter))
                for reader in waiters[id(module)] if gather is None else [gather]:
                    if all(known is not reader for known in layer.readers):
                        layer.readers.append(reader)
