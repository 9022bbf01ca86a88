"""Whether training may go on, and how the trainer's threads wait for one another.

The link's threads announce changes and failures; the user's threads wait for a change, or raise the failure. Once
something has failed, everything raises it: half an update must not be trained on (I8).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from hytrain.errors import ClusterTimeout, HyTrainError, UsageError
from hytrain.step.life import Event, State, StepLife

UPDATE_TIMEOUT_S: Final = 600.0


class Health:
    """The step's life, the first failure, and the condition that announces changes of layers."""

    def __init__(self) -> None:
        self.life = StepLife()
        self.changed = threading.Condition()
        self.failure: HyTrainError | None = None

    def check(self) -> None:
        """Raise the failure if there is one."""
        if self.failure is not None:
            raise self.failure

    def require(self, event: Event, **facts: object) -> None:
        """Raise `UsageError` unless the step's life allows `event` now. `facts` complete the sentence."""
        self.check()
        if (refusal := self.life.refusal(event)) is None:
            return
        sentence = refusal.sentence.format(**facts)
        if refusal.fatal:
            self.refuse(sentence)
        raise UsageError(sentence)

    def on(self, event: Event, **facts: object) -> State:
        """Let `event` happen to the step; the new state. Raises as `require` does."""
        self.require(event, **facts)
        return self.life.on(event)

    def fail(self, error: HyTrainError) -> None:
        """From now on everything raises `error`, or the one that came before it."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def refuse(self, sentence: str) -> NoReturn:
        """Refuse to go on: some updates of this step have been made, others have not."""
        self.abort(UsageError(f"{sentence} (training cannot go on: make the optimizer anew and load a checkpoint)"))

    def abort(self, error: HyTrainError) -> NoReturn:
        """Fail with `error` and raise what failed first."""
        self.life.on(Event.BREAK)
        self.fail(error)
        assert self.failure is not None
        raise self.failure

    @contextlib.contextmanager
    def undivided(self, what: str) -> Iterator[None]:
        """What is left half-way ends training: a layer must not have two owners, nor a step some of its updates."""
        try:
            yield
        except BaseException as error:
            self.fail(UsageError(f"{what} was interrupted by {type(error).__name__}: {error}"))
            raise

    def end_in_child(self, error: HyTrainError) -> None:
        """In a forked child, where nobody is left who could announce anything, or give back what was locked."""
        self.changed, self.failure = threading.Condition(), error

    def wait_for(self, happened: Callable[[], bool], what: str, timeout_s: float = UPDATE_TIMEOUT_S) -> None:
        """Sleep until something has happened. Raises a failure as soon as there is one, `ClusterTimeout` at last."""
        with self.changed:
            done = self.changed.wait_for(lambda: self.failure is not None or happened(), timeout_s)
        self.check()
        if not done:
            raise ClusterTimeout(f"{what} did not happen within {timeout_s:.0f} s")
