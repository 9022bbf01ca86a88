"""Memory is pinned in pieces, no copy crosses from one to the next, and weights are copied in turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain.memory.transfer import PIECE_BYTES, TURN_BYTES, CudaTransfers, _pieces, cut, turns


@given(st.integers(0, 10 * PIECE_BYTES), st.integers(1, 5 * PIECE_BYTES), st.data())
def test_a_range_and_its_parts_are_cut_at_multiples(address: int, nbytes: int, data: st.DataObject) -> None:
    """Planes and segments are parts of what was pinned."""
    pieces = list(cut(address, nbytes))
    assert pieces[0][0] == address and pieces[-1][1] == address + nbytes
    assert all(before[1] == after[0] for before, after in zip(pieces, pieces[1:], strict=False))
    assert all(stop % PIECE_BYTES == 0 for _, stop in pieces[:-1])
    assert all(0 < stop - start <= PIECE_BYTES for start, stop in pieces)
    start = data.draw(st.integers(address, address + nbytes - 1))
    stop = data.draw(st.integers(start + 1, address + nbytes))
    for first, last in cut(start, stop - start):
        assert any(begin <= first and last <= end for begin, end in pieces)


def test_turns_copy_everything_in_order_a_bit_at_a_time() -> None:
    sizes = (10, PIECE_BYTES + 10, 5, TURN_BYTES + PIECE_BYTES, PIECE_BYTES // 2, 7)
    sources = [torch.full((size,), 1 + index, dtype=torch.uint8) for index, size in enumerate(sizes)]
    copies = [(torch.zeros_like(source), source) for source in sources]
    found = list(turns(_pieces(copies)))
    assert all(sum(source.nbytes for _, source in turn) <= TURN_BYTES for turn in found)
    assert max(len(turn) for turn in found) > 1, "small ones share a turn"
    order = [int(source[0]) for turn in found for _, source in turn]
    assert order == sorted(order)
    for destination, source in (each for turn in found for each in turn):
        destination.copy_(source)
    assert all(torch.equal(destination, source) for destination, source in copies)


@pytest.mark.gpu
def test_a_small_copy_does_not_wait_for_all_weights() -> None:
    """They take 40 ms or more. Another stream's copy of a few bytes, which is made after them, ends before them."""
    device = torch.device("cuda")
    transfers, other = CudaTransfers(device), torch.cuda.Stream(device)
    planes = torch.ones(64, PIECE_BYTES, dtype=torch.uint8).pin_memory()
    weights = torch.zeros_like(planes, device=device)
    few, few_on_device = torch.ones(16).pin_memory(), torch.zeros(16, device=device)
    torch.cuda.synchronize()
    landings = [transfers.weights_in([(weights[index], planes[index])]) for index in range(len(planes))]
    with torch.cuda.stream(other):
        few_on_device.copy_(few, non_blocking=True)
    other.synchronize()
    assert landings[-1].done is not None and not landings[-1].done.query()
    transfers.drain()
    assert torch.equal(weights.cpu(), planes) and torch.equal(few_on_device.cpu(), few)


@pytest.mark.gpu
def test_weights_have_landed_when_the_last_turn_has() -> None:
    """The last turn is short, and on another stream than the one before."""
    device = torch.device("cuda")
    transfers = CudaTransfers(device)
    for turns_before in (3, 4):
        plane = torch.ones(turns_before * TURN_BYTES + 16, dtype=torch.uint8).pin_memory()
        weights = torch.zeros_like(plane, device=device)
        torch.cuda.synchronize()
        copies = [*zip(weights.split(PIECE_BYTES), plane.split(PIECE_BYTES), strict=True)]
        transfers.land(transfers.weights_in(copies))
        assert bool(weights.all())
