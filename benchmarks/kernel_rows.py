"""What one process of `benchmarks.kernel` measures: pins itself as the optimizer process does, then times.

    pin ─▶ load the backend ─▶ arena ─▶ touch ─▶ fill ─▶ rounds of every case ─▶ rows, a JSON line each

A case is one pass over all elements of the planes, cut into tiles as the optimizer cuts them. A system runs alone
in its process: torch brings an OpenMP runtime of its own, and two of them fight over the cores.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hytrain.kernels.backend import Backend, Into
from hytrain.kernels.choice import load
from hytrain.kernels.build import build, find_compiler
from hytrain.kernels.scalars import Hyper, scalars
from hytrain.memory.arena import HostArena
from protocol.handles import BANKED_PLANES, DTYPE_BYTES, PLANES, bank_plane, layout
from protocol.messages import Layer, Segment
from workers import affinity
from workers.update_queue import TILE_NUMEL

MI: Final = 1 << 20
SWEPT_TILES: Final = (MI, 4 * MI, 16 * MI, 64 * MI)
CAST_TILES: Final = (MI, 4 * MI, 16 * MI)
SWEPT_THREADS: Final = (1, 2, 4, 8)
SCALARS: Final = scalars(Hyper(lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1), step=10)

# Bytes an element that one update reads and writes.
TRAFFIC: Final = {"bfloat16": 26, "float32": 28}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pass over `numel` elements; `bytes_each` is the traffic of one."""

    system: str
    dtype: str
    tile: int
    threads: int
    numel: int
    bytes_each: int
    run: Callable[[], None]


class Planes:
    """One segment in an arena of its own, touched by `backend`; its first bank is filled as training fills it."""

    def __init__(self, numel: int, dtype: str, backend: Backend, banks: int = 1) -> None:
        segment = Segment(name="all", numel=numel, dtype=dtype, grads_dtype=dtype, group=0)
        self.numel, self.dtype = numel, dtype
        self.arena = HostArena(layout(Layer(lid=0, rank=0, name="all", segments=(segment,)), banks))
        backend.touch(self.arena.address, self.arena.layout.nbytes)
        self.base: dict[str, int] = {}
        self.itemsize: dict[str, int] = {}
        for plane in PLANES:
            if handle := self.arena.layout.handles[plane][0]:
                self.base[plane] = self.arena.address_of(handle)
                self.itemsize[plane] = DTYPE_BYTES[handle.dtype]
                _fill(self.base[plane], handle.nbytes, _pattern(plane, handle.dtype))

    def at(self, start: int) -> dict[str, int]:
        """The planes' addresses at element `start`; 0 for a plane that is not there."""
        return {plane: self.base[plane] + start * self.itemsize[plane] if plane in self.base else 0 for plane in PLANES}

    def second(self, start: int) -> Into:
        """Those of the second bank."""
        handles = {plane: self.arena.layout.handles[bank_plane(plane, 1)][0] for plane in BANKED_PLANES}
        return Into(
            **{
                plane: self.arena.address_of(handle) + start * self.itemsize[plane] if handle else 0
                for plane, handle in handles.items()
            }
        )

    def buffer(self, plane: str) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * (self.numel * self.itemsize[plane])).from_address(self.base[plane])

    def tiles(self, tile: int) -> Iterator[tuple[dict[str, int], int]]:
        for start in range(0, self.numel, tile):
            yield self.at(start), min(tile, self.numel - start)


def measure(system: str, *, cores: str, threads: int, numel: int, rounds: int) -> None:
    """Measure one system of `SYSTEMS` in this process and print its rows as JSON lines."""
    pinning = affinity.choose(cores, threads)
    affinity.pin(pinning)
    for row in SYSTEMS[system](threads, numel, rounds):
        print(json.dumps(row), flush=True)


def native(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The native kernel beside streams over the very same pages: for each size of tile, and without prefetches."""
    backend, stream = load("native", threads)[0], Stream()
    planes = Planes(numel, "bfloat16", backend, banks=2)
    cases = [stream.copy(planes, threads), into_second_bank(backend, planes, TILE_NUMEL, threads)]
    for tile in (*(tile for tile in SWEPT_TILES if tile < numel), numel):
        cases += [update(backend, planes, tile, threads), stream.over(planes, tile, threads)]
    with compiled_with("-DHYTRAIN_PREFETCH=0"):
        plain, plain_stream = load("native", threads)[0], Stream()
    cases.append(update(plain, planes, TILE_NUMEL, threads, "native without prefetch"))
    cases.append(plain_stream.over(planes, TILE_NUMEL, threads, "stream without prefetch"))
    yield from rows(cases, rounds)
    del cases
    planes.arena.close()
    yield from rows([update(backend, Planes(numel, "float32", backend), TILE_NUMEL, threads)], rounds)


def thread_sweep(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The native kernel and the stream with fewer threads, on a quarter of the elements."""
    backend, stream = load("native", threads)[0], Stream()
    planes = Planes(numel // 4, "bfloat16", backend)
    for count in (*(count for count in SWEPT_THREADS if count < threads), threads):
        backend.threads = count
        yield from rows(
            [update(backend, planes, TILE_NUMEL, count), stream.over(planes, TILE_NUMEL, count)], min(rounds, 3)
        )


def other(name: str) -> Callable[[int, int, int], Iterator[dict[str, Any]]]:
    """Another kernel: on an fp32 master with the casts that a bf16 trainer needs, without them, and as a backend."""

    def measured(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
        backend, _ = load(name, threads)
        master = Planes(numel, "float32", backend)
        cases = [with_casts(backend, master, tile, threads) for tile in CAST_TILES]
        yield from rows([*cases, update(backend, master, TILE_NUMEL, threads)], rounds)
        del cases
        master.arena.close()
        yield from rows([update(backend, Planes(numel // 4, "bfloat16", backend), TILE_NUMEL, threads)], rounds)

    return measured


def with_casts(backend: Backend, planes: Planes, tile: int, threads: int) -> Case:
    """bf16 gradients to fp32, the update, fp32 weights to bf16: a tile at a time, through a scratch that is reused."""
    import torch

    grads = torch.full((planes.numel,), 1e-3, dtype=torch.bfloat16)
    weights = torch.zeros_like(grads)
    scratch = torch.empty(tile)
    master = torch.frombuffer(planes.buffer("weights"), dtype=torch.float32)

    def run() -> None:
        for start in range(0, planes.numel, tile):
            stop = min(start + tile, planes.numel)
            scratch[: stop - start].copy_(grads[start:stop])
            addresses = planes.at(start) | {"grads": scratch.data_ptr()}
            backend.update(
                **addresses, numel=stop - start, weights_dtype="float32", grads_dtype="float32", scalars=SCALARS
            )
            weights[start:stop].copy_(master[start:stop])

    return Case(
        system=f"{backend.name} with casts", dtype="bfloat16", tile=tile, threads=threads,
        numel=planes.numel, bytes_each=28, run=run,
    )  # fmt: skip


def gpu(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The device's kernel, over sets of planes that together exceed its cache many times."""
    import torch

    from hytrain.kernels import gpu as kernel

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    numel, sets, repeats = min(numel // 4, 64 * MI), 4, 5
    planes = [
        {
            "weights": torch.randn(numel, device="cuda").mul_(0.02).bfloat16(),
            "grads": torch.randn(numel, device="cuda").mul_(1e-3).bfloat16(),
            "remainder": torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, device="cuda"),
            "exp_avg": torch.zeros(numel, device="cuda"),
            "exp_avg_sq": torch.zeros(numel, device="cuda"),
        }
        for _ in range(sets)
    ]
    seconds = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for tensors in planes * repeats:
            kernel.update(**tensors, scalars=SCALARS)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    case = Case(
        system="gpu", dtype="bfloat16", tile=numel, threads=0, numel=repeats * sets * numel,
        bytes_each=TRAFFIC["bfloat16"], run=lambda: None,
    )  # fmt: skip
    yield _row(case, seconds[2:]) | {"device": torch.cuda.get_device_name()}


SYSTEMS: Final[dict[str, Callable[[int, int, int], Iterator[dict[str, Any]]]]] = {
    "native": native,
    "deepspeed": other("deepspeed"),
    "torch": other("torch"),
    "threads": thread_sweep,
    "gpu": gpu,
}


def update(backend: Backend, planes: Planes, tile: int, threads: int, system: str = "") -> Case:
    """One AdamW step over all planes, as the optimizer process makes it: a call for each tile."""

    def run() -> None:
        for addresses, numel in planes.tiles(tile):
            backend.update(
                **addresses, numel=numel, weights_dtype=planes.dtype, grads_dtype=planes.dtype, scalars=SCALARS
            )

    return Case(
        system=system or backend.name, dtype=planes.dtype, tile=tile, threads=threads,
        numel=planes.numel, bytes_each=TRAFFIC[planes.dtype], run=run,
    )  # fmt: skip


def into_second_bank(backend: Backend, planes: Planes, tile: int, threads: int) -> Case:
    """The same step, as it is made ahead of a verdict."""

    def run() -> None:
        for start in range(0, planes.numel, tile):
            backend.update(
                **planes.at(start),
                numel=min(tile, planes.numel - start),
                weights_dtype=planes.dtype,
                grads_dtype=planes.dtype,
                scalars=SCALARS,
                into=planes.second(start),
            )

    return Case(
        system=f"{backend.name} into a second bank", dtype=planes.dtype, tile=tile, threads=threads,
        numel=planes.numel, bytes_each=TRAFFIC[planes.dtype], run=run,
    )  # fmt: skip


class Stream:
    """stream.cpp: what the memory gives without arithmetic."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(build(Path(__file__).with_name("stream.cpp"))))
        self._stream, self._copy = library.hytrain_stream, library.hytrain_copy
        self._stream.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int)
        self._copy.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int)
        self._stream.restype = self._copy.restype = None

    def over(self, planes: Planes, tile: int, threads: int, system: str = "stream") -> Case:
        """Read and write back what an update does, tile by tile."""
        order = ("weights", "grads", "remainder", "exp_avg", "exp_avg_sq")

        def run() -> None:
            for addresses, numel in planes.tiles(tile):
                self._stream(*(addresses[plane] for plane in order), numel, threads)

        return Case(
            system=system, dtype=planes.dtype, tile=tile, threads=threads,
            numel=planes.numel, bytes_each=TRAFFIC[planes.dtype], run=run,
        )  # fmt: skip

    def copy(self, planes: Planes, threads: int) -> Case:
        """One plane onto another: what is copied is positive and small, and does for both."""
        source, target = planes.base["exp_avg_sq"], planes.base["exp_avg"]
        return Case(
            system="copy", dtype="float32", tile=planes.numel, threads=threads, numel=planes.numel, bytes_each=8,
            run=lambda: self._copy(target, source, 4 * planes.numel, threads),
        )  # fmt: skip


def rows(cases: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Every case once to warm up, then `rounds` times in turn."""
    seconds: list[list[float]] = [[] for _ in cases]
    for round_ in range(rounds + 1):
        for case, taken in zip(cases, seconds, strict=True):
            began = time.perf_counter()
            case.run()
            if round_:
                taken.append(time.perf_counter() - began)
    for case, taken in zip(cases, seconds, strict=True):
        yield _row(case, taken)


def _row(case: Case, seconds: list[float]) -> dict[str, Any]:
    names = ("system", "dtype", "tile", "threads", "numel", "bytes_each")
    return {name: getattr(case, name) for name in names} | {"seconds": seconds}


def _pattern(plane: str, dtype: str) -> bytes:
    """64 Ki values of the plane: of a size that training has, and none subnormal."""
    sigma = {"grads": 1e-3, "weights": 0.02, "remainder": 1.0, "exp_avg": 1e-4, "exp_avg_sq": 1e-3}[plane]
    values = array.array("f", (random.gauss(0, sigma) for _ in range(1 << 16)))
    if plane == "exp_avg_sq":
        values = array.array("f", (value * value for value in values))
    halves = memoryview(values).cast("B").cast("H")
    return {"float32": halves, "bfloat16": halves[1::2], "int16": halves[0::2]}[dtype].tobytes()


def _fill(address: int, nbytes: int, pattern: bytes) -> None:
    for offset in range(0, nbytes, len(pattern)):
        ctypes.memmove(address + offset, pattern, min(len(pattern), nbytes - offset))


@contextmanager
def compiled_with(flag: str) -> Iterator[None]:
    """Libraries loaded meanwhile are built with `flag`, too: CXX may name a compiler with arguments."""
    before = dict(os.environ)
    os.environ["CXX"] = " ".join((*find_compiler(os.environ), flag))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
