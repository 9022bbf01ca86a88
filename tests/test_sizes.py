"""What layers take in each placement, against what is said of them by those who ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_strategies import segments

from protocol import messages as m
from protocol import placement
from protocol.handles import layout
from protocol.placement import CPU, CPU_OFFLOADED, GPU, PLACEMENTS, VISIT, VISIT_OFFLOADED, Placement, Places
from protocol.sizes import GRADS, WEIGHTS, Sizes, is_on_gpu, is_on_host

PLANES = (GRADS, WEIGHTS, "weights'", "remainder", "exp_avg", "exp_avg'")


@pytest.mark.parametrize("where", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_weights_and_state_are_somewhere_and_where_they_rest(where: Placement) -> None:
    assert is_on_gpu(WEIGHTS, where) == (where.weights == "gpu")
    assert is_on_host("exp_avg", where) != is_on_gpu("exp_avg", where) == (where.state == "gpu")
    assert is_on_host("exp_avg'", where) == is_on_host("exp_avg", where) and not is_on_gpu("exp_avg'", where)
    assert is_on_host(GRADS, where) == (where.updates == "cpu"), "who updates has the gradients"
    assert is_on_gpu(GRADS, where, waits=True) == (where.updates == "gpu")
    assert not is_on_gpu(GRADS, where), "they are on their way"
    assert where.weights == "gpu" or is_on_host(WEIGHTS, where), "weights that rest on the host are in the arena"


@given(st.lists(segments(), min_size=1, max_size=3), st.sampled_from([1, 2]), st.booleans())
def test_an_arena_is_what_a_layer_of_the_cpus_takes(drawn: list[m.Segment], banks: int, awaits: bool) -> None:
    layer = m.Layer(lid=0, position=0, name="a", segments=tuple(drawn))
    sizes, alone = Sizes([layer], banks=banks, waits=awaits), layout(layer)
    assert sum(sizes.host(0, CPU).values()) == layout(layer, banks).nbytes
    assert sizes.host(0, CPU_OFFLOADED) == sizes.host(0, CPU) and not sizes.host(0, GPU)
    assert {**sizes.host(0, VISIT), GRADS: sizes.host(0, CPU)[GRADS]} == sizes.host(0, CPU)
    held = alone.plane_nbytes[WEIGHTS] if awaits else 0
    assert sizes.gradients(0) == alone.plane_nbytes[WEIGHTS], "they get another dtype on their way to the host"
    assert sum(sizes.gpu(0, GPU).values()) == alone.nbytes - alone.plane_nbytes[GRADS] + held
    assert sum(sizes.gpu(0, VISIT_OFFLOADED).values()) == held


def test_another_placement_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Placement("disk", weights="gpu", state="disk", updates="cpu")
    monkeypatch.setitem(PLACEMENTS, disk.name, disk)
    monkeypatch.setitem(placement._BY_FACTS, (disk.weights, disk.state, disk.updates), disk)
    places = Places(("disk", "gpu", "cpu")).offload({0, 2})
    assert [*places] == [disk, GPU, CPU_OFFLOADED]
    assert (places.cpu, places.gpu, places.offloaded) == ({0, 2}, {1}, {2})
    assert replace(places, names=("disk",) * 3).gpu_fraction([1, 1, 1]) == 0.0
    assert [plane for plane in PLANES if is_on_host(plane, disk) or is_on_gpu(plane, disk)] == [WEIGHTS]
