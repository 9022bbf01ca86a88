"""Keeps the compiler out of HyTrain's own functions, without importing it, which takes seconds.

`torch.compiler.disable` does the same with a wrapper, which takes some microseconds in each call: hooks have one for
each gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Final[Any] = torch._C._dynamo.eval_frame
_SKIP: Final = _frames._FrameAction.SKIP


def uncompiled(function: _Function) -> _Function:
    """The compiler does not trace the function, nor what it calls: a graph that comes here is broken."""
    _skip(function, inside=_SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return function


def traced_by_others(function: _Function) -> _Function:
    """The compiler makes no code of the function alone. Code that calls it has it traced."""
    _skip(function, inside=_frames._FrameAction.DEFAULT)
    return function


def constant_when_traced(function: _Function) -> _Function:
    """The compiler calls the function once, and traces what it has returned."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def undecorated(method: Any) -> Any:
    """A method that torch keeps out of compiled graphs by importing the compiler in its first call, without that."""
    return getattr(method, "__wrapped__", method)


def _skip(function: Any, *, inside: Any) -> None:
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(_SKIP, inside))


class Weakly:
    """A hook that calls a method, first with what is `given`, and does not keep the method's object."""

    def __init__(self, method: Callable[..., object], *given: Any) -> None:
        self._method, self._given = weakref.WeakMethod(method), given

    @uncompiled
    def __call__(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*self._given, *args)
