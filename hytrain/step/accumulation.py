"""Gradient accumulation: which backward is the last one of a step, and the sums of the gradients before it.

    backward 1 … n-1    gradient ─▶ float32 sum, computed on the parameter's device  nothing is sent; `p.grad` shows it
    backward n          gradient + sum ─▶ the gradient's own dtype ─▶ its layer      as after a single backward
    step() before that  sum ─▶ the gradient's own dtype ─▶ its layer                 `p.grad` shows it on

A backward with `retain_graph=True` is never the last one: another one comes through the same graph, or `step()` does.

Gradients are added in the order of the backwards, whoever owns the layer, so the bits do not depend on k. The sums are
kept on the device if it has room for them when the first one is made, otherwise in host memory (sums.py). Those of a
last backward whose updates begin in `step()` go on to the planes where these will read them, for layers of the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hytrain.errors import UsageError
from hytrain.memory.capacity import Room
from hytrain.memory.transfer import Transfers
from hytrain.model.consumed import CONSUMED
from hytrain.model.summed import SummedGradient, norm_of, summed
from hytrain.model.trained import TrainedParameter, with_gradients
from hytrain.options import Options
from hytrain.readable import gib
from hytrain.step.autograd import in_backward
from hytrain.step.sums import DeviceSums, HostSums, PlaneSums, Sums
from hytrain.step.timing import NORMS, Timing
from hytrain.tensors import address, distributed, flat, laid_out, local, shaped, version

_log = logging.getLogger(__name__)


class _Sum:
    """One parameter's sum, in `sums` until it is taken from there. If its values are kept then, `own` has them.

    Whoever takes it there multiplies it by `factor`, if there is one.
    """

    def __init__(self, parameter: TrainedParameter, sums: Sums, first: Tensor, timing: Timing) -> None:
        self._parameter, self.sums, self._dtype, self._timing = parameter, sums, first.dtype, timing
        self.own: Tensor | None = None
        self.factor: Tensor | None = None
        self._fresh: Tensor | None = None  # autograd has just added to it
        self._passes(first)
        self._await_update: Callable[[TrainedParameter], None] = lambda parameter: None

    def add(self, gradient: Tensor) -> None:
        if not in_backward():
            self._timing.saw("uses gradients")
        if self.own is not None:
            self._await_update(self._parameter)
            self.own.add_(gradient)
            return
        more = flat(laid_out(gradient, self._parameter.own))
        self._fresh = self.take().add_(more)
        if not in_backward():
            self.put_back()

    def put_back(self) -> None:
        """After a backward's addition: the backward is not the step's last one, which would take the sum at once."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            self.put(fresh)
            self._passes(fresh)

    def _passes(self, total: Tensor) -> None:
        """The device has all of the sum now: note its norm, if the loop has asked for norms before."""
        operator = self._timing.norms
        found = None if operator is None else norm_of(operator, self._as_gradient(total))
        self._norm = operator, found

    def norm(self, operator: Any) -> Tensor:
        self._timing.saw(NORMS)
        known, found = self._norm
        if found is not None and known is operator and self.own is None and self.factor is None:
            return found
        self._timing.norms = operator
        return norm_of(operator, self._value())

    def multiply(self, factor: Tensor) -> None:
        self._timing.saw("scales gradients")
        if self.own is not None:
            self.settle().mul_(factor)
        elif self.factor is not None or self._dtype != factor.dtype:
            self.write(self._value().mul_(factor))
        else:
            self.factor = self._timing.same(factor)

    def value(self) -> Tensor:
        self._timing.saw("uses gradients")
        return self._value()

    def _value(self) -> Tensor:
        return self._as_gradient(self.peek()) if self.own is None else self.own

    def write(self, value: Tensor) -> None:
        if self.own is None:
            self._fresh = self.factor = None
            self._norm = None, None
            self.sums.discard(self._parameter)
            self.put(flat(value).to(self._dtype))

    def put(self, total: Tensor) -> None:
        self.sums.put(self._parameter, total)

    def unscaled(self) -> Tensor:
        total = self.sums.peek(self._parameter)
        assert total is not None, "nobody else has taken it"
        return total

    def settle(self) -> Tensor:
        self._timing.saw("uses gradients")
        if self.own is None:
            self.own = self._as_gradient(self.take())
        self._await_update(self._parameter)
        return self.own

    def keep(self, gradient: Tensor, await_update: Callable[[TrainedParameter], None]) -> None:
        """It was taken for an update. Others may see its values on, and write them after that update."""
        self.own, self._await_update = self._as_gradient(gradient), await_update

    def take(self) -> Tensor:
        """The sum, shape (numel,), in storage order. Raises `UsageError` if an update has consumed it."""
        total = self._found(self.sums.take)
        self.factor, self._norm = None, (None, None)
        return total

    def peek(self) -> Tensor:
        """The same, but it stays."""
        fresh = self._fresh
        total = self._found(self.sums.peek)
        self._fresh = fresh
        return total

    def _found(self, get: Callable[[TrainedParameter], Tensor | None]) -> Tensor:
        if self._parameter.sum is None or self._parameter.sum() is not self:
            raise UsageError(CONSUMED)
        fresh, self._fresh = self._fresh, None
        total = get(self._parameter) if fresh is None else fresh
        assert total is not None, "nobody else has taken it"
        return total if self.factor is None else total * self.factor

    def _as_gradient(self, total: Tensor) -> Tensor:
        return shaped(total.to(self._parameter.own.dtype), self._parameter.own)


def _multiply(scaled: Iterable[_Sum]) -> None:
    """Multiply them now, those on the device together, as torch does."""
    of = dict[int, list[_Sum]]()
    for total in scaled:
        of.setdefault(id(total.factor), []).append(total)
    for totals in of.values():
        factor, there = totals[0].factor, [total for total in totals if total.sums.on_device]
        assert factor is not None, "they are scaled"
        if there:
            torch._foreach_mul_([total.unscaled() for total in there], factor)
        for total in totals:
            if total.sums.on_device:
                total.factor, total._norm = None, (None, None)
            else:
                total.put(total.take())


class _Left(NamedTuple):
    """A gradient that is left in `p.grad`, as in torch, when its backward has ended: where it is, and its version.

    And its `values` while it is learned what the loop does, since others can write them without a version.
    """

    address: int
    version: int
    values: Tensor | None

    @classmethod
    def of(cls, gradient: Tensor, values: Tensor | None = None) -> _Left:
        return cls(address(gradient), version(gradient), values)


class Accumulation:
    """The gradient sums of one optimizer. A parameter's `p.grad` shows its sum, and drops it by becoming another."""

    def __init__(self, backwards: int, timing: Timing) -> None:
        self._backwards, self.timing = backwards, timing
        self._held = False
        self._goes_on: Callable[[], bool] = lambda: False
        self.begin_anew(lambda *_: DeviceSums())

    def begin_anew(self, choose: Callable[[torch.dtype, bool], Sums], planes: PlaneSums | None = None) -> None:
        """Start over with new layers. `planes`: where the sums of a last backward go, if they can.

        `choose` decides where the others are kept, when the first one is made: of this dtype, and if others are in
        planes.
        """
        self._choose, self._planes = choose, planes
        self._sums: Sums = DeviceSums()
        self._in_use = list[Sums]()  # those that have something
        self._shared = dict[TrainedParameter, _Left]()  # gradients that share their memory
        self._chosen: tuple[torch.dtype, bool] | None = None  # for which

    def begin_step(self, step: int, *, keeps: bool) -> None:
        """The first backward of a step begins. Whether the loop `keeps` the last step's gradients is seen now.

        Free the memory of sums if it was learned that none are needed.
        """
        self.end_step()
        if keeps and step:
            self.timing.saw("keeps gradients", after_step=True)
        if self.timing.begin_step(step) and not self.timing.in_step:
            self._sums.close()
            self._sums, self._chosen = DeviceSums(), None
            self._in_use = [sums for sums in self._in_use if sums is self._planes]

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
        for sums in self._in_use:
            sums.begin()
        if self.timing.may_be_last and ended:
            self.timing.saw("calls backward several times")
        self.timing.may_be_last = not (self._held or goes_on or _keeps_graph()) and ended + 1 >= self._backwards
        return self.timing.may_be_last and not self.timing.in_step

    def expects(self, ended: int) -> bool:
        """Whether more backwards were announced than the `ended` ones of this step."""
        return self._goes_on() or ended < self._backwards

    def add(self, parameter: TrainedParameter) -> None:
        """A backward that only sums has made a gradient. Autograd has added it to the sum, or it is the first one.

        Or it was added to a tensor that the loop keeps, which it stays until `step()`, as in torch.
        """
        total = summed(parameter.parameter.grad)
        if isinstance(total, _Sum):
            total.put_back()
            return
        is_kept, shared = parameter.kept() is not None, None
        if not is_kept and (self.timing.may_be_last or _keeps_graph()):
            shared = parameter.shared()
        if is_kept or shared is not None:
            self._forget(parameter)
            if shared is not None:
                self._shared[parameter] = _Left.of(shared)
            return
        gradient = parameter.gradient(parameter.parameter)
        parameter.parameter.grad = None  # autograd must neither add to it nor keep it
        self._begin_sum(parameter, gradient)

    def end_backward(self) -> None:
        """A backward has ended that only sums: what autograd alone had in use, nobody else has any more."""
        for parameter, before in list(self._shared.items()):
            if (gradient := parameter.shared()) is not None:
                self._shared[parameter] = _Left.of(gradient, gradient.clone() if self.timing.learns else None)
                if version(gradient) != before.version:
                    self.timing.saw("sets gradients")
                continue
            del self._shared[parameter]
            if parameter.parameter.grad is not None:
                self.add(parameter)

    def is_as_backward_left_it(self, parameter: TrainedParameter) -> bool:
        """Whether `p.grad` has a gradient that shares its memory, and has been written by none since."""
        gradient, seen = parameter.parameter.grad, self._shared.get(parameter)
        if gradient is None or seen is None or (address(gradient), version(gradient)) != seen[:2]:
            return False
        return seen.values is None or torch.equal(gradient, seen.values)

    def add_from_elsewhere(self, parameter: TrainedParameter, gradient: Tensor) -> None:
        """Add a gradient, in the shape of what this rank has, that no backward of this process has made."""
        if parameter.parameter.grad is None:
            self._begin_sum(parameter, flat(laid_out(gradient, parameter.own)))
        else:
            local(parameter.parameter.grad).add_(gradient)
            self.add(parameter)

    def _begin_sum(self, parameter: TrainedParameter, gradient: Tensor) -> None:
        self._forget(parameter)
        # If no more backwards were announced, it is torch's sum, in the gradient's own dtype. Otherwise a copy: a
        # replayed CUDA graph writes each gradient where the one before was.
        first = gradient if self.timing.may_be_last else gradient.to(torch.float32, copy=True)
        sums = self._sums_for(parameter, first)
        self._use(sums).put(parameter, first)
        total = _Sum(parameter, sums, first, self.timing)
        parameter.sum = weakref.ref(total)
        parameter.parameter.grad = distributed(SummedGradient(total, parameter.own), parameter.parameter)

    def _use(self, sums: Sums) -> Sums:
        if sums not in self._in_use:
            self._in_use.append(sums)
        return sums

    def _sums_for(self, parameter: TrainedParameter, first: Tensor) -> Sums:
        planes = self._planes if self.timing.may_be_last else None
        if planes is not None and planes.takes(parameter, first):
            return planes
        return self._chosen_sums(first.dtype, beside_planes=planes is not None)

    def _chosen_sums(self, dtype: torch.dtype, *, beside_planes: bool) -> Sums:
        """Those that were chosen for as many bytes, or anew: in a loop that begins to accumulate, for example."""
        chosen = self._chosen or (dtype, beside_planes)
        wanted = max(chosen[0], dtype, key=attrgetter("itemsize")), chosen[1] and beside_planes
        if wanted != self._chosen and not self._sums.waiting():
            self._sums.close()
            self._sums, self._chosen = self._choose(*wanted), wanted
        return self._sums

    @property
    def _all(self) -> list[Sums]:
        return [self._sums] if self._planes is None else [self._planes, self._sums]

    def _waiting(self) -> list[TrainedParameter]:
        return [parameter for sums in self._in_use for parameter in sums.waiting()]

    def is_in_place(self, parameter: TrainedParameter) -> bool:
        """Whether `p.grad` is a sum that is in the planes from which the parameter's update reads it."""
        total = self._sum_of(parameter)
        return total is not None and total.sums is self._planes and self._planes.is_in_place(parameter)

    def is_on_host(self, parameter: TrainedParameter) -> bool:
        """Whether `p.grad` is a sum that comes from host memory when it is taken."""
        total = self._sum_of(parameter)
        return total is not None and not total.sums.on_device

    def factor(self, parameters: Iterable[TrainedParameter]) -> Tensor | None:
        """By which the CPU multiplies all gradients of a step whose updates begin in `step()`.

        There is one if the loop has multiplied them all by one number. If not, those that it has are multiplied here.
        """
        given = with_gradients(parameters)
        totals = {known: total for known in given if (total := self._sum_of(known)) is not None}
        scaled = {known: total for known, total in totals.items() if total.factor is not None}
        of_cpu = {known for known in given if any([layer.life.placement.updates == "cpu" for layer, _ in known.places])}
        waits = of_cpu <= scaled.keys() and all(map(self.is_in_place, of_cpu))
        factors = {id(scaled[known].factor): scaled[known].factor for known in of_cpu} if waits else {}
        shared = next(iter(factors.values())) if len(factors) == 1 else None
        _multiply([total for known, total in scaled.items() if shared is None or known not in of_cpu])
        return shared

    def leave_planes(self, parameters: Iterable[TrainedParameter]) -> None:
        """Layers are about to leave the CPU: bring what is left in planes to where other sums are."""
        self.end_step()
        for parameter in parameters:
            total = self._sum_of(parameter)
            if total is not None and total.sums is self._planes:
                value = total.take()
                total.sums = self._chosen_sums(value.dtype, beside_planes=False)
                self._use(total.sums).put(parameter, value)

    def take(
        self, parameter: TrainedParameter, *, keep: Callable[[TrainedParameter], None] | None = None
    ) -> Tensor | None:
        """The step's gradient, shape (numel,) in storage order, if `p.grad` is a sum of this step; else None.

        With `keep`, which waits for a parameter's update, `p.grad` is that on, as in torch. Otherwise it is consumed.
        """
        total = self._sum_of(parameter)
        if total is None:
            self._forget(parameter)
            return None
        stays = keep is not None and not total.sums.on_device
        gradient = (total.peek() if stays else total.take()).to(parameter.own.dtype)
        if stays:
            return gradient
        parameter.sum = None
        if keep is not None:
            total.keep(gradient, keep)
        return gradient

    def _sum_of(self, parameter: TrainedParameter) -> _Sum | None:
        """The sum in `p.grad`; None if the loop has dropped it, replaced it, or made a gradient of its own of it."""
        total = summed(parameter.parameter.grad)
        if not isinstance(total, _Sum) or parameter.sum is None or parameter.sum() is not total:  # another parameter's
            return None
        return total if total.own is None else None

    def _forget(self, parameter: TrainedParameter) -> None:
        """The loop has dropped the parameter's sum. Whoever still has the tensor that was in `p.grad` sees it on."""
        total = None if parameter.sum is None else parameter.sum()
        if isinstance(total, _Sum) and total.own is None:
            total.settle()
        else:
            for sums in self._all:
                sums.discard(parameter)
        parameter.sum = None

    def note_dropped(self) -> None:
        """No more backwards come in this step: has the loop dropped or replaced gradients?"""
        waiting, left = self._waiting(), self._shared
        if any(self._sum_of(known) is None for known in waiting) or any(known.parameter.grad is None for known in left):
            self.timing.saw("drops gradients")

    def drop(self) -> None:
        """Drop the sums that are left."""
        for parameter in self._waiting():
            if self._sum_of(parameter) is not None:
                parameter.parameter.grad = None
            self._forget(parameter)

    def end_step(self) -> None:
        """Forget the sums that the loop has dropped."""
        for parameter in self._waiting():
            if self._sum_of(parameter) is None:
                self._forget(parameter)
        self._in_use = [sums for sums in self._in_use if sums.end_step()]
        self._shared.clear()

    def close(self) -> None:
        """Free the sums' memory. No copy may be under way. Sums become gradients of their own."""
        with contextlib.suppress(RuntimeError):  # a device that has failed, or that has no memory for those on the host
            for parameter in self._waiting():
                self._forget(parameter)
        for sums in self._all:
            sums.close()


def _keeps_graph() -> bool:
    """Whether this backward retains its graph for another one, which needs the weights of before the update."""
    inside = torch._C._current_graph_task_id() != -1
    return inside and torch._C._autograd._get_current_graph_task_keep_graph()


def plane_sums(
    options: Options, norms: bool, transfers: Transfers, await_update: Callable[[TrainedParameter], None]
) -> PlaneSums | None:
    """Where gradients wait for `step()` in the planes of their layers, unless they are needed on the device.

    There `norms` are computed. Without overlap, they are in their planes once all updates before were made.
    """
    wanted = options.overlap and options.accumulate_on == "auto" and not norms
    return PlaneSums(transfers, await_update) if wanted else None


def choose_sums(
    place: str,
    parameters: Sequence[TrainedParameter],
    transfers: Transfers,
    gpu_room: Callable[[], Room | None],
    dtype: torch.dtype,
    beside_planes: bool,
) -> Sums:
    """`place` is "device", "host" or "auto": the device if its room suffices. None means that there is no bound.

    Of this dtype are those of all parameters, or only those that are not in planes.
    """
    kept = [known for known in parameters if not (beside_planes and known.is_updated_on_host)]
    needed = dtype.itemsize * sum(known.own.numel() for known in kept)
    if place == "auto":
        room = gpu_room()
        place = "device" if room is None or needed <= room.free else "host"
        free = "enough" if room is None else gib(max(room.free, 0))
        _log.info("sums of gradients take %s on the %s; free on the device: %s", gib(needed), place, free)
    return DeviceSums() if place == "device" else HostSums(transfers)
