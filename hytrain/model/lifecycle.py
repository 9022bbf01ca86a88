"""The life of a layer's gradient in the trainer: a pure state machine per layer.

                      ┌── the GPU updates ──▶ CURRENT
    CURRENT ──Filled──┤
                      └── the CPU updates ──▶ LEAVING ──Copied──▶ UPDATING
                                                                      │
                   CURRENT ◀──Awaited── LANDING ◀──WeightsReady───────┘

CURRENT: forward may read the weights. LEAVING: gradients are being copied out. UPDATING: the optimizer has them.
LANDING: the new weights are being copied in, and no reader has waited for them yet. After an update, a layer can be
read only when it is CURRENT again (I1). The state determines who may access the planes (I2).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from protocol.placement import Placement


class State(Enum):
    CURRENT = auto()
    LEAVING = auto()
    UPDATING = auto()
    LANDING = auto()


class Event(Enum):
    FILLED = auto()
    COPIED = auto()
    WEIGHTS_READY = auto()
    AWAITED = auto()


class InvalidTransition(RuntimeError):
    """An event that a state does not allow: of a layer, whose recent events the message has, a block, or a step."""


#: (who updates, state, event) -> next state
TRANSITIONS: Final[dict[tuple[str, State, Event], State]] = {
    ("gpu", State.CURRENT, Event.FILLED): State.CURRENT,
    ("cpu", State.CURRENT, Event.FILLED): State.LEAVING,
    ("cpu", State.LEAVING, Event.COPIED): State.UPDATING,
    ("cpu", State.UPDATING, Event.WEIGHTS_READY): State.LANDING,
    ("cpu", State.LANDING, Event.AWAITED): State.CURRENT,
}


class LayerLife:
    """The state of one layer. `updated` is the step of the last update that began."""

    STORY_LENGTH: Final = 12

    def __init__(self, lid: int, placement: Placement) -> None:
        self.lid, self.placement = lid, placement.resident  # where its weights are, its block says
        self.state = State.CURRENT
        self.updated = -1
        self._story: list[tuple[Event, int, State]] = []  # each event, its step, and the state after it

    @property
    def is_current(self) -> bool:
        return self.state is State.CURRENT

    def on(self, event: Event, step: int) -> None:
        """Apply `event` of step `step`. Raises `InvalidTransition`, and changes nothing, if it is not allowed."""
        after = TRANSITIONS.get((self.placement.updates, self.state, event))
        if after is None:
            raise InvalidTransition(self._tell(f"{event.name} of step {step} while {self.state.name}"))
        if event is Event.FILLED:
            if step <= self.updated:
                raise InvalidTransition(self._tell(f"a second gradient of step {step}"))
            self.updated = step
        elif step != self.updated:
            raise InvalidTransition(self._tell(f"{event.name} of step {step}, the update is step {self.updated}'s"))
        self.state = after
        self._story = [*self._story[1 - self.STORY_LENGTH :], (event, step, self.state)]

    def place(self, placement: Placement) -> None:
        """Change the layer's placement. Raises `InvalidTransition` during an update (I3)."""
        if self.state is not State.CURRENT:
            raise InvalidTransition(self._tell(f"handover to {placement.name} while {self.state.name}"))
        self.placement = placement

    def check(self) -> None:
        assert self.placement.updates == "cpu" or self.state is State.CURRENT, "the GPU's updates take no trip"

    def _tell(self, what: str) -> str:
        story = ", ".join(f"{event.name}@{step}→{state.name}" for event, step, state in self._story) or "nothing"
        return f"layer {self.lid}, placed on {self.placement.name}: {what}; before: {story}"
