"""The arena's layout, whatever the segments."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import segments

from protocol.handles import (
    ALIGN_ELEMENTS,
    DTYPE_BYTES,
    PAGE_BYTES,
    PLANES,
    ArenaLayout,
    TensorHandle,
    bank_plane,
    layout,
    planes_of,
)
from protocol.messages import Layer, Segment
from protocol.rules import MOMENT_PLANES, MOMENTS


def layer(*parts: Segment, lid: int = 0) -> Layer:
    return Layer(lid=lid, position=0, name="layer", segments=parts)


def segment(numel: int, dtype: str = "bfloat16", grads_dtype: str | None = None) -> Segment:
    return Segment(name="s", numel=numel, dtype=dtype, grads_dtype=grads_dtype or dtype, group=0)


MIXED = layer(segment(130), segment(5, "float32"), segment(1000, "float32", "bfloat16"), lid=7)
some_layers = st.lists(segments(), min_size=1, max_size=5).map(lambda parts: layer(*parts))


def arrays(arena: ArenaLayout) -> list[TensorHandle]:
    return [handle for plane in planes_of(arena.banks) for handle in arena.handles[plane] if handle is not None]


@given(some_layers, st.sampled_from([1, 2]))
def test_arrays_are_disjoint_aligned_and_inside(spec: Layer, banks: int) -> None:
    arena = layout(spec, banks)
    assert tuple(arena.handles) == planes_of(banks)
    for before, after in pairwise(arrays(arena)):
        assert before.offset + before.nbytes <= after.offset
    assert arrays(arena)[-1].offset + arrays(arena)[-1].nbytes <= arena.nbytes
    start = 0
    for plane in planes_of(banks):
        row = [handle for handle in arena.handles[plane] if handle is not None]
        for handle in row:
            assert handle.offset % DTYPE_BYTES[handle.dtype] == 0
            assert start <= handle.offset and handle.offset + handle.nbytes <= start + arena.plane_nbytes[plane]
        for before, after in pairwise(row):
            padded = -(-before.numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            assert after.offset - before.offset == padded * DTYPE_BYTES[before.dtype]
        if row:
            assert row[0].offset == start
        assert start % PAGE_BYTES == arena.plane_nbytes[plane] % PAGE_BYTES == 0
        start += arena.plane_nbytes[plane]
        if plane == bank_plane("weights", banks - 1):
            assert arena.shared_nbytes == start
    assert start == arena.nbytes == sum(arena.plane_nbytes.values())


@given(some_layers)
def test_every_segment_has_its_arrays(spec: Layer) -> None:
    arena = layout(spec)
    for index, part in enumerate(spec.segments):
        remainder = {"bfloat16": "int16", "float16": "float32"}.get(part.dtype)
        if part.dtype == part.master_dtype:
            remainder = None
        moments = dict.fromkeys(MOMENTS[part.rule], part.state_dtype)
        expected = {"grads": part.grads_dtype, "weights": part.dtype, "remainder": remainder, **moments}
        for plane in PLANES:
            dtype = expected.get(plane)
            handle = arena.handles[plane][index]
            if dtype is None:
                assert handle is None
            else:
                assert handle is not None
                assert (handle.numel, handle.dtype) == (part.numel, dtype)


@pytest.mark.parametrize(
    ("dtype", "banks", "expected"),
    [("bfloat16", 1, 14), ("float16", 1, 16), ("float32", 1, 16), ("bfloat16", 2, 26), ("float16", 2, 30)],
)
def test_bytes_for_each_parameter(dtype: str, banks: int, expected: int) -> None:
    numel = 1 << 20
    assert layout(layer(segment(numel, dtype)), banks).nbytes == expected * numel


@pytest.mark.parametrize(
    ("rule", "banks", "expected"), [("sgd", 1, 6), ("sgd_momentum", 1, 10), ("sgd_momentum", 2, 18), ("lion", 1, 10)]
)
def test_moments_take_the_bytes_of_their_rule(rule: str, banks: int, expected: int) -> None:
    numel = 1 << 20
    arena = layout(layer(replace(segment(numel), rule=rule)), banks)
    assert arena.nbytes == expected * numel
    assert {plane for plane, nbytes in arena.plane_nbytes.items() if nbytes} & set(MOMENT_PLANES) == set(MOMENTS[rule])
