"""`hytrain-cluster doctor`: what this machine can train, how fast, and what to change first. It trains nothing.

in a process of its own, pinned as the optimizer would be ─▶ the CPU's updates ┐
here ─▶ copies, updates and a matrix product on the GPU ───────────────────────┼─▶ forecast ─▶ tables, advice
memory, control groups, limits, PCIe ──────────────────────────────────────────┘

With `--model`, `fits` answers first: whether it fits, how fast it would be, whether exactly. With `--gpu`, the machine
is one that is described, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from hytrain.errors import ClusterError, ConfigError
from hytrain.gpus import CONTEXT_BYTES
from hytrain.memory import host
from hytrain.readable import gib, size, table
from protocol.handles import EXACT, Precision
from workers import affinity
from workers.exits import EXIT_USAGE, printing

if TYPE_CHECKING:
    from workers.watch.fits import Host

#: What is forecast, by the name that a page has for it.
PRECISIONS: Final = {
    "exact": EXACT,
    "bf16 moments": Precision("bfloat16"),
    "float8 moments": Precision("float8"),
    "float8, no masters": Precision("float8", "bfloat16"),
}
NUMEL: Final = 1 << 26
PRODUCT: Final = 8192
#: So long until the GPU has its clocks of hours of work, not those of a cold start, and is measured; so many at a time.
WARM_S: Final = 1.5
PRODUCTS: Final = 10
SHMEM_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
#: From this Linux on, memory is made of huge pages whatever that setting says.
COLLAPSES: Final = (6, 1)
#: Two for each layer and some more; no model has needed half of it.
DESCRIPTORS: Final = 4096
ASK_S: Final = 5.0
_LINK: Final = ("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")

#: Of each parameter that is trained on a CPU: weights of the trainer, and the optimizer's copy, gradients and moments.
CPU_BYTES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Bytes, bytes/s, FLOP/s, parameters/s. `link`: PCIe generation now and at most, lanes now and at most.

    `bound_bytes` is what may be planned with: what is free, or the limit that was given. `is_integrated`: its memory
    is the host's.
    """

    name: str
    total_bytes: int
    free_bytes: int
    bound_bytes: int
    to_host: float
    from_host: float
    update: float
    product: float
    link: tuple[int, ...] | None = None
    is_integrated: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found. `cpu_update`: parameters/s by the name of `PRECISIONS`, on `cores`, as `backend` says."""

    gpu: Gpu | None
    no_gpu: str = ""  # why there is none
    cpu: str
    cores: int
    pinning: str
    is_shared: bool
    backend: str
    cpu_update: dict[str, float]
    memory_bytes: int
    available_bytes: int
    bound_bytes: int
    group_bytes: int | None
    locked_bytes: int | None
    descriptors: int | None
    kernel: tuple[int, int]
    huge_pages: str
    is_wsl: bool


def main(argv: Sequence[str]) -> int:
    """The command line. Returns 2 for cores that this process may not use, and 1 if the CPU cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="hytrain-cluster doctor", description="What this machine can train, and what to change first."
    )
    parser.add_argument(
        "--model",
        help="answer for this model: a size such as 7B, or a folder or name of the Hub with a config.json",
    )
    parser.add_argument("--gpu", metavar="NAME", help='answer for a machine with this GPU, such as "RTX 4090"')
    parser.add_argument("--ram", type=size, metavar="SIZE", help="with --gpu: its host memory, such as 64GiB")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (4)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of each (1024)")
    parser.add_argument(
        "--cores", default="auto", help="cores of the optimizer, as for a run; with --gpu, how many cores"
    )
    parser.add_argument("--threads", type=int, help="its threads, as for a run")
    parser.add_argument(
        "--host-memory-limit", type=size, metavar="SIZE", help="maximum host memory for planes, such as 58GiB"
    )
    parser.add_argument(
        "--gpu-memory-limit", type=size, metavar="SIZE", help="memory to plan with on the GPU, such as 24GiB"
    )
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)  # only measure the CPU, print JSON
    asked = parser.parse_args(argv)
    try:
        if asked.batch < 1 or asked.sequence < 1:
            raise ConfigError("--batch and --sequence must be at least 1")
        with printing():
            print(json.dumps(_measure_cpu(asked.cores, asked.threads)) if asked.cpu else _told(asked))
    except (ClusterError, ConfigError) as error:
        print(f"hytrain-cluster: {error}", file=sys.stderr)
        return 1 if isinstance(error, ClusterError) else EXIT_USAGE
    return 0


def _told(asked: argparse.Namespace) -> str:
    """What is printed: the answer for a model, and the machine that was measured, or models on a described one."""
    if asked.gpu is None and asked.ram is not None:
        raise ConfigError('--ram describes another machine: name its GPU, too, as in --gpu "RTX 4090"')
    machine = None if asked.gpu is not None else examine(asked)
    from workers.watch import fits

    shape = None if asked.model is None else fits.model_named(asked.model)
    host = _described(asked) if machine is None else _measured(machine)
    parts = []
    if shape is not None and host is None:
        parts.append("No: torch sees no GPU here. --gpu and --ram answer for a machine that has one.")
    elif shape is not None and host is not None:
        parts.append(fits.answer(shape, host, asked.batch, asked.sequence).render())
    if machine is not None:
        parts.append(render(machine, asked.batch, asked.sequence))
    elif host is not None and shape is None:
        parts.append(_forecasts(host, asked.batch, asked.sequence))
    return "\n\n".join(parts)


def _described(asked: argparse.Namespace) -> Host:
    """The machine that is described. What is not said of it is as here."""
    from workers.watch import fits

    if asked.cores != "auto" and not asked.cores.isdecimal():
        raise ConfigError(f"--cores {asked.cores}: with --gpu, give the number of cores, such as 8")
    cores = len(os.sched_getaffinity(0)) if asked.cores == "auto" else int(asked.cores)
    ram = int(psutil.virtual_memory().total) if asked.ram is None else asked.ram
    host = fits.described(asked.gpu, ram, cores, PRECISIONS.values())
    bounds = {"gpu_bytes": asked.gpu_memory_limit, "host_bytes": asked.host_memory_limit}
    return replace(host, **{name: min(most, getattr(host, name)) for name, most in bounds.items() if most is not None})


def _measured(machine: Machine) -> Host | None:
    """The rates and the memory of a machine; None without a GPU."""
    from workers.watch.fits import Host
    from workers.watch.forecast import Rates

    if (gpu := machine.gpu) is None:
        return None
    cpu_update = {PRECISIONS[name]: rate for name, rate in machine.cpu_update.items()}
    rates = Rates(gpu.product, gpu.to_host, gpu.from_host, gpu.update, cpu_update)
    return Host("this machine", rates, gpu.bound_bytes, machine.bound_bytes)


def examine(asked: argparse.Namespace) -> Machine:
    """Measure this machine. Raises `ConfigError` for impossible cores, `ClusterError` if the CPU cannot be measured."""
    affinity.choose(asked.cores, asked.threads)  # raises before anything is measured
    command = [sys.executable, "-P", "-m", "workers.watch.doctor", "--cpu", "--cores", asked.cores]
    command += [] if asked.threads is None else ["--threads", str(asked.threads)]
    ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise ClusterError(
            f"the CPU's updates could not be measured: exit status {ran.returncode}; the output above says why"
        )
    measured = json.loads(ran.stdout)
    from hytrain.memory.capacity import host_bound
    from hytrain.run.environment import cpu_name

    gpu = _measure_gpu(asked.gpu_memory_limit)
    in_use = psutil.virtual_memory()
    left = host.left_in_groups()
    release = platform.release()
    version = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    return Machine(
        gpu=gpu,
        no_gpu="" if gpu is not None else _why_no_gpu(),
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(in_use.total),
        available_bytes=host.available_bytes(),
        bound_bytes=host_bound(asked.host_memory_limit, shared=gpu.bound_bytes if gpu and gpu.is_integrated else 0),
        group_bytes=left if left is not None and left < in_use.available else None,
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK, soft=True),
        descriptors=_limit(resource.RLIMIT_NOFILE, soft=False),
        kernel=(version[0], version[1]) if len(version) == 2 else COLLAPSES,
        huge_pages=_chosen(SHMEM_HUGE_PAGES),
        is_wsl="microsoft" in release.lower(),
        **measured,
    )


def _limit(kind: int, *, soft: bool) -> int | None:
    limit = resource.getrlimit(kind)[0 if soft else 1]
    return None if limit == resource.RLIM_INFINITY else limit


def _chosen(path: Path) -> str:
    """The word in brackets; empty without one."""
    words = affinity.read_text(path).split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _measure_cpu(cores: str, threads: int | None) -> dict[str, Any]:
    """In a process that has not loaded OpenMP: how fast the CPU updates, with the pinning of an optimizer process."""
    pinning = affinity.choose(cores, threads)
    affinity.pin(pinning)
    from hytrain.kernels.choice import load
    from workers.optimize.update_rate import seconds_per_parameter

    backend, reason = load("auto", pinning.threads)
    rates = {name: 1 / seconds_per_parameter(backend, [_layer(one)]) for name, one in PRECISIONS.items()}
    return {
        "pinning": pinning.describe(),
        "is_shared": not pinning.exclusive,
        "backend": reason,
        "cpu_update": rates,
    }


def _layer(precision: Precision) -> Any:
    from protocol.messages import Layer, Segment

    dtypes = {"dtype": "bfloat16", "grads_dtype": "bfloat16", **precision._asdict()}
    segment = Segment(name="scratch", numel=NUMEL, group=0, **dtypes)
    return Layer(lid=0, position=0, name="scratch", segments=(segment,))


def _measure_gpu(limit: int | None) -> Gpu | None:
    """The GPU that a trainer would use; None without one."""
    import torch

    from hytrain.memory.capacity import is_integrated
    from hytrain.memory.transfer import transfers_for
    from hytrain.run.calibration import calibrate
    from hytrain.run.environment import gpu_uuid

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    rates = calibrate([_layer(EXACT)], device, transfers_for(device), None)
    assert rates.d2h_s and rates.h2d_s and rates.gpu_update_s, "measured on a GPU"
    left, right = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device) for _ in range(2))
    warm_s = time.perf_counter() + WARM_S
    while (began_s := time.perf_counter()) < warm_s:
        for _ in range(PRODUCTS):
            torch.mm(left, right)
        torch.cuda.synchronize(device)
        product_s = (time.perf_counter() - began_s) / PRODUCTS
    return Gpu(
        name=torch.cuda.get_device_name(device),
        total_bytes=total,
        free_bytes=free,
        bound_bytes=free if limit is None else min(free, limit),
        to_host=2 / rates.d2h_s,
        from_host=2 / rates.h2d_s,
        update=1 / rates.gpu_update_s,
        product=2 * PRODUCT**3 / product_s,
        link=_link(gpu_uuid(device)),
        is_integrated=is_integrated(device),
    )


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "CUDA finds no device; nvidia-smi says whether the driver does"


def _link(uuid: str) -> tuple[int, ...] | None:
    """PCIe generation now and at most, lanes now and at most, as the driver tells; None if it does not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_LINK)}", "--format=csv,noheader", f"--id={uuid}"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=ASK_S).stdout
        numbers = tuple(int(number) for number in told.split(","))
        return numbers if len(numbers) == len(_LINK) else None
    return None


# ---------------------------------------------------------------- what is printed


def render(machine: Machine, batch: int, sequence: int) -> str:
    """What the machine trains, the machine, forecasts and advice."""
    host = _measured(machine)
    parts = [_largest(machine, host), "\n".join(f"{name:15} {text}" for name, text in _facts(machine))]
    if host is not None:
        parts.append(_forecasts(host, batch, sequence))
    if advice := list(advise(machine)):
        parts.append("What to change first:\n" + "\n".join(f"- {sentence}" for sentence in advice))
    return "\n\n".join(parts)


def _largest(machine: Machine, host: Host | None) -> str:
    """The largest models, in a sentence."""
    from workers.watch import forecast

    if host is None:
        alone = machine.bound_bytes / CPU_BYTES / 1e9
        return (
            f"This machine trains on its CPU alone: up to {alone:.1f} B parameters in float32 fit ({CPU_BYTES} bytes "
            "each, and activations).\nHyTrain makes nothing faster there. Run doctor where the GPU is, or name one: "
            'doctor --gpu "RTX 4090" --ram 64GiB\n--cores 8 --model 7B. --dry-run says here how much memory a recipe '
            "needs."
        )
    bounds = {"gpu_bytes": host.gpu_bytes, "host_bytes": host.host_bytes}
    most = ", ".join(
        f"{forecast.most_parameters(**bounds, precision=one) / 1e9:.1f} B ({name})" for name, one in PRECISIONS.items()
    )
    return f"This machine trains models in bf16 of up to {most} parameters, activations not counted."


def _facts(machine: Machine) -> list[tuple[str, str]]:
    updates = ", ".join(f"{rate / 1e9:.2f} {name}" for name, rate in machine.cpu_update.items())
    beside = " beside the GPU, whose memory it is" if machine.gpu is not None and machine.gpu.is_integrated else ""
    memory = f"{gib(machine.available_bytes)} of {gib(machine.memory_bytes)} free, planes may take "
    found = [
        ("CPU", f"{machine.cpu}, {machine.cores} cores"),
        ("optimizer", machine.pinning),
        ("CPU's updates", f"{updates}, in billions of parameters per second ({machine.backend})"),
        ("host memory", memory + gib(machine.bound_bytes) + beside),
    ]
    if (gpu := machine.gpu) is None:
        return [("GPU", f"none that torch can use: {machine.no_gpu}"), *found]
    link = f"{gpu.to_host / 1e9:.1f} GB/s to the host, {gpu.from_host / 1e9:.1f} from it"
    if gpu.link is not None:
        link += f" (PCIe {gpu.link[0]} x {gpu.link[2]})"
    return [
        ("GPU", f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"),
        ("GPU's products", f"{gpu.product / 1e12:.0f} TFLOP/s in bf16"),
        ("GPU's updates", f"{gpu.update / 1e9:.0f} billion parameters per second"),
        ("link", link),
        *found,
    ]


def _forecasts(host: Host, batch: int, sequence: int) -> str:
    """A table of models and how fast each would train."""
    from workers.watch import fits, forecast

    rows = []
    for shape in forecast.SHAPES:
        found = [host.forecast(shape, batch * sequence, one) for one in PRECISIONS.values()]
        largest = shape.most_tokens(host.gpu_bytes, next(iter(PRECISIONS.values())))
        rows.append(
            [shape.name, *(cell for one in found for cell in fits.cells(one, batch * sequence)), f"{largest:,}"]
        )
        if all(one.step_s is None for one in found):
            break
    heads = ["model"] + [head for name in PRECISIONS for head in (f"{name}: s/step", "tokens/s", "of full speed")]
    heads.append("most tokens")
    return "\n\n".join(
        (
            f"LLaMA models in bf16, {batch} x {sequence} tokens per step, with checkpointing and the loss in parts, on "
            f"{host.name}:",
            table(heads, rows),
            "Where steps were measured, forecasts were 0.82 to 1.18 times as long as the steps. Full speed is that of "
            "forward\nand backward alone, on a GPU that could hold everything.",
            "Most tokens: the largest batch, with visits and offloaded weights.",
        )
    )


def advise(machine: Machine) -> list[str]:
    """What would help, in the order of what it is likely to bring."""
    gpu, found = machine.gpu, list[str]()
    if machine.backend.startswith("torch"):
        found.append(
            "Install a C++ compiler (g++): updates on the CPU are several times as fast, with the same bits everywhere."
        )
    if machine.is_shared:
        found.append("With fewer than four cores, trainer and optimizer share them: give the process more cores.")
    if machine.group_bytes is not None:
        found.append(
            f"A control group leaves {gib(machine.group_bytes)} of host memory, less than the machine has: raise its "
            "limit (a container's --memory, Slurm's --mem)."
        )
    if gpu is not None and machine.locked_bytes is not None and machine.locked_bytes < machine.bound_bytes:
        found.append(
            f"`ulimit -l` is {gib(machine.locked_bytes)}. If CUDA may pin no more than that, copies take longer: raise "
            "it, by memlock in /etc/security/limits.conf, or --ulimit memlock=-1 for a container."
        )
    if machine.is_wsl:
        found.append(
            "Under WSL2, Windows gives Linux half of the memory, and CUDA may pin only a part of that: raise `memory` "
            "in .wslconfig. Linux itself has no such bound."
        )
    if gpu is not None and gpu.is_integrated:
        found.append(
            "GPU and host share one memory: state that leaves the GPU frees none of it. So a model trains here if it "
            'fits the GPU. state_dtype="bfloat16" or "float8" takes less of it.'
        )
    if gpu is not None and gpu.link is not None and gpu.link[2] < gpu.link[3]:
        found.append(f"The GPU uses {gpu.link[2]} of {gpu.link[3]} PCIe lanes: another slot makes copies faster.")
    taken = 0 if gpu is None or gpu.is_integrated else gpu.total_bytes - gpu.free_bytes
    if gpu is not None and taken > CONTEXT_BYTES + gpu.total_bytes // 20:
        found.append(f"{gib(taken)} of the GPU's memory are in use: by a desktop, or another program?")
    if machine.descriptors is not None and machine.descriptors < DESCRIPTORS:
        found.append(
            f"`ulimit -Hn` is {machine.descriptors}: a model of many layers needs up to {DESCRIPTORS} open files."
        )
    if machine.huge_pages in ("never", "deny") and machine.kernel < COLLAPSES:
        found.append(
            "Shared memory has no huge pages, so that it is slow to allocate, pin and move: use Linux 6.1 or later, or "
            f"write `advise` to {SHMEM_HUGE_PAGES}."
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
