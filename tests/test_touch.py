"""Fresh memory: every page of a range can be made, in huge pages where the kernel has them, and none beyond it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hytrain.memory import arena
from hytrain.memory.arena import HUGE_PAGE_BYTES, Mapping

MADV_COLLAPSE = 25
DEADLINE_S = 60.0
PAGES = 10
libc = ctypes.CDLL(None, use_errno=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lead", [0, mmap.PAGESIZE, mmap.PAGESIZE + 100, HUGE_PAGE_BYTES - 1])
def test_a_mapping_gets_its_pages_and_keeps_what_it_has(
    lead: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_POPULATED_BYTES", 2 * HUGE_PAGE_BYTES)
    whole = (3 - bool(lead)) * has_huge_pages()
    found, ends_s = list[int](), time.monotonic() + DEADLINE_S
    while whole not in found and time.monotonic() < ends_s:  # the kernel may be busy with a page
        with memory_file(6 * HUGE_PAGE_BYTES) as (mapping, descriptor):
            start, middle = HUGE_PAGE_BYTES + lead, 2 * HUGE_PAGE_BYTES + lead + mmap.PAGESIZE
            stop = start + 3 * HUGE_PAGE_BYTES
            mapping.buffer[middle : middle + 3] = b"abc"
            mapping.populate((start, middle - start), (middle, stop - middle), threads=threads)
            assert resident(mapping) == list(range(start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE)))
            kept = os.pread(descriptor, mapping.nbytes, 0)
            assert kept.find(b"abc") == middle and kept.count(b"\0") == len(kept) - 3
            found.append(huge_bytes(mapping) // HUGE_PAGE_BYTES)
    assert found[-1] == whole


def test_a_mapping_gets_its_pages_where_no_thread_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the end of the main thread, while another one trains."""

    class Ended(ThreadPoolExecutor):
        def submit(self, *call: Any, **options: Any) -> Any:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(arena, "ThreadPoolExecutor", Ended)
    monkeypatch.setattr(arena, "_POPULATED_BYTES", 2 * HUGE_PAGE_BYTES)
    with memory_file(8 * HUGE_PAGE_BYTES) as (mapping, _):
        mapping.populate((0, mapping.nbytes))
        assert len(resident(mapping)) == mapping.nbytes // mmap.PAGESIZE


class Kernel:
    """Refuses an advice for want of what it takes, and notes what it is asked for."""

    def __init__(self, **refused: int) -> None:
        self.asked = list[tuple[int, int]]()
        self._refused = {getattr(arena, f"_MADV_{name}"): number for name, number in refused.items()}

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.asked.append((advice, nbytes))
        if (number := self._refused.get(advice)) is not None:
            ctypes.set_errno(number)
            return -1
        return int(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice))

    def searched(self) -> list[int]:
        return [nbytes for advice, nbytes in self.asked if advice == MADV_COLLAPSE]


def test_where_there_are_no_huge_pages_a_mapping_gets_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(COLLAPSE=errno.ENOMEM)
    with memory_file(8 * HUGE_PAGE_BYTES) as (mapping, _), monkeypatch.context() as patch:
        patch.setattr(arena, "_libc", kernel)
        patch.setattr(arena, "_POPULATED_BYTES", 2 * HUGE_PAGE_BYTES)
        for start in (0, mapping.nbytes // 2):
            mapping.populate((start, mapping.nbytes // 2), threads=1)
        assert len(resident(mapping)) == mapping.nbytes // mmap.PAGESIZE
        assert len(kernel.searched()) == 1, "a search takes long"


def test_threads_share_what_one_could_make_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for its huge pages in one call, because each call waits for all cores."""
    kernel = Kernel(COLLAPSE=errno.EAGAIN)
    with memory_file(8 * HUGE_PAGE_BYTES) as (mapping, _), monkeypatch.context() as patch:
        patch.setattr(arena, "_libc", kernel)
        mapping.populate((0, mapping.nbytes), threads=2)
        assert kernel.searched() == [4 * HUGE_PAGE_BYTES] * 2
        assert len(resident(mapping)) == mapping.nbytes // mmap.PAGESIZE


def test_an_older_kernel_makes_pages_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(COLLAPSE=errno.EINVAL, POPULATE_WRITE=errno.EINVAL)
    with memory_file(64 * mmap.PAGESIZE) as (mapping, descriptor), monkeypatch.context() as patch:
        mapping.buffer[:3] = b"abc"
        patch.setattr(arena, "_libc", kernel)
        mapping.populate((0, mmap.PAGESIZE), (9 * mmap.PAGESIZE + 100, 11 * mmap.PAGESIZE), threads=2)
        assert resident(mapping) == [0, *range(9, 21)]
        assert os.pread(descriptor, mapping.nbytes, 0).rstrip(b"\0") == b"abc", "what is there stays"


def has_huge_pages() -> bool:
    """Whether this kernel gives shared memory huge pages to a process that asks for them."""
    with memory_file(PAGES * HUGE_PAGE_BYTES) as (mapping, _):
        places = range(0, mapping.nbytes, HUGE_PAGE_BYTES)
        mapping.buffer[::HUGE_PAGE_BYTES] = bytes(PAGES)
        size = ctypes.c_size_t(HUGE_PAGE_BYTES)
        return any(libc.madvise(ctypes.c_void_p(mapping.address + at), size, MADV_COLLAPSE) == 0 for at in places)


@contextmanager
def memory_file(nbytes: int) -> Iterator[tuple[Mapping, int]]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    try:
        yield Mapping(descriptor, nbytes), descriptor
    finally:
        os.close(descriptor)


def resident(mapping: Mapping) -> list[int]:
    pages = (ctypes.c_ubyte * (mapping.nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.nbytes), pages) == 0
    return [index for index, page in enumerate(pages) if page & 1]


def huge_bytes(mapping: Mapping) -> int:
    """Of the mapping, what the page tables hold as huge pages."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.partition("-")[0]
        elif line.startswith("ShmemPmdMapped:") and int(found, 16) == mapping.address:
            return int(line.split()[1]) << 10
    raise AssertionError("the mapping is not in smaps")
