"""A self-check: in its first steps, torch's optimizer updates copies beside HyTrain, and all bits are compared.

    a layer's gradients are sent  ─▶ copies of them, and of its weights, masters and moments
    the update has been made      ─▶ torch's own, of the copies, on the CPU ─▶ compared with what is there now
    the last of these steps       ─▶ the log says "the same bits", or where not

With the option `check`, `engine` has a `CheckedTrip` in place of a `RoundTrip`. `SelfCheck` is the session's, whose
engines may change. docs/porting.md says what is compared.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from hytrain.checks import Groups
from hytrain.kernels import as_torch
from hytrain.kernels.split import join
from hytrain.memory.clock import Stream
from hytrain.memory.transfer import Transfer
from hytrain.model.trained import TrainedLayer, TrainedSegment
from hytrain.options import Options
from hytrain.step.common import Common
from hytrain.step.device import DeviceUpdates
from hytrain.step.gradient import RoundTrip
from hytrain.tensors import DTYPES
from protocol.rules import MOMENTS, ON_DEVICE

#: Copies may take so much until the step ends. With more, backward waits for updates, so that these are compared.
HELD_BYTES: Final = 1 << 30
#: So many differences are told one by one.
TOLD: Final = 10

_log = logging.getLogger(__name__)


class SelfCheck:
    """The check of one optimizer's first `steps` steps, of which `left` are still to come.

    `left_out` are the names of parameters that are not compared.
    """

    def __init__(self, steps: int, options: Options, groups: Groups) -> None:
        name = options.algorithm.name
        self._by = "Lion in plain torch" if name == "Lion" else f"torch.optim.{name}"
        self.groups, self._steps, self.left = groups, steps, steps
        self._compared, self._differing, self.left_out = set[str](), set[str](), set[str]()
        self._told = 0
        _log.setLevel(logging.INFO)  # the result was asked for
        if why_not := _why_not(options):
            self.left = 0
            _say(logging.WARNING, f"check: nothing is compared, as torch has nothing like {why_not}")

    def compare(self, segment: TrainedSegment, theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        """Compare a parameter's arrays, or those of a piece of one."""
        name, numel = segment.owner.name, segment.spec.numel
        self._compared.add(name)
        found = [text for kind, tensor in theirs.items() if (text := _difference(kind, tensor, ours[kind]))]
        if not found:
            return
        self._differing.add(name)
        self._told += 1
        if self._told <= TOLD:
            step = f"step {self._steps - self.left + 1} of {self._steps}"
            is_whole = numel == segment.owner.own.numel()
            place = name if is_whole else f"{name}, from its element {segment.start} on,"
            _say(logging.WARNING, f"check: {step}: {place} is not what {self._by} makes of it: {'; '.join(found)}")

    def end_step(self) -> None:
        self.left -= 1
        if not self.left:
            self._conclude()

    def close(self) -> None:
        """Training has ended, perhaps before its last step that was to be compared."""
        if self.left:
            self._steps, self.left = self._steps - self.left, 0
            self._conclude()

    def _conclude(self) -> None:
        what = f"check: {len(self._compared)} parameters in {self._steps} step{'s' * (self._steps != 1)}"
        rest = f"; not compared: {', '.join(sorted(self.left_out))}" if self.left_out else ""
        if self._differing:
            _say(logging.WARNING, f"{what}: {len(self._differing)} of them are not what {self._by} makes of them{rest}")
        elif self._compared:
            _say(logging.INFO, f"{what}: the same bits as {self._by}{rest}")
        else:
            _say(logging.WARNING, f"check: nothing was compared{rest}")


@dataclass(slots=True, eq=False)
class _Copies:
    """A layer before an update: arrays and gradients by segment, the number of each update."""

    layer: TrainedLayer
    arrays: list[dict[str, Tensor]]
    gradients: dict[int, Tensor]
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        arrays = [array for arrays in self.arrays for array in arrays.values()]
        return sum(array.nbytes for array in (*arrays, *self.gradients.values()))


class CheckedTrip(RoundTrip):
    """A `RoundTrip` that copies what it sends, and compares."""

    def __init__(self, common: Common, device: DeviceUpdates, check: SelfCheck) -> None:
        super().__init__(common, device)
        self._check, self._copies = check, list[_Copies]()

    def send(self, layer: TrainedLayer, stream: Stream) -> Transfer | None:
        if not self._check.left:
            return super().send(layer, stream)
        arrays = self._arrays(layer)
        gradients = {index: gradient.to("cpu", copy=True) for index, gradient in layer.filled.items()}
        if self._verdicts.factor is not None and layer.life.placement.updates == "cpu":
            factor = self._verdicts.factor.cpu()
            gradients = {index: gradient.mul_(factor) for index, gradient in gradients.items()}
        leaving = super().send(layer, stream)
        self._copies.append(_Copies(layer, arrays, gradients, layer.sent))
        if sum(copies.nbytes for copies in self._copies) > HELD_BYTES and not self._verdicts.comes:
            self._device.update_held()  # those that wait until backward is over
            self._compare(list(self._copies))
        return leaving

    def end_step(self) -> None:
        super().end_step()
        if self._check.left:
            self._compare(list(self._copies))
            self._check.end_step()

    def _arrays(self, layer: TrainedLayer) -> list[dict[str, Tensor]]:
        """Copies of a layer's arrays, once its last update has arrived everywhere."""
        self.wait_for(layer, on_host=True)
        self._transfers.drain()
        return [_arrays(layer, index) for index in range(len(layer.segments))]

    def _compare(self, made: list[_Copies]) -> None:
        """Let torch update these copies, and compare them with the layers. A skipped step changes neither."""
        scale, groups = self._verdicts.host_scale(), self._check.groups.read()
        for copies in made:
            self._copies.remove(copies)
            now = self._arrays(copies.layer)
            for index, (segment, arrays) in enumerate(zip(copies.layer.segments, copies.arrays, strict=True)):
                spec, gradient = segment.spec, copies.gradients.get(index)
                on_device = spec.rule in ON_DEVICE and segment.weights.is_cuda  # its products of matrices are the GPU's
                if on_device or spec.is_shared:
                    self._check.left_out.add(segment.owner.name)
                    continue
                if gradient is not None and scale is not None:
                    scaled = gradient.to(DTYPES[spec.grads_dtype]).float() * scale
                    as_torch.update(groups[spec.group], spec, arrays, scaled, copies.counts[index])
                self._check.compare(segment, arrays, now[index])


def _why_not(options: Options) -> str | None:
    for name in ("state_dtype", "master_dtype"):
        if (dtype := getattr(options, name)) != "float32":
            return f"{name}={dtype}"
    return "clip=per_layer" if options.clip == "per_layer" else None


def _arrays(layer: TrainedLayer, index: int) -> dict[str, Tensor]:
    """Copies of a segment's arrays in host memory, each of shape (numel,). Weights of 16 bits have a master besides."""
    weights = layer.values[index].to("cpu", copy=True)
    arrays = {"weights": weights}
    if (remainder := layer.part("remainder", index)) is not None:
        kept = remainder.to("cpu", copy=True)
        arrays["master"] = join(weights, kept) if weights.dtype is torch.bfloat16 else kept
    for plane in MOMENTS[layer.segments[index].spec.rule]:
        arrays[plane] = cast(Tensor, layer.part(plane, index)).to("cpu", copy=True)
    return arrays


def _difference(kind: str, theirs: Tensor, ours: Tensor) -> str:
    """Where bits differ; empty if nowhere. All NaNs are the same."""
    bits = torch.int16 if theirs.itemsize == 2 else torch.int32
    differs = (theirs.view(bits) != ours.view(bits)) & ~(theirs.isnan() & ours.isnan())
    if not (count := int(differs.sum())):
        return ""
    largest = float((theirs.double() - ours.double()).abs()[differs].max())
    return f"{count} of {differs.numel()} elements of its {kind} differ, by {largest:.3g} at most"


def _say(level: int, text: str) -> None:
    if _log.hasHandlers():
        _log.log(level, text)
    else:  # Python would show no more than warnings
        print(text, file=sys.stderr, flush=True)
