"""Gradient accumulation: which backward is the last one of a step, and the sums of the gradients before it.

    backward 1 … n-1    gradient ─▶ float32 sum, computed on the parameter's device  nothing is sent
    backward n          gradient + sum ─▶ the gradient's own dtype ─▶ its layer      as after a single backward
    step() before that  sum ─▶ the gradient's own dtype ─▶ its layer

A backward with `retain_graph=True` is never the last one: another one comes through the same graph, or `step()` does.

Gradients are added in the order of the backwards, whoever owns the layer, so the bits do not depend on k. The sums are
kept on the device if it has room for them when the first one is made, otherwise in host memory (sums.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hytrain.memory.capacity import Room
from hytrain.memory.transfer import Transfers
from hytrain.model.trained import TrainedParameter
from hytrain.step.sums import DeviceSums, HostSums, Sums

_log = logging.getLogger(__name__)


class Accumulation:
    """The gradient sums of one optimizer. Until `has_sums` is set, `take` has nothing to add."""

    def __init__(self, backwards: int) -> None:
        self._backwards = backwards
        self._held = False
        self._goes_on: Callable[[], bool] = lambda: False
        self.begin_anew(DeviceSums)

    def begin_anew(self, choose: Callable[[], Sums]) -> None:
        """Start over with new layers. `choose` decides where the sums are kept, when the first one is made."""
        self._choose = choose
        self._sums: Sums = DeviceSums()
        self.has_sums = False

    @property
    def pending(self) -> list[TrainedParameter]:
        return self._sums.waiting()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which no backward is the last one."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def ask(self, goes_on: Callable[[], bool]) -> None:
        """Let a loop tell whether more backwards follow. Once one does, the count of backwards is ignored."""
        self._goes_on = goes_on

    def count_no_more(self) -> None:
        """Whoever tells has told once: the number of backwards per step is not needed."""
        self._backwards = 1

    def begin(self, ended: int) -> bool:
        """Begin a backward after `ended` others of this step. Returns whether it is the last one."""
        if goes_on := self._goes_on():
            self.count_no_more()
        self._sums.begin()
        return not (self._held or goes_on or _keeps_graph()) and ended + 1 >= self._backwards

    def expects(self, ended: int) -> bool:
        """Whether more backwards were announced than the `ended` ones of this step."""
        return self._goes_on() or ended < self._backwards

    def add(self, parameter: TrainedParameter) -> None:
        """Move the parameter's gradient into its sum."""
        gradient = parameter.gradient()
        parameter.parameter.grad = None  # autograd must neither add to it nor keep it
        if not self.has_sums:
            self._sums, self.has_sums = self._choose(), True
        total = self._sums.take(parameter)
        if total is None:  # a copy: a replayed CUDA graph writes each gradient where the one before was
            total = gradient.to(torch.float32, copy=True)
        else:
            total.add_(gradient)
        self._sums.put(parameter, total)

    def take(self, parameter: TrainedParameter) -> Tensor:
        """The step's gradient, shape (numel,) in storage order: the sum plus the last backward's, if both exist."""
        total = self._sums.take(parameter)
        if total is None:
            return parameter.gradient()
        if parameter.parameter.grad is not None:
            total.add_(parameter.gradient())
        return total.to(parameter.parameter.dtype)

    def drop(self) -> None:
        self._sums.clear()

    def close(self) -> None:
        """Free the sums' memory. No copy may be under way."""
        self._sums.clear()
        self._sums.close()


def _keeps_graph() -> bool:
    """Whether this backward retains its graph for another one, which needs the weights of before the update."""
    inside = torch._C._current_graph_task_id() != -1
    return inside and torch._C._autograd._get_current_graph_task_keep_graph()


def choose_sums(place: str, parameters: Sequence[TrainedParameter], transfers: Transfers, room: Room | None) -> Sums:
    """`place` is "device", "host" or "auto": the device if its `room` suffices. None means that there is no bound."""
    needed = 4 * sum(known.own.numel() for known in parameters)
    if place == "auto":
        place = "device" if room is None or needed <= room.free else "host"
        free = "enough" if room is None else f"{room.free / 1e9:.2f} GB"
        _log.info("sums of gradients take %.2f GB on the %s; free on the device: %s", needed / 1e9, place, free)
    return DeviceSums() if place == "device" else HostSums(transfers)
