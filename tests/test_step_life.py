"""The life of a step: every (state, event), those that happen, those that are refused and those that cannot be."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain.errors import ClusterTimeout, UsageError
from hytrain.model.lifecycle import InvalidTransition
from hytrain.step import health as module
from hytrain.step.health import Health
from hytrain.step.life import IN_BACKWARD, TRANSITIONS, Event, Refusal, State, StepLife
from hytrain.step.timing import Timing

#: Events that lead from the beginning to each state.
WAYS: dict[State, list[Event]] = {
    State.IDLE: [],
    State.SUMMING: [Event.BEGIN],
    State.SUMMED: [Event.BEGIN, Event.END],
    State.COMMITTING: [Event.BEGIN_LAST],
    State.COMMITTED: [Event.BEGIN_LAST, Event.END],
    State.PARKED: [Event.PARK],
    State.PARKED_WEIGHTS: [Event.PARK_WEIGHTS],
    State.BROKEN: [Event.BREAK],
}
FACTS = {"name": "layer.weight", "advice": "call opt.step()", "what": "opt.load()"}


def life_in(state: State) -> StepLife:
    life = StepLife()
    for event in WAYS[state]:
        life.on(event)
    assert life.state is state
    return life


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_the_table_is_all_there_is(state: State, event: Event) -> None:
    life = life_in(state)
    before = copy.copy(vars(life))
    after = TRANSITIONS.get((state, event))
    if isinstance(after, State):
        assert life.refusal(event) is None
        assert life.on(event) is life.state is after
        life.check()
        return
    if after is None:
        with pytest.raises(InvalidTransition, match=f"{event.name} in step 0, which is {state.name}"):
            life.refusal(event)
    else:
        assert life.refusal(event) is after
    with pytest.raises(InvalidTransition):
        life.on(event)
    assert vars(life) == before


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair, after in TRANSITIONS.items() if isinstance(after, Refusal)]
)
def test_a_refusal_is_a_whole_sentence_and_changes_nothing(state: State, event: Event) -> None:
    health, refusal = Health(Timing("backward")), TRANSITIONS[state, event]
    assert isinstance(refusal, Refusal)
    health.life = life_in(state)
    before = copy.copy(vars(health.life))
    sentence = refusal.sentence.format(**FACTS)
    assert "{" not in sentence
    with pytest.raises(UsageError) as refused:
        health.on(event, **FACTS)
    assert str(refused.value).startswith(sentence)
    assert vars(health.life) == before and health.failure is None


@given(st.lists(st.sampled_from([event for event in Event if event is not Event.BREAK]), max_size=60))
@settings(deadline=None)
def test_any_walk_counts_steps_and_backwards(events: list[Event]) -> None:
    life = StepLife()
    steps = backwards = ended = 0
    for event in events:
        after = TRANSITIONS.get((life.state, event))
        if not isinstance(after, State):
            continue
        steps += event is Event.STEP and life.state is State.COMMITTED
        backwards += event in (Event.BEGIN, Event.BEGIN_LAST)
        ended = 0 if life.on(event) is State.IDLE else ended + (event is Event.END)
        life.check()
        assert (life.step, life.backward, life.ended) == (steps, backwards, ended)
        assert life.state not in IN_BACKWARD or life.backward


def test_a_wait_counts_no_time_in_which_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again before it gives up, and then it fails for good."""
    seconds, looks = itertools.count(0.0, 1000.0), itertools.count(1)
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    health = Health(Timing("backward"), "optimizer-0 (process 7)", timeout_s=0.0095)
    health.wait_for(lambda: next(looks) == 4, "the update")
    with pytest.raises(ClusterTimeout, match=r"optimizer-0 \(process 7\) has not finished the update"):
        health.wait_for(lambda: False, "the update")
    with pytest.raises(ClusterTimeout):
        health.check()
