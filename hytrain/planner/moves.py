"""Which layers move first, where a plan has no room beside what is there now.

Memory for what comes is taken before what leaves gives its own up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from hytrain.planner.profile import LayerFacts
from protocol.placement import CPU, GPU, VISIT, Placement, Places

#: Of weights: where they rest, before and after. Of all else: its placement, as if weights rested on the GPU.
Kind = tuple[str, str] | tuple[Placement, Placement]
#: What leaves the GPU comes first: state before weights, which come to it before state does.
_ORDER: Final[tuple[Kind, ...]] = (
    (GPU, CPU),
    (CPU, VISIT),
    (GPU, VISIT),
    (VISIT, CPU),
    ("gpu", "host"),
    ("host", "gpu"),
    (CPU, GPU),
    (VISIT, GPU),
)


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
    by_way = [lids for lids in moves[GPU, VISIT] if lids.isdisjoint(must_visit)]
    return _as_many(now, (GPU, CPU), by_way, has_room)


def _as_many(there: Places, kind: Kind, moves: Sequence[frozenset[int]], has_room: Callable[[Places], bool]) -> Places:
    """The first of these moves, as many as have room. State and weights of a layer follow each other."""
    stay = there.gpu if kind[1] == "host" else there.offloaded if kind[1] is GPU else frozenset()
    moves = [lids for lids in moves if lids.isdisjoint(stay)]
    counts = range(1, len(moves) + 1)
    count = bisect_left(counts, True, key=lambda n: not has_room(_after(there, kind, moves[:n])))
    return _after(there, kind, moves[:count])


def _moves(layers: Sequence[LayerFacts], now: Places, then: Places) -> defaultdict[Kind, list[frozenset[int]]]:
    """By kind, the layers that move: one by one, and those whose weights move block by block."""
    blocks: defaultdict[int, set[int]] = defaultdict(set)
    moves: defaultdict[Kind, list[frozenset[int]]] = defaultdict(list)
    for layer, before, after in zip(layers, now, then, strict=True):
        if before.resident is not after.resident:
            moves[before.resident, after.resident].append(frozenset({layer.lid}))
        if before.weights != after.weights:
            blocks[layer.block].add(layer.lid)
    for lids in map(frozenset, blocks.values()):
        moves[("gpu", "host") if lids <= then.offloaded else ("host", "gpu")].append(lids)
    return moves


def _after(there: Places, kind: Kind, moves: Sequence[frozenset[int]]) -> Places:
    lids, to = frozenset[int]().union(*moves), kind[1]
    if isinstance(to, Placement):
        return there.moved(lids, to)
    return there.offload(there.offloaded | lids if to == "host" else there.offloaded - lids)
