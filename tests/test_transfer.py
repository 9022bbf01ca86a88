"""Memory is pinned in pieces, and no copy crosses from one to the next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hytrain.memory.transfer import PIECE_BYTES, cut


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
