"""The launcher's output: all of it to who reads, and nobody waits for who does not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from workers.launch import output
from workers.launch.output import HELD_BYTES, Output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its two ends."""
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def read_all(end: int) -> bytes:
    return b"".join(iter(lambda: os.read(end, 1 << 16), b""))


@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "not blocking"])
def test_a_reader_who_comes_back_gets_what_was_held_and_is_told_of_the_rest(
    pipe: tuple[int, int], blocks: bool
) -> None:
    os.set_blocking(pipe[1], blocks)
    written, piece = Output(pipe[1]), b"." * 1000
    many = 2 * HELD_BYTES // len(piece)
    for _ in range(many):
        written.write(piece)
    told = b""
    while not told.endswith(b"see the logs\n"):
        told += os.read(pipe[0], 1 << 16)
    written.write(b"again\n")
    written.drain()
    os.close(pipe[1])
    shown, _, note = told.partition(b"\n")
    lost = many * len(piece) - len(shown)
    assert not shown.strip(b".") and HELD_BYTES - len(piece) < len(shown) <= HELD_BYTES + (1 << 17)
    assert note == b"hytrain-cluster: %d bytes were not read in time: see the logs\n" % lost
    assert read_all(pipe[0]) == b"again\n"


def test_at_the_end_who_reads_gets_all_and_who_does_not_is_left(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PATIENCE_S", 0.01)
    written = Output(pipe[1])
    written.write(b"." * HELD_BYTES)
    written.drain()
    assert written._held, "more than a pipe takes"
    monkeypatch.undo()
    got = len(os.read(pipe[0], 1 << 16))
    while got < HELD_BYTES:
        got += len(os.read(pipe[0], 1 << 16))
    written.drain()
    assert not written._held
    os.close(pipe[1])


def test_a_reader_who_is_gone_keeps_nobody(pipe: tuple[int, int]) -> None:
    nobody, end = os.pipe()
    os.close(nobody)
    lost, written = Output(end), Output(pipe[1])
    for one in (lost, written):
        one.write(b"a line\n")
        one.drain()
        assert not one._held
    os.close(pipe[1])
    os.close(end)
    assert read_all(pipe[0]) == b"a line\n"
