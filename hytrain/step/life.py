"""The life of a step: a pure state machine, with every refusal as a row.

    IDLE ─begin─▶ SUMMING ─end─▶ SUMMED ─begin last─▶ COMMITTING ─end─▶ COMMITTED ─step─▶ IDLE
    IDLE ─begin last─▶ COMMITTING      SUMMED ─begin─▶ SUMMING      SUMMED ─drop─▶ IDLE
    SUMMED ─step─▶ COMMITTING: fewer backwards came than were announced, so the update begins now

In SUMMING a backward only adds up gradients. In COMMITTING the step's updates begin as gradients arrive; COMMITTED
waits for `step()`. BROKEN: some updates of a step were made and others were not. A backward's end is an event that
autograd brings, or the loop where gradients are reduced outside of any backward. Knows no tensors, layers or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class State(Enum):
    IDLE = auto()
    SUMMING = auto()
    SUMMED = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    BROKEN = auto()


#: A backward has begun and not ended. One that was interrupted never ends.
IN_BACKWARD: Final = (State.SUMMING, State.COMMITTING)


class Event(Enum):
    BEGIN = auto()  # the first gradient of a backward that only sums
    BEGIN_LAST = auto()  # the first gradient of the step's last backward
    END = auto()
    STEP = auto()
    DROP = auto()  # zero_grad()
    LOAD = auto()  # weights or state are about to be loaded
    REGROUP = auto()  # the parameters are about to change
    OUTSIDE = auto()  # forward, synchronize, a read: from outside of any backward
    BREAK = auto()  # a step was left half-way


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event cannot happen, as a format string. `fatal`: it already has, and training cannot go on."""

    sentence: str
    fatal: bool = False


class InvalidTransition(RuntimeError):
    """An event that no caller may bring: an error of HyTrain's own."""


_INTERRUPTED: Final = Refusal(
    "the last backward ended with an exception, so training cannot go on (make the optimizer anew and load a "
    "checkpoint); or it goes on in another thread, which comes first"
)
_NO_STEP: Final = Refusal("a backward reached {name} before step() was called: {advice}", fatal=True)
_DROPPED: Final = Refusal(
    "zero_grad() between backward and step() comes too late: the updates began in backward. Call it after opt.step(); "
    'to leave out steps, pass on_nonfinite="skip"; freeze what a loss is not to train'
)
_LOADED: Final = Refusal(
    "{what} between backward and step(), when updates have begun that torch would make afterwards: call it after "
    "opt.step()"
)
_REGROUPED: Final = Refusal("{what} between backward and step(): call it after opt.step()")
_OVER: Final = Refusal("a step was left half-way: make the optimizer anew and load a checkpoint")

TRANSITIONS: Final[dict[tuple[State, Event], State | Refusal]] = {
    (State.IDLE, Event.BEGIN): State.SUMMING,
    (State.IDLE, Event.BEGIN_LAST): State.COMMITTING,
    (State.IDLE, Event.STEP): State.IDLE,
    (State.IDLE, Event.DROP): State.IDLE,
    (State.IDLE, Event.LOAD): State.IDLE,
    (State.IDLE, Event.REGROUP): State.IDLE,
    (State.IDLE, Event.OUTSIDE): State.IDLE,
    (State.SUMMING, Event.END): State.SUMMED,
    (State.SUMMING, Event.STEP): _INTERRUPTED,
    (State.SUMMING, Event.DROP): State.SUMMING,
    (State.SUMMING, Event.LOAD): State.SUMMING,
    (State.SUMMING, Event.REGROUP): _REGROUPED,
    (State.SUMMING, Event.OUTSIDE): _INTERRUPTED,
    (State.SUMMED, Event.BEGIN): State.SUMMING,
    (State.SUMMED, Event.BEGIN_LAST): State.COMMITTING,
    (State.SUMMED, Event.STEP): State.COMMITTING,
    (State.SUMMED, Event.DROP): State.IDLE,
    (State.SUMMED, Event.LOAD): State.SUMMED,
    (State.SUMMED, Event.REGROUP): _REGROUPED,
    (State.SUMMED, Event.OUTSIDE): State.SUMMED,
    (State.COMMITTING, Event.END): State.COMMITTED,
    (State.COMMITTING, Event.STEP): _INTERRUPTED,
    (State.COMMITTING, Event.DROP): State.COMMITTING,
    (State.COMMITTING, Event.LOAD): _LOADED,
    (State.COMMITTING, Event.REGROUP): _REGROUPED,
    (State.COMMITTING, Event.OUTSIDE): _INTERRUPTED,
    (State.COMMITTED, Event.BEGIN): _NO_STEP,
    (State.COMMITTED, Event.BEGIN_LAST): _NO_STEP,
    (State.COMMITTED, Event.STEP): State.IDLE,
    (State.COMMITTED, Event.DROP): _DROPPED,
    (State.COMMITTED, Event.LOAD): _LOADED,
    (State.COMMITTED, Event.REGROUP): _REGROUPED,
    (State.COMMITTED, Event.OUTSIDE): State.COMMITTED,
    **{(state, Event.BREAK): State.BROKEN for state in State},
    **{(State.BROKEN, event): _OVER for event in Event if event is not Event.BREAK},
}


class StepLife:
    """Where training stands. `step` counts from 0, `ended` the backwards of the step that have ended, `backward` all
    that ever began.
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        self.step = self.ended = self.backward = 0

    def refusal(self, event: Event) -> Refusal | None:
        """Why `event` cannot happen now, if it cannot. Raises `InvalidTransition` for one that no caller may bring."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise InvalidTransition(f"{event.name} in step {self.step}, which is {self.state.name}")
        return after if isinstance(after, Refusal) else None

    def on(self, event: Event) -> State:
        """Let `event` happen; the new state. Whoever calls has asked `refusal` first."""
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
        assert (self.state is not State.IDLE) or self.ended == 0, "a step that has not begun has no backwards"
        assert self.state not in (State.SUMMED, State.COMMITTED) or self.ended, "what has ended was counted"
