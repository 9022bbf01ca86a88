"""How fast the AdamW update is, beside what the memory gives and beside other kernels.

    python -m benchmarks.kernel --threads 14 --numel 268435456 --json kernel.json

Each system runs in processes of its own (kernel_rows.py), pinned as the optimizer process is, in alternation; medians
are taken over the rounds of all its processes. While DeepSpeed compiles its operator, nothing but the GPU is timed.

    build DeepSpeed's operator ∥ gpu  ─▶  native, deepspeed, torch, native, deepspeed, torch  ─▶  threads  ─▶  table
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.kernel_rows import MI, SYSTEMS, measure
from hytrain.errors import BackendUnavailable
from hytrain.kernels.build import FLAGS, find_compiler
from workers.update_queue import TILE_NUMEL

ROOT: Final = Path(__file__).resolve().parent.parent
KEY: Final = ("system", "dtype", "tile", "threads", "numel", "bytes_each")
COMPARED: Final = ("native", "deepspeed", "torch")
BUILD_TIMEOUT_S: Final = 150.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=SYSTEMS, help="measure this system in this process, print JSON lines")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cores", default="auto", help='as the optimizer process takes them: "auto", "node:0", "2-15"')
    parser.add_argument("--numel", type=int, default=256 * MI)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2, help="processes for each system")
    parser.add_argument("--skip", nargs="*", default=[], choices=SYSTEMS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        options = {name: getattr(arguments, name) for name in ("cores", "threads", "numel", "rounds")}
        measure(arguments.one, **options)
        return 0
    result = {"machine": machine(), "threads": arguments.threads, "rows": medians(run_all(arguments))}
    result["summary"] = summary(result["rows"], arguments.threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all processes, one after the other; a system that fails is a row with its error."""
    began = time.monotonic()

    def run(system: str) -> list[dict[str, Any]]:
        found = [] if system in arguments.skip else _run_one(system, arguments)
        print(f"{time.monotonic() - began:6.1f} s  {system}", file=sys.stderr, flush=True)
        return found

    found = []
    build = _start_build() if "deepspeed" not in arguments.skip else None
    try:
        found += run("gpu")
        if build is not None:
            build.wait(BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print("DeepSpeed's build takes too long", file=sys.stderr)
        arguments.skip.append("deepspeed")
        found.append({"system": "deepspeed", "error": f"its operator was not built within {BUILD_TIMEOUT_S:.0f} s"})
    finally:
        if build is not None and build.poll() is None:
            build.kill()
            build.wait()
    for system in COMPARED * arguments.passes:
        found += run(system)
    found += run("threads")
    return found


def _start_build() -> subprocess.Popen[bytes]:
    program = "from hytrain.kernels.choice import load; load('deepspeed', 1)"
    silent = subprocess.DEVNULL  # the rows' process says it again if it fails
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=silent, stderr=silent)


def _run_one(system: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.kernel", "--one", system]
    for name in ("threads", "cores", "numel", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        found.append({"system": system, "error": done.stderr.strip()[-600:]})
    return found


def medians(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case, over the rounds of all processes; errors at the end, each once."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    errors: dict[str, dict[str, Any]] = {}
    for row in found:
        if "error" in row:
            errors[row["system"]] = row
        else:
            case = cases.setdefault(tuple(row[name] for name in KEY), row | {"seconds": []})
            case["seconds"] += row["seconds"]
    for row in cases.values():
        median_s = statistics.median(row["seconds"])
        row["gparam_s"] = row["numel"] / median_s / 1e9
        row["gb_s"] = row["gparam_s"] * row["bytes_each"]
        row["spread"] = max(row["seconds"]) / min(row["seconds"])
    return [*cases.values(), *errors.values()]


def summary(rows: list[dict[str, Any]], threads: int) -> dict[str, float]:
    """The ratios of rates that matter; what was not measured is not there.

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
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in cpuinfo if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    try:
        compiler = find_compiler(os.environ)
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    except BackendUnavailable as reason:
        version = str(reason)
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "cache": fields.get("cache size"),
        "vectors": sorted(flags & {"avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16"}),
        "kernel": platform.release(),
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge pages in shared memory": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "compiler": version,
        "compiler flags": " ".join(FLAGS),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def table(result: dict[str, Any]) -> str:
    """A Markdown table of the rows, then the summary."""
    facts = result["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['compiler']}",
        "",
        "| system | planes | Mi elements | Mi a call | threads | Gparam/s | GB/s | max/min |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['system']} | failed: {' '.join(row['error'].split())[-200:]} | | | | | | |")
            continue
        lines.append(
            f"| {row['system']} | {row['dtype']} | {row['numel'] / MI:g} | {row['tile'] / MI:g} "
            f"| {row['threads'] or ''} | {row['gparam_s']:.2f} | {row['gb_s']:.1f} | {row['spread']:.2f} |"
        )
    lines += ["", *(f"{name}: {value:.3f}" for name, value in result["summary"].items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
