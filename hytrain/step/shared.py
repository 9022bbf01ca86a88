"""Muon's matrices that ranks share: each is orthogonalized once, as a whole, by one rank, between the update's passes.

    backward    in any order        first pass over this rank's part ─▶ its direction, in bfloat16, which waits
    step()      in the same order   directions ── all-to-all ──▶ workers, who orthogonalize wholes
                on all ranks,       wholes     ── all-to-all ──▶ each rank's parts
                round by round      last pass over this rank's part

`model.rounds` says who works on which matrix. All ranks take part in all rounds of a step, also those that have no
gradient of a matrix: collectives depend on nothing that may differ between ranks. The bits depend neither on the worker
nor on placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from hytrain.kernels.orthogonal import orthogonalized
from hytrain.memory.passes import as_matrix, as_stored
from hytrain.memory.transfer import Transfer, Transfers
from hytrain.model.rounds import SharedMatrix, Spans, numel
from hytrain.model.trained import TrainedLayer
from protocol.rules import Hyper, MuonHyper


@dataclass(frozen=True, slots=True)
class Direction:
    """What the first pass has made of this rank's part, once `ready`: bfloat16, shape (numel,). `counts`: as sent."""

    counts: tuple[int, ...]
    elements: Tensor
    ready: Transfer


#: By layer, what was sent of it, and the parts of its segments.
Parts = dict[TrainedLayer, tuple[tuple[int, ...], dict[int, Tensor]]]


class SharedMatrices:
    """Those of one model. `ranks` are those that share it, in ascending order, `group` is theirs; None is torch's."""

    def __init__(
        self,
        layers: Sequence[TrainedLayer],
        rounds: Sequence[Sequence[SharedMatrix]],
        transfers: Transfers,
        *,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rounds, self._transfers = rounds, transfers
        self._rank, self._ranks, self._group = rank, ranks, group
        self._device = layers[0].weights[0].device
        self._places = {
            segment.owner.name: (layer, index)
            for layer in layers
            for index, segment in enumerate(layer.segments)
            if segment.spec.is_shared
        }
        self._waiting: dict[str, Direction] = {}

    def directions(self, layer: TrainedLayer, gradients: Mapping[int, Tensor], *, visits: bool) -> dict[int, Tensor]:
        """Memory for what a layer's first passes make: float32, shape (numel,). `visits`: its state visits.

        It is that of the stream on which they run, so the next layer's passes can have it without waiting for anything.
        """
        shared = [index for index in gradients if layer.segments[index].spec.is_shared]
        with self._passes(visits=visits):
            return {index: torch.empty_like(gradients[index], dtype=torch.float32) for index in shared}

    def keep(
        self, layer: TrainedLayer, counts: tuple[int, ...], directions: Mapping[int, Tensor], *, visits: bool
    ) -> None:
        """Round what a layer's first passes have made."""
        with self._passes(visits=visits):
            rounded = {index: direction.bfloat16() for index, direction in directions.items()}
            ready = self._transfers.so_far()
        self._transfers.clock.recycle(ready.span[:1])
        for index, elements in rounded.items():
            self._waiting[layer.segments[index].owner.name] = Direction(counts, elements, ready)

    def _passes(self, *, visits: bool) -> AbstractContextManager[object]:
        """The stream of a layer's passes."""
        return self._transfers.visit(()) if visits else nullcontext()

    def orthogonalize(self, groups: Sequence[Hyper]) -> Iterator[Parts]:
        """This rank's parts of each round's orthogonalized matrices, of which it has a gradient in this step.

        A collective of all ranks. `groups` has the hyperparameters of the parameter groups.
        """
        waiting, self._waiting = self._waiting, {}
        for direction in waiting.values():
            self._transfers.land(direction.ready)
        self._transfers.keep_for(None, [direction.elements for direction in waiting.values()])
        for matrices in self._rounds:
            parts = Parts()
            for name, part in self._round(matrices, waiting, groups).items():
                if (own := waiting.pop(name, None)) is not None:
                    layer, index = self._places[name]
                    parts.setdefault(layer, (own.counts, {}))[1][index] = part
            yield parts

    def _round(
        self, matrices: Sequence[SharedMatrix], waiting: Mapping[str, Direction], groups: Sequence[Hyper]
    ) -> dict[str, Tensor]:
        """By name, this rank's parts of all of a round's matrices, in storage order."""
        me = self._rank
        leaving, coming = self._mail()
        for matrix in matrices:
            for rank, part in matrix.sources.items():
                if rank == me:
                    leaving[matrix.worker].append(self._direction(matrix, waiting))
                if matrix.worker == me:
                    coming[rank] += numel(part)
        came = self._exchange(leaving, coming)
        leaving, coming = self._mail()
        for matrix in matrices:
            if matrix.worker == me:
                found = self._orthogonalized(matrix, came, groups)
                for rank, part in matrix.parts.items():
                    leaving[rank].append(found[_slices(part)].reshape(-1))
            if me in matrix.parts:
                coming[matrix.worker] += numel(matrix.parts[me])
        del came
        came = self._exchange(leaving, coming)
        return {
            matrix.name: self._stored(matrix, _taken(came, matrix.worker, matrix.parts[me]))
            for matrix in matrices
            if me in matrix.parts
        }

    def _direction(self, matrix: SharedMatrix, waiting: Mapping[str, Direction]) -> Tensor:
        """This rank's part, row by row, shape (numel,). Zeros without a gradient."""
        part = matrix.parts[self._rank]
        if (direction := waiting.get(matrix.name)) is None:
            return torch.zeros(numel(part), dtype=torch.bfloat16, device=self._device)
        layer, index = self._places[matrix.name]
        by_columns = layer.segments[index].spec.by_columns
        return as_matrix(direction.elements, _shape(part), by_columns=by_columns).reshape(-1)

    def _stored(self, matrix: SharedMatrix, part: Tensor) -> Tensor:
        layer, index = self._places[matrix.name]
        return as_stored(part, by_columns=layer.segments[index].spec.by_columns)

    def _orthogonalized(self, matrix: SharedMatrix, came: dict[int, Tensor], groups: Sequence[Hyper]) -> Tensor:
        """The whole matrix, of whose parts those that `came` from each rank are next."""
        whole = torch.empty(matrix.shape, dtype=torch.bfloat16, device=self._device)
        for rank, part in matrix.sources.items():
            whole[_slices(part)] = _taken(came, rank, part)
        layer, index = self._places[matrix.name]
        return orthogonalized(whole, cast(MuonHyper, groups[layer.segments[index].spec.group]))

    def _mail(self) -> tuple[dict[int, list[Tensor]], dict[int, int]]:
        """By rank, what goes there, and how many elements come from there."""
        return {rank: [] for rank in self._ranks}, dict.fromkeys(self._ranks, 0)

    def _exchange(self, leaving: Mapping[int, Sequence[Tensor]], coming: Mapping[int, int]) -> dict[int, Tensor]:
        """By rank, the elements that have come from there: bfloat16, shape (numel,)."""
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        sent = torch.cat([empty, *(part for parts in leaving.values() for part in parts)])
        numels = [sum(part.numel() for part in parts) for parts in leaving.values()]
        came = torch.empty(sum(coming.values()), dtype=torch.bfloat16, device=self._device)
        dist.all_to_all_single(came, sent, [*coming.values()], numels, group=self._group)
        return dict(zip(coming, came.split([*coming.values()]), strict=True))


def _shape(part: Spans) -> tuple[int, int]:
    (top, bottom), (left, right) = part
    return bottom - top, right - left


def _slices(part: Spans) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in part)


def _taken(came: dict[int, Tensor], rank: int, part: Spans) -> Tensor:
    """The next part that came from a rank, in its shape."""
    size = numel(part)
    here, came[rank] = came[rank][:size], came[rank][size:]
    return here.view(_shape(part))
