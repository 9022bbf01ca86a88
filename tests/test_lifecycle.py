"""The life of a gradient: every (who updates, state, event), those that happen and those that are refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain.model.lifecycle import TRANSITIONS, Event, InvalidTransition, LayerLife, State
from protocol.placement import CPU, GPU, PLACEMENTS, VISIT, Placement

TRIP = [
    (Event.FILLED, State.LEAVING),
    (Event.COPIED, State.UPDATING),
    (Event.WEIGHTS_READY, State.LANDING),
    (Event.AWAITED, State.CURRENT),
]


def life_in(state: State, placement: Placement = CPU, step: int = 5) -> LayerLife:
    """A layer whose update of `step` has come as far as `state`, or is over."""
    life = LayerLife(3, placement)
    if placement.updates == "gpu":
        life.on(Event.FILLED, step)
    for event, after in TRIP if placement.updates == "cpu" else []:
        life.on(event, step)
        assert (life.state, life.updated, life.is_current) == (after, step, after is State.CURRENT)
        if after is state:
            break
    assert life.state is state and life.updated == step
    life.check()
    return life


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize(
    ("placement", "state"), [*itertools.product([CPU], State), (GPU, State.CURRENT), (VISIT, State.CURRENT)]
)
def test_the_table_is_all_there_is(placement: Placement, state: State, event: Event) -> None:
    life = life_in(state, placement)
    step = 6 if event is Event.FILLED else 5
    if (placement.updates, state, event) in TRANSITIONS:
        life.on(event, step)
        assert life.state is TRANSITIONS[placement.updates, state, event]
    else:
        said = f"layer 3, placed on {placement.name}: {event.name} of step {step} while"
        with pytest.raises(InvalidTransition, match=said):
            life.on(event, step)
        assert (life.state, life.updated) == (state, 5)
    life.check()


@pytest.mark.parametrize("placement", PLACEMENTS.values())
@pytest.mark.parametrize("step", [5, 4, 0])
def test_a_second_gradient_of_a_step_is_refused(placement: Placement, step: int) -> None:
    life = life_in(State.CURRENT, placement)
    with pytest.raises(InvalidTransition, match=f"a second gradient of step {step}"):
        life.on(Event.FILLED, step)
    assert life.updated == 5 and life.is_current


@pytest.mark.parametrize(("state", "event"), [(before[1], after[0]) for before, after in itertools.pairwise(TRIP)])
@pytest.mark.parametrize("step", [4, 6])
def test_news_of_another_steps_update_are_refused(state: State, event: Event, step: int) -> None:
    life = life_in(state)
    with pytest.raises(InvalidTransition, match=f"{event.name} of step {step}, the update is step 5's"):
        life.on(event, step)
    assert life.state is state


@pytest.mark.parametrize("state", State)
def test_a_handover_only_between_updates(state: State) -> None:
    life = life_in(state)
    if state is State.CURRENT:
        life.place(GPU)
        assert life.placement is GPU
        life.on(Event.FILLED, 6)
        assert life.state is State.CURRENT
        life.place(CPU)
        life.on(Event.FILLED, 7)
        assert life.state is State.LEAVING
    else:
        with pytest.raises(InvalidTransition, match=f"handover to gpu while {state.name}"):
            life.place(GPU)
        assert life.placement is CPU
    life.check()


def test_a_refusal_tells_the_story_but_not_all_of_it() -> None:
    life = LayerLife(3, CPU)
    with pytest.raises(InvalidTransition, match="before: nothing"):
        life.on(Event.COPIED, 0)
    for step, (event, _) in itertools.product(range(10), TRIP):
        life.on(event, step)
    with pytest.raises(InvalidTransition, match="WEIGHTS_READY@9→LANDING, AWAITED@9→CURRENT") as caught:
        life.on(Event.AWAITED, 9)
    told = str(caught.value)
    assert told.count("→") == LayerLife.STORY_LENGTH and "@6" not in told


@given(st.lists(st.tuples(st.sampled_from([*Event, GPU, CPU]), st.integers(0, 3)), max_size=30))
@settings(deadline=None)
def test_any_events(events: list[tuple[Event | Placement, int]]) -> None:
    """What is refused changes nothing; an update begins once for each step, and each step of it comes in its turn."""
    life, began = LayerLife(0, CPU), list[int]()
    for event, step in events:
        before = (life.placement, life.state, life.updated)
        try:
            if isinstance(event, Placement):
                life.place(event)
            else:
                life.on(event, step)
                if event is Event.FILLED:
                    began.append(step)
        except InvalidTransition:
            assert (life.placement, life.state, life.updated) == before
        life.check()
    assert began == sorted(set(began))
