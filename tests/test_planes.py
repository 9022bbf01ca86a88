"""The trainer's view of an arena with two banks: each segment where it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from hytrain.memory.arena import ArenaFile, HostArena
from hytrain.memory.planes import ArenaPlanes
from hytrain.memory.transfer import HostTransfers
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
def arena() -> Iterator[HostArena]:
    with closing(HostArena(LAYOUT)) as arena:
        yield arena


@pytest.fixture
def planes(arena: HostArena) -> Iterator[ArenaPlanes]:
    with closing(ArenaPlanes(ArenaFile(LAYOUT, os.dup(arena.descriptor)), HostTransfers())) as planes:
        yield planes


def view(planes: ArenaPlanes, plane: str) -> list[Tensor | None]:
    return planes.weights if plane == "weights" else planes.state(plane)


@pytest.mark.parametrize("plane", ["weights", "exp_avg", "exp_avg_sq"])
def test_each_segment_is_read_where_it_holds(arena: HostArena, planes: ArenaPlanes, plane: str) -> None:
    for bank in (0, 1):
        for handle in LAYOUT.handles[bank_plane(plane, bank)]:
            assert handle is not None
            os.pwrite(arena.descriptor, bytes([bank + 1]) * handle.nbytes, handle.offset)
    assert planes.banks == (0, 0), "at first"
    for banks in BANKS:
        planes.banks = banks
        seen = [set(part.view(torch.uint8).tolist()) for part in view(planes, plane) if part is not None]
        assert seen == [{bank + 1} for bank in banks]


@pytest.mark.parametrize("banks", BANKS)
@pytest.mark.parametrize("plane", ["weights", "remainder", "exp_avg"])
def test_and_written_there_alone(arena: HostArena, planes: ArenaPlanes, plane: str, banks: tuple[int, ...]) -> None:
    planes.banks = banks
    for part in view(planes, plane):
        if part is not None:
            part.fill_(1)
    for bank in (0, 1):
        for index, handle in enumerate(LAYOUT.handles[bank_plane(plane, bank)]):
            if handle is not None:
                found = any(os.pread(arena.descriptor, handle.nbytes, handle.offset))
                assert found == (bank == banks[index])


def test_the_gradient_has_one_place(planes: ArenaPlanes) -> None:
    first = [part.data_ptr() for part in planes.grads if part is not None]
    planes.banks = (1, 1)
    assert [part.data_ptr() for part in planes.grads if part is not None] == first and len(first) == 2
