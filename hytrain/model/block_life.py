"""The life of a block whose weights may rest in host memory: where they are, and whether they may leave the GPU. Pure.

                Offload            Free
    RESIDENT ◀──────────▶ HERE ───────────▶ AWAY
                Settle     │ ▲              ▲ │
                    Update │ │ Fetch   Free │ │ Fetch, or FetchEarly: an update is under way on the host
                           ▼ │              │ ▼
                          STALE ────────────┘

RESIDENT: the weights rest on the GPU, as any others. In the other states they rest in host memory. HERE: the GPU has
them, too. STALE: what the GPU has is older than what an update has written on the host, or is writing there. AWAY: the
GPU has no memory for them. A block may leave when it is on the GPU and nothing pins it there.
"""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import Final

from hytrain.model.lifecycle import InvalidTransition


class State(Enum):
    RESIDENT = auto()
    HERE = auto()
    STALE = auto()
    AWAY = auto()


class Event(Enum):
    OFFLOAD = auto()
    SETTLE = auto()
    UPDATE = auto()
    FETCH = auto()
    FETCH_EARLY = auto()
    FREE = auto()
    END = auto()  # nobody moves it any more


class Pin(Flag):
    """Why a block must stay on the GPU."""

    NONE = 0
    COMPUTES = auto()  # its forward runs, or its backward, up to its last gradient
    GRAPH = auto()  # a graph of this step may need it
    VISIT = auto()  # a visit updates it after backward, and it stays for the forward after that
    HIDDEN = auto()  # it is read where nobody sees it
    VIEWED = auto()  # somebody else has used a parameter, and may have a view: as long as its memory is shared


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.RESIDENT, Event.OFFLOAD): State.HERE,
    (State.HERE, Event.SETTLE): State.RESIDENT,
    (State.HERE, Event.UPDATE): State.STALE,
    (State.HERE, Event.FREE): State.AWAY,
    (State.STALE, Event.SETTLE): State.RESIDENT,  # the update under way brings the rest
    (State.STALE, Event.UPDATE): State.STALE,
    (State.STALE, Event.FETCH): State.HERE,
    (State.STALE, Event.FETCH_EARLY): State.STALE,
    (State.STALE, Event.FREE): State.AWAY,
    (State.AWAY, Event.UPDATE): State.AWAY,
    (State.AWAY, Event.FETCH): State.HERE,
    (State.AWAY, Event.FETCH_EARLY): State.STALE,
    **{(state, Event.END): State.RESIDENT for state in State},
}


class BlockLife:
    """The state of one block, and its pins. `planned`: the plan wants its weights to rest in host memory."""

    def __init__(self) -> None:
        self.pins, self.planned = Pin.NONE, True
        self._users = 0  # operations outside of its forward that use one of its weights right now
        self._be(State.RESIDENT)

    def _be(self, state: State) -> None:
        self.state = state
        self.is_offloaded = state is not State.RESIDENT  # its weights rest in host memory
        self.is_present = state is not State.AWAY  # they have memory on the GPU
        self.is_away = state in (State.STALE, State.AWAY)  # the current ones are in host memory alone

    def on(self, event: Event) -> None:
        """Apply an event. Raises `InvalidTransition`, and changes nothing, if it is not allowed."""
        after = TRANSITIONS.get((self.state, event))
        if after is None or (event is Event.FREE and not self.may_leave):
            pins = "" if self.pins is Pin.NONE and not self._users else f", {self.pins}, in {self._users} operations"
            raise InvalidTransition(f"{event.name} while {self.state.name}{pins}")
        self._be(after)
        if event is Event.OFFLOAD:
            self.pins &= Pin.HIDDEN

    def pin(self, why: Pin) -> None:
        self.pins |= why

    def unpin(self, why: Pin) -> None:
        self.pins &= ~why

    def begin_use(self) -> None:
        self._users += 1

    def end_use(self) -> None:
        assert self._users > 0, "as often as `begin_use`"
        self._users -= 1

    @property
    def may_leave(self) -> bool:
        """Whether it is on the GPU, and nothing pins it but views, which matter while others have its memory, too."""
        pins = self.pins & ~Pin.VIEWED
        return self.state in (State.HERE, State.STALE) and pins is Pin.NONE and not self._users

    def check(self) -> None:
        assert self._users >= 0 and (self.state is not State.AWAY or Pin.COMPUTES not in self.pins), "it computes here"
