"""Keeps what autograd saves for backward in host memory, where it is asked to (`offload_activations`).

    forward    block 1 │ block 2 │ block 3 │ head        what a block has saved leaves when the next one begins, so what
    out                  ── 1 ──   ── 2 ──               the last one and the head have saved stays
    backward             head │ block 3 │ block 2 │ …    when backward reaches a block, what the one before has saved
    in                          ── 2 ──   ── 1 ──        is fetched

With checkpointing, a block saves its input. Whole storages are copied, so each tensor comes back with its shape and its
strides, and tensors that share memory are copied once. Nothing waits on the host: streams wait for copies. Memory on
the device is freed for the stream that computes once it waits for the copy out, a block later; so what forward
allocates next can be that memory, however far ahead of the device the host is.

`reads` calls it from autograd's hooks, and where modules begin and end. A saved tensor that is written before backward
is refused there, as torch does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hytrain.errors import UsageError
from hytrain.memory.clock import Stream
from hytrain.memory.pinned import PinnedStack
from hytrain.memory.transfer import Copy, Transfer, Transfers
from hytrain.readable import gib
from hytrain.tensors import (
    form_of,
    in_form,
    is_plain,
    local,
    storage_bytes,
    storage_of,
    version,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Smaller ones stay on the device. The link takes as long to begin a copy as to copy this much.
MIN_BYTES: Final = 1 << 20
#: Device memory whose copy may be under way while forward goes on. What one block has saved may take more.
WINDOW_BYTES: Final = 256 << 20
#: Copies begin at multiples of this in host memory.
ALIGN_BYTES: Final = 512

MODIFIED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a weight was "
    "updated, or a tensor written, after the forward that this backward belongs to"
)
_CLOSED: Final = "this graph's activations were in host memory of an optimizer that is closed: run forward again"


class Saved:
    """A tensor that autograd has saved. It has its graph's memory: as long as this exists, backward may need it."""

    def __init__(self, activation: _Activation, tensor: Tensor) -> None:
        self.activation = activation
        self._tensor: Tensor | None = tensor  # until its copy has left
        self._count, self._form = version(tensor), form_of(tensor)
        self._is_spoilt = False
        self.read_in: int | None = None  # the backward that has had it last

    def leave(self) -> None:
        """Its copy has left the device, or the current stream waits for that. What is written later does no harm."""
        if self._tensor is not None:
            self._is_spoilt = version(self._tensor) != self._count
            self._tensor = None

    @property
    def source(self) -> Tensor | None:
        """Its storage on the device, uint8; None if it has left."""
        return None if self._tensor is None else storage_bytes(self._tensor)

    def tensor(self) -> Tensor | None:
        """The tensor on the device; None if it has left. Raises RuntimeError if it was written."""
        if self._is_spoilt or (self._tensor is not None and version(self._tensor) != self._count):
            raise RuntimeError(MODIFIED)
        return self._tensor

    def of(self, whole: Tensor) -> Tensor:
        return in_form(whole, self._form)


class _Activation:
    """A storage that autograd needs. `whole`: its bytes, back on the device, in memory of `stream`, after `came`."""

    def __init__(self, group: _Group, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.group, self.storage, self.version = group, weakref.ref(storage), version(tensor)
        self.nbytes = storage.nbytes()
        self.start = 0  # in host memory
        self.has_left = False
        self.saved: list[weakref.ref[Saved]] = []
        self.whole: Tensor | None = None
        self.came: Transfer | None = None
        self.stream: Stream = None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is the tensor's storage, as it was. Another storage may be where it was."""
        return self.storage() is tensor.untyped_storage() and self.version == version(tensor)

    def users(self) -> Iterator[Saved]:
        return _alive(self.saved)


class _Group:
    """What was saved between the ends of two blocks. It is copied together, both ways."""

    def __init__(self, number: int, before: weakref.ref[_Group] | None) -> None:
        self.number, self.before = number, before
        self.activations: list[weakref.ref[_Activation]] = []
        self.streams = set[Stream]()  # on which they were saved
        self.start = self.stop = 0  # in host memory
        self.departure: Transfer | None = None
        self.has_left = False
        self.fetched_in: int | None = None  # the backward that has fetched it last
        self.failed_in: int | None = None  # the backward in which there was no memory to fetch it ahead

    def alive(self) -> list[_Activation]:
        return list(_alive(self.activations))


class Activations:
    """The saved tensors of one model, on one device.

    `model`: what is there anyway, parameters and buffers. `host_free` tells how many bytes of host memory may still be
    taken; None is not known. Where they do not suffice, tensors stay on the device.
    """

    def __init__(
        self,
        transfers: Transfers,
        device: torch.device,
        model: Iterable[Tensor],
        host_free: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._transfers, self._device, self._host_free = transfers, device, host_free
        self._model = [TensorWeakRef(tensor) for tensor in model]  # which is the user's to keep
        self._has_warned = False
        self._stack = PinnedStack(transfers)
        self._is_closed = False
        self._constant: frozenset[int] = frozenset()
        self._of_storage: weakref.WeakValueDictionary[int, _Activation] = weakref.WeakValueDictionary()
        self._filling = _Group(0, None)
        self._complete: list[weakref.ref[_Group]] = []  # they leave when the next block begins
        self._leaving: deque[tuple[_Group, int]] = deque()  # and their bytes
        self._sent: list[weakref.ref[_Group]] = []  # by their place in host memory
        self._coming: dict[_Group, tuple[Transfer, Stream]] = {}  # what they write is not to be freed before
        self._lock = threading.RLock()  # forward and backward run on threads of their own

    @property
    def host_bytes(self) -> int:
        """Pinned host memory."""
        return self._stack.nbytes

    def begin_forward(self) -> None:
        """The model is called: note which memory it has, as that may have changed."""
        with self._lock:
            for group in list(self._coming):  # no backward has waited for it
                self._land(group)
        with torch._C.DisableTorchFunctionSubclass():
            model = (tensor for of in self._model if (tensor := of()) is not None)
            self._constant = frozenset(storage_of(local(tensor)) for tensor in model if is_plain(tensor))

    def save(self, tensor: Tensor, alias: Tensor) -> Saved | None:
        """What autograd is to save in place of a tensor, of which `alias` is a detached one; None if it stays.

        A storage that several blocks save stays on the device for all but the first two: it is needed all the time.
        """
        if not self._wants(tensor, alias):
            return None
        with self._lock:
            activation = self._of_storage.get(storage_of(alias))
            if activation is None or not activation.is_of(alias):
                activation = _Activation(self._filling, alias)
                self._of_storage[storage_of(alias)] = activation
                self._filling.activations.append(weakref.ref(activation))
            elif activation.group.number < self._filling.number - 1:
                return None
            saved = Saved(activation, alias)
            activation.saved.append(weakref.ref(saved))
            activation.group.streams.add(self._transfers.stream())
            if activation.has_left:
                saved.leave()
            return saved

    def _wants(self, tensor: Tensor, alias: Tensor) -> bool:
        if not (type(alias) is Tensor and alias.layout is torch.strided and alias.is_floating_point()):
            return False
        if alias.device != self._device or alias.is_neg() or alias.untyped_storage().nbytes() < MIN_BYTES:
            return False
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return not is_weight and storage_of(alias) not in self._constant

    def enter_block(self) -> None:
        """A block's forward begins: send what those before it have saved."""
        with self._lock:
            for group in _alive(self._complete):
                self._send(group)
            self._complete.clear()

    def leave_block(self) -> None:
        """A block's forward has ended."""
        with self._lock:
            ended, number = self._filling, self._filling.number + 1
            if not ended.activations:
                self._filling = _Group(number, ended.before)
                return
            self._complete.append(weakref.ref(ended))
            self._filling = _Group(number, weakref.ref(ended))

    def end_forward(self) -> None:
        """The model's forward has ended, or failed: free the memory of all that has been sent."""
        with self._lock:
            self.leave_block()
            while self._leaving:
                self._free_first()

    def _send(self, group: _Group) -> None:
        sources = [(activation, _source(activation)) for activation in group.alive()]
        present = [(one, source) for one, source in sources if source is not None and source.nbytes == one.nbytes]
        if not present or self._is_closed:
            return
        first = top = self._place(sum(_aligned(activation.nbytes) for activation, _ in present))
        copies: list[Copy] = []
        for activation, _ in present:
            activation.start, top = top, top + _aligned(activation.nbytes)
        if not self._has_room(top):
            return
        for activation, source in present:
            copies += self._pairs(activation, source, to_host=True)
        group.start, group.stop = first, top
        group.activations = [weakref.ref(activation) for activation, _ in present]
        whole = [source for _, source in present]
        self._transfers.join(group.streams, whole)
        group.streams.add(self._transfers.stream())
        group.departure = self._transfers.activations_out(copies)
        self._sent.append(weakref.ref(group))
        self._leaving.append((group, sum([source.nbytes for source in whole])))
        while len(self._leaving) > 1 and sum(nbytes for _, nbytes in self._leaving) > WINDOW_BYTES:
            self._free_first()

    def _has_room(self, nbytes: int) -> bool:
        """Whether there is host memory for so much in all."""
        more = nbytes - self._stack.nbytes
        free = self._host_free() if more > 0 else None
        try:
            if free is None or more <= free:
                self._stack.grow(nbytes)
                return True
            why = f"{gib(max(free, 0))} of host memory are free, and {gib(more)} more are needed"
        except OSError as error:
            why = str(error)
        if not self._has_warned:
            self._has_warned = True
            _log.warning("activations stay on the device: %s; a lower host_memory_limit leaves them more", why)
        return False

    def _place(self, nbytes: int) -> int:
        """Where so many bytes begin: in the first gap between groups that are still needed."""
        place = 0
        self._sent = [reference for reference in self._sent if reference() is not None]
        for other in sorted(_alive(self._sent), key=lambda group: group.start):
            if other.start - place >= nbytes:
                break
            place = max(place, other.stop)
        return place

    def _free_first(self) -> None:
        """Let whoever computes wait for the oldest copy, and then have its memory."""
        group, _ = self._leaving.popleft()
        assert group.departure is not None, "it was sent"
        for stream in group.streams | {self._transfers.stream()}:
            self._transfers.land(group.departure, stream)
        group.departure = replace(group.departure, keep=())
        group.has_left = True
        for activation in group.alive():
            activation.has_left = True
            for saved in activation.users():
                saved.leave()

    def restore(self, saved: Saved) -> Tensor:
        """Backward needs a saved tensor on the current stream. Fetches ahead what it will need next.

        Raises RuntimeError if the tensor was written, `UsageError` if the optimizer is closed.
        """
        with self._lock:
            group, task = saved.activation.group, torch._C._current_graph_task_id()  # -1 outside of any backward
            tensor = saved.tensor()
            if tensor is None:
                tensor = self._fetched(saved, task)
            before = None if group.before is None else group.before()
            if before is None or not before.has_left or self._is_closed:
                return tensor
            if task not in (before.fetched_in, before.failed_in):
                try:
                    self._fetch(before.alive(), before, task)
                except torch.OutOfMemoryError:
                    before.failed_in = task  # it comes when it is needed
            return tensor

    def _fetched(self, saved: Saved, task: int) -> Tensor:
        activation = saved.activation
        group = activation.group
        if self._is_closed:
            raise UsageError(_CLOSED)
        if activation.whole is None:  # if its group has come already, it is read once more
            self._fetch(group.alive() if group.fetched_in != task else [activation], group, task)
        whole, came = activation.whole, activation.came
        assert whole is not None and came is not None, "just fetched"
        self._land(group)
        self._transfers.land(came)  # also where another stream has waited for it before
        if activation.stream != self._transfers.stream():
            self._transfers.keep_for(None, [whole])
        saved.read_in = task
        if all(other.read_in == task for other in activation.users()):
            activation.whole = None  # autograd frees it once it has used it
        return saved.of(whole)

    def _fetch(self, activations: Sequence[_Activation], group: _Group, task: int) -> None:
        """Raises `torch.OutOfMemoryError`; then nothing has changed."""
        assert group.departure is not None, "it has left"
        self._land(group)
        away = [activation for activation in activations if activation.whole is None]
        wholes = [torch.empty(one.nbytes, dtype=torch.uint8, device=self._device) for one in away]
        copies = [
            pair for one, whole in zip(away, wholes, strict=True) for pair in self._pairs(one, whole, to_host=False)
        ]
        came = self._transfers.activations_in(copies, self._transfers.fence(), after=group.departure)
        for activation, whole in zip(away, wholes, strict=True):
            activation.whole, activation.came, activation.stream = whole, came, self._transfers.stream()
        self._coming[group] = replace(came, keep=wholes), self._transfers.stream()
        group.fetched_in = task

    def _land(self, group: _Group) -> None:
        """Let the stream in whose memory the group comes wait for it: from then on, that memory can be freed."""
        came, stream = self._coming.pop(group, (None, None))
        if came is not None:
            self._transfers.land(came, stream)

    def _pairs(self, activation: _Activation, whole: Tensor, *, to_host: bool) -> Iterator[Copy]:
        parts = self._stack.parts(activation.start, activation.nbytes)
        for part, own in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            yield (part, own) if to_host else (own, part)

    def close(self) -> None:
        """Free the host memory. No copy may be under way."""
        with self._lock:
            self._is_closed = True
            self._model.clear()
            self._leaving.clear()
            self._coming.clear()
            self._stack.close()


def _alive(references: Iterable[weakref.ref[T]]) -> Iterator[T]:
    for reference in references:
        if (target := reference()) is not None:
            yield target


def _source(activation: _Activation) -> Tensor | None:
    return next((source for saved in activation.users() if (source := saved.source) is not None), None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
