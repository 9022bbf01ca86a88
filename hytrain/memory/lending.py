"""Lends one step's weights to other processes: where they are in shared memory, and that they stay as they are.

    the CPU owns the layer        in its arena, in the current bank: the plane that the optimizer updates
    offloaded weights that visit   in its arena, too
    any other tensor of the model in copies: other layers' parameters, those in several pieces, frozen ones, buffers

What lies in an arena is not copied, as long as nobody uses it any more when it is written the next time. If somebody
does, it is copied then (`before_writes`), before the first write, and those who have mapped it map the copy over it:

    lend ─▶ Loan ─▶ take: a borrower maps it ─┬─▶ give_back ─▶ the next updates write in place
                                              └─▶ before_writes ─ copies ─▶ borrowers, until they say that they see it

`run.lender` speaks with the borrowers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hytrain.errors import CapacityError, UsageError
from hytrain.memory import arena
from hytrain.memory.arena import Memory, ReadOnlyMapping, SharedMemory
from hytrain.memory.host import available_bytes
from hytrain.memory.transfer import Copy, Transfers
from hytrain.model.trained import TrainedParameter
from hytrain.readable import gib
from hytrain.tensors import is_plain, local, shaped
from protocol.handles import PAGE_BYTES

TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
#: A borrower answers when its Python gets to it. Only a hang takes longer, or a process that is stopped.
ANSWER_S: Final = 600.0
#: After this long, the log says who is waited for.
NOTICE_S: Final = 5.0

_log = logging.getLogger(__name__)


class Form(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    shape: torch.Size


class Lent(NamedTuple):
    """A tensor's elements begin at byte `offset` of `memory`, one after the other. `kind`: "trained", "frozen" …"""

    memory: Memory
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    kind: str


class Moved(NamedTuple):
    """Bytes of a memory that are about to be written are at `offset` of another one, too."""

    memory: int
    start: int
    nbytes: int
    offset: int


class Borrower(Protocol):
    """A process that may have mapped what is lent. `is_moving`: it was told of a copy, and has not answered yet."""

    loan: Loan | None
    is_moving: bool
    pid: int

    def tell(self, moved: Sequence[Moved], into: Memory) -> None: ...


class Loan(Mapping[str, Lent], AbstractContextManager["Loan"]):
    """What `opt.lend_weights()` returns: where one step's weights are, by name, until `close()` takes them back.

    A tensor with several names is there by each of them. `step`: the number of the last step that is in them.
    """

    def __init__(self, lending: Lending, step: int, lent: dict[str, Lent], copies: Copies) -> None:
        self.step, self.copies = step, copies
        self._lending, self._lent, self._pid = lending, lent, os.getpid()
        self._kept: SharedMemory | None = None
        in_arenas = {each.memory for each in lent.values()} - {copies.memory}
        self._descriptors = dict[Memory, int]()  # its own: a layer's arena is closed when the layer moves
        try:
            for memory in in_arenas:
                self._descriptors[memory] = os.dup(memory.descriptor)
        except OSError as error:
            self._close_descriptors()
            raise CapacityError(f"no descriptor is free for lent weights ({error}): raise `ulimit -n`") from None

    def __getitem__(self, name: str) -> Lent:
        return self._lent[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lent)

    def __len__(self) -> int:
        return len(self._lent)

    def descriptor(self, memory: Memory) -> int:
        return self._descriptors.get(memory, memory.descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether some of it lies where the next updates are going to write."""
        return bool(self._descriptors)

    def keep(self, spare: SharedMemory | None = None) -> tuple[list[Moved], SharedMemory]:
        """Copy what lies in arenas, into `spare` memory if that fits: new pages take longer than the copy.

        Raises `CapacityError` if host memory has no room; then nothing has changed.
        """
        arenas = list(self._descriptors)
        *starts, nbytes = accumulate((each.nbytes - each.start for each in arenas), initial=0)
        kept = spare
        if spare is None or spare.memory.nbytes != nbytes:
            if spare is not None:
                spare.close()
            _require(
                nbytes, "to keep the weights of a past step, which another process still uses, beside the new ones"
            )
            kept = None
        try:
            if kept is None:
                kept = SharedMemory("lent", nbytes)
                kept.mapping.populate((0, nbytes))
            for each, at in zip(arenas, starts, strict=True):
                shape, source = (each.nbytes - each.start,), ReadOnlyMapping(self._descriptors[each], each.nbytes)
                into = view(kept.mapping, at, torch.uint8, shape)
                into.copy_(view(source, each.start, torch.uint8, shape))
        except OSError as error:
            if kept is not None:
                kept.close()
            raise CapacityError(f"lent weights cannot be copied: {error}") from None
        at_of = dict(zip(arenas, starts, strict=True))
        for name, lent in self._lent.items():
            if lent.memory in at_of:
                offset = lent.offset - lent.memory.start + at_of[lent.memory]
                self._lent[name] = lent._replace(memory=kept.memory, offset=offset)
        self._kept = kept
        moved = [Moved(each.number, each.start, each.nbytes - each.start, at) for each, at in at_of.items()]
        self._close_descriptors()
        return moved, kept

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def free(self) -> SharedMemory | None:
        """Nobody uses it any more. Returns memory that the next one can have."""
        self._close_descriptors()
        kept, self._kept = self._kept, None
        return kept

    def close(self) -> None:
        """Take the weights back: no other process can attach them from now on. Those that have, keep what they see."""
        if os.getpid() == self._pid:  # not of a child that was forked meanwhile
            self._lending.end(self)

    def __exit__(self, *error: object) -> None:
        self.close()


class Copies:
    """Memory with room for each of `like`. Each begins on a page, and takes memory once it is `written`."""

    def __init__(self, like: Sequence[Form], transfers: Transfers) -> None:
        self.like, self._transfers = like, transfers
        *self.offsets, nbytes = accumulate(map(_in_pages, like), initial=0)
        self._shared = SharedMemory("weights", max(nbytes, PAGE_BYTES))
        self.memory = Memory(self._shared.descriptor, nbytes)
        mapping = self._shared.mapping
        self._views = [view(mapping, at, each.dtype, each.shape) for at, each in zip(self.offsets, like, strict=True)]
        self.written, self._pinned = set[int](), set[int]()

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Copy these tensors into their places. Raises `CapacityError`."""
        new = [(self.offsets[index], self._nbytes(index)) for index in values if index not in self.written]
        _require(sum(nbytes for _, nbytes in new), "for copies of weights")
        self._shared.mapping.populate(*new)
        copies = list[Copy]()
        for index, tensor in values.items():
            into = self._views[index]
            if tensor.is_contiguous() and tensor.numel():
                self._pin(index)
                copies.append((into.view(-1), tensor.view(-1)))
            else:
                into.copy_(tensor)
            self.written.add(index)
        self._transfers.state_out(copies).synchronize()

    def _pin(self, index: int) -> None:
        if index not in self._pinned:
            self._transfers.pin(self._shared.mapping.address + self.offsets[index], self._nbytes(index))
            self._pinned.add(index)

    def _nbytes(self, index: int) -> int:
        return _in_pages(self.like[index])

    def close(self) -> None:
        for index in self._pinned:
            self._transfers.unpin(self._shared.mapping.address + self.offsets[index], self._nbytes(index))
        self._views = []
        self._shared.close()


class Lending:
    """The weights of `parameters`, as other processes find them. `open_door` lets them ask, from the first loan on."""

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        transfers: Transfers,
        open_door: Callable[[Lending], Callable[[], None]] = lambda lending: lambda: None,
    ) -> None:
        self._parameters, self._transfers, self._open_door = parameters, transfers, open_door
        self._close_door: Callable[[], None] | None = None
        #: Held for each change of what follows. Notified when a borrower answers, gives back or is gone.
        self.changed = threading.Condition()
        self.borrowers = set[Borrower]()
        self._open: Loan | None = None
        self._in_use = list[Loan]()
        self._spare: Copies | None = None
        self._spare_kept: SharedMemory | None = None

    def lend(self, step: int, tensors: Mapping[str, Tensor]) -> Loan:
        """Once all updates were waited for: a loan of the model's `tensors`, of which there are some by several names.

        It takes the place of the one before. Raises `CapacityError` if host memory has no room for the copies.
        """
        if self._open is not None:
            self.end(self._open)
        trained = {id(known.parameter): known for known in self._parameters if not known.is_gone}
        given = {id(each): each for each in tensors.values() if id(each) in trained or is_plain(each)}
        like = [(known.own if (known := trained.get(key)) else local(each)) for key, each in given.items()]
        homes = {key: home for key, known in trained.items() if key in given and (home := _home(known)) is not None}
        values = {
            index: _values(trained[key]) if key in trained else local(each).detach()
            for index, (key, each) in enumerate(given.items())
            if key not in homes
        }
        copies = self._copies([Form(each.dtype, each.shape) for each in like], values.keys())
        places = dict[int, Lent]()
        for index, (key, each) in enumerate(given.items()):
            memory, offset = homes.get(key) or (copies.memory, copies.offsets[index])
            kind = TRAINED if key in trained else FROZEN if isinstance(each, nn.Parameter) else BUFFER
            places[key] = Lent(memory, offset, *copies.like[index], kind)
        lent = {name: places[id(each)] for name, each in tensors.items() if id(each) in places}
        try:
            copies.write(values)
            loan = Loan(self, step, lent, copies)
        except BaseException:
            copies.close()
            raise
        with self.changed:
            self._open = loan
            self._in_use.append(loan)
        if self._close_door is None:
            self._close_door = self._open_door(self)
        return loan

    def _copies(self, like: Sequence[Form], wanted: Set[int]) -> Copies:
        """Those of a loan that nobody uses any more, if they fit, and have nothing else than what is wanted.

        Pages that have nothing wanted are not freed one by one: a borrower may have registered them with CUDA, which
        would go on with what they were.
        """
        with self.changed:
            spare, self._spare = self._spare, None
        if spare is not None and spare.like == like and spare.written <= wanted:
            return spare
        if spare is not None:
            spare.close()
        try:
            return Copies(like, self._transfers)
        except OSError as error:
            raise CapacityError(f"host memory for copies of weights cannot be mapped: {error}") from None

    def take(self, borrower: Borrower) -> Loan | None:
        """The borrower uses what is lent now, and nothing else any more. None if nothing is lent."""
        with self.changed:
            self.give_back(borrower)
            borrower.loan = self._open
            return self._open

    def give_back(self, borrower: Borrower) -> None:
        """The borrower uses nothing any more."""
        with self.changed:
            loan, borrower.loan, borrower.is_moving = borrower.loan, None, False
            self.changed.notify_all()
            if loan is not None:
                self._free_unused(loan)

    def end(self, loan: Loan) -> None:
        """Nobody can take the loan from now on."""
        with self.changed:
            if self._open is loan:
                self._open = None
                self._free_unused(loan)

    def _free_unused(self, loan: Loan) -> None:
        if loan is self._open or any(each.loan is loan for each in self.borrowers):
            return
        self._in_use.remove(loan)
        kept, copies = loan.free(), loan.copies
        if kept is not None:
            self._spare_kept, kept = kept, self._spare_kept
        if kept is not None:
            kept.close()
        if self._spare is not None:
            self._spare.close()
        self._spare = copies

    def before_writes(self) -> None:
        """Weights in arenas are about to be written: copy those that are in use, and wait until nobody sees the others.

        Raises `UsageError` if there is no host memory for that, or if a borrower does not answer; then nothing is
        written, and it can be tried again.
        """
        if not self._in_use:
            return
        with self.changed:
            for loan in [each for each in self._in_use if each.is_in_place]:
                spare, self._spare_kept = self._spare_kept, None
                try:
                    moved, into = loan.keep(spare)
                except CapacityError as error:
                    raise UsageError(
                        f"{error}. Let it release them first, and leave the block of opt.lend_weights()"
                    ) from None
                for borrower in [each for each in self.borrowers if each.loan is loan]:
                    borrower.tell(moved, into.memory)
            if not self.changed.wait_for(lambda: not self._silent(), min(NOTICE_S, ANSWER_S)):
                _log.warning(
                    "a step waits for process %d, which uses weights that the step would overwrite", self._silent()[0]
                )
                self.changed.wait_for(lambda: not self._silent(), ANSWER_S)
            if silent := self._silent():
                raise UsageError(
                    f"process {silent[0]} uses weights that this step would overwrite, and has not answered for "
                    f"{ANSWER_S:.0f} s: let it go on, or end it"
                )

    def _silent(self) -> list[int]:
        return [each.pid for each in self.borrowers if each.is_moving]

    def close(self) -> None:
        """Borrowers keep what they see: from now on, nobody writes it."""
        if self._close_door is not None:
            self._close_door()
            self._close_door = None
        with self.changed:
            self._open = None
            for borrower in self.borrowers:
                borrower.loan = None
            for loan in [*self._in_use]:
                self._free_unused(loan)
            if self._spare is not None:
                self._spare.close()
                self._spare = None
            if self._spare_kept is not None:
                self._spare_kept.close()
                self._spare_kept = None


def _home(known: TrainedParameter) -> tuple[Memory, int] | None:
    """Where the parameter's current weights are in an arena; None if none has all of them, one after the other."""
    if len(known.places) != 1 or not known.own.is_contiguous():
        return None
    [(layer, index)] = known.places
    return (layer.arena.memory, layer.arena.weights_offset(index)) if layer.keeps_weights else None


def _values(known: TrainedParameter) -> Tensor:
    """In its shape; from host memory where its weights are there, too: a copy from the GPU waits for what that has."""
    parts = [(layer.arena.weights if layer.keeps_weights else layer.values)[index] for layer, index in known.places]
    if not parts:
        return known.own
    return shaped(parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts]), known.own)


def _require(nbytes: int, why: str) -> None:
    if nbytes > (free := available_bytes()):
        raise CapacityError(f"{gib(nbytes)} of host memory are needed {why}, and {gib(free)} are free")


def _in_pages(like: Form) -> int:
    return -(-math.prod(like.shape) * like.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


def view(mapping: arena.Mapping, at: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of this shape that begins at byte `at`. It keeps the mapping alive."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping.buffer, dtype=dtype, count=numel, offset=at).view(shape)
