"""Formats a status and its processes' usage for `monitor`: as JSON, as a line, as a table.

    record of metrics.jsonl ─┬─▶ line, record_json  --follow
    ranks, the slowest one ──┤
    layers, places, reason ──┼─▶ as_json            --once --json
    processes, their use ────┴─▶ table ─▶ as_text   --once; `screen` redraws it
    runs' folders ─────────────▶ listing           --list, --prune

It reads no clock, file or socket. Only the table needs rich.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from hytrain.errors import ConfigError
from hytrain.readable import GIB, age, format_cores, format_threads, gib, seconds
from protocol import messages as m
from protocol.handles import Precision
from protocol.placement import PLACEMENTS
from workers.watch.troubles import Snapshot, Usage, silence

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from workers.run_folder import Run

#: For each placement, in the order of `PLACEMENTS`.
STYLES: Final = dict(zip(PLACEMENTS, ("green", "blue", "cyan", "dim blue", "dim cyan"), strict=True))
MARKS: Final = dict(zip(PLACEMENTS, "█░▒·▚", strict=True))
BARS: Final = "▁▂▃▄▅▆▇█"
#: When the CPU updates in a step that may be clipped.
MODES: Final = {"speculate": "updates ahead of the norm", "defer": "updates after the norm"}
TEXT_COLUMNS: Final = 140
#: A rank is called the slowest if the others wait for it at least this share of a step.
MIN_WAIT: Final = 0.01
#: The first machine hears of the others' ranks a little later. A rank this many steps behind is not heard of any more.
SILENT_STEPS: Final = 16


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


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that the others wait for in all-gathers, and for how long at least, in each step."""

    rank: int
    wait_s: float


def waits_s(status: m.Status) -> tuple[float | None, ...]:
    """For each rank, how long it waits for others in all-gathers of a step; None unless all are known.

    All ranks leave an all-gather at the same time. Who joins last spends only the time of the transfer in it.
    """
    gathers_s = [rank.gather_s for rank in status.ranks]
    known_s = [gather_s for gather_s in gathers_s if gather_s is not None]
    if not status.ranks or len(known_s) < status.ranks[0].world:
        return (None,) * len(gathers_s)
    return tuple(gather_s - min(known_s) for gather_s in known_s)


def slowest(status: m.Status) -> Slowest | None:
    """The slowest rank; None if the ranks wait for each other in turn, or hardly at all."""
    ranked = sorted((wait_s, rank.rank) for wait_s, rank in zip(waits_s(status), status.ranks) if wait_s is not None)
    step_s = json.loads(status.record).get("step_s", 0.0)
    if len(ranked) < 2 or ranked[1][0] < MIN_WAIT * step_s:
        return None
    return Slowest(ranked[0][1], ranked[1][0])


def _ranks_json(status: m.Status) -> dict[str, Any]:
    """The ranks of a job with several, as further keys of a record; nothing for a single one."""
    if not status.ranks:
        return {}
    ranks = [
        {**json.loads(rank.record), "rank": rank.rank, "host": rank.host, "cores": rank.cores, "waits_s": wait_s}
        for rank, wait_s in zip(status.ranks, waits_s(status), strict=True)
    ]
    found = slowest(status)
    return {"ranks": ranks, "slowest": None if found is None else asdict(found)}


def record_json(status: m.Status) -> str:
    """The newest record of metrics.jsonl. If the job has several ranks, also their newest ones."""
    ranks = _ranks_json(status)
    return json.dumps({**json.loads(status.record), **ranks}) if ranks else status.record


def _silent(rank: m.RankStatus, record: dict[str, Any]) -> bool:
    return bool(record.get("step", 0) - json.loads(rank.record).get("step", 0) > SILENT_STEPS)


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
    return "  ".join([*_training(record), k, *_timing(record), busy, *_waiting(status)])


def _waiting(status: m.Status) -> list[str]:
    found = slowest(status)
    return [] if found is None else [f"rank {found.rank} is the slowest: the others wait {seconds(found.wait_s)}"]


def _training(record: dict[str, Any]) -> list[str]:
    """The loop's own numbers, as far as the program logs them."""
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
        if (value := record.get(name)) is not None:
            shown.append(text.format(value))
    if skipped := record.get("skipped_steps"):
        shown.append(f"{skipped} skipped")
    return shown


def _progress(record: dict[str, Any]) -> str:
    """The step, of how many, and how long the rest takes, as far as the loop tells."""
    steps, remaining_s = record.get("steps"), record.get("remaining_s")
    of_all = "" if steps is None else f" of {steps:.0f}"
    return f"step {record['step']}{of_all}" + ("" if remaining_s is None else f", {age(remaining_s)} left")


def _timing(record: dict[str, Any]) -> list[str]:
    predicted = record["predicted_step_s"]
    foreseen = "" if predicted is None else f" ({seconds(predicted)} predicted)"
    more = [MODES[mode]] if (mode := record.get("mode")) is not None else []
    precision = Precision(*(record.get(name, "float32") for name in Precision._fields))
    if not precision.is_exact:
        more.append(f"{precision}: not exact")
    return [f"step time {seconds(record['step_s'])}{foreseen}", f"stall {seconds(record['stall_s'])}", *more]


def _gauges(record: dict[str, Any]) -> list[str]:
    """What NVML and the host's counters tell, as far as they do."""
    shown = (
        ("gpu_watts", "GPU {:.0f} W", 1.0),
        ("gpu_utilization", "in use {:.0%}", 1.0),
        ("gpu_used_bytes", "{:.1f} GiB of its memory", 1 / GIB),
        ("host_watts", "host {:.0f} W", 1.0),
    )
    return [text.format(record[name] * factor) for name, text, factor in shown if record.get(name) is not None]


def _copied(record: dict[str, Any]) -> str:
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


# ---------------------------------------------------------------- the list of runs


def listing(runs: Sequence[Run], now_s: float, *, as_json: bool = False) -> Iterator[str]:
    """A line for each run, below a head; or a JSON object for each."""
    if as_json:
        for run in runs:
            yield json.dumps({**asdict(run), "folder": str(run.folder)})
        return
    rows = [("run", "state", "steps", "loss", "age", "size", "folder")]
    for run in runs:
        rows.append(
            (
                run.folder.name,
                "live" if run.live else "ended",
                "-" if run.steps is None else str(run.steps),
                "-" if run.loss is None else f"{run.loss:.4f}",
                age(now_s - run.at_s),
                f"{run.nbytes / 1e6:,.1f} MB",
                str(run.folder),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(w) if 2 <= n <= 5 else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()


# ---------------------------------------------------------------- the table


def as_text(snapshot: Snapshot) -> str:
    """The table without colours. Raises `ConfigError` without rich."""
    _require_rich()
    from rich.console import Console

    console = Console(width=TEXT_COLUMNS, color_system=None)
    with console.capture() as capture:
        console.print(table(snapshot))
    return "\n".join(row.rstrip() for row in capture.get().splitlines())


def table(snapshot: Snapshot, *, ended: bool = False) -> Group:
    """The whole table: the run, its step, k and the reason, the layers, the processes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = snapshot.status
    record = json.loads(status.record)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("run", Text(f"{status.run_name}{', which has ended' if ended else ''}  {status.run_dir}"))
    if record:
        facts.add_row("training", "   ".join(_training(record)))
        facts.add_row("time", "   ".join(_timing(record)))
        if used := _gauges(record):
            facts.add_row("hardware", "   ".join(used))
        if copied := _copied(record):
            facts.add_row("copies", copied)
        facts.add_row(
            "k", Text(f"{record['k']:.3f}   {status.policy or record['policy']}: {status.reason}".rstrip(": "))
        )
    else:
        facts.add_row("training", "no step has ended yet")
    for trouble in snapshot.troubles:
        facts.add_row(Text("trouble", "bold red"), Text(trouble.text, "bold red"))
    if status.layer_names:
        facts.add_row("layers", _strip(status))
    if used := memory(status):
        facts.add_row("memory", "\n".join(used))
    if groups := cores(snapshot):
        facts.add_row("cores", _core_rows(groups))
    for sentence in _waiting(status):
        facts.add_row("ranks", f"{sentence} in each step")
    parts = [facts, _rank_table(status, record)] if status.ranks else [facts]
    return Group(*(part for above in parts for part in (above, "")), _process_table(snapshot, record))


def _strip(status: m.Status) -> Text:
    """A mark for each layer in forward order, then each placement's share of the parameters."""
    from rich.text import Text

    strip, of_each, numels = Text(), status.places.names, status.layer_numels
    for _, name in sorted(zip(status.layer_positions, of_each, strict=True)):
        strip.append(MARKS[name], STYLES[name])
    for name, mark in MARKS.items():
        if name not in of_each:
            continue
        numel = sum(numel for numel, its in zip(numels, of_each, strict=True) if its == name)
        strip.append(f"   {mark} ", STYLES[name])
        strip.append(f"{name.upper()} {of_each.count(name)} layers, {numel / sum(numels):.0%}")
    return strip


def _core_rows(groups: Sequence[Cores]) -> Table:
    from rich.table import Table

    rows = Table.grid(padding=(0, 2))
    for column in ("owner", "cores", "mean", "bars"):
        rows.add_column(justify="right" if column == "mean" else "left", no_wrap=column != "bars", overflow="fold")
    for group in groups:
        rows.add_row(*group.cells)
    return rows


def _rank_table(status: m.Status, record: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    for name in ("rank", "host", "step", "step time", "stall", "waits", "k"):
        rows.add_column(name, justify="left" if name == "host" else "right", no_wrap=True)
    rows.add_column("optimizer", no_wrap=True, ratio=1)
    for rank, wait_s in zip(status.ranks, waits_s(status), strict=True):
        its = json.loads(rank.record)
        cells = [""] * 5
        if its:
            waits = "" if wait_s is None else _share(wait_s, its["step_s"])
            stall = _share(its["stall_s"], its["step_s"])
            cells = [str(its["step"]), seconds(its["step_s"]), stall, waits, f"{its['k']:.3f}"]
        what = rank.cores if its.get("threads") is None else f"{format_threads(its['threads'])} {rank.cores}"
        if _silent(rank, record):
            what = f"no news since step {its.get('step', 0)}"
        rows.add_row(str(rank.rank), rank.host, *cells, Text(what))
    return rows


def _process_table(snapshot: Snapshot, record: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    for name in ("process", "pid", "cores", "CPU", "memory", "busy", "stall"):
        rows.add_column(name, justify="left" if name in ("process", "cores") else "right", no_wrap=True)
    rows.add_column("what", no_wrap=True, ratio=1)  # shrinks on a narrow terminal
    for process, usage in snapshot.processes:
        if usage is None:
            use = ["", "gone", ""]
        else:
            use = [format_cores(usage.cores), f"{usage.cpu_share:.0%}", f"{usage.rss_bytes / 2**30:.2f} GiB"]
        what = process.detail
        if process.silent_s:
            rows.add_row(str(process.address), str(process.pid), *use, "", "", Text(silence(process), "bold red"))
            continue
        if process.address.role == "optimizer" and (threads := record.get("threads")) is not None:
            what = f"{format_threads(threads)} {what}"  # from the record, since a command can change it
        load = _load(process.address.role, record)
        rows.add_row(str(process.address), str(process.pid), *use, *load, Text(what))
    return rows


def _load(role: str, record: dict[str, Any]) -> tuple[str, str]:
    """A process's busy and stalled time in the newest step, each with its share of the step."""
    if not record or role not in ("trainer", "optimizer"):
        return "", ""
    step_s, stalled = record["step_s"], ""
    if role == "trainer":
        busy_s, stalled = step_s - record["stall_s"], _share(record["stall_s"], step_s)
    else:
        busy_s = record["cpu_busy_s"]
    return "" if busy_s is None else _share(busy_s, step_s), stalled


def _share(part_s: float, step_s: float) -> str:
    return f"{seconds(part_s)} {part_s / step_s:.0%}" if step_s > 0 else seconds(part_s)


def _require_rich() -> None:
    try:
        import rich  # noqa: F401, only checks that it exists
    except ImportError:
        raise ConfigError(
            "the table needs rich: python -m pip install 'hytrain[monitor]'; --json and --follow work without it"
        ) from None
