"""How fast the AdamW update is, compared with what the memory allows and with other kernels.

    python -m benchmarks.kernel --threads 14 --numel 268435456 --json kernel.json

Each system runs in processes of its own, in alternation, pinned as the optimizer process is: torch brings an OpenMP
runtime of its own, and two of them fight over the cores.

    main ─▶ gpu, native, deepspeed, torch, native, deepspeed, torch, threads ─▶ medians ─▶ table
               └─ one process: pin ─▶ load a backend ─▶ arena ─▶ fill ─▶ rounds of every case ─▶ rows, a JSON line each

A case is one pass over all elements of the planes, cut into tiles as the optimizer cuts them.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import host
from benchmarks.columns import markdown, number
from hytrain.kernels.backend import Backend, Into, Operands
from hytrain.kernels.build import build, find_compiler
from hytrain.kernels.choice import load
from hytrain.kernels.scalars import scalars
from hytrain.memory.arena import Arena
from protocol.handles import BANKED_PLANES, DTYPE_BYTES, PLANES, bank_plane, layout
from protocol.messages import Layer, Segment
from protocol.rules import MOMENTS, TILE_NUMEL, AdamWHyper
from workers import affinity

MI: Final = 1 << 20
SWEPT_TILES: Final = (MI, 4 * MI, 16 * MI, 64 * MI)
CAST_TILES: Final = (MI, 4 * MI, 16 * MI)
SWEPT_THREADS: Final = (1, 2, 4, 8)
SCALARS: Final = scalars(AdamWHyper(lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1), step=10)
#: Bytes per element that one update reads and writes.
TRAFFIC: Final = {"bfloat16": 26, "float32": 28}
COMPARED: Final = ("native", "deepspeed", "torch")
#: of `Case`: rows that agree in these are rounds of one case
KEY: Final = ("system", "dtype", "tile", "threads", "numel", "bytes_each")


# ---------------------------------------------------------------- all processes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=SYSTEMS, help="measure this system in this process, print JSON lines")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--numel", type=int, default=256 * MI)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], choices=SYSTEMS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        affinity.pin(affinity.choose("auto", arguments.threads))
        for row in SYSTEMS[arguments.one](arguments.threads, arguments.numel, arguments.rounds):
            print(json.dumps(row), flush=True)
        return 0
    found: list[dict[str, Any]] = []
    for system in ("gpu", *COMPARED, *COMPARED, "threads"):
        if system not in arguments.skip:
            print(f"{system} …", file=sys.stderr, flush=True)
            found += _run_one(system, arguments)
    result = {"machine": machine(), "threads": arguments.threads, "rows": medians(found)}
    result["summary"] = summary(result["rows"], arguments.threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


def _run_one(system: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One process's rows; a system that fails is a row with its error."""
    command = [sys.executable, "-m", "benchmarks.kernel", "--one", system]
    for name in ("threads", "numel", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        found.append({"system": system, "error": done.stderr.strip()[-600:]})
    return found


def medians(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case, over the rounds of all processes; errors at the end, each once."""
    errors = {row["system"]: row for row in found if "error" in row}
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in found:
        if "error" not in row:
            case = cases.setdefault(tuple(row[name] for name in KEY), row | {"seconds": []})
            case["seconds"] += row["seconds"]
    for row in cases.values():
        row["gparam_s"] = row["numel"] / statistics.median(row["seconds"]) / 1e9
        row["gb_s"] = row["gparam_s"] * row["bytes_each"]
        row["spread"] = max(row["seconds"]) / min(row["seconds"])
    return [*cases.values(), *errors.values()]


def summary(rows: list[dict[str, Any]], threads: int) -> dict[str, float]:
    """The ratios of rates that matter; what was not measured is missing.

    The native rate is that of the most elements: of fewer, as in the sweep over threads, a part stays in the cache.
    The better stream is the limit, whether its prefetches help it or not.
    """

    def rate(system: str, **wanted: Any) -> float:
        wanted |= {"system": system, "dtype": "bfloat16"}
        return max((row.get("gparam_s", 0.0) for row in rows if wanted.items() <= row.items()), default=0.0)

    numel = max((row["numel"] for row in rows if row["system"] == "native" and "error" not in row), default=0)
    as_called = {"tile": TILE_NUMEL, "threads": threads, "numel": numel}
    ours = rate("native", **as_called)
    others = {
        "native / stream": max(rate(f"stream{how}", **as_called) for how in ("", " without prefetch")),
        "native / native without prefetch": rate("native without prefetch", **as_called),
        "native / native into a second bank": rate("native into a second bank", **as_called),
        "native / DeepSpeed's operator with casts, at its best tile": rate("deepspeed with casts"),
        "native / torch's fused AdamW with casts, at its best tile": rate("torch with casts"),
        "alpha, the GPU's time / the CPU's": rate("gpu"),
    }
    return {name: ours / other for name, other in others.items() if ours and other}


def machine() -> dict[str, Any]:
    """What the numbers depend on and a reader can compare, without the machine's name."""
    command = [*find_compiler(os.environ), "--version"]
    compiler = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return {**host.hardware(), "compiler": compiler}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of the rows, then the summary."""

    def cells(row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return [row["system"], f"failed: {' '.join(row['error'].split())[-200:]}", *[""] * 6]
        sizes = [f"{row['numel'] / MI:g}", f"{row['tile'] / MI:g}", str(row["threads"] or "")]
        rates = [number(row["gparam_s"], 2), number(row["gb_s"], 1), number(row["spread"], 2)]
        return [row["system"], row["dtype"], *sizes, *rates]

    facts, head = result["machine"], ("system", "planes", "Mi elements", "Mi a call", "threads")
    rows = markdown([*head, "Gparam/s", "GB/s", "max/min"], list(map(cells, result["rows"])))
    ratios = (f"{name}: {value:.3f}" for name, value in result["summary"].items())
    return "\n".join([f"{facts['cpu']}, {facts['cores']} cores, {facts['compiler']}", "", rows, "", *ratios])


# ---------------------------------------------------------------- one process


@dataclass(slots=True, kw_only=True)
class Case:
    """One pass over `numel` elements; `bytes_each` is the traffic of one. `seconds`: of each round."""

    system: str
    dtype: str
    tile: int
    threads: int
    numel: int
    bytes_each: int
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*KEY, "seconds")}


def rows(cases: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Every case once to warm up, then `rounds` times in turn."""
    for round_ in range(rounds + 1):
        for case in cases:
            began = time.perf_counter()
            case.run()
            if round_:
                case.seconds.append(time.perf_counter() - began)
    yield from (case.row() for case in cases)


class Planes:
    """One segment in an arena of its own, touched by as many threads; its first bank is filled as training fills it."""

    def __init__(self, numel: int, dtype: str, backend: Backend, banks: int = 1) -> None:
        segment = Segment(name="all", numel=numel, dtype=dtype, grads_dtype=dtype, group=0)
        self.numel, self.dtype = numel, dtype
        self.arena = Arena(layout(Layer(lid=0, position=0, name="all", segments=(segment,)), banks))
        self.address = self.arena.mapping.address
        self.arena.mapping.populate((0, self.arena.layout.nbytes), threads=backend.threads)
        self.base, self.itemsize = dict[str, int](), dict[str, int]()
        for plane in PLANES:
            if handle := self.arena.layout.handles[plane][0]:
                self.base[plane] = self.address + handle.offset
                self.itemsize[plane] = DTYPE_BYTES[handle.dtype]
                _fill(self.base[plane], handle.nbytes, _pattern(plane, handle.dtype))

    def at(self, start: int) -> dict[str, int]:
        """The planes' addresses at element `start`; 0 for a plane that is not there."""
        return {plane: self.base[plane] + start * self.itemsize[plane] if plane in self.base else 0 for plane in PLANES}

    def arguments(self, start: int) -> dict[str, Any]:
        """The same as an update takes them."""
        at = self.at(start)
        moments = tuple(at[plane] for plane in MOMENTS["adamw"])
        return {"moments": moments, **{name: at[name] for name in ("weights", "grads", "remainder")}}

    def second(self, start: int) -> Into:
        """Those of the second bank."""
        handles = {plane: self.arena.layout.handles[bank_plane(plane, 1)][0] for plane in BANKED_PLANES}
        starts = {plane: start * self.itemsize.get(plane, 0) for plane in handles}
        at = {plane: self.address + each.offset + starts[plane] if each else 0 for plane, each in handles.items()}
        moments = tuple(at[plane] for plane in MOMENTS["adamw"])
        return Into(weights=at["weights"], remainder=at["remainder"], moments=moments)

    def buffer(self, plane: str) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * (self.numel * self.itemsize[plane])).from_address(self.base[plane])

    def case(self, system: str, tile: int, threads: int, run: Callable[[int, int], object], **others: Any) -> Case:
        """A case that calls `run(start, count)` for each tile."""

        def over_tiles() -> None:
            for start in range(0, self.numel, tile):
                run(start, min(tile, self.numel - start))

        usual = {"dtype": self.dtype, "numel": self.numel, "bytes_each": TRAFFIC[self.dtype]}
        return Case(system=system, tile=tile, threads=threads, run=over_tiles, **(usual | others))

    def update(self, backend: Backend, tile: int, threads: int, system: str = "", *, banked: bool = False) -> Case:
        """One AdamW step as the optimizer process makes it; `banked`, as it is made ahead of a verdict."""

        def run(start: int, count: int) -> None:
            into = {"into": self.second(start)} if banked else {}
            dtypes = {"weights_dtype": self.dtype, "grads_dtype": self.dtype}
            backend.update(Operands(**self.arguments(start), **dtypes, **into, numel=count, scalars=SCALARS))

        return self.case(system or backend.name, tile, threads, run)


class Stream:
    """stream.cpp: what the memory allows without arithmetic."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(build(Path(__file__).with_name("stream.cpp"))))
        self._stream, self._copy = library.hytrain_stream, library.hytrain_copy
        self._stream.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int)
        self._copy.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int)
        self._stream.restype = self._copy.restype = None

    def over(self, planes: Planes, tile: int, threads: int, system: str = "stream") -> Case:
        """Read and write back what an update does, tile by tile."""
        order = ("weights", "grads", "remainder", "exp_avg", "exp_avg_sq")

        def run(start: int, count: int) -> None:
            addresses = planes.at(start)
            self._stream(*(addresses[plane] for plane in order), count, threads)

        return planes.case(system, tile, threads, run)

    def copy(self, planes: Planes, threads: int) -> Case:
        """One plane onto another: what is copied is positive and small, and does for both."""

        def run(start: int, count: int) -> None:
            self._copy(planes.base["exp_avg"], planes.base["exp_avg_sq"], 4 * count, threads)

        return planes.case("copy", planes.numel, threads, run, dtype="float32", bytes_each=8)


def native(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The native kernel and streams over the very same pages: for each size of tile, and without prefetches."""
    backend, stream = load("native", threads)[0], Stream()
    planes = Planes(numel, "bfloat16", backend, banks=2)
    second = "native into a second bank"
    cases = [stream.copy(planes, threads), planes.update(backend, TILE_NUMEL, threads, second, banked=True)]
    for tile in (*(tile for tile in SWEPT_TILES if tile < numel), numel):
        cases += [planes.update(backend, tile, threads), stream.over(planes, tile, threads)]
    with compiled_with("-DHYTRAIN_PREFETCH=0"):
        plain, plain_stream = load("native", threads)[0], Stream()
    cases.append(planes.update(plain, TILE_NUMEL, threads, "native without prefetch"))
    cases.append(plain_stream.over(planes, TILE_NUMEL, threads, "stream without prefetch"))
    yield from rows(cases, rounds)
    del cases
    planes.arena.close()
    yield from rows([Planes(numel, "float32", backend).update(backend, TILE_NUMEL, threads)], rounds)


def thread_sweep(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The native kernel and the stream with fewer threads, on a quarter of the elements."""
    backend, stream = load("native", threads)[0], Stream()
    planes = Planes(numel // 4, "bfloat16", backend)
    for count in (*(count for count in SWEPT_THREADS if count < threads), threads):
        backend.threads = count
        cases = [planes.update(backend, TILE_NUMEL, count), stream.over(planes, TILE_NUMEL, count)]
        yield from rows(cases, min(rounds, 3))


def other(threads: int, numel: int, rounds: int, *, name: str) -> Iterator[dict[str, Any]]:
    """Another kernel: on an fp32 master with the casts that a bf16 trainer needs, without them, and as a backend."""
    backend, _ = load(name, threads)
    master = Planes(numel, "float32", backend)
    cases = [with_casts(backend, master, tile, threads) for tile in CAST_TILES]
    yield from rows([*cases, master.update(backend, TILE_NUMEL, threads)], rounds)
    del cases
    master.arena.close()
    yield from rows([Planes(numel // 4, "bfloat16", backend).update(backend, TILE_NUMEL, threads)], rounds)


def with_casts(backend: Backend, planes: Planes, tile: int, threads: int) -> Case:
    """bf16 gradients to fp32, the update, fp32 weights to bf16: a tile at a time, through a scratch that is reused."""
    import torch

    grads = torch.full((planes.numel,), 1e-3, dtype=torch.bfloat16)
    weights = torch.zeros_like(grads)
    scratch = torch.empty(tile)
    master = torch.frombuffer(planes.buffer("weights"), dtype=torch.float32)
    dtypes = {"weights_dtype": "float32", "grads_dtype": "float32"}

    def run(start: int, count: int) -> None:
        scratch[:count].copy_(grads[start : start + count])
        addresses = planes.arguments(start) | {"grads": scratch.data_ptr()}
        backend.update(Operands(**addresses, **dtypes, numel=count, scalars=SCALARS))
        weights[start : start + count].copy_(master[start : start + count])

    return planes.case(f"{backend.name} with casts", tile, threads, run, dtype="bfloat16", bytes_each=28)


def gpu(threads: int, numel: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The device's kernel, over sets of planes that together exceed its cache many times."""
    import torch

    from hytrain.kernels import gpu as kernel

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    numel, sets, repeats = min(numel // 4, 64 * MI), 4, 5

    def planes() -> dict[str, Any]:
        weights, grads = (torch.randn(numel, device="cuda").mul_(sigma).bfloat16() for sigma in (0.02, 1e-3))
        moments = tuple(torch.zeros(numel, device="cuda") for _ in range(2))
        remainder = torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, device="cuda")
        return dict(weights=weights, grads=grads, remainder=remainder, moments=moments)

    total = repeats * sets * numel
    case = Case(system="gpu", dtype="bfloat16", tile=numel, threads=0, numel=total, bytes_each=26, run=lambda: None)
    every = [planes() for _ in range(sets)] * repeats
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for tensors in every:
            kernel.update(**tensors, scalars=SCALARS)
        end.record()
        end.synchronize()
        case.seconds.append(begin.elapsed_time(end) / 1e3)
    del case.seconds[:2]
    yield case.row()


SYSTEMS: Final[dict[str, Callable[[int, int, int], Iterator[dict[str, Any]]]]] = {
    "native": native,
    "deepspeed": partial(other, name="deepspeed"),
    "torch": partial(other, name="torch"),
    "threads": thread_sweep,
    "gpu": gpu,
}


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


if __name__ == "__main__":
    sys.exit(main())
