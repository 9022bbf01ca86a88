"""The life of a gradient on the trainer's side: a pure state machine for each layer.

                      ┌────────── the GPU updates: UpdateOnDevice ──────────┐
                      │                                                     ▼
    CURRENT ──Filled──┤                                                  CURRENT
                      └─ the CPU: CopyGradients ───▶ LEAVING ──Copied: SendGradReady─▶ UPDATING
                                                                                          │
                   CURRENT ◀──Awaited── LANDING ◀──CopyWeights :WeightsReady──────────────┘

CURRENT: forward may read the weights. LEAVING: gradients are being copied out. UPDATING: the optimizer has
them. LANDING: the new weights are on their way in, and nobody has been made to wait for them yet. After an
update a layer can be read only once it is CURRENT again (I1), and its planes are touched only by whoever the state
says (I2). The engine feeds events and carries the commands out; nothing here knows how.
"""

from __future__ import annotations

from dataclasses import dataclass
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


class Command(Enum):
    COPY_GRADIENTS = auto()
    SEND_GRAD_READY = auto()
    COPY_WEIGHTS = auto()
    UPDATE_ON_DEVICE = auto()


class InvalidTransition(RuntimeError):
    """An event that a layer's state does not allow, with the layer's recent story."""


#: (who updates, state, event) -> (next state, command)
TRANSITIONS: Final[dict[tuple[str, State, Event], tuple[State, Command | None]]] = {
    ("gpu", State.CURRENT, Event.FILLED): (State.CURRENT, Command.UPDATE_ON_DEVICE),
    ("cpu", State.CURRENT, Event.FILLED): (State.LEAVING, Command.COPY_GRADIENTS),
    ("cpu", State.LEAVING, Event.COPIED): (State.UPDATING, Command.SEND_GRAD_READY),
    ("cpu", State.UPDATING, Event.WEIGHTS_READY): (State.LANDING, Command.COPY_WEIGHTS),
    ("cpu", State.LANDING, Event.AWAITED): (State.CURRENT, None),
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """One event of a layer's story."""

    step: int
    event: Event
    state: State


class LayerLife:
    """One layer's place in the life of a gradient. `updated` is the step of the last update that began."""

    STORY_LENGTH: Final = 12

    def __init__(self, lid: int, placement: Placement) -> None:
        self.lid, self.placement = lid, placement
        self.state = State.CURRENT
        self.updated = -1
        self._story: list[Chapter] = []

    @property
    def is_current(self) -> bool:
        return self.state is State.CURRENT

    def on(self, event: Event, step: int) -> Command | None:
        """Let `event` of step `step` happen. Raises `InvalidTransition` if it cannot, changing nothing."""
        after = TRANSITIONS.get((self.placement.updates, self.state, event))
        if after is None:
            raise InvalidTransition(self._tell(f"{event.name} of step {step} while {self.state.name}"))
        if event is Event.FILLED:
            if step <= self.updated:
                raise InvalidTransition(self._tell(f"a second gradient of step {step}"))
            self.updated = step
        elif step != self.updated:
            raise InvalidTransition(self._tell(f"{event.name} of step {step}, the update is step {self.updated}'s"))
        self.state, command = after
        self._story = [*self._story[1 - self.STORY_LENGTH :], Chapter(step, event, self.state)]
        return command

    def place(self, placement: Placement) -> None:
        """Change the layer's placement. Only between updates: raises `InvalidTransition` otherwise (I3)."""
        if self.state is not State.CURRENT:
            raise InvalidTransition(self._tell(f"handover to {placement.name} while {self.state.name}"))
        self.placement = placement

    def check(self) -> None:
        assert self.placement.updates == "cpu" or self.state is State.CURRENT, "the GPU's updates take no trip"

    def _tell(self, what: str) -> str:
        story = ", ".join(f"{c.event.name}@{c.step}→{c.state.name}" for c in self._story) or "nothing"
        return f"layer {self.lid}, placed on {self.placement.name}: {what}; before: {story}"
