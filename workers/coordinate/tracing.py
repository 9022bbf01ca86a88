"""The timeline of some steps, which a monitor asks for during the run: who still draws it. `CoordinatorState` calls it.

    Command ─▶ begin ─▶ Draw, TraceNext to the trainers ─▶ … ─▶ Traced of all, or they have left ─▶ Draw no more

Each trainer tells its optimizer which steps these are. A run that is drawn from its start on ends that on command
only. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.address import Address
from protocol.messages import MAX_TRACED_STEPS, TraceNext
from workers.effects import Command, Draw, Send


class Tracing:
    """Whether the timeline is drawn, and by whom besides the coordinator, if its end is known."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._drawing: set[Address] = set()

    def command(self, value: str, trainers: Collection[Address]) -> tuple[str, list[Command]]:
        """Draw the next so many steps, or, with 0, no more of them. Returns what to tell the user.

        Raises `ValueError` if that is not possible now.
        """
        if not value.isdecimal() or len(value) > 4 or int(value) > MAX_TRACED_STEPS:
            raise ValueError(f"trace is {value!r}: give a number of steps up to {MAX_TRACED_STEPS}, or 0 to end it")
        if not trainers:
            raise ValueError("there is no trainer")
        steps = int(value)
        if steps and self._is_on:
            raise ValueError("the timeline is drawn already: trace 0 ends it and writes trace.json")
        if not steps and not self._is_on:
            raise ValueError("no timeline is drawn")
        self._is_on = True
        self._drawing = {Address(role, one.rank) for one in trainers for role in ("trainer", "optimizer")}
        told: list[Command] = [Send(trainer, TraceNext(steps=steps)) for trainer in trainers]
        if not steps:
            return "the timeline ends, and is written into trace.json", told
        return f"the next {steps} steps are drawn into trace.json", [Draw(begins=True), *told]

    def has_drawn(self, worker: Address) -> list[Command]:
        """A trainer or optimizer has drawn its part, perhaps for a coordinator that has died."""
        return self.has_left(worker) if self._is_on else [Draw(begins=False)]

    def goes_on(self, trainer: Address) -> None:
        """A trainer draws steps that a coordinator which has died was asked for."""
        self._is_on = True
        self._drawing.add(trainer)

    def has_left(self, worker: Address) -> list[Command]:
        """A trainer or optimizer draws no more."""
        if worker not in self._drawing:
            return []
        self._drawing.remove(worker)
        if self._drawing:
            return []
        self._is_on = False
        return [Draw(begins=False)]

    def check(self) -> None:
        assert self._is_on or not self._drawing
