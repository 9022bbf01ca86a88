"""What making, pinning and giving back host memory takes, in small pages and in huge ones.

    python -m benchmarks.pages --threads 14 --gb 6

    memfd ─▶ touch, as the optimizer does ─▶ pin and unpin, as the trainer does (with a GPU) ─▶ unmap ─▶ ms a GB

Small pages are had by advising the kernel against huge ones.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from benchmarks.columns import markdown, number
from hytrain.kernels.choice import load
from hytrain.memory.arena import Mapping
from hytrain.memory.transfer import CudaTransfers
from workers import affinity
from workers.arenas import PIECE_BYTES

WORK: Final = ("touch", "pin", "unpin", "give back")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gb", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    affinity.pin(affinity.choose("auto", arguments.threads))
    nbytes = int(arguments.gb * 1e9) // mmap.PAGESIZE * mmap.PAGESIZE
    took: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for huge, rounds in took.items():
            rounds.append(measure(arguments.threads, nbytes, huge=huge))
    print(table(took, nbytes))
    return 0


def measure(threads: int, nbytes: int, *, huge: bool) -> dict[str, float]:
    """Seconds for each kind of `WORK`, and the share of the memory that came in huge pages."""
    backend, _ = load("native", threads)  # a new one: after a refusal it would not ask for a while
    took: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took[name] = time.perf_counter() - began

    descriptor = os.memfd_create("hytrain-pages")
    os.ftruncate(descriptor, nbytes)
    mapping, address = _map(descriptor, nbytes, huge=huge)
    before = _huge_bytes()
    with timed("touch"):
        for start in range(0, nbytes, PIECE_BYTES):
            backend.touch(address + start, min(PIECE_BYTES, nbytes - start))
    took["huge"] = (_huge_bytes() - before) / nbytes
    if torch.cuda.is_available():
        transfers = CudaTransfers(torch.device("cuda"))
        other, address = _map(descriptor, nbytes, huge=huge)
        with timed("pin"):
            transfers.pin(address, nbytes)
        with timed("unpin"):
            transfers.unpin(address, nbytes)
        del other
    with timed("give back"):
        os.close(descriptor)
        del mapping
    return took


def _map(descriptor: int, nbytes: int, *, huge: bool) -> tuple[object, int]:
    """A mapping, held by what it gives, and its address."""
    if huge:
        mapping = Mapping(descriptor, nbytes)
        return mapping.buffer, mapping.address
    small = mmap.mmap(descriptor, nbytes)
    small.madvise(mmap.MADV_NOHUGEPAGE)
    return small, ctypes.addressof(ctypes.c_char.from_buffer(small))


def _huge_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("ShmemHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def table(took: dict[bool, list[dict[str, float]]], nbytes: int) -> str:
    body = []
    for huge, rounds in took.items():
        times = [[one[name] for one in rounds if name in one] for name in WORK]
        ms_per_gb = [number(statistics.median(each) / nbytes * 1e12 if each else None, 1) for each in times]
        came = statistics.median(one["huge"] for one in rounds)
        body.append(["huge" if huge else "small", f"{came:.0%}", *ms_per_gb])
    return markdown(["ms per GB", "in huge pages", *WORK], body)


if __name__ == "__main__":
    raise SystemExit(main())
