"""The tensors of the whole model, in memory that the CPU trainer and all ranks of a job share.

    rank r    its parts of weights, buffers ─▶ Shared ─▶ the CPU trainer, which has the whole model
              its parts of gradients        ◀─ Shared ◀─
              its micro-batches             ─ gather ─▶ the first rank, which alone talks to the CPU trainer

A part is a shard of FSDP2's, or a parameter of a pipeline's stage. With one rank, it is all of a tensor. `team`
makes these, and `partner` gives their descriptors to the CPU trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hytrain.memory import arena
from hytrain.memory.arena import SharedMemory
from hytrain.memory.lending import TRAINED, Lent, view
from hytrain.memory.transfer import Transfer, transfers_for
from hytrain.run.ranks import Ranks
from hytrain.tensors import Spans, address, spans
from protocol.handles import PAGE_BYTES


class Layout:
    """Where the ranks' tensors are in memory, whole, one after the other, each on pages of its own.

    `like`: those of all ranks by name, without memory, in an order that is the same on all of them. `nbytes`: of all.
    `parts`: this rank's part of each tensor that it has. `owners`: dtype and shape of each, from each rank that has it.
    """

    def __init__(self, ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
        """A collective: all ranks make one."""
        self.parts: dict[str, Spans] = {name: spans(each) for name, each in tensors.items()}
        dtypes = (str(each.dtype).removeprefix("torch.") for each in tensors.values())
        mine = [(name, *row) for (name, row) in zip(tensors, zip(dtypes, map(_shape, tensors.values())), strict=True)]
        self.owners = dict[str, list[tuple[str, tuple[int, ...]]]]()
        for name, dtype, shape in (row for rows in ranks.gather(mine) for row in rows):
            self.owners.setdefault(name, []).append((dtype, shape))
        self.like = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, ((dtype, shape), *_) in self.owners.items()
        }
        self.offsets, self.nbytes = spread(self.like.values())

    def described(self) -> list[list[Any]]:
        """Name, first byte, dtype and shape of each, as JSON."""
        dtypes = (str(each.dtype).removeprefix("torch.") for each in self.like.values())
        rows = zip(self.like.items(), self.offsets, dtypes, strict=True)
        return [[name, at, dtype, [*each.shape]] for (name, each), at, dtype in rows]


class Shared:
    """Memory with `count` copies of a layout's tensors, zeros at first. The first rank makes it, the others map it."""

    def __init__(self, ranks: Ranks, name: str, layout: Layout, count: int = 1) -> None:
        """A collective. Raises `HyTrainError` on all ranks if there is no address space for it on one of them."""
        self.layout = layout
        nbytes = max(count * layout.nbytes, 1)
        with ranks.together():
            self.made = SharedMemory(name, nbytes) if ranks.rank == 0 else None
        try:
            place = ranks.gather(None if self.made is None else f"/proc/{os.getpid()}/fd/{self.made.descriptor}")[0]
            with ranks.together():
                self.mapping = _mapped(place, nbytes) if self.made is None else self.made.mapping
        except BaseException:
            if self.made is not None:
                self.made.close()
            raise

    def own(self, index: int = 0) -> dict[str, Tensor]:
        """This rank's parts, by name, as views of copy `index`."""
        at, layout = index * self.layout.nbytes, self.layout
        whole = dict(zip(layout.like, views(self.mapping, layout.offsets, layout.like.values(), at), strict=True))
        return {name: whole[name][tuple(slice(*span) for span in part)] for name, part in layout.parts.items()}

    def lent(self) -> dict[str, Lent]:
        """Where the tensors are, on the first rank, as `opt.lend_weights` says it."""
        assert self.made is not None, "only the first rank talks to the CPU trainer"
        rows = zip(self.layout.like.items(), self.layout.offsets, strict=True)
        return {name: Lent(self.made.memory, at, each.dtype, each.shape, TRAINED) for (name, each), at in rows}

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
        del self.mapping


class Gradients:
    """What the CPU trainer has computed: a slot for each part of a batch, of which this rank reads its own parts.

    What this rank reads of a slot is pinned when it is first read.
    """

    def __init__(self, shared: Shared, device: torch.device) -> None:
        self.shared = shared
        self._transfers, self._pinned = transfers_for(device), set[int]()  # slots
        self.taken: Transfer | None = None  # the last copy out of a slot

    def of(self, slot: int, has_gradient: Sequence[bool]) -> dict[str, Tensor]:
        """This rank's parts of the gradients in `slot`, by name. Whoever copies them sets `taken`."""
        layout = self.shared.layout
        if slot not in self._pinned:
            for start, nbytes in self._read(slot):
                self._transfers.pin(start, nbytes, gently=True)
            self._pinned.add(slot)
        there = {name for name, has in zip(layout.like, has_gradient, strict=True) if has}
        return {name: part.contiguous() for name, part in self.shared.own(slot).items() if name in there}

    def wait(self) -> None:
        """Return once the slots may be written again."""
        if self.taken is not None:
            self.taken.synchronize()

    def close(self) -> None:
        """Unpin the slots, whose memory is then closed."""
        self.wait()
        for slot in self._pinned:
            for start, nbytes in self._read(slot):
                self._transfers.unpin(start, nbytes)
        self._pinned.clear()

    def _read(self, slot: int) -> list[tuple[int, int]]:
        """Address and bytes of what this rank reads of a slot: whole pages, as one where they follow each other.

        Parts with gaps are copied by the host.
        """
        found = list[tuple[int, int]]()
        parts = [part for part in self.shared.own(slot).values() if part.nbytes and part.is_contiguous()]
        for start, part in sorted(zip(map(address, parts), parts, strict=True), key=itemgetter(0)):
            first = start // PAGE_BYTES * PAGE_BYTES
            stop = -(-(start + part.nbytes) // PAGE_BYTES) * PAGE_BYTES
            if found and first == sum(found[-1]):
                first, _ = found.pop()
            found.append((first, stop - first))
        return found


def spread(like: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where each of them begins, in bytes, if each has pages of its own; and where the last one ends."""
    *offsets, end = accumulate((-(-each.nbytes // PAGE_BYTES) * PAGE_BYTES for each in like), initial=0)
    return offsets, end


def views(mapping: arena.Mapping, offsets: Iterable[int], like: Iterable[Tensor], start: int = 0) -> list[Tensor]:
    """Tensors in a mapping, with the shapes and dtypes of `like`, each at its offset from `start`, in bytes."""
    return [view(mapping, start + at, each.dtype, each.shape) for at, each in zip(offsets, like, strict=True)]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _mapped(place: str, nbytes: int) -> arena.Mapping:
    descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        return arena.Mapping(descriptor, nbytes)
    finally:
        os.close(descriptor)
