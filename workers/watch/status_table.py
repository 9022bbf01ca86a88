"""A status as a table of rich: for `hytrain-monitor --once`, and for `screen`, which redraws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hytrain.readable import format_cores, format_threads, seconds
from protocol import messages as m
from protocol.placement import PLACEMENTS
from workers.watch import status_text as text
from workers.watch.status_text import Cores
from workers.watch.troubles import DIVERGENCE, Snapshot, Trouble, silence

#: For each placement, in the order of `PLACEMENTS`.
STYLES: Final = dict(zip(PLACEMENTS, ("green", "blue", "cyan", "dim blue", "dim cyan"), strict=True))
MARKS: Final = dict(zip(PLACEMENTS, "█░▒·▚", strict=True))
TEXT_COLUMNS: Final = 140


def as_text(snapshot: Snapshot) -> str:
    """The table without colours."""
    console = Console(width=TEXT_COLUMNS, color_system=None)
    with console.capture() as capture:
        console.print(table(snapshot))
    return "\n".join(row.rstrip() for row in capture.get().splitlines())


def table(snapshot: Snapshot, *, ended: bool = False) -> Group:
    """The whole table: the run, its step, k and the reason, the layers, the processes."""
    status = snapshot.status
    record = json.loads(status.record)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("run", Text(f"{status.run_name}{', which has ended' if ended else ''}  {status.run_dir}"))
    if record:
        facts.add_row("training", "   ".join(text.training(record)))
        facts.add_row("time", "   ".join(text.timing(record)))
        if used := text.gauges(record):
            facts.add_row("hardware", "   ".join(used))
        if copied := text.copied(record):
            facts.add_row("copies", copied)
        facts.add_row(
            "k", Text(f"{record['k']:.3f}   {status.policy or record['policy']}: {status.reason}".rstrip(": "))
        )
    else:
        facts.add_row("training", "no step has ended yet")
    for trouble in standing(snapshot, ended=ended):
        facts.add_row(Text("trouble", "bold red"), Text(trouble.text, "bold red"))
    if status.layer_names:
        facts.add_row("layers", _strip(status))
    if used := text.memory(status):
        facts.add_row("memory", "\n".join(used))
    if groups := text.cores(snapshot):
        facts.add_row("cores", _core_rows(groups))
    for sentence in text.waiting(status):
        facts.add_row("ranks", f"{sentence} in each step")
    parts = [facts, _rank_table(status, record)] if status.ranks else [facts]
    return Group(*(part for above in parts for part in (above, "")), _process_table(snapshot, record))


def standing(snapshot: Snapshot, *, ended: bool) -> list[Trouble]:
    """What is wrong. Of a run that has ended, only what its last record shows."""
    return [trouble for trouble in snapshot.troubles if not ended or trouble.about == DIVERGENCE]


def _strip(status: m.Status) -> Text:
    """A mark for each layer in forward order, then each placement's share of the parameters."""
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
    rows = Table.grid(padding=(0, 2))
    for column in ("owner", "cores", "mean", "bars"):
        rows.add_column(justify="right" if column == "mean" else "left", no_wrap=column != "bars", overflow="fold")
    for group in groups:
        rows.add_row(*group.cells)
    return rows


def _rank_table(status: m.Status, record: dict[str, Any]) -> Table:
    rows = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    for name in ("rank", "host", "step", "step time", "stall", "waits", "k"):
        rows.add_column(name, justify="left" if name == "host" else "right", no_wrap=True)
    rows.add_column("optimizer", no_wrap=True, ratio=1)
    for rank, wait_s in zip(status.ranks, text.waits_s(status), strict=True):
        its = json.loads(rank.record)
        cells = [""] * 5
        if its:
            waits = "" if wait_s is None else _share(wait_s, its["step_s"])
            stall = _share(its["stall_s"], its["step_s"])
            cells = [str(its["step"]), seconds(its["step_s"]), stall, waits, f"{its['k']:.3f}"]
        what = rank.cores if its.get("threads") is None else f"{format_threads(its['threads'])} {rank.cores}"
        if text.silent(rank, record):
            what = f"no news since step {its.get('step', 0)}"
        rows.add_row(str(rank.rank), rank.host, *cells, Text(what))
    return rows


def _process_table(snapshot: Snapshot, record: dict[str, Any]) -> Table:
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
