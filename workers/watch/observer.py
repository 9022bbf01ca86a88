"""Looks at a run's processes and at what else runs on the optimizers' cores, beside the coordinator's statuses.

    status ─▶ Observer.look ─▶ psutil: use and state of each process, load of each core ──┬─▶ Snapshot, for the views
                          └─▶ Strangers: CPU time of other programs ──────────────────────┘

The monitor does this, so that it costs the run nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import psutil

from hytrain.config import Cluster
from protocol import messages as m
from protocol.address import Address
from workers.watch.troubles import Snapshot, Stranger, Usage, find

#: How often the run's processes and the cores are looked at, at most.
LOOK_S: Final = 0.5
#: Other programs are looked for so often: reading what all processes use takes some milliseconds.
EVERY_S: Final = 2.0
#: The first time is over sooner.
FIRST_S: Final = 1.0
_ASKED: Final = ("pid", "ppid", "name", "cpu_times", "cpu_num", "create_time")


def followed(statuses: Iterable[m.Status]) -> Iterator[tuple[m.Status, str | None]]:
    """Each status, and its record if that is new. Once the trainer has left, a status has the layers that it had."""
    last, record = None, "{}"
    for status in statuses:
        if last is not None and last.layer_names and not status.layer_names:
            status = replace(last, processes=status.processes)
        is_new, last, record = status.record != record, status, status.record
        yield status, record if is_new else None


class Observer:
    """Reads what a run's processes use and what the cores do, and remembers their times at the last look.

    It may be asked more often than it looks: then what is new are the status and what is wrong with it.
    """

    def __init__(self, run: Cluster) -> None:
        address, detail = Address("launcher", 0), "starts and supervises the others"
        self._launcher = m.Process(address=address, pid=run.launcher_pid, detail=detail)
        self._seen: dict[int, tuple[float, float]] = {}
        self._loads: tuple[float, ...] = ()
        self._usages: dict[int, Usage | None] = {}
        self._looked_s = time.monotonic()
        psutil.cpu_percent(percpu=True)  # from here on
        self._strangers = Strangers()

    def look(self, status: m.Status) -> Snapshot:
        """`status`, with the usage of its processes and of the launcher, the loads of cores, and what is wrong."""
        processes, now_s = (*status.processes, self._launcher), time.monotonic()
        pids = {process.pid for process in processes}
        is_due = now_s - self._looked_s >= LOOK_S
        if is_due or not pids <= self._usages.keys():
            self._usages = {pid: self._usage(pid) for pid in pids}
        if is_due:
            self._looked_s = now_s
            loads = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
            self._loads = loads if any(loads) else ()  # a thread's first ones are all 0
        used = tuple((process, self._usages.get(process.pid)) for process in processes)
        optimizers = [use for process, use in used if use is not None and process.address.role == "optimizer"]
        strangers = self._strangers.look(pids, {core for use in optimizers for core in use.cores})
        return Snapshot(status, used, find(status, used, strangers), loads=self._loads)

    def _usage(self, pid: int) -> Usage | None:
        """A process's usage, or None if it is gone. `cpu_share` is since the last look, at first since its start."""
        try:
            process = psutil.Process(pid)
            times, now_s = process.cpu_times(), time.time()
            cpu_s = times.user + times.system
            seen_s, seen_cpu_s = self._seen.get(pid, (process.create_time(), 0.0))
            self._seen[pid] = now_s, cpu_s
            return Usage(
                cores=_cores(pid),
                rss_bytes=process.memory_info().rss,
                cpu_s=cpu_s,
                cpu_share=(cpu_s - seen_cpu_s) / max(now_s - seen_s, 1e-3),
                state=str(process.status()),
            )
        except (psutil.Error, OSError):
            return None


class Strangers:
    """CPU time that programs besides the run take on some cores, since the last time that it was read."""

    def __init__(self) -> None:
        self._read_s, self._every_s = time.monotonic(), FIRST_S
        self._seen = _all_times()
        self._busy = psutil.cpu_times(percpu=True)
        self._found: tuple[Stranger, ...] = ()

    def look(self, own: Collection[int], cores: Collection[int]) -> tuple[Stranger, ...]:
        """Those on `cores`, which take most first. `own`: the run's processes; what they have started is theirs.

        A program's time is counted where it ran last. What the cores have worked besides is of programs that are not
        seen, as those of other containers; without the time of ended children, and of all that the run has done,
        wherever that was.
        """
        now_s = time.monotonic()
        if now_s - self._read_s < self._every_s or not cores:
            return self._found
        span_s, self._read_s, self._every_s = now_s - self._read_s, now_s, EVERY_S
        before, self._seen = self._seen, _all_times()
        busy_before, self._busy = self._busy, psutil.cpu_times(percpu=True)
        of_run = _with_children(own, {pid: known.parent for pid, known in self._seen.items()})
        found, seen_s = list[Stranger](), 0.0
        for pid, known in self._seen.items():
            cpu_s, childrens_s = known.since(before.get(pid))
            is_own = pid in of_run or pid == os.getpid()
            if is_own or known.core in cores:
                seen_s += cpu_s + childrens_s
            if not is_own and known.core in cores:
                found.append(Stranger(pid, known.name, cpu_s / span_s))
        found.sort(key=lambda stranger: -stranger.cpu_share)
        pairs = zip(busy_before, self._busy, strict=False)
        worked_s = sum(_worked_s(now) - _worked_s(then) for core, (then, now) in enumerate(pairs) if core in cores)
        self._found = (*found, Stranger(0, "", (worked_s - seen_s) / span_s))
        return self._found


class _Times:
    """One process's CPU seconds, also those of its ended children; its parent, and the core that it ran on last."""

    __slots__ = ("began_s", "childrens_s", "core", "cpu_s", "name", "parent")

    def __init__(self, asked: dict[str, Any]) -> None:
        times = asked["cpu_times"]
        self.cpu_s, self.childrens_s = times.user + times.system, times.children_user + times.children_system
        self.parent, self.core, self.began_s = asked["ppid"], asked["cpu_num"], asked["create_time"]
        #: Others chose it: without what would steer a terminal.
        self.name = "".join(letter if letter.isprintable() else "\ufffd" for letter in str(asked["name"]))

    def since(self, before: _Times | None) -> tuple[float, float]:
        """Its own CPU seconds and those of its ended children, since then; all, if it has begun since."""
        if before is None or before.began_s != self.began_s:
            return self.cpu_s, self.childrens_s
        return self.cpu_s - before.cpu_s, self.childrens_s - before.childrens_s


def _all_times() -> dict[int, _Times]:
    found = (process.info for process in psutil.process_iter(_ASKED))
    return {asked["pid"]: _Times(asked) for asked in found if asked["cpu_times"] is not None}


def _with_children(own: Collection[int], parents: dict[int, object]) -> set[int]:
    """The run's processes with all that they have started and that still lives."""
    found = set(own)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _cores(pid: int) -> tuple[int, ...]:
    """Where any of its threads may run: OpenMP's are bound to a core each, and the first one is among them."""
    found = set[int]()
    for tid in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found |= os.sched_getaffinity(int(tid))
    return tuple(sorted(found))


def _worked_s(times: Any) -> float:
    return float(times.user + times.nice + times.system)
