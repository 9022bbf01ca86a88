"""Host memory that is still available, by the machine and by the control groups (cgroups) of this process.

A container's memory limit is that of a control group. Beyond it the kernel kills a process, even if the machine has
memory left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

MEMBERSHIP: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
MACHINE: Final = Path("/proc/vmstat")
_PEAKS: Final = {"memory.max": "memory.peak", "memory.limit_in_bytes": "memory.max_usage_in_bytes"}


def available_bytes() -> int:
    """The bytes available on the machine, or in the control groups if that is less."""
    available, left = int(psutil.virtual_memory().available), left_in_groups()
    return available if left is None else max(min(available, left), 0)


def left_in_groups() -> int | None:
    """The bytes left below the tightest limit of the groups; None without one. Cached files count as free."""
    return min(
        (
            limit - in_use + _cached(group)
            for group, limit_name, usage_name in _groups()
            if (limit := _number(group / limit_name)) is not None
            and (in_use := _number(group / usage_name)) is not None
        ),
        default=None,
    )


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this process's group or else on the machine."""
    for group, limit_name, _ in _groups():
        events = group / ("memory.events" if limit_name == "memory.max" else "memory.oom_control")
        if (count := _named(events, "oom_kill")) is not None:
            return count
    return _named(MACHINE, "oom_kill") or 0


def sizes() -> str:
    """How much memory there is, and how much was used at most, as far as that is measured."""
    limits, peaks = list[int](), list[int]()
    for group, limit_name, _ in _groups():
        limit, peak = _number(group / limit_name), _number(group / _PEAKS[limit_name])
        limits += [] if limit is None else [limit]
        peaks += [] if peak is None else [peak]
    total = int(psutil.virtual_memory().total)
    whose = "the control group's limit is" if min(limits, default=total) < total else "the machine has"
    used = f", and the control group has used at most {peaks[0] / 2**30:.1f} GiB" if peaks else ""
    return f"{whose} {min([total, *limits]) / 2**30:.1f} GiB{used}"


def _groups() -> Iterator[tuple[Path, str, str]]:
    """This process's groups and their parents, with the names of their limit and usage files (cgroup v2 and v1).

    In a container, the path may be the host's. The container's own group is then at the top.
    """
    for line in _text(MEMBERSHIP).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in dict.fromkeys((inner, *inner.parents)):
            yield top / group, *names


def _cached(group: Path) -> int:
    """Cached file bytes. In cgroup v1, the number that includes child groups is `total_inactive_file`."""
    statistics = group / "memory.stat"
    return _named(statistics, "total_inactive_file") or _named(statistics, "inactive_file") or 0


def _named(path: Path, name: str) -> int | None:
    """A number of a file with one name and number per line."""
    numbers = dict(line.split(" ", 1) for line in _text(path).splitlines() if " " in line)
    return int(numbers[name]) if name in numbers else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
