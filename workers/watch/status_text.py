"""A status and its processes' usage as words: a line, JSON, and the sentences that `status_table` and pages show.

    record of metrics.jsonl ─┬─▶ line, record_json  --follow
    ranks, the slowest one ──┤
    layers, places, reason ──┼─▶ as_json            --once --json
    processes, their use ────┘

It reads no clock, file or socket.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Final

from hytrain.readable import GIB, age, format_cores, gib, seconds
from protocol import messages as m
from protocol.handles import Precision
from workers.watch.troubles import Snapshot, Usage

BARS: Final = "▁▂▃▄▅▆▇█"
#: When the CPU updates in a step that may be clipped.
MODES: Final = {"speculate": "updates ahead of the norm", "defer": "updates after the norm"}
#: A rank is called the slowest if the others wait for it at least this share of a step.
MIN_WAIT: Final = 0.01
#: The first machine hears of the others' ranks some seconds later. A rank that is behind by so many steps, which take
#: so long, is not heard of any more.
SILENT_STEPS: Final = 16
SILENT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of one owner: the processes that are pinned to them, or "others". `loads` are theirs."""

    owner: str
    cores: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The owner, the cores, their mean load, and a bar for each core that is as high as its load."""
        bars = "".join(BARS[min(int(load * len(BARS)), len(BARS) - 1)] for load in self.loads)
        return self.owner, format_cores(self.cores), f"{sum(self.loads) / len(self.loads):.0%}", bars


# ---------------------------------------------------------------- the ranks of a job


def waits_s(status: m.Status) -> tuple[float | None, ...]:
    """For each rank, how long it waits for others in all-gathers of a step; None unless all are known.

    All ranks leave an all-gather at the same time. Who joins last spends only the time of the transfer in it.
    """
    gathers_s = [rank.gather_s for rank in status.ranks]
    known_s = [gather_s for gather_s in gathers_s if gather_s is not None]
    if not status.ranks or len(known_s) < status.ranks[0].world:
        return (None,) * len(gathers_s)
    return tuple(gather_s - min(known_s) for gather_s in known_s)


def slowest(status: m.Status) -> tuple[int, float] | None:
    """The rank that the others wait for in all-gathers, and for how long at least, in each step.

    None if the ranks wait for each other in turn, or hardly at all.
    """
    ranked = sorted((wait_s, rank.rank) for wait_s, rank in zip(waits_s(status), status.ranks) if wait_s is not None)
    step_s = json.loads(status.record).get("step_s", 0.0)
    if len(ranked) < 2 or ranked[1][0] < MIN_WAIT * step_s:
        return None
    return ranked[0][1], ranked[1][0]


def _ranks_json(status: m.Status) -> dict[str, Any]:
    """The ranks of a job with several, as further keys of a record; nothing for a single one."""
    if not status.ranks:
        return {}
    ranks = [
        {**json.loads(rank.record), "rank": rank.rank, "host": rank.host, "cores": rank.cores, "waits_s": wait_s}
        for rank, wait_s in zip(status.ranks, waits_s(status), strict=True)
    ]
    found = slowest(status)
    return {"ranks": ranks, "slowest": found and dict(zip(("rank", "wait_s"), found))}


def record_json(status: m.Status) -> str:
    """The newest record of metrics.jsonl. If the job has several ranks, also their newest ones."""
    ranks = _ranks_json(status)
    return json.dumps({**json.loads(status.record), **ranks}) if ranks else status.record


def silent(rank: m.RankStatus, record: dict[str, Any]) -> bool:
    behind = record.get("step", 0) - json.loads(rank.record).get("step", 0)
    return bool(behind > SILENT_STEPS and behind * record["step_s"] > SILENT_S)


def as_json(snapshot: Snapshot) -> str:
    """The newest record of metrics.jsonl, with the run, its layers and their placements, and its processes."""
    status = snapshot.status
    layers = zip(status.layer_names, status.layer_numels, status.places, strict=True)
    described: dict[str, Any] = {
        **json.loads(status.record),
        "run_name": status.run_name,
        "run_dir": status.run_dir,
        "policy": status.policy,
        "reason": status.reason,
        "layers": [{"name": name, "numel": numel, "owner": placed.resident.name} for name, numel, placed in layers],
        "processes": [_process_json(process, usage) for process, usage in snapshot.processes],
        "cores": [asdict(group) for group in cores(snapshot)],
        "host_planes": status.host_planes,
        "device_planes": status.device_planes,
        "troubles": [trouble.text for trouble in snapshot.troubles],
        **_ranks_json(status),
    }
    return json.dumps(described)


def _process_json(process: m.Process, usage: Usage | None) -> dict[str, Any]:
    described = {
        "role": process.address.role,
        "rank": process.address.rank,
        "pid": process.pid,
        "detail": process.detail,
        "silent_s": process.silent_s,
        "alive": usage is not None,
    }
    return described if usage is None else described | asdict(usage)


def line(status: m.Status) -> str:
    """The newest record as one line."""
    record = json.loads(status.record)
    busy_s = record["cpu_busy_s"]  # of the first steps of another coordinator, it is not known
    busy = "optimizer busy" + (" ?" if busy_s is None else f" {seconds(busy_s)}")
    k = f"k {record['k']:.3f} {record['policy']}"
    return "  ".join([*training(record), k, *timing(record), busy, *waiting(status)])


def asked_first(record: dict[str, Any]) -> list[str]:
    """What everybody asks first of a record."""
    names = ("loss", "validation_loss", "tokens_per_s", "mfu")
    return [*training(record, names), f"{seconds(record.get('step_s', 0.0))} per step"]


def waiting(status: m.Status) -> list[str]:
    found = slowest(status)
    return [] if found is None else [f"rank {found[0]} is the slowest: the others wait {seconds(found[1])}"]


def training(record: dict[str, Any], asked: Collection[str] = ()) -> list[str]:
    """The loop's own numbers, or those that are asked for, as far as the program logs them."""
    shown = [_progress(record)]
    if (step := record.get("diverged_at")) is not None:
        shown.append(f"diverged at step {step:.0f}")
    for name, text in (
        ("loss", "loss {:.4f}"),
        ("validation_loss", "validation {:.4f}"),
        ("lr", "lr {:.3g}"),
        ("grad_norm", "norm {:.3g}"),
        ("loss_scale", "scale {:g}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("mfu", "MFU {:.1%}"),
    ):
        if (value := record.get(name)) is not None and (not asked or name in asked):
            shown.append(text.format(value))
    if skipped := record.get("skipped_steps"):
        shown.append(f"{skipped} skipped")
    return shown


def _progress(record: dict[str, Any]) -> str:
    """The step, of how many, and how long the rest takes, as far as the loop tells."""
    steps, remaining_s = record.get("steps"), record.get("remaining_s")
    of_all = "" if steps is None else f" of {steps:.0f}"
    return f"step {record['step']}{of_all}" + ("" if remaining_s is None else f", {age(remaining_s)} left")


def timing(record: dict[str, Any]) -> list[str]:
    predicted = record["predicted_step_s"]
    foreseen = "" if predicted is None else f" ({seconds(predicted)} predicted)"
    more = [MODES[mode]] if (mode := record.get("mode")) is not None else []
    precision = Precision(*(record.get(name, "float32") for name in Precision._fields))
    if not precision.is_exact:
        more.append(f"{precision}: not exact")
    return [f"step time {seconds(record['step_s'])}{foreseen}", f"stall {seconds(record['stall_s'])}", *more]


def gauges(record: dict[str, Any]) -> list[str]:
    """What NVML and the host's counters tell, as far as they do."""
    shown = (
        ("gpu_watts", "GPU {:.0f} W", 1.0),
        ("gpu_utilization", "in use {:.0%}", 1.0),
        ("gpu_used_bytes", "{:.1f} GiB of its memory", 1 / GIB),
        ("host_watts", "host {:.0f} W", 1.0),
    )
    return [text.format(record[name] * factor) for name, text, factor in shown if record.get(name) is not None]


def copied(record: dict[str, Any]) -> str:
    """What the step has copied between host memory and the trainer's device; nothing without any."""
    ways = (("to_device_bytes", "to the trainer's device"), ("to_host_bytes", "to host memory"))
    found = [(number, way) for name, way in ways if (number := record.get(name))]
    return "   ".join(f"{gib(number)} {way}, {gib(round(number / record['step_s']))}/s" for number, way in found)


# ---------------------------------------------------------------- memory and cores


def cores(snapshot: Snapshot) -> list[Cores]:
    """The cores by their owner: of the trainers and optimizers that may run on a core, those with the fewest cores."""
    pinned = {
        str(process.address): usage.cores
        for process, usage in snapshot.processes
        if usage is not None and process.address.role in ("optimizer", "trainer")
    }
    groups: dict[str, list[int]] = {}
    for core in range(len(snapshot.loads)):
        having = {name: len(its) for name, its in pinned.items() if core in its}
        owner = ", ".join(name for name, count in having.items() if count == min(having.values()))
        groups.setdefault(owner or "others", []).append(core)
    return [
        Cores(owner, tuple(its), tuple(snapshot.loads[core] for core in its)) for owner, its in sorted(groups.items())
    ]


def planes(status: m.Status) -> list[tuple[str, dict[str, int]]]:
    """Bytes by plane on the host, and on the trainer's device with what else steps needed. Both have names."""
    record = json.loads(status.record)
    on_device, peak = dict(status.device_planes), record.get("gpu_peak_bytes")
    if peak is not None and (rest := peak - sum(on_device.values())) > 0:
        on_device["activations and others, at the peak"] = rest
    return [("host", status.host_planes), ("trainer" if peak is None else "GPU", on_device)]


def memory(status: m.Status) -> list[str]:
    """A sentence for each place with planes, the largest first."""
    found = []
    for where, sizes in planes(status):
        if sizes:
            parts = [f"{plane} {gib(nbytes)}" for plane, nbytes in sorted(sizes.items(), key=lambda it: -it[1])]
            found.append(f"{where} {gib(sum(sizes.values()))}: {', '.join(parts)}")
    return found
