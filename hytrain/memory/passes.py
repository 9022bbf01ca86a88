"""The update of one segment on the trainer's device, as passes of a kernel over its elements.

    most rules    one pass: gradient, weights and all planes of the state
    muon          momentum ─▶ direction ─ orthogonalized, the whole matrix ─▶ weights and remainder

If ranks share the matrix, each makes the passes over its part, and `step.shared` is between them.
Only passes see pieces of a segment, so state may come to the device piece by piece (`visits`). `planes` has it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import torch
from torch import Tensor

from hytrain.kernels.backend import Backend, Elements, Operands
from hytrain.kernels.orthogonal import SHARED_BYTES, WORK_BYTES, orthogonalized
from hytrain.kernels.scalars import Scalars, muon_step
from hytrain.kernels.torch_backend import TorchBackend
from hytrain.tensors import DTYPE_NAMES, addresses
from protocol.handles import STATE_PLANES, plane_dtype
from protocol.messages import Segment
from protocol.rules import MOMENTS, ON_DEVICE, MuonHyper

#: For each rule, where its moments are among `STATE_PLANES`.
_MOMENTS_AT: Final = {rule: tuple(map(STATE_PLANES.index, planes)) for rule, planes in MOMENTS.items()}


@dataclass(frozen=True, slots=True)
class Pass:
    """Changes `weights` and the planes in `uses`, of `STATE_PLANES`. Weights and gradients have shape (numel,).

    The segment's own weights are in `weights` if it uses the `remainder`.
    """

    segment: Segment
    weights: Tensor
    grads: Tensor
    uses: tuple[str, ...]
    scalars: Scalars

    def on(self, state: Sequence[Tensor | None], part: slice = slice(None)) -> list[Tensor | None]:
        """Of a segment's `STATE_PLANES`, or of a part of its elements, those that the pass uses."""
        named = zip(STATE_PLANES, state, strict=True)
        return [None if plane is None or name not in self.uses else plane[part] for name, plane in named]

    def run(
        self, state: Sequence[Tensor | None], host: Backend | None, verdict: Tensor | None, part: slice | None = None
    ) -> None:
        """Update all elements, or a part, on the current stream of their device.

        `state` has those of their `STATE_PLANES` that the pass uses. On device "cpu" the `host` backend updates, and
        the verdict is in `scalars`.
        """
        start, remainder = 0 if part is None else part.start, state[0]
        weights, grads = (self.weights, self.grads) if part is None else (self.weights[part], self.grads[part])
        has_remainder = "remainder" in self.uses and plane_dtype("remainder", self.segment) is not None
        assert (remainder is not None) is has_remainder, "or the weights would be rounded"
        moments = [moment for index in _MOMENTS_AT[self.segment.rule] if (moment := state[index]) is not None]
        elements = Elements.of(self.segment, start)
        if grads.is_cuda:
            from hytrain.kernels import gpu

            with torch.cuda.device(grads.device):
                gpu.update(
                    weights=weights,
                    grads=grads,
                    remainder=remainder,
                    moments=moments,
                    scalars=self.scalars,
                    verdict=verdict,
                    elements=elements,
                )
            return
        assert host is not None, "device cpu has a host backend"
        backend = _with_torch() if self.segment.rule in ON_DEVICE else host
        here = [weights, grads, *moments] if remainder is None else [weights, grads, *moments, remainder]
        to_weights, to_grads, *to_state = addresses(here)
        operands = Operands(
            weights=to_weights,
            grads=to_grads,
            remainder=0 if remainder is None else to_state.pop(),
            moments=tuple(to_state),
            numel=grads.numel(),
            weights_dtype=DTYPE_NAMES[weights.dtype],
            grads_dtype=DTYPE_NAMES[grads.dtype],
            scalars=self.scalars,
            state_dtype=self.segment.state_dtype,
            elements=elements,
        )
        backend.update(operands)


def passes(
    segment: Segment, weights: Tensor, grads: Tensor, scalars: Scalars, direction: Tensor | None = None
) -> Iterator[Pass]:
    """The passes of a segment's update. Run each one over all elements before the next is asked for.

    `weights` and `grads` have shape (numel,) and are on the device; the last pass writes the weights. Of a matrix that
    ranks share there is one pass at a time: the first one into `direction`, float32, shape (numel,); without it, the
    last one, whose `grads` are this rank's part of the orthogonalized matrix, in bfloat16.
    """
    assert segment.rule == scalars.hyper.rule, "or its moments would be another rule's"
    if segment.rule not in ON_DEVICE:
        yield Pass(segment, weights, grads, STATE_PLANES, scalars)
        return
    hyper, (rows, cols) = cast(MuonHyper, scalars.hyper), segment.shape
    stored = grads
    if direction is not None:
        yield Pass(segment, direction, grads, MOMENTS["muon"], scalars)
        return
    if not segment.is_shared:
        direction = torch.empty(segment.numel, dtype=torch.float32, device=grads.device)
        yield Pass(segment, direction, grads, MOMENTS["muon"], scalars)
        found = orthogonalized(as_matrix(direction, segment.shape, by_columns=segment.by_columns), hyper)
        stored = as_stored(found, by_columns=segment.by_columns)
    yield Pass(segment, weights, stored, ("remainder",), muon_step(hyper, scalars.step, rows, cols))


def as_read(segment: Segment, grads: Tensor, direction: Tensor | None = None) -> Tensor:
    """What `passes` takes as `grads`: gradients in the dtype that was agreed on, if they are any."""
    is_orthogonal = segment.is_shared and direction is None
    return grads if is_orthogonal else grads.to(getattr(torch, segment.grads_dtype))


def as_matrix(elements: Tensor, shape: Sequence[int], *, by_columns: bool) -> Tensor:
    """A matrix's elements, shape (numel,) in storage order, as a view of its shape (rows, columns)."""
    rows, cols = shape
    return elements.view(cols, rows).T if by_columns else elements.view(rows, cols)


def as_stored(matrix: Tensor, *, by_columns: bool) -> Tensor:
    """The inverse of `as_matrix`."""
    return (matrix.T if by_columns else matrix).reshape(-1)


def work_bytes(segments: Sequence[Segment]) -> int:
    """The memory on the device that an update takes beside the planes of its segment, at most."""
    whole = [(math.prod(each.shape), each.is_shared) for each in segments if each.rule in ON_DEVICE]
    return max(((WORK_BYTES + is_shared * SHARED_BYTES) * numel for numel, is_shared in whole), default=0)


@cache
def _with_torch() -> TorchBackend:
    """What updates on device "cpu" where the native backend has no kernel."""
    return TorchBackend(torch.get_num_threads())
