"""The layout of a layer's arrays in its arena.

An arena is a shared-memory file that contains the planes of one layer, one after the other, in one bank or in two:
docs/architecture.md draws it. Both processes compute the layout from the layer table. A message therefore only has the
layer ID, and the file's size must match the layout.

Trainer and optimizer map all or part of an arena. Sizes are in bytes, and offsets count from the arena's start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from protocol.messages import Layer, Segment
from protocol.rules import MOMENT_PLANES, MOMENTS

#: What is kept of each weight from step to step. A segment has those of its rule and its dtypes.
STATE_PLANES: Final = ("remainder", *MOMENT_PLANES)
PLANES: Final = ("grads", "weights", *STATE_PLANES)
#: The planes that an update writes. A second bank has copies of them.
BANKED_PLANES: Final = PLANES[1:]
#: The planes that the trainer uses in every step, in all banks. They come first.
SHARED_PLANES: Final = ("grads", "weights")
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "int16": 2, "float8": 1}
#: The dtype of a segment's `remainder` for each dtype of its weights. For bfloat16 weights, it has the part of the
#: float32 master that they lack; for float16 weights, the whole master, since a float16 is not part of a float32.
#: Weights that are their own masters have none.
REMAINDER_DTYPES: Final = {"bfloat16": "int16", "float16": "float32", "float32": None}
PAGE_BYTES: Final = 4096
ALIGN_ELEMENTS: Final = 128


class TensorHandle(NamedTuple):
    """One segment's array in one plane: `numel` elements of `dtype`, `offset` bytes into the arena."""

    offset: int
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The arena of one layer. `handles[plane][i]` is segment i's array in a plane of `planes_of(banks)`, or None."""

    lid: int
    banks: int
    nbytes: int
    shared_nbytes: int
    plane_nbytes: dict[str, int]
    handles: dict[str, tuple[TensorHandle | None, ...]]

    @property
    def numel(self) -> int:
        """The number of parameters in the layer."""
        return sum(handle.numel for handle in self.handles["weights"] if handle is not None)


class Precision(NamedTuple):
    """The dtypes of the moments, and of the masters of bfloat16 weights. If one is not "float32", nothing is exact."""

    state_dtype: str = "float32"
    master_dtype: str = "float32"

    def planes(self, dtype: str, rule: str = "adamw") -> dict[str, str]:
        """The state planes that weights of this dtype have under this rule, with their dtypes."""
        remainder = None if dtype == self.master_dtype else REMAINDER_DTYPES.get(dtype)
        first = {} if remainder is None else {"remainder": remainder}
        return {**first, **dict.fromkeys(MOMENTS[rule], self.state_dtype)}

    @property
    def is_exact(self) -> bool:
        return self == EXACT

    def __str__(self) -> str:
        moments = [] if self.state_dtype == "float32" else [f"moments in {self.state_dtype}"]
        masters = [] if self.master_dtype == "float32" else ["without masters"]
        return ", ".join([*moments, *masters]) or "exact"


EXACT: Final = Precision()


def plane_dtype(plane: str, segment: Segment) -> str | None:
    """The dtype of `segment` in `plane`, or None if it has no array there (float32 weights need no remainder)."""
    state = Precision(segment.state_dtype, segment.master_dtype).planes(segment.dtype, segment.rule)
    return {"grads": segment.grads_dtype, "weights": segment.dtype, **state}.get(plane.removesuffix("'"))


def typical_segment(layers: Sequence[Layer], numel: int) -> Segment:
    """A made-up segment of the layers' most frequent kind, to measure with: as large as a layer, or of `numel`.

    One that is updated as a whole matrix is of the most frequent shape, and whole.
    """
    numels: Counter[Segment] = Counter()
    for layer in layers:
        for it in layer.segments:
            whole = math.prod(it.shape)  # 1 without a shape
            numels[replace(it, name="scratch", numel=whole, group=0, key=0, start=0)] += it.numel
    [(typical, _)] = numels.most_common(1)
    return typical if typical.shape else replace(typical, numel=min(numel, max(layer.numel for layer in layers)))


def bank_plane(plane: str, bank: int) -> str:
    """The name of a plane of `BANKED_PLANES` in bank 0 or 1."""
    return plane + "'" * bank


def planes_of(banks: int) -> tuple[str, ...]:
    """The planes of an arena with one or two banks, in order. The shared planes come first."""
    shared = [bank_plane("weights", bank) for bank in range(banks)]
    state = [bank_plane(plane, bank) for bank in range(banks) for plane in BANKED_PLANES if plane != "weights"]
    return ("grads", *shared, *state)


def layout(layer: Layer, banks: int = 1) -> ArenaLayout:
    """Lay out the planes of `layer`. `shared_nbytes` covers `grads` and all banks' `weights`, which come first."""
    offset = shared = 0
    handles: dict[str, tuple[TensorHandle | None, ...]] = {}
    sizes: dict[str, int] = {}
    for plane in planes_of(banks):
        start = offset
        row: list[TensorHandle | None] = []
        for segment in layer.segments:
            dtype = plane_dtype(plane, segment)
            if dtype is None:
                row.append(None)
                continue
            row.append(TensorHandle(offset, segment.numel, dtype))
            offset += _round_up(segment.numel, ALIGN_ELEMENTS) * DTYPE_BYTES[dtype]
        offset = _round_up(offset, PAGE_BYTES)
        handles[plane], sizes[plane] = tuple(row), offset - start
        if plane.removesuffix("'") in SHARED_PLANES:
            shared = offset
    return ArenaLayout(layer.lid, banks, offset, shared, sizes, handles)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
