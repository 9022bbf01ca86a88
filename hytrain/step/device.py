"""The updates that the trainer's device makes: at once, with state that visits it, or held until backward is over.

If a step awaits a verdict, all of them are held. So are visits that would only make others wait. The last pass over
matrices that ranks share is made in `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hytrain.kernels.backend import Backend
from hytrain.kernels.scalars import scalars
from hytrain.memory.clock import Span, Stream
from hytrain.memory.visits import Visit
from hytrain.model.block_life import Pin
from hytrain.model.trained import TrainedLayer
from hytrain.step.common import Common
from hytrain.step.late import LateReads
from hytrain.step.shared import SharedMatrices
from protocol.handles import STATE_PLANES
from protocol.rules import Hyper
from protocol.visiting import Turn, put_off


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
        self.positions: Sequence[int] = [layer.spec.position for layer in common.layers]
        self.groups: tuple[Hyper, ...] = ()
        # The updates until backward is over: the layer, the stream that has made its gradients, and these.
        self._held: list[tuple[TrainedLayer, Stream, Collection[Tensor], Callable[[], None]]] = []
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
        self.late.keep(layer, gradients)
        visits = layer.life.placement.visits
        is_held = self._overlap and (self._verdicts.awaited or (visits and self._puts_off(layer, gradients.values())))
        update = partial(self._make, layer, self._health.life.step, layer.sent, gradients)
        if is_held:
            self._held.append((layer, stream, gradients.values(), update))
            return
        update()
        if visits and self._visits.is_full:
            arrived = self._meter.mark()
            self._visits.make_room()
            self._meter.fetched(layer.lid, arrived)

    def update_held(self) -> None:
        """Make the updates that were held back until now: forward needs the first layers first."""
        self._visits.begin_put_off()
        for _, stream, gradients, update in sorted(self._held, key=lambda held: self.positions[held[0].lid]):
            self._transfers.join([stream], gradients)
            update()
        self._held.clear()

    def _puts_off(self, layer: TrainedLayer, gradients: Collection[Tensor]) -> bool:
        """Whether the layer's visit can wait until backward is over, and so can its gradients and offloaded weights."""
        if layer.lid not in self._put_off:
            return False
        block = layer.block if layer.rests_on_host else None
        weights_bytes = 0 if block is None or Pin.VISIT in block.life.pins else block.nbytes
        puts_off = self._visits.puts_off(sum(gradient.nbytes for gradient in gradients), weights_bytes)
        if block is not None and puts_off:
            self._offload.pin(block, Pin.VISIT)
        return puts_off

    def _scale(self) -> tuple[float | None, Tensor | None]:
        """The factor of gradients, for scalars, or None for a skipped step; on a GPU, the verdict for its kernels."""
        return (1.0, self._verdicts.scale) if self._host is None else (self._verdicts.host_scale(), None)

    def _make(self, layer: TrainedLayer, step: int, counts: tuple[int, ...], gradients: dict[int, Tensor]) -> None:
        """The update, or of what ranks share the first pass of it."""
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

    def _update(self, made: _Update) -> tuple[str, Span]:
        """The state is on the device, or on its way there."""
        layer, counts, gradients, directions, scale, verdict = made
        if layer.returned is not None:
            self._transfers.land(layer.returned)
            if layer.returned.has_ended:
                layer.returned = None
        began = self._meter.mark()
        alike: dict[tuple[int, int], dict[int, Tensor]] = {}
        for index, gradient in gradients.items():
            alike.setdefault((layer.segments[index].spec.group, counts[index]), {})[index] = gradient
        for (group, count), of in alike.items():
            layer.device.update(of, scalars(self.groups[group], count, scale), self._host, verdict, directions)
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
