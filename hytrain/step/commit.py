"""A step's updates: they begin with its last backward, which ends when all of them are sent, and `step()` checks them.

    the last backward's first gradient  ─▶ begin_step  masters and hyperparameters hold for this step
    its end                             ─▶ complete    layers that lack gradients are sent, too; then the verdict
    step()                              ─▶ check       backward has updated what torch's optimizer would update now
                                        ─▶ commit      without overlap, everything is sent here; matrices that ranks
                                                       share are orthogonalized, and their updates end

The stages of a pipeline end their backwards one after another, and each needs the next one's gradients. So the verdict
of a stage, a collective, comes in `step()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Final

from torch import Tensor

from hytrain.errors import UsageError
from hytrain.kernels.backend import Backend
from hytrain.memory.transfer import Transfer
from hytrain.model.trained import TrainedParameter, gradients, with_gradients
from hytrain.model.watched import unwatched
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.step.gradient import RoundTrip
from hytrain.step.life import State
from hytrain.step.masters import Masters
from protocol.messages import Counted, StepBegin
from protocol.rules import Hyper

_TOO_LATE: Final = (
    "the learning rate, or another value in opt.param_groups, was set between backward and step(), but the updates "
    "began in backward, with the earlier values: set them before backward, or after opt.step(), as schedulers do that "
    'step after the optimizer; or pass updates="step"'
)


class Commit:
    """The updates of one model's steps. `read_groups` returns the current hyperparameters of the parameter groups."""

    def __init__(
        self,
        common: Common,
        trip: RoundTrip,
        device: DeviceUpdates,
        masters: Masters,
        *,
        host: Backend | None,
        read_groups: Callable[[], tuple[Hyper, ...]],
    ) -> None:
        self._layers, self._parameters, self._link = common.layers, common.parameters, common.link
        self._transfers, self._meter, self._health = common.transfers, common.meter, common.health
        self._verdicts, self._accumulation, self._kept = common.verdicts, common.accumulation, common.kept
        self._trip, self._device, self._masters = trip, device, masters
        self._host, self._read_groups, self._lending = host, read_groups, common.lending
        self._overlap, self._is_stage = common.overlap, common.is_stage
        self._groups_seen: tuple[Hyper, ...] = ()  # at the end of a backward that began no updates

    @property
    def waits_for_step(self) -> bool:
        """Whether updates have begun that become final in `step()` only, when the norm of all stages is known."""
        waits = self._is_stage and self._overlap and self._verdicts.awaited
        return waits and self._health.life.state is State.COMMITTED

    def end_sum(self) -> None:
        """A backward has ended that began no updates."""
        if self._accumulation.timing.learns:
            self._groups_seen = self._read_groups()

    def begin_step(self) -> None:
        """The step's updates are about to begin: fix masters and hyperparameters for this step."""
        self._lending.before_writes()
        self._verdicts.count_last()
        self._masters.begin_step()
        for layer in self._layers:
            if layer.life.placement.updates == "cpu" and not layer.is_counted:
                layer.is_counted = True
                counts = tuple(segment.owner.count for segment in layer.segments)
                self._link.post("optimizer", Counted(lid=layer.lid, counts=counts))
        self._device.groups = self._read_groups()
        if self._groups_seen and _were_set(self._groups_seen, self._device.groups):
            self._accumulation.timing.saw("sets hyperparameters")
        self._groups_seen = ()
        in_step = self._accumulation.timing.in_step
        self._verdicts.factor = self._accumulation.factor(self._parameters) if in_step else None
        self._device.begin_step()
        begin = StepBegin(
            step=self._health.life.step,
            groups=self._device.groups,
            awaits_verdict=self._verdicts.comes,
            float_mode=0 if self._host is None else self._host.float_mode,
        )
        self._link.post("optimizer", begin)

    def complete(self, *, keep: bool) -> None:
        """All gradients of the step have come: also send the layers that lack some of theirs (I5).

        Layer by layer: for sums in host memory, the device needs no more room than for those that are under way.
        """
        others = self._others()
        leaving: Transfer | None = None  # the last layer that left for the host
        for layer in self._layers:
            is_fetched = any([self._fill(parameter, keep=keep) for parameter in others.get(layer.lid, ())])
            if not layer.filled:
                continue
            if not keep and len(layer.filled) < len(layer.segments):
                self._meter.backward(layer.lid)
            if self._overlap:
                if (sent := self._trip.send(layer, self._transfers.stream())) is not None:
                    if is_fetched and leaving is not None:
                        leaving.synchronize()
                    leaving = sent
        if self._overlap and not (self._is_stage and self._verdicts.awaited):
            self._judge()

    def _others(self) -> dict[int, list[TrainedParameter]]:
        """Parameters whose gradients are in `p.grad`, since no last backward has reached them: by their first layer."""
        others = dict[int, list[TrainedParameter]]()
        for parameter in with_gradients(self._parameters):
            if parameter.step == self._health.life.step:
                self._health.refuse(
                    f"the gradient of {parameter.name} was set in backward by a hook that ran after HyTrain's, when "
                    'its update had begun: pass updates="step"'
                )
            lid = parameter.places[0][0].lid if parameter.places else 0  # one without elements is in none
            others.setdefault(lid, []).append(parameter)
        return others

    def _fill(self, parameter: TrainedParameter, *, keep: bool) -> bool:
        """Take the gradient that is in `p.grad`. With `keep`, it stays there. Returns whether the host had it."""
        step, stream = self._health.life.step, self._transfers.stream()
        clips = self._verdicts.takes_norms  # torch would leave clipped gradients there
        keeps = self._trip.await_update if keep and not clips else None
        self._trip.await_update(parameter)  # perhaps nothing has read it since
        if keep and self._accumulation.is_in_place(parameter):
            parameter.fill_in_place(step)
            return False
        is_on_host = self._accumulation.is_on_host(parameter)
        total = self._accumulation.take(parameter, keep=keeps)
        is_own = total is None  # the loop's, which may write it from now on
        if is_own:
            # In step 0 it may have come before there was a session.
            if step and not self._accumulation.is_as_backward_left_it(parameter):
                self._accumulation.timing.saw("sets gradients")
            total = None if keep else self._kept.copy_of(parameter)
        if total is None:
            total = parameter.gradient(parameter.parameter)
            total = total.clone() if keep else total
        parameter.fill(total, step, stream)
        if not keep or keeps is None:
            parameter.parameter.grad = parameter.consume()
        return is_on_host

    def _update_all(self) -> None:
        """Without overlap, all updates are made here: those of each layer before the next one's."""
        layers = [layer for layer in self._layers if layer.filled]
        for layer in layers if self._verdicts.takes_norms else ():
            self._verdicts.add(layer)
        self._judge()
        for layer in layers:
            self._trip.send(layer, self._transfers.stream())
            self._trip.wait_for(layer, on_host=True)

    def _judge(self) -> None:
        """All gradients of the step have come: decide by their norm if updates await that, and make those held back."""
        if self._verdicts.awaited:
            judgement = self._verdicts.judge(self._health.life.step)
            for role in ("optimizer", "coordinator"):
                self._link.post(role, judgement.message, after=judgement.arrival)
        elif self._verdicts.comes:
            judgement = self._verdicts.by_loop(self._health.life.step)
            self._link.post("optimizer", judgement.message, after=judgement.arrival)
        self._device.update_held()

    def norm(self) -> Tensor | None:
        """The norm of the step's gradients, all of which have come: without overlap, no verdict has been made yet."""
        waiting = [layer for layer in self._layers if layer.filled]
        return self._verdicts.norm_of(waiting) if waiting and self._verdicts.awaited else self._verdicts.grad_norm

    def check(self) -> None:
        """`step()` was called: check that backward updated what `torch.optim.AdamW` would update now."""
        life, health = self._health.life, self._health
        if life.state is State.SUMMED:  # no update has begun: what is in `p.grad` now is taken
            return
        if (written := self._kept.written_since()) is not None:
            health.refuse(
                f"the gradient of {written.name}, which others have, too, was written when its update had begun: pass "
                'updates="step"'
            )
        with unwatched():
            found = gradients(self._parameters)
        for parameter, gradient in found:
            if gradient is parameter.consumed:
                if life.state is State.IDLE:
                    raise UsageError(
                        "step() was called again without a backward: gradients that HyTrain has consumed are used "
                        "once; call opt.zero_grad() after each opt.step()"
                    )
            elif gradient is not None:
                health.refuse(f"the gradient of {parameter.name} was set by hand, where HyTrain cannot see it")
            elif parameter.step == life.step:
                health.refuse(
                    f"the gradient of {parameter.name} was dropped between backward and step(), when its update had "
                    'begun: pass updates="step", or on_nonfinite="skip" to leave out steps that are not finite; freeze '
                    "what is not to be trained"
                )

    def commit(self) -> bool:
        """Send off what backward did not. Returns False if there was no gradient in this step."""
        life = self._health.life
        if life.state is State.IDLE:
            self._verdicts.take_part(life.step)
            self._device.end_step(self._read_groups)
            return False
        if self._read_groups() != self._device.groups:
            self._health.refuse(_TOO_LATE)
        with self._health.undivided("the update of layers"):
            if not self._overlap:
                self._update_all()
            elif self._is_stage and self._verdicts.awaited:
                self._judge()
            self._device.end_step(self._read_groups)
        return True


def _were_set(before: tuple[Hyper, ...], now: tuple[Hyper, ...]) -> bool:
    """Whether a hyperparameter is another object than before: set anew, perhaps to the value that it had."""
    pairs = zip(before, now, strict=True)
    return any(getattr(one, it.name) is not getattr(two, it.name) for one, two in pairs for it in fields(one))
