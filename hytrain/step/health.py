"""Whether training may continue, and how the trainer's threads wait for one another.

The link's threads announce changes and failures. The user's threads wait for a change, or raise the failure. After a
failure every call raises it: training must not continue on half an update (I8).
"""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

from hytrain.errors import ClusterTimeout, HyTrainError, UsageError
from hytrain.model.consumed import refuse
from hytrain.step.life import IN_BACKWARD, Event, State, StepLife
from hytrain.step.timing import SEEN, Timing

LOOK_S: Final = 1.0


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes at the end, unless it is pressed twice. Python has signals handled by its main thread alone."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[tuple[int, FrameType | None]]()

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])


class Health:
    """The step's life, the first failure, and the condition that announces changes of layers."""

    def __init__(self, timing: Timing, updater: str = "the optimizer process", timeout_s: float = math.inf) -> None:
        """`updater`: the process that is waited for, by its name. `timeout_s`: for how long."""
        self.timing, self._updater, self._timeout_s = timing, updater, timeout_s
        self.waits_for = ""  # what the user's thread is waiting for, in words
        self.life = StepLife()
        #: Ends a backward that autograd has dropped; waits for so many seconds if another thread may be dropping it.
        self.end_dropped: Callable[[float], None] = lambda wait_s: None
        self.changed = threading.Condition()
        self.failure: HyTrainError | None = None  # the first one

    def check(self) -> None:
        """Raise a copy of the failure: what is raised keeps the frames that it comes through, and the user's model."""
        if (failure := self.failure) is None:
            return
        again = copy.copy(failure)
        if failure.__cause__ is not None:
            again.__cause__ = failure.__cause__
        raise again

    def require(self, event: Event, **facts: object) -> None:
        """Raise `UsageError` unless the step's life allows `event` now. `facts` fill in the sentence."""
        self.check()
        if self.life.state in IN_BACKWARD:
            self.end_dropped(LOOK_S)
        if (refusal := self.life.refusal(event)) is not None:
            refuse(refusal.sentence.format(**facts))
        if self.life.state is State.SUMMED and event in SEEN:
            self.timing.saw(SEEN[event])

    def on(self, event: Event, **facts: object) -> State:
        """Apply `event`, and return the new state. Raises as `require` does."""
        self.require(event, **facts)
        return self.life.on(event)

    def fail(self, error: HyTrainError) -> None:
        """From now on every call raises `error`, or the failure that came before it."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def refuse(self, sentence: str, kind: type[HyTrainError] = UsageError) -> NoReturn:
        """Refuse to continue: some updates of this step have been made, others have not."""
        error = kind(f"{sentence} (training cannot go on: make the optimizer anew and load a checkpoint)")
        self.life.on(Event.BREAK)
        self.fail(error)
        self.check()
        raise error

    @contextlib.contextmanager
    def undivided(self, what: str) -> Iterator[None]:
        """An exception inside ends training: a layer must not have two owners, nor a step half of its updates.

        Ctrl-C comes after it.
        """
        with interrupts_held_back():
            try:
                yield
            except BaseException as error:
                self.fail(UsageError(f"{what} was interrupted by {type(error).__name__}: {error}"))
                raise

    def end_in_child(self, error: HyTrainError) -> None:
        """Fail in a forked child. No other thread is left to notify or unlock the old condition."""
        self.changed, self.failure = threading.Condition(), error

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Sleep until `happened` is true. Raises a failure as soon as there is one, and `ClusterTimeout` in the end.

        A timeout is a failure, too: nothing is waited for twice.
        """
        self.waits_for, left_s = what, self._timeout_s
        with self.changed:
            while not (done := self.failure is not None or happened()) and left_s > 0:
                began_s = time.monotonic()
                self.changed.wait(LOOK_S)
                left_s -= min(time.monotonic() - began_s, LOOK_S)  # not the time in which this process was stopped
        self.waits_for = ""
        if not done:
            self.fail(ClusterTimeout(f"{self._updater} has not finished {what} in {self._timeout_s:.0f} s"))
        self.check()
