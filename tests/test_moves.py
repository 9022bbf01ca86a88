"""What moves first, where a plan has no room beside what is there now."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from hytrain.planner.moves import first_part
from hytrain.planner.profile import LayerFacts
from protocol.placement import CPU, GPU, PLACEMENTS, VISIT, Places

LAYERS, IN_A_BLOCK = 6, 2
RESIDENT = sorted(name for name, placement in PLACEMENTS.items() if placement.weights == "gpu")
STATE, WEIGHTS, GRADS = 10, 2, 2


class Machine(NamedTuple):
    gpu: int
    host: int
    for_visits: int = 0  # on the GPU, as soon as a layer visits it

    def takes(self, now: Places, then: Places) -> tuple[int, int]:
        """Bytes on the GPU and on the host, with both at once."""
        on_gpu = STATE * len(now.gpu | then.gpu) + WEIGHTS * (LAYERS - len(now.offloaded & then.offloaded))
        on_gpu += self.for_visits * bool(now.visiting | then.visiting)
        host_of = {GPU: 0, VISIT: STATE + WEIGHTS, CPU: STATE + WEIGHTS + GRADS}
        pairs = zip(now, then, strict=True)
        return on_gpu, sum(max(host_of[before.resident], host_of[after.resident]) for before, after in pairs)

    def has_room(self, now: Places, then: Places) -> bool:
        bounds = map(max, self[:2], self.takes(now, now))
        return all(taken <= bound for taken, bound in zip(self.takes(now, then), bounds, strict=True))

    def first(self, now: Places, then: Places, must_visit: bool = False) -> Places:
        facts = [replace(fact, must_visit=must_visit) for fact in FACTS]
        return first_part(facts, now, then, lambda places: self.has_room(now, places))


def fact(lid: int) -> LayerFacts:
    return LayerFacts(
        lid=lid,
        position=lid,
        numel=1,
        gpu_state_bytes=STATE,
        host_bytes=STATE + WEIGHTS + GRADS,
        weights_bytes=WEIGHTS,
        block=lid // IN_A_BLOCK,
    )


FACTS = [fact(lid) for lid in range(LAYERS)]
names = st.tuples(*[st.sampled_from(RESIDENT)] * LAYERS)


@st.composite
def places(draw: st.DrawFn) -> Places:
    """Blocks may be offloaded of which the GPU owns no layer."""
    owned, drawn = Places(draw(names)), draw(st.sets(st.integers(0, LAYERS // IN_A_BLOCK - 1)))
    free = drawn - {lid // IN_A_BLOCK for lid in owned.gpu}
    return owned.offload({lid for lid in range(LAYERS) if lid // IN_A_BLOCK in free})


machines = st.builds(Machine, st.integers(0, 72), st.integers(0, 84))


@given(machines, places(), places())
def test_what_moves_has_room_and_all_does_that_has(machine: Machine, now: Places, then: Places) -> None:
    reached = machine.first(now, then)
    assert machine.has_room(now, reached)
    assert reached == then or not machine.has_room(now, then)
    for lid in range(LAYERS):
        way = now[lid].resident, then[lid].resident
        assert reached[lid].resident in (*way, CPU if way == (GPU, VISIT) else None)
        assert reached[lid].weights in (now[lid].weights, then[lid].weights)
        assert reached[lid].weights == reached[lid - lid % IN_A_BLOCK].weights, "blocks move whole"


@given(places(), places())
def test_room_for_one_layer_is_enough_to_get_there_in_time(now: Places, then: Places) -> None:
    """Where both memories are full but for the largest move: layers change places in turn."""
    bounds = map(max, Machine(0, 0).takes(now, now), Machine(0, 0).takes(then, then))
    most_gpu, most_host = STATE + IN_A_BLOCK * WEIGHTS, STATE + WEIGHTS + GRADS
    on_gpu, on_host = bounds
    machine = Machine(on_gpu + most_gpu, on_host + most_host)
    for _ in range(4 * LAYERS):
        if now == then:
            return
        now = machine.first(now, then)
    raise AssertionError(f"{now} is not {then}")


def test_state_leaves_before_visits_begin() -> None:
    """What made a run keep a slow plan: a layer was to leave the GPU, and to visit it in the place of its own state."""
    now, then = (
        Places.of([first, *[CPU] * (LAYERS - 1)]).offload(set(range(IN_A_BLOCK, LAYERS))) for first in (GPU, VISIT)
    )
    machine = Machine(STATE + IN_A_BLOCK * WEIGHTS, LAYERS * (STATE + WEIGHTS + GRADS), for_visits=STATE)
    first = machine.first(now, then)
    assert first.cpu == set(range(LAYERS))
    assert machine.first(first, then) == then
    assert machine.first(now, then, must_visit=True) == now, "where the CPU can update it"


def test_weights_leave_before_state_comes() -> None:
    """What ended a run: state came to a GPU that had room for it only without the weights that were to leave."""
    now = Places.of([VISIT] * LAYERS)
    then = now.moved({LAYERS - 2, LAYERS - 1}, GPU).offload(set(range(LAYERS - 2)))
    machine = Machine(2 * STATE + 2 * WEIGHTS, LAYERS * (STATE + WEIGHTS))
    first = machine.first(now, then)
    assert first.offloaded == then.offloaded
    assert len(first.gpu) == 1, "there is room for one beside all weights"
    assert machine.first(first, then) == then
