"""The life of an offloaded block: every (state, event), those that happen and those that are refused, and its pins."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.model.block_life import TRANSITIONS, BlockLife, Event, Pin, State
from hytrain.model.lifecycle import InvalidTransition

#: Events that lead there from the beginning.
WAYS = {
    State.RESIDENT: [],
    State.HERE: [Event.OFFLOAD],
    State.STALE: [Event.OFFLOAD, Event.UPDATE],
    State.AWAY: [Event.OFFLOAD, Event.FREE],
}
PINS = [pin for pin in Pin if pin is not Pin.NONE]


def life_in(state: State) -> BlockLife:
    life = BlockLife()
    for event in WAYS[state]:
        life.on(event)
    assert life.state is state
    life.check()
    return life


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_the_table_is_all_there_is(state: State, event: Event) -> None:
    life = life_in(state)
    if (state, event) in TRANSITIONS:
        life.on(event)
        assert life.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvalidTransition, match=f"{event.name} while {state.name}"):
            life.on(event)
        assert life.state is state
    life.check()


def test_what_a_state_means() -> None:
    seen = {state: (life.is_offloaded, life.is_present, life.is_away) for state in State if (life := life_in(state))}
    assert seen == {
        State.RESIDENT: (False, True, False),
        State.HERE: (True, True, False),
        State.STALE: (True, True, True),
        State.AWAY: (True, False, True),
    }


@pytest.mark.parametrize("state", State)
def test_a_block_leaves_only_what_it_shares_with_the_host(state: State) -> None:
    life = life_in(state)
    life.begin_use()
    life.begin_use()
    life.end_use()
    assert not life.may_leave
    life.end_use()
    assert life.may_leave is (state in (State.HERE, State.STALE))


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
@pytest.mark.parametrize("state", [State.HERE, State.STALE], ids=lambda state: state.name)
def test_a_pinned_block_stays(state: State, pin: Pin) -> None:
    """But for one of which somebody may have a view: that matters only while somebody shares its memory."""
    life = life_in(state)
    life.pin(pin)
    assert life.may_leave is (pin is Pin.VIEWED)
    if pin is not Pin.VIEWED:
        with pytest.raises(InvalidTransition, match=f"FREE while {state.name}, Pin.{pin.name}"):
            life.on(Event.FREE)
        assert life.state is state
    life.unpin(pin)
    life.on(Event.FREE)
    assert life.state is State.AWAY


def test_only_hidden_readers_outlast_a_time_on_the_gpu() -> None:
    life = life_in(State.HERE)
    for pin in PINS:
        life.pin(pin)
    life.on(Event.SETTLE)
    life.on(Event.OFFLOAD)
    assert life.pins is Pin.HIDDEN


STEPS = st.one_of(
    st.sampled_from(Event),
    st.tuples(st.sampled_from(["pin", "unpin"]), st.sampled_from(PINS)),
    st.sampled_from(["begin_use", "end_use"]),
)


@given(st.lists(STEPS, max_size=40))
def test_any_events(steps: list[Event | tuple[str, Pin] | str]) -> None:
    """What is refused changes nothing; nothing leaves that is pinned or used; stale weights never count as current."""
    life, users, is_newer = BlockLife(), 0, False
    for step in steps:
        before = life.state, life.pins
        if isinstance(step, Event):
            could_leave = life.may_leave
            try:
                life.on(step)
            except InvalidTransition:
                assert (life.state, life.pins) == before
                continue
            assert step is not Event.FREE or could_leave
            is_newer = (is_newer or step in (Event.UPDATE, Event.FREE, Event.FETCH_EARLY)) and step not in (
                Event.FETCH,
                Event.SETTLE,
                Event.END,
            )
            assert life.is_away is is_newer
        elif isinstance(step, tuple):
            if life.state is not State.AWAY:
                getattr(life, step[0])(step[1])
                assert (step[1] in life.pins) is (step[0] == "pin")
        elif step == "begin_use" or users:
            getattr(life, step)()
            users += 1 if step == "begin_use" else -1
        assert not (users and life.may_leave)
        life.check()
