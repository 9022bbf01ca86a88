"""Sums in host memory, over transfers that take their time: what comes when, and what memory it takes."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hytrain.memory.capacity import Room
from hytrain.memory.clock import HostClock, Span, Stream
from hytrain.memory.transfer import Copy, Fence, HostTransfers, Transfer
from hytrain.model.trained import TrainedParameter
from hytrain.step import sums
from hytrain.step.accumulation import choose_sums
from hytrain.step.sums import DeviceSums, HostSums

NUMEL = 8


@dataclass
class SlowTransfers(HostTransfers):
    """A copy happens when somebody waits for it, or for one that waits for it; never later than in order."""

    clock: Any = field(default_factory=HostClock)
    under_way: dict[Span, list[Copy]] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    waits_for: dict[Span, Transfer] = field(default_factory=dict)
    count: int = 0

    def pin(self, address: int, nbytes: int, *, gently: bool = False) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.pinned.pop(address) == nbytes

    def gradients_out(self, copies: Any) -> Transfer:
        return self._later(copies, keep=[source for _, source in copies])

    def sums_in(self, copies: Any, fence: Fence, *, after: Transfer) -> Transfer:
        transfer = self._later(copies)
        self.waits_for[transfer.span] = after
        return transfer

    def land(self, transfer: Transfer, stream: Stream = None) -> None:
        if (before := self.waits_for.pop(transfer.span, None)) is not None:
            self.land(before)
        for destination, source in self.under_way.pop(transfer.span, []):
            destination.copy_(source)

    def _later(self, copies: Any, keep: Any = ()) -> Transfer:
        self.count += 1
        transfer = Transfer(None, (self.count, self.count), keep)
        self.under_way[transfer.span] = list(copies)
        return transfer


def parameters(count: int) -> list[TrainedParameter]:
    return [TrainedParameter(f"p{index}", nn.Parameter(torch.zeros(NUMEL)), 0) for index in range(count)]


def numbers(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [1, 10 * NUMEL, 1 << 20])
@pytest.mark.parametrize("backward", [False, True], ids=["same order", "other order"])
def test_they_are_those_that_the_device_keeps(window: int, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever room there is for copies, and in whatever order they are needed."""
    monkeypatch.setattr(sums, "WINDOW_BYTES", window)
    transfers = SlowTransfers()
    known = parameters(6)
    places = DeviceSums(), HostSums(transfers)
    for step in range(2):
        for turn in range(4):
            order = known[::-1] if backward and turn % 2 else known
            for place in places:
                place.begin()
                for index, parameter in enumerate(order):
                    if (turn + index) % 5 == 4:
                        continue  # no gradient this time
                    total = place.take(parameter)
                    more = numbers(1000 * step + 100 * turn + known.index(parameter))
                    place.put(parameter, more.clone() if total is None else total.add_(more))
        assert {p.name for p in places[0].waiting()} == {p.name for p in places[1].waiting()}
        for parameter in known:
            mine, expected = places[1].take(parameter), places[0].take(parameter)
            assert (mine is None) is (expected is None)
            assert mine is None or (expected is not None and torch.equal(mine, expected))
        assert places[1].waiting() == []
    places[1].close()
    assert transfers.pinned == {}


def test_little_of_them_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums on their way in, two on their way out; the next comes before it is asked for."""
    nbytes = 4 * NUMEL
    monkeypatch.setattr(sums, "WINDOW_BYTES", 2 * nbytes)
    transfers = SlowTransfers()
    known, place, out = parameters(6), HostSums(transfers), list[weakref.ref[Tensor]]()
    for turn in range(3):
        place.begin()
        for index, parameter in enumerate(known):
            total = place.take(parameter)
            assert (total is None) is (turn == 0)
            if turn and index + 1 < len(known):
                assert known[index + 1] in place._coming
            assert sum(t.nbytes for t, *_ in place._coming.values()) <= 2 * nbytes
            total = numbers(index) if total is None else total
            out.append(weakref.ref(total))
            place.put(parameter, total)
            del total
            transfers.under_way.clear()  # the stand-in's own
            assert sum(held() is not None for held in out) - len(place._coming) <= 2


def test_what_is_not_wanted_is_not_added_to() -> None:
    transfers = SlowTransfers()
    (known,), place = parameters(1), HostSums(transfers)
    place.begin()
    place.put(known, numbers(1))
    place.begin()  # and it is fetched
    place.discard(known)
    assert transfers.under_way == {}, "memory is given back before copies into it have ended"
    assert place.take(known) is None and place.waiting() == []
    place.put(known, numbers(2))
    total = place.take(known)
    assert total is not None and torch.equal(total, numbers(2))


@pytest.mark.parametrize(
    ("place", "free", "dtype", "beside_planes", "kind"),
    [
        ("auto", None, torch.float32, False, DeviceSums),
        ("auto", 4 * 3 * NUMEL, torch.float32, False, DeviceSums),
        ("auto", 4 * 3 * NUMEL - 1, torch.float32, False, HostSums),
        ("auto", 2 * 3 * NUMEL, torch.bfloat16, False, DeviceSums),
        ("auto", 2 * 2 * NUMEL, torch.bfloat16, True, DeviceSums),
        ("auto", 2 * 2 * NUMEL - 1, torch.bfloat16, True, HostSums),
        ("device", 0, torch.float32, False, DeviceSums),
        ("host", None, torch.float32, False, HostSums),
    ],
)
def test_the_place_is_chosen_by_memory_and_told(
    place: str,
    free: int | None,
    dtype: torch.dtype,
    beside_planes: bool,
    kind: type,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums in planes take no memory of it: here those of one of three parameters."""
    known = parameters(3)
    monkeypatch.setattr(TrainedParameter, "is_updated_on_host", property(lambda one: one is known[0]))
    room = None if free is None else Room(usable=free, needed=0)
    with caplog.at_level(logging.INFO, logger="hytrain"):
        assert isinstance(choose_sums(place, known, SlowTransfers(), lambda: room, dtype, beside_planes), kind)
    told = "on the host" if kind is HostSums else "on the device"
    assert (told in caplog.text) is (place == "auto")
