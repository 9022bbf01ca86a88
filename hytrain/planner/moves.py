"""Which layers move first, where a plan has no room beside what is there now.

Memory for what comes is taken before what leaves gives its own up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from hytrain.planner.profile import LayerFacts
from protocol.placement import CPU, GPU, VISIT

#: Where weights are kept, as moves name it.
_STREAMED, _RESIDENT = "streamed", "resident"
#: What leaves the GPU comes first. Weights come to it before state of their layers does.
_ORDER: Final = (
    (_RESIDENT, _STREAMED),
    (GPU.name, CPU.name),
    (CPU.name, VISIT.name),
    (GPU.name, VISIT.name),
    (VISIT.name, CPU.name),
    (_STREAMED, _RESIDENT),
    (CPU.name, GPU.name),
    (VISIT.name, GPU.name),
)


class Places(NamedTuple):
    """The placement of each layer, and the layers whose weights rest in host memory."""

    placements: tuple[str, ...]
    streamed: frozenset[int]


def first_part(layers: Sequence[LayerFacts], now: Places, then: Places, has_room: Callable[[Places], bool]) -> Places:
    """As much of the way from `now` to `then` as there is room for; at worst none of it.

    `has_room` tells whether there is memory for `now` and other places at once. Of each kind of moves, so many are made
    that the next one has no room beside those before. What visits need on the GPU may have no room until state has left
    it. So if nothing else can move, that goes by way of the CPU, with layers that it can update.
    """
    moves = _moves(layers, now, then)
    reached = now
    for kind in _ORDER:
        reached = _as_many(reached, kind, moves[kind], has_room)
    if reached != now:
        return reached
    must_visit = {layer.lid for layer in layers if layer.must_visit}
    by_way = [lids for lids in moves[GPU.name, VISIT.name] if lids.isdisjoint(must_visit)]
    return _as_many(now, (GPU.name, CPU.name), by_way, has_room)


def _as_many(
    there: Places, kind: tuple[str, str], moves: Sequence[frozenset[int]], has_room: Callable[[Places], bool]
) -> Places:
    """The first of these moves, as many as have room."""
    counts = range(1, len(moves) + 1)
    count = bisect_left(counts, True, key=lambda n: not has_room(_after(there, kind, moves[:n])))
    return _after(there, kind, moves[:count])


def _moves(
    layers: Sequence[LayerFacts], now: Places, then: Places
) -> defaultdict[tuple[str, str], list[frozenset[int]]]:
    """By kind, the layers that move: one by one, and those whose weights move block by block."""
    blocks: defaultdict[int, set[int]] = defaultdict(set)
    moves: defaultdict[tuple[str, str], list[frozenset[int]]] = defaultdict(list)
    for layer, before, after in zip(layers, now.placements, then.placements, strict=True):
        if before != after:
            moves[before, after].append(frozenset({layer.lid}))
        if layer.lid in now.streamed ^ then.streamed:
            blocks[layer.block].add(layer.lid)
    for lids in map(frozenset, blocks.values()):
        moves[(_RESIDENT, _STREAMED) if lids <= then.streamed else (_STREAMED, _RESIDENT)].append(lids)
    return moves


def _after(there: Places, kind: tuple[str, str], moves: Sequence[frozenset[int]]) -> Places:
    lids, to = frozenset[int]().union(*moves), kind[1]
    if to == _STREAMED:
        return there._replace(streamed=there.streamed | lids)
    if to == _RESIDENT:
        return there._replace(streamed=there.streamed - lids)
    return there._replace(placements=tuple(to if lid in lids else name for lid, name in enumerate(there.placements)))
