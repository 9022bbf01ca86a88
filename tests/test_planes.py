"""The trainer's view of an arena with two banks: each segment where it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import pytest
import torch

from hytrain.memory.arena import Arena
from hytrain.memory.planes import ArenaPlanes, DevicePlanes
from hytrain.memory.transfer import HostTransfers
from hytrain.tensors import PART_ALIGN_BYTES
from protocol.handles import bank_plane, layout
from protocol.messages import Layer, Segment

DTYPES = ("bfloat16", "float32")
LAYOUT = layout(
    Layer(
        lid=0,
        position=0,
        name="layer",
        segments=tuple(Segment(name=dtype, numel=300, dtype=dtype, grads_dtype=dtype, group=0) for dtype in DTYPES),
    ),
    banks=2,
)
BANKS = [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(LAYOUT)) as arena:
        yield arena


@pytest.fixture
def planes(arena: Arena) -> Iterator[ArenaPlanes]:
    with closing(ArenaPlanes(Arena(LAYOUT, os.dup(arena.descriptor)), HostTransfers())) as planes:
        yield planes


@pytest.mark.parametrize("plane", ["weights", "remainder", "exp_avg", "exp_avg_sq"])
def test_each_segment_is_where_it_holds_and_there_alone(arena: Arena, planes: ArenaPlanes, plane: str) -> None:
    """What is written through the trainer's view is in that bank's plane; a gradient has one place."""
    assert planes.banks == (0, 0), "at first"
    grads = [part.data_ptr() for part in planes.grads if part is not None]
    for number, banks in enumerate(BANKS, 1):
        planes.banks = banks
        for part in planes.weights if plane == "weights" else planes.state(plane):
            if part is not None:
                part.view(torch.uint8).fill_(number)
        for bank in (0, 1):
            for index, handle in enumerate(LAYOUT.handles[bank_plane(plane, bank)]):
                if handle is not None:
                    found = set(os.pread(arena.descriptor, handle.nbytes, handle.offset))
                    assert len(found) == 1 and (number in found) == (bank == banks[index])
        assert [part.data_ptr() for part in planes.grads if part is not None] == grads and len(grads) == 2


def test_gradients_take_memory_only_while_they_are_held(arena: Arena, planes: ArenaPlanes) -> None:
    """The other planes keep theirs, and their values."""

    def taken() -> int:
        return 512 * os.fstat(arena.descriptor).st_blocks

    (weights, *_), (grads, *_) = planes.weights, planes.grads
    weights.fill_(3)
    before = taken()
    for _ in range(2):
        planes.pin("grads")
        for plane in planes.grads:
            plane.fill_(1)
        assert taken() == before + LAYOUT.plane_nbytes["grads"]
        planes.drop_gradients()
        assert taken() == before and (weights == 3).all()
    assert not grads.any()


@pytest.mark.parametrize("is_viewed", [False, True])
def test_state_is_freed_for_good_unless_somebody_has_a_view_of_it(
    arena: Arena, planes: ArenaPlanes, is_viewed: bool
) -> None:
    for plane in ("exp_avg", "exp_avg_sq"):
        for part in planes.state(plane):
            assert part is not None
            part.fill_(5)
    (weights, *_), view = planes.weights, planes.state("exp_avg")[1][:] if is_viewed else None
    weights.fill_(3)
    del part
    before = 512 * os.fstat(arena.descriptor).st_blocks
    planes.free_state()
    freed = before - 512 * os.fstat(arena.descriptor).st_blocks
    assert freed >= 0.5 * before if view is None else (view == 5).all() and freed == 0
    assert (weights == 3).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_state_that_the_gpu_owns_is_one_piece_of_memory(device: str) -> None:
    """Of tensors that are saved and freed one by one. Of pieces of 42.5 MiB, the allocator would lose 1.5 MiB each."""
    numels, dtypes = (7, 5440 * 2048), ("bfloat16", "float32")
    segments = [
        Segment(name=f"{dtype} {numel}", numel=numel, dtype=dtype, grads_dtype=dtype, group=0)
        for numel in numels
        for dtype in dtypes
    ]
    weights = [torch.zeros(each.numel, dtype=getattr(torch, each.dtype), device=device) for each in segments]
    if device == "cuda":
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
    made = DevicePlanes(segments, weights, fresh=False)
    parts = sorted(made.parts, key=torch.Tensor.data_ptr)
    assert len(parts) == 2 * 5 and made.nbytes == sum(numels) * (8 + 8 + 2)
    first = parts[0].data_ptr()
    for part, after in pairwise(parts):
        assert part.untyped_storage().nbytes() == part.nbytes
        assert (after.data_ptr() - first) % PART_ALIGN_BYTES == 0
        assert 0 <= after.data_ptr() - (part.data_ptr() + part.nbytes) < PART_ALIGN_BYTES
    if device == "cuda":
        assert torch.cuda.memory_reserved() - reserved < made.nbytes + (2 << 20)
        kept = parts[0]
        made.close()
        del parts, part, after
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() > reserved, "somebody has a part of it"
        del kept
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved
