"""Who goes on when, streams of device work, and what memory must hold: the ground of a run with the real step code.

The scheduler lets exactly one party go on at a time, chosen by chance. Most parties are plain functions. Code that
blocks is a `Baton` thread: at a blocking point it gives the turn back until its condition holds.

A tile of memory holds a number that names the step that wrote it, so that whoever reads the tile can tell if it is the
right one; `require` raises `Violation` if it is not.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from memory_network import MemoryNetwork
from torch import Tensor

from hytrain.model.trained import TrainedLayer
from hytrain.tensors import address
from protocol import messages as m
from protocol.address import Address

TILE = 128
#: What memory holds: weights before the first update (their state is zero), a gradient that has not been made, memory
#: never written or used up, an update made ahead of another verdict, memory that is being written.
INITIAL, NEVER, BLANK, WRONG, TORN = 999.0, -1.0, -2.0, -3.0, -4.0


class Violation(AssertionError):
    """An invariant does not hold."""


class Stopped(BaseException):
    """The run has ended: unwinds a thread that waits."""


def require(condition: bool, invariant: str) -> None:
    if not condition:
        raise Violation(invariant)


def written_in(step: int) -> float:
    """What memory holds after step `step` has written it."""
    return 1000.0 + step


# ---------------------------------------------------------------- who goes on


@dataclass
class Actor:
    """A party without a thread: `act` does one thing, whenever `ready` says that it can."""

    ready: Callable[[], bool]
    act: Callable[[], None]


class Baton:
    """A thread that runs only while it has the turn, with the face of `threading.Thread`."""

    def __init__(self, scheduler: Scheduler, target: Callable[[], None], **options: Any) -> None:
        self._scheduler, self._target = scheduler, target
        self._turn = threading.Semaphore(0)
        self._until: Callable[[], bool] = lambda: True
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.done = False

    def start(self) -> None:
        self._thread.start()
        self._scheduler.add(self)

    def is_alive(self) -> bool:
        return not self.done

    def join(self, timeout_s: float | None = None) -> None:
        self._scheduler.wait_until(lambda: self.done)

    def ready(self) -> bool:
        return not self.done and self._until()

    def act(self) -> None:
        """Let the thread go on to its next blocking point; raises what the thread raises."""
        self._scheduler.current = self
        self._turn.release()
        self._scheduler.returned.acquire()
        self._scheduler.current = None
        if self._error is not None:
            raise self._error

    def wait(self, until: Callable[[], bool]) -> None:
        """On this thread: give the turn back until the condition holds and the thread is chosen."""
        self._until = until
        if not self._scheduler.stopping:
            self._scheduler.returned.release()
            self._turn.acquire()
        if self._scheduler.stopping:
            raise Stopped

    def stop(self) -> None:
        """End the thread, wherever it waits."""
        if not self.done:
            self._turn.release()
        self._thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._scheduler.stopping:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        self.done = True
        self._scheduler.returned.release()


class Scheduler:
    """Chooses by chance who goes on, with paces that change now and then so that anybody may fall far behind."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.stopping = rng, False
        self.current: Baton | None = None
        self.returned = threading.Semaphore(0)
        self._actors: list[Actor | Baton] = []
        self._paces: list[float] = []

    def add(self, actor: Actor | Baton) -> None:
        self._actors.append(actor)
        self._paces.append(1.0)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """A blocking point. Parties without a thread come here only when it has happened."""
        if self.current is not None:
            self.current.wait(happened)
        else:
            assert happened(), "only threads wait"

    def pause(self) -> None:
        """Others may go on here, if it is a thread that asks."""
        if self.current is not None and self.rng.random() < 0.5:
            self.current.wait(lambda: True)

    def play(self, check: Callable[[], None]) -> None:
        """Go on until nobody can. `check` is called after every turn."""
        while able := [index for index, actor in enumerate(self._actors) if actor.ready()]:
            if self.rng.random() < 0.03:
                self._paces = [self.rng.choice((0.001, 0.1, 1.0, 1.0, 10.0)) for _ in self._actors]
            (chosen,) = self.rng.choices(able, [self._paces[index] for index in able])
            self._actors[chosen].act()
            check()
        waiting = [actor for actor in self._actors if isinstance(actor, Baton) and not actor.done]
        require(not waiting, "nobody can go on: a deadlock")

    def stop(self) -> None:
        """End all threads."""
        self.stopping = True
        for actor in self._actors:
            if isinstance(actor, Baton):
                actor.stop()


# ---------------------------------------------------------------- streams


class Mark:
    """A point in a stream: has the face of a CUDA event."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.passed = stream, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.stream.scheduler.wait_until(lambda: self.passed)


class Stream:
    """Operations in order; one that waits for another stream's mark holds up those behind it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.operations: deque[Mark | Callable[[], None]] = deque()
        scheduler.add(Actor(self._is_ready, self._act))
        self.run = self.wait = self.operations.append

    def mark(self) -> Mark:
        mark = Mark(self)
        self.run(lambda: setattr(mark, "passed", True))
        return mark

    def _is_ready(self) -> bool:
        first = self.operations[0] if self.operations else None
        return first is not None and (not isinstance(first, Mark) or first.passed)

    def _act(self) -> None:
        operation = self.operations.popleft()
        if not isinstance(operation, Mark):
            operation()


# ---------------------------------------------------------------- memory


def at(start: int, numel: int) -> list[Any]:
    """The float32 elements at an address, tile by tile. A write to them is none that autograd counts."""
    array = np.frombuffer((ctypes.c_float * numel).from_address(start), dtype=np.float32)
    return [array[first : first + TILE] for first in range(0, numel, TILE)]


def holds(array: Any, value: float) -> bool:
    return bool(np.all(array == value))


@dataclass
class Expected:
    """What one segment must hold: `due` is what the next forward must find, `before[step]` what that step's update
    must find. A parameter is one segment, so its gradients come as a whole."""

    layer: TrainedLayer
    weights: Tensor
    due: float = INITIAL
    before: dict[int, float] = field(default_factory=dict)


@dataclass
class World:
    """What everybody shares, and the record of who did what. `scales` has each step's verdict; None: it is skipped."""

    rng: random.Random
    scheduler: Scheduler
    layers: list[TrainedLayer]
    chance: random.Random
    step: Callable[[], int] = lambda: 0
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    kept: list[Any] = field(default_factory=list)  # the device's memory is never given back
    accepted: dict[int, set[str]] = field(default_factory=dict)
    plans: dict[int, m.Plan] = field(default_factory=dict)
    scales: dict[int, float | None] = field(default_factory=dict)
    handing: Counter[int] = field(default_factory=Counter)  # handovers under way: a layer may have two
    story: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    moved: int = 0
    moved_before_death: int | None = None  # of the last coordinator but one
    postponed: int = 0
    evicted: int = 0  # bytes
    undone: int = 0

    def __post_init__(self) -> None:
        self.expected = [[Expected(layer, weights) for weights in layer.weights] for layer in self.layers]
        self.by_address = {address(known.weights): known for layer in self.expected for known in layer}

    def covering(self, start: int) -> Expected:
        """The segment that has this address."""
        first = max(known for known in self.by_address if known <= start)
        return self.by_address[first]

    def reading(self, layer: TrainedLayer) -> Callable[[], None]:
        """A kernel that reads a layer's weights: every update that was caused before it was launched, and no other."""
        step, due = self.step(), [known.due for known in self.expected[layer.lid]]

        def read() -> None:
            for weights, value in zip(layer.weights, due):
                found = weights.numpy()
                require(holds(found, value), f"I1: step {step} reads layer {layer.lid} at {found[::TILE]}, not {value}")

        return read

    def require_update(self, step: int, before: float, gradient: Any, weights: Any, *state: Any) -> None:
        """What an update must find: its gradient, and what the update before has left."""
        require(holds(gradient, written_in(step)), "I1: an update without its gradient")
        left = holds(weights, before) and all(holds(plane, 0.0 if before == INITIAL else before) for plane in state)
        require(left, f"I1: an update on another's leftovers: {weights[0]}, not {before}")

    def judged(self, step: int) -> None:
        """The verdict is known. A skipped step is as if it had not been."""
        for known in self.by_address.values() if self.scales[step] is None else ():
            known.due = known.before.get(step, known.due)

    def send(self, sender: str, to: str, message: m.Message) -> None:
        self.story.append(f"{sender} → {to}: {message}")
        self.network.send(Address(sender, 0), f"{to} from {sender}", message)
        match message:
            case m.Plan():
                self.plans[message.plan_id] = message
            case m.PlanAck(accepted=True):
                self.accepted.setdefault(message.plan_id, set()).add(sender)
            case m.TakeOver() | m.GiveUp() | m.PlanApplied():
                plan = self.plans[message.plan_id]
                require(plan.step <= message.step, "I3: a plan holds from its step on")
                require(self.accepted.get(message.plan_id) == {"trainer", "optimizer"}, "I3: both acknowledge")
                if isinstance(message, m.PlanApplied) and to == "coordinator":
                    self.moved += message.moved
                    self.postponed += plan.step < message.step

    def take(self, at: str, sender: str) -> m.Message:
        incoming = self.network.try_receive(f"{at} from {sender}")
        assert incoming is not None
        self.story.append(f"{at} takes {type(incoming.message).__name__} from {sender}")
        return incoming.message

    def waits(self, at: str, sender: str) -> bool:
        return bool(self.network.pending([f"{at} from {sender}"]))
