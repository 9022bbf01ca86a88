"""What autograd is doing."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final, Self

import torch
from torch.utils.checkpoint import CheckpointFunction

from hytrain.uncompiled import uncompiled

#: What helps where a backward is made of several.
REENTRANT: Final = ": reentrant checkpointing makes a backward of several, so pass use_reentrant=False to checkpoint()"


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_reentrant_checkpoint() -> bool:
    """Whether this thread runs a backward that reentrant activation checkpointing started inside another one."""
    code: Final = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class Running:
    """The backward that this thread runs, for as long as autograd has it.

    `at_end` is called when all of its gradients are computed, after what others have queued in it: FSDP2's roots reduce
    there. It is not called if the backward raises, and not in a compiled one (compiled autograd): then autograd only
    drops it. `task`: autograd's number of it.
    """

    @classmethod
    def now(cls, at_end: Callable[[], None]) -> Self | None:
        """None outside of a backward."""
        return cls(at_end) if in_backward() else None

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.task = torch._C._current_graph_task_id()
        callback = partial(_queue, at_end)
        self._is_over = threading.Event()
        self._callback = weakref.ref(callback, lambda _: self._is_over.set())
        _queue(callback)

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def wait(self, timeout_s: float) -> None:
        """Return when it is over: a thread of autograd may have it for a moment longer than the one that called it."""
        self._is_over.wait(timeout_s)


@uncompiled
def _queue(call: Callable[[], None]) -> None:
    """Call it when all gradients of the present backward are computed, after the calls that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
