"""The updates that the trainer's device makes: at once, with state that visits it, or held until backward is over.

    state rests on the device    held, if there is memory for its gradients until then: all of these in one launch
    state visits it              at once, which frees its gradients; held, if it would only make others wait
    the step awaits a verdict    held

The last pass over matrices that ranks share is made in `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import scalars
from hytrain.memory.clock import Span, Stream
from hytrain.memory.planes import DevicePlanes
from hytrain.memory.visits import Visit
from hytrain.model.block_life import Pin
from hytrain.model.trained import TrainedLayer
from hytrain.step.common import Common
from hytrain.step.late import LateReads
from hytrain.step.shared import SharedMatrices
from protocol.handles import STATE_PLANES
from protocol.rules import ON_DEVICE, Hyper
from protocol.visiting import Turn, put_off


class _Due(NamedTuple):
    """The update of a layer in this step. `stream` has made the gradients of its segments."""

    layer: TrainedLayer
    step: int
    counts: tuple[int, ...]
    gradients: dict[int, Tensor]
    stream: Stream


class _Update(NamedTuple):
    """Of a layer. `scale` is the gradients' factor for scalars, `verdict` the one for a GPU's kernels."""

    layer: TrainedLayer
    counts: tuple[int, ...]
    gradients: dict[int, Tensor]
    directions: dict[int, Tensor]
    scale: float
    verdict: Tensor | None


class DeviceUpdates:
    """Those of one model. `positions`: the layers' positions in forward, as far as known. `groups`: of this step."""

    def __init__(self, common: Common, host: Backend | None, shared: SharedMatrices | None = None) -> None:
        self._layers, self._transfers, self._health = common.layers, common.transfers, common.health
        self._meter, self._verdicts, self._overlap = common.meter, common.verdicts, common.overlap
        self._host, self._visits, self._offload, self.late = host, common.visits, common.offload, LateReads(common)
        self._shared = shared
        self._alone = {layer.lid for layer in common.layers if layer.spec.stays_on_device}  # each in its own launch
        self.positions: Sequence[int] = [layer.spec.position for layer in common.layers]
        self.groups: tuple[Hyper, ...] = ()
        self._held: list[_Due] = []  # until backward is over
        self._put_off: frozenset[int] = frozenset()  # of this step's visits
        self.offer: Callable[[TrainedLayer], None] = lambda layer: None  # its state is used no more in this step

    def begin_step(self) -> None:
        """Choose which layers' visits are put off, by the times of the last step that was measured."""
        visits = any(layer.life.placement.visits for layer in self._layers)
        self._put_off = self._visits_after_backward() if visits and not self._verdicts.awaited else frozenset()

    def _visits_after_backward(self) -> frozenset[int]:
        return put_off(
            [
                Turn(
                    one.lid,
                    one.forward_s or 0.0,
                    (one.backward_s or 0.0) + (one.gpu_update_s or 0.0),
                    one.visit_s or 0.0,
                )
                for one in sorted(self._meter.times, key=lambda one: self.positions[one.lid])
            ]
        )

    def update(self, layer: TrainedLayer, gradients: dict[int, Tensor], stream: Stream) -> None:
        """Update the layer with the gradients of its segments, which `stream`, the current one, has made."""
        layer.take_back()
        due = _Due(layer, self._health.life.step, layer.sent, gradients, stream)
        is_kept, visits = self.late.keep(layer, gradients), layer.life.placement.visits
        waits = self._puts_off(layer, gradients.values()) if visits else is_kept and layer.lid not in self._alone
        if self._overlap and (waits or self._verdicts.awaited):
            self._held.append(due)
            self.offer(layer)
            return
        self._make(due)
        if visits and self._visits.is_full:
            arrived = self._meter.mark()
            self._visits.make_room()
            self._meter.fetched(layer.lid, arrived)

    def update_held(self) -> None:
        """Make the updates that were held back until now: of visits, forward needs the first layers first."""
        self._visits.begin_put_off()
        together, others = list[_Due](), list[_Due]()
        for due in sorted(self._held, key=lambda due: self.positions[due.layer.lid]):
            self._transfers.join([due.stream], due.gradients.values())
            due.layer.take_back()  # in the meantime its state may have left
            alone = due.layer.life.placement.visits or due.layer.lid in self._alone
            (others if alone else together).append(due)
        self._make_together(together)
        for due in others:
            self._make(due)
        self._held.clear()

    def _puts_off(self, layer: TrainedLayer, gradients: Collection[Tensor]) -> bool:
        """Whether the layer's visit can wait until backward is over, and so can its gradients and offloaded weights."""
        if layer.lid not in self._put_off:
            return False
        block = layer.block if layer.rests_on_host else None
        weights_bytes = 0 if block is None or Pin.VISIT in block.life.pins else block.nbytes
        puts_off = self._visits.puts_off(sum(gradient.nbytes for gradient in gradients), weights_bytes)
        if block is not None and puts_off:
            block.life.pin(Pin.VISIT)
        return puts_off

    def _scale(self) -> tuple[float | None, Tensor | None]:
        """The factor of gradients, for scalars, or None for a skipped step; on a GPU, the verdict for its kernels."""
        return (1.0, self._verdicts.scale) if self._host is None else (self._verdicts.host_scale(), None)

    def _make_together(self, dues: Sequence[_Due]) -> None:
        """The updates of layers whose state rests on the device."""
        scale, verdict = self._scale() if dues else (None, None)
        if scale is not None:
            made = [_Update(due.layer, due.counts, due.gradients, {}, scale, verdict) for due in dues]
            kind, span = self._update(*made)
            self._meter.span(kind, tuple([due.layer.lid for due in dues]), dues[0].step, span)
        for due in dues:
            if scale is not None:
                due.layer.note_writes(due.gradients)
            self.offer(due.layer)

    def _make(self, due: _Due) -> None:
        """The update, or of what ranks share the first pass of it."""
        layer, step, counts, gradients, _ = due
        scale, verdict = self._scale()
        if scale is None:
            self.offer(layer)
            return
        layer.take_back()
        visits = layer.life.placement.visits  # until it is offered
        directions = {} if self._shared is None else self._shared.directions(layer, gradients, visits=visits)
        kind, span = self._pass(_Update(layer, counts, gradients, directions, scale, verdict))
        self._meter.span(kind, layer.lid, step, span)
        if directions:
            assert self._shared is not None, "who shares matrices was agreed on"
            self._shared.keep(layer, counts, directions, visits=visits)

    def end_step(self, read_groups: Callable[[], tuple[Hyper, ...]]) -> None:
        """`step()` was called: make the last pass over what ranks share. Ranks without gradients take part, too."""
        scale, verdict = self._scale()
        if self._shared is None or scale is None:
            return
        for parts in self._shared.orthogonalize(read_groups()):
            for layer, (counts, of) in parts.items():
                layer.take_back()
                _, span = self._pass(_Update(layer, counts, of, {}, scale, verdict))
                self._meter.forget(span)
                self._visits.make_room()

    def _pass(self, made: _Update) -> tuple[str, Span]:
        """Its layer's state was taken back: where it is may have changed since the update was held."""
        measured = self._visit(made) if made.layer.life.placement.visits else self._update(made)
        made.layer.note_writes(made.gradients.keys() - made.directions.keys())
        self.offer(made.layer)
        return measured

    def _update(self, *updates: _Update) -> tuple[str, Span]:
        """The state is on the device, or on its way there. They have one scale."""
        for layer, *_ in updates:
            if layer.returned is not None:
                self._transfers.land(layer.returned)
                if layer.returned.has_ended:
                    layer.returned = None
        began = self._meter.mark()
        alike = dict[tuple[int, int], dict[int, dict[int, Tensor]]]()
        for number, (layer, counts, gradients, *_) in enumerate(updates):
            for index, gradient in gradients.items():
                of = alike.setdefault((layer.segments[index].spec.group, counts[index]), {})
                of.setdefault(number, {})[index] = gradient
        for (group, count), of in alike.items():
            numbers, verdict = scalars(self.groups[group], count, updates[0].scale), updates[0].verdict
            if self._host is None and numbers.hyper.rule not in ON_DEVICE:
                parts = [(updates[number].layer.device, gradients) for number, gradients in of.items()]
                DevicePlanes.update_together(parts, numbers, verdict)
                continue
            for number, gradients in of.items():
                made = updates[number]
                made.layer.device.update(gradients, numbers, self._host, verdict, made.directions)
        return "gpu_update_s", (began, self._meter.mark())

    def _visit(self, made: _Update) -> tuple[str, Span]:
        """The state is in host memory, and visits the device."""
        layer, counts, gradients, directions, scale, verdict = made
        if layer.block is not None:
            self._offload.before_update(layer.block)
        segments, state = layer.segments, [layer.state(plane) for plane in STATE_PLANES]
        homes = layer.arena.weights if layer.keeps_weights else [None] * len(segments)
        numbers = {i: scalars(self.groups[segments[i].spec.group], counts[i], scale) for i in gradients}
        visits = [
            Visit(
                segments[i].spec,
                segments[i].weights,
                grads,
                [plane[i] for plane in state],
                numbers[i],
                homes[i],
                directions.get(i),
            )
            for i, grads in gradients.items()
        ]
        awaited = self._verdicts.awaited
        layer.landing, layer.returned = self._visits.update(
            visits, after=layer.returned, host=self._host, verdict=verdict, awaited=awaited
        )
        return "visit_s", layer.returned.span

    def close(self) -> None:
        self._held.clear()
        self._shared = None
