"""Matrices that ranks share and Muon updates as wholes: which rank orthogonalizes which one, and in which order. Pure.

    matrices, in the model's order ─▶ rounds ─▶ in each round, every rank has about the same work at the same time

All ranks come to the same rounds, whatever they have of each matrix and wherever its state is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Where a part begins and ends in each of the matrix's two dimensions.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A matrix of `shape`, which `worker` orthogonalizes. `parts` has by rank which part of it that has, if any.

    Replicas have the same part: `sources` are parts that make up the whole, once each, the worker's own one among them.
    """

    name: str
    shape: tuple[int, int]
    parts: Mapping[int, Spans]
    worker: int

    @property
    def sources(self) -> dict[int, Spans]:
        first: dict[Spans, int] = {}
        for rank in (self.worker, *self.parts):
            first.setdefault(self.parts[rank], rank)
        return {rank: part for part, rank in first.items()}


def numel(part: Spans) -> int:
    """The number of a part's elements."""
    (top, bottom), (left, right) = part
    return (bottom - top) * (right - left)


def work(shape: tuple[int, int]) -> int:
    """In proportion to the multiplications of a Newton-Schulz step: two products with the matrix, one without."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def rounds(shapes: Mapping[str, tuple[int, int]], parts: Mapping[int, Mapping[str, Spans]]) -> list[list[SharedMatrix]]:
    """The rounds for matrices of these `shapes`, in their order. `parts` has each rank's, by name.

    A round has as many elements as the largest matrix for each rank, or fewer: so much more memory does it take.
    """
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    bound, turns, room = len(parts) * max(sizes.values(), default=0), list[list[str]](), 0
    for name, size in sizes.items():
        if size > room:
            turns.append([])
            room = bound
        turns[-1].append(name)
        room -= size
    done = Counter[int]()
    return [_dealt(turn, shapes, parts, done) for turn in turns]


def _dealt(
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, int]],
    parts: Mapping[int, Mapping[str, Spans]],
    done: Counter[int],
) -> list[SharedMatrix]:
    """The largest first, each to the rank that has least work in this round, or so far, of those that have a part."""
    workers, load = dict[str, int](), Counter[int]()
    for name in sorted(names, key=lambda name: -work(shapes[name])):
        having: Iterable[int] = (rank for rank, theirs in parts.items() if name in theirs)
        worker = workers[name] = min(having, key=lambda rank: (load[rank], done[rank], rank))
        load[worker] += work(shapes[name])
        done[worker] += work(shapes[name])
    return [
        SharedMatrix(
            name,
            shapes[name],
            {rank: theirs[name] for rank, theirs in parts.items() if name in theirs},
            workers[name],
        )
        for name in names
    ]
