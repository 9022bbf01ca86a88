"""One gradient's way to its update and back, for a layer that the CPU updates.

    the layer's last   take              p.grad of each ─▶ its layer, and a placeholder ─▶ p.grad
    the layer is full  send              its gradients ─▶ the `grads` plane in host memory, on a stream of their own
    sender thread      departed          this copy has ended: GradReady ─▶ optimizer
    receiver thread    on_weights_ready  optimizer ─▶ WeightsReady: the `weights` plane ─▶ parameters, on another stream
    the next forward   wait_for          the stream that computes waits for exactly this copy

Autograd's threads wait for nothing here, the link's for copies, and readers for the optimizer. `LayerLife` has the
states in between.

Around it: `backward` says which gradients are taken, `commit` when a step's updates begin and end. `device` updates the
GPU's layers, `verdict` has the norms, `accumulation` sums over several backwards, `offload` has offloaded weights.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hytrain.errors import UsageError
from hytrain.memory.clock import Stream
from hytrain.memory.transfer import Transfer
from hytrain.model.lifecycle import Event, State
from hytrain.model.trained import Come, Gate, TrainedLayer, TrainedParameter, fill
from hytrain.step.autograd import in_backward
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.tensors import count_write
from protocol.messages import GradReady, WeightsReady


class RoundTrip:
    """The gradients of one model on their way to the optimizer, and its new weights on their way back."""

    def __init__(self, common: Common, device: DeviceUpdates) -> None:
        self._layers, self._link, self._transfers = common.layers, common.link, common.transfers
        self._health, self._meter, self._overlap = common.health, common.meter, common.overlap
        self._verdicts, self._accumulation, self._kept = common.verdicts, common.accumulation, common.kept
        self._device, self._offload = device, common.offload

    # ------------------------------------------------------------ to the optimizer: autograd's threads

    def take(self, come: list[Come], stream: Stream) -> None:
        """Give complete gradients, computed on `stream`, to their layers. Send those that are full now."""
        for layer in fill(come, self._given, self._health.life.step, stream):
            self._meter.backward(layer.lid)
            self.send(layer, self._transfers.stream())

    def _given(self, parameter: TrainedParameter, tensor: Tensor) -> Tensor | None:
        """The sum over several backwards, or a copy of a tensor that the loop keeps; None for what is in `p.grad`."""
        if not parameter.is_in_place:
            self._health.refuse(f"the storage of {parameter.name} was replaced in the middle of a backward")
        total = None if parameter.sum is None else self._accumulation.take(parameter)
        return self._kept.copy_of(parameter) if total is None else total

    def send(self, layer: TrainedLayer, stream: Stream) -> Transfer | None:
        """Send a full layer's gradients to the optimizer, or to the device's updates. `stream` is the current one.

        Returns the copy out of them, if there is one.
        """
        if layer.streams != {stream}:
            self._transfers.join(layer.streams, layer.filled.values())
        if self._overlap and self._verdicts.takes_norms:
            self._verdicts.add(layer)
        step = self._health.life.step
        with self._health.changed:
            counts = tuple([s.owner.count if i in layer.filled else 0 for i, s in enumerate(layer.segments)])
            layer.life.on(Event.FILLED, step)
            gradients, layer.filled, layer.sent, layer.landing, layer.source = layer.filled, {}, counts, None, None
            layer.whole.clear()
            layer.streams.clear()
            if layer.life.placement.updates == "cpu" and not self._verdicts.awaited:
                _count_write(layer)
        if layer.life.placement.updates == "gpu":
            self._device.update(layer, gradients, stream)
            return None
        if layer.block is not None:
            self._offload.begin_update(layer.block)
        grads = layer.arena.grads
        copies = [(grads[index], each) for index, each in sorted(gradients.items()) if each is not grads[index]]
        leaving = self._transfers.let_go(self._transfers.gradients_out(copies))
        self._meter.span("d2h_s", layer.lid, step, leaving.span)
        self._link.post("optimizer", partial(self.departed, layer, step, counts), after=leaving)
        return leaving

    def departed(self, layer: TrainedLayer, step: int, counts: tuple[int, ...]) -> GradReady:
        """A layer's gradients are in host memory. On the sender thread."""
        layer.life.on(Event.COPIED, step)
        return GradReady(step=step, lid=layer.lid, counts=counts)

    def end_step(self) -> None:
        """All updates of a step were sent, or made: `check` compares them."""
        self._device.late.end_step()

    # ------------------------------------------------------------ and back: the link's threads

    def on_weights_ready(self, done: WeightsReady) -> None:
        """The optimizer has updated a layer: start the copy of its weights. Called on the receiver thread."""
        layer = self._layers[done.lid]
        layer.life.on(Event.WEIGHTS_READY, done.step)
        layer.arena.banks = done.banks
        copies, is_offloaded = layer.incoming(), layer.rests_on_host
        if is_offloaded:
            count_write([weights for weights, _ in copies])  # they stay where they are until they are needed
            copies = []
        landing = self._transfers.weights_in(copies)
        with self._health.changed:
            layer.note_writes(index for index, count in enumerate(layer.sent) if count)
            layer.landing, layer.source = landing, layer.holds
            if layer.moving is not None:
                layer.moving.start(layer.arena, self._transfers)
            self._health.changed.notify_all()
        if not is_offloaded:
            self._meter.span("h2d_s", layer.lid, done.step, landing.span)

    # ------------------------------------------------------------ into the weights: whoever reads them

    def wait_for(self, layer: TrainedLayer, *, on_host: bool = False) -> None:
        """Wait until the copy of the layer's new weights was started, and make the stream wait for its end.

        With `on_host`, the thread also waits for the end, for readers on any stream.
        """
        if layer.life.state is not State.CURRENT:
            self._land(layer)
        elif layer.landing is not None and layer.landing.done is not None:
            self._transfers.land(layer.landing)  # the stream that waited before may be another one
        for ends in (layer.landing, layer.returned) if on_host else ():
            if ends is not None:
                ends.synchronize()

    def _land(self, layer: TrainedLayer) -> None:
        life = layer.life
        self._health.wait_for(lambda: layer.landing is not None or life.is_current, f"the update of layer {layer.name}")
        if life.is_current or layer.landing is None:
            return
        for segment in layer.segments:
            if not segment.owner.is_in_place:
                raise UsageError(
                    f"the storage of {segment.owner.name} was replaced while its update was under way: call "
                    "opt.synchronize() before swapping .data, and opt.close() before moving or converting the model"
                )
        self._transfers.land(layer.landing)
        with self._health.changed:
            if not life.is_current:
                life.on(Event.AWAITED, life.updated)

    def await_update(self, parameter: TrainedParameter) -> None:
        """Wait for a parameter's last update, which reads its gradient."""
        for layer, _ in parameter.places:
            self.wait_for(layer)

    def updated_in_this_backward(self, gate: Gate) -> TrainedLayer | None:
        """The first of the gate's layers that the backward which runs has already updated."""
        step = self._health.life.step
        return next((layer for layer in gate.layers if layer.life.updated == step), None) if in_backward() else None


def _count_write(layer: TrainedLayer) -> None:
    """The CPU's update may write the weights from now on, so autograd counts the write already now.

    So it raises if this backward still reads a weight that it has saved (as with `W` and `W.detach()` in one graph).
    """
    written = [segment for segment, count in zip(layer.segments, layer.sent, strict=True) if count]
    count_write([segment.weights for segment in written])
    for segment in written:
        if segment.owner.version is not None:
            segment.owner.version += 1
