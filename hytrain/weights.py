"""The weights that a trainer lends, in another process of the same user: `attach`. docs/lending.md shows how to use it.

    trainer       with opt.lend_weights():            another process     weights = hytrain.weights.attach(run)
                      …                                                   weights.load_into(model)

They are in the trainer's memory: no byte is copied here, and none of them changes as long as this process holds them. A
thread of this process listens for the trainer. When it is about to write some of them, that thread maps a copy over
them, and says so; until then the trainer waits.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hytrain.config import Cluster
from hytrain.errors import CapacityError, ClusterTimeout, ConfigError, UsageError
from hytrain.memory.arena import ReadOnlyMapping
from hytrain.memory.lending import TRAINED, view
from hytrain.memory.transfer import Transfers, transfers_for
from hytrain.model.given import give
from hytrain.model.layers import clean
from hytrain.run.lender import door, peer, receive
from hytrain.run.live import find
from protocol.handles import PAGE_BYTES

__all__ = ["Weights", "attach"]

ANSWER_S: Final = 60.0
_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: int
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def attach(run: str | Path | Cluster | None = None, *, rank: int = 0) -> Weights:
    """The weights that a run's trainer lends now, by `opt.lend_weights()`.

    Args:
        run: The run's name, its folder (`opt.run_dir`) or its socket folder. None stands for the newest run.
        rank: Of several trainers on this machine, this one.

    Raises:
        ConfigError: There is no such run, or it lends no weights now.
        UsageError: This is the trainer itself.
        ClusterTimeout: The trainer does not answer.
    """
    return Weights(run if isinstance(run, Cluster) else find(None if run is None else str(run)), rank)


class Weights(Mapping[str, Tensor], AbstractContextManager["Weights"]):
    """One step's weights, by name: parameters, frozen ones too, and buffers. `attach` makes it.

    Nobody may write them: that ends the process with SIGSEGV. They stay as they are until `renew`, `release` or
    `close`, also if the trainer dies. A forked child has none of them.

    Attributes:
        step: The number of the last step that is in them.
    """

    step: int

    def __init__(self, run: Cluster, rank: int) -> None:
        self._run, self._pid = run, os.getpid()
        self._changed = threading.Condition()
        self._mappings = dict[int, ReadOnlyMapping]()
        self._moved = set[int]()  # of them, those that no longer show the trainer's memory
        self._pinned = dict[int, list[tuple[int, int]]]()
        self._transfers = dict[torch.device, Transfers]()
        self._pins_with: Transfers | None = None  # what one device has pinned, all have
        self._places = dict[str, _Place]()
        self._tensors = dict[str, Tensor]()
        self._answer: tuple[str, Any, list[int]] | None = None
        self._asked = 0
        self._is_held = self._is_closed = False
        self._over: str | None = None  # why nothing comes from the trainer any more
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connect(rank)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="hytrain-weights", daemon=True)
        self._thread.start()
        try:
            self.renew()
        except BaseException:
            self.close()
            raise

    def _connect(self, rank: int) -> None:
        try:
            self._socket.connect(door(self._run.socket_dir, rank))
        except OSError:
            raise ConfigError(
                f"the run {self._run.run_name} has lent no weights yet: its trainer calls opt.lend_weights()"
            ) from None
        if peer(self._socket)[0] == os.getpid():
            raise UsageError("attach() is for another process: in the trainer itself, the model has these weights")

    # ---------------------------------------------------------------- what is lent

    def renew(self) -> None:
        """Take the weights that the trainer lends now, in place of those held so far. What is mapped stays mapped.

        The tensors of before may change from then on.

        Raises:
            ConfigError: The trainer lends none now, or is gone. Then those of before are held no more.
            ClusterTimeout: It does not answer.
        """
        self._require_open()
        with self._changed:
            self._is_held, self._answer, self._asked = False, None, self._asked + 1
            has = [number for number in self._mappings if number not in self._moved]
            self._say({"kind": "take", "token": self._run.token, "asked": self._asked, "has": has})
            self._changed.wait_for(lambda: self._answer is not None or self._over is not None, ANSWER_S)
            if self._answer is None:
                if self._over is None:
                    raise ClusterTimeout(f"the trainer of the run {self._run.run_name} does not answer")
                raise ConfigError(f"the run {self._run.run_name} lends nothing any more: {self._over}")
            (kind, body, descriptors), self._answer = self._answer, None
            if kind == "refused":
                raise ConfigError(f"the run {self._run.run_name}: {body['why']}")
            self._take(body, descriptors)

    def _take(self, body: dict[str, Any], descriptors: Sequence[int]) -> None:
        try:
            new = {
                number: ReadOnlyMapping(descriptor, nbytes)
                for (number, nbytes), descriptor in zip(body["memories"], descriptors, strict=True)
            }
        except OSError as error:
            raise CapacityError(f"lent weights cannot be mapped: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for number in self._mappings.keys() - {*body["kept"]}:
            self._unmap(number)
        self._mappings |= new
        before, self._places, had = self._places, {}, self._tensors
        self._tensors = {}
        for name, kind, dtype, shape, number, offset in body["tensors"]:
            place = self._places[name] = _Place(kind, getattr(torch, dtype), tuple(shape), number, offset)
            is_same = number not in new and before.get(name) == place
            self._tensors[name] = (
                had[name] if is_same else view(self._mappings[number], offset, place.dtype, place.shape)
            )
        self.step, self._is_held = body["step"], True

    def _unmap(self, number: int) -> None:
        self._unpin(number)
        self._moved.discard(number)
        del self._mappings[number]

    def release(self) -> None:
        """Let the trainer write them without a copy. From now on they may change, so use none of them until `renew`."""
        self._require_open()
        with self._changed:
            self._is_held = False
            if self._over is None:
                self._say({"kind": "release"})

    def close(self) -> None:
        """Release them for good, and unmap them as soon as nobody has a tensor of them."""
        if os.getpid() != self._pid or self._is_closed:
            return
        with self._changed:
            self._is_held, self._is_closed = False, True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._tensors = {}
        for number in [*self._mappings]:
            self._unmap(number)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("these weights were attached in the process that has forked this one: attach(…) here")
        if self._is_closed:
            raise UsageError("these weights are closed: hytrain.weights.attach(…) again")

    def _require_held(self) -> None:
        self._require_open()
        if not self._is_held:
            raise UsageError("these weights are released, and may have changed: call renew() first")

    def __getitem__(self, name: str) -> Tensor:
        self._require_held()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- what to do with them

    def to(self, device: torch.device | str) -> dict[str, Tensor]:
        """Copies of all on a device, which are this process's own. To a GPU they travel at the link's speed.

        The first time, the memory is registered with CUDA, which takes a tenth of a second per gigabyte.
        """
        self._require_held()
        device = torch.device(device)
        with self._changed:
            if device not in self._transfers:
                self._transfers[device] = transfers_for(device)
            transfers = self._transfers[device]
            if device.type == "cuda":
                self._pins_with = self._pins_with or transfers
                self._pin(self._pins_with)
            made, copies = dict[_Place, Tensor](), []
            for name, tensor in self._tensors.items():
                if (place := self._places[name]) not in made:
                    made[place] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if tensor.numel():
                        copies.append((made[place].view(-1), tensor.view(-1)))
            transfers.state_in(copies, transfers.fence()).synchronize()
            return {name: made[place] for name, place in self._places.items()}

    def load_into(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        """Put them into a model of the trained kind, in place of what it has: views, or copies on a `device`.

        Build it on the meta device, and it takes no memory of its own. After `renew`, call this again.

        Raises:
            ConfigError: It has other parameters or buffers than the trained one.
        """
        self._require_held()
        tensors = self._tensors if device is None else self.to(device)
        all_of = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
        named = {clean(name) for name, _ in all_of}
        known = {self._places[name] for name in named & self._places.keys()}
        ties = {name for name, place in self._places.items() if name not in named and place in known}
        kinds = {name: place.kind for name, place in self._places.items() if name not in ties}
        trained = {name: tensors[name] for name, kind in kinds.items() if kind == TRAINED}
        others = {name: tensors[name] for name, kind in kinds.items() if kind != TRAINED}
        give(model, trained, others, who="load_into(): what has made this")

    def _pin(self, transfers: Transfers) -> None:
        """Register the pages that have tensors."""
        for number, mapping in self._mappings.items():
            if (ranges := self._ranges(number)) != self._pinned.get(number):
                self._unpin(number)
                self._pinned[number] = pinned = []
                for start, nbytes in ranges:
                    with mapping.writable(start, nbytes):
                        transfers.pin(mapping.address + start, nbytes)
                    pinned.append((start, nbytes))

    def _ranges(self, number: int) -> list[tuple[int, int]]:
        """The pages of a memory that have tensors, as ranges with a gap between any two."""
        found = list[tuple[int, int]]()
        places = [place for place in self._places.values() if place.memory == number and place.nbytes]
        for place in sorted(places, key=lambda place: place.offset):
            start = place.offset // PAGE_BYTES * PAGE_BYTES
            stop = -(-(place.offset + place.nbytes) // PAGE_BYTES) * PAGE_BYTES
            if found and start <= sum(found[-1]):
                first, nbytes = found.pop()
                start, stop = first, max(first + nbytes, stop)
            found.append((start, stop - start))
        return found

    def _unpin(self, number: int) -> None:
        for start, nbytes in self._pinned.pop(number, ()):
            assert self._pins_with is not None, "it has pinned them"
            self._pins_with.unpin(self._mappings[number].address + start, nbytes)

    # ---------------------------------------------------------------- the trainer

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the thread says that it is gone
            self._socket.send(json.dumps(message).encode())

    def _listen(self) -> None:
        over = "its trainer has ended, or has closed its optimizer"
        try:
            while (message := receive(self._socket)) is not None:
                with self._changed:
                    if message[0] == "moved":
                        self._follow(*message[1:])
                    elif message[1]["asked"] == self._asked:
                        self._answer = message
                        self._changed.notify_all()
                    else:  # an answer that nobody has waited for so long
                        for descriptor in message[2]:
                            os.close(descriptor)
        except ConnectionResetError:
            pass
        except Exception as error:  # the socket stays open: the trainer must not write what is still seen here
            over = f"what it sent was not understood: {type(error).__name__}: {error}"
            _log.exception("the lender is no longer heard")
        with self._changed:
            self._over = over
            self._changed.notify_all()

    def _follow(self, body: Any, descriptors: Sequence[int]) -> None:
        """The trainer is about to write these bytes: see the copy instead, and say so."""
        told, moved = body
        [into] = descriptors
        try:
            for number, start, nbytes, offset in moved:
                if number in self._mappings:
                    self._unpin(number)
                    self._mappings[number].replace(start, nbytes, into, offset)
                    self._moved.add(number)
        finally:
            os.close(into)
        self._say({"kind": "seen", "told": told})
