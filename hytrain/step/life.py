"""The life of a step: a pure state machine. Its table has every transition and every refusal.

    IDLE ─begin─▶ SUMMING ─end─▶ SUMMED ─begin last─▶ COMMITTING ─end─▶ COMMITTED ─step─▶ IDLE
    IDLE ─begin last─▶ COMMITTING      SUMMED ─begin─▶ SUMMING      SUMMED ─drop─▶ IDLE
    SUMMED ─step─▶ COMMITTING: fewer backwards came than were announced, so the update begins now
    IDLE ─park─▶ PARKED, PARKED_WEIGHTS ─resume─▶ IDLE

In SUMMING, a backward only adds up gradients. In COMMITTING, the step's updates begin as gradients arrive. COMMITTED
waits for `step()`. BROKEN means that some updates of a step were made and others were not. Autograd reports the end of
a backward; if gradients are reduced outside of autograd, `step()` does. Knows no tensors, layers or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from hytrain.model.lifecycle import InvalidTransition


class State(Enum):
    IDLE = auto()
    SUMMING = auto()
    SUMMED = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    PARKED = auto()
    PARKED_WEIGHTS = auto()
    BROKEN = auto()


#: Between two steps: nothing of the next one has begun.
BETWEEN: Final = (State.IDLE, State.PARKED, State.PARKED_WEIGHTS)
#: A backward has begun and not ended. An interrupted backward never ends.
IN_BACKWARD: Final = (State.SUMMING, State.COMMITTING)


class Event(Enum):
    BEGIN = auto()  # the first gradient of a backward that only sums
    BEGIN_LAST = auto()  # the first gradient of the step's last backward
    END = auto()
    STEP = auto()
    DROP = auto()  # zero_grad()
    LOAD = auto()  # weights or state are about to be loaded
    REGROUP = auto()  # the parameters are about to change
    PARK = auto()  # what HyTrain has on the device leaves it
    PARK_WEIGHTS = auto()  # and so do weights
    RESUME = auto()  # it is back
    OUTSIDE = auto()  # forward, synchronize or a read, outside of any backward
    BREAK = auto()  # a step was abandoned half-way


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event is refused, as a format string."""

    sentence: str


_INTERRUPTED: Final = Refusal(
    "the last backward ended with an exception, so training cannot go on (make the optimizer anew and load a "
    "checkpoint); or it is still running in another thread, or around this call, as in a hook, and has to end first"
)
_NO_STEP: Final = Refusal(
    "a backward reached {name} before step() was called for the last backward, which has already updated weights: add "
    "the losses and call backward once, or call opt.step() after each backward, or pass grad_accumulation=n, or wrap "
    "all but a step's last backward in opt.no_sync()"
)
_DROPPED: Final = Refusal(
    "zero_grad() between backward and step() comes too late: the updates began in backward. Call it after opt.step(), "
    'or pass updates="step"; to leave out steps that are not finite, pass on_nonfinite="skip"; freeze what a loss is '
    "not to train"
)
_LOADED: Final = Refusal(
    "{what} between backward and step(), but updates have already begun, which torch would make in step(): call it "
    "after opt.step()"
)
_REGROUPED: Final = Refusal("{what} between backward and step(): call it after opt.step()")
_IS_PARKED: Final = Refusal(
    "opt.park() has taken from the GPU what updates need: call opt.resume() before training goes on"
)
_NO_WEIGHTS: Final = Refusal(
    "opt.park(weights=True) has taken the weights from the GPU: call opt.resume() before they are used"
)
_OVER: Final = Refusal("a step was left half-way: make the optimizer anew and load a checkpoint")

#: By event, the outcome in each of `STATES`; None for an event that cannot come there.
STATES: Final = (
    State.IDLE,
    State.SUMMING,
    State.SUMMED,
    State.COMMITTING,
    State.COMMITTED,
    State.PARKED,
    State.PARKED_WEIGHTS,
)
OUTCOMES: Final[dict[Event, tuple[State | Refusal | None, ...]]] = {
    Event.BEGIN: (State.SUMMING, None, State.SUMMING, None, _NO_STEP, _IS_PARKED, _IS_PARKED),
    Event.BEGIN_LAST: (State.COMMITTING, None, State.COMMITTING, None, _NO_STEP, _IS_PARKED, _IS_PARKED),
    Event.END: (None, State.SUMMED, None, State.COMMITTED, None, None, None),
    Event.STEP: (State.IDLE, _INTERRUPTED, State.COMMITTING, _INTERRUPTED, State.IDLE, _IS_PARKED, _IS_PARKED),
    Event.DROP: (State.IDLE, State.SUMMING, State.IDLE, State.COMMITTING, _DROPPED, State.PARKED, State.PARKED_WEIGHTS),
    Event.LOAD: (State.IDLE, State.SUMMING, State.SUMMED, _LOADED, _LOADED, State.PARKED, _NO_WEIGHTS),
    Event.REGROUP: (State.IDLE, _REGROUPED, _REGROUPED, _REGROUPED, _REGROUPED, _IS_PARKED, _IS_PARKED),
    Event.PARK: (State.PARKED, *[_REGROUPED] * 4, State.PARKED, State.PARKED_WEIGHTS),
    Event.PARK_WEIGHTS: (State.PARKED_WEIGHTS, *[_REGROUPED] * 4, State.PARKED_WEIGHTS, State.PARKED_WEIGHTS),
    Event.RESUME: (State.IDLE, *[None] * 4, State.IDLE, State.IDLE),
    Event.OUTSIDE: (State.IDLE, _INTERRUPTED, State.SUMMED, _INTERRUPTED, State.COMMITTED, State.PARKED, _NO_WEIGHTS),
}
TRANSITIONS: Final[dict[tuple[State, Event], State | Refusal]] = {
    **{(s, event): out for event, row in OUTCOMES.items() for s, out in zip(STATES, row, strict=True) if out},
    **{(state, Event.BREAK): State.BROKEN for state in State},
    **{(State.BROKEN, event): _OVER for event in Event if event is not Event.BREAK},
}


class StepLife:
    """The current step, counted from 0. `ended` counts its finished backwards, `backward` all that ever began."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.step = self.ended = self.backward = 0

    def refusal(self, event: Event) -> Refusal | None:
        """Why `event` is refused now; None if it is allowed. Raises `InvalidTransition` if no caller may send it."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise InvalidTransition(f"{event.name} in step {self.step}, which is {self.state.name}")
        return after if isinstance(after, Refusal) else None

    def on(self, event: Event) -> State:
        """Apply `event` and return the new state. The caller has asked `refusal` first."""
        after = TRANSITIONS.get((self.state, event))
        if not isinstance(after, State):
            raise InvalidTransition(f"{event.name} in step {self.step}, which is {self.state.name}")
        match event:
            case Event.BEGIN | Event.BEGIN_LAST:
                self.backward += 1
            case Event.END:
                self.ended += 1
            case Event.STEP if self.state is State.COMMITTED:
                self.step, self.ended = self.step + 1, 0
            case Event.DROP if after is State.IDLE:
                self.ended = 0
        self.state = after
        return after

    def check(self) -> None:
        assert (self.state not in BETWEEN) or self.ended == 0, "a step that has not begun has no backwards"
        assert self.state not in (State.SUMMED, State.COMMITTED) or self.ended, "what has ended was counted"
