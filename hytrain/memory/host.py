"""Host memory that may still be taken: by the machine's account, and by the control groups that this process is in.

A container's limit is a control group's. Beyond it the kernel kills a process, however much the machine has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

MEMBERSHIP: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What the machine has available, or what the control groups leave, if that is less."""
    available, left = int(psutil.virtual_memory().available), left_in_groups()
    return available if left is None else max(min(available, left), 0)


def left_in_groups() -> int | None:
    """Bytes below the tightest limit of this process's groups; None where there is none.

    Cached files count as left: the kernel drops them first.
    """
    return min(
        (
            limit - in_use + _cached(group)
            for group, limit_name, usage_name in _groups()
            if (limit := _number(group / limit_name)) is not None
            and (in_use := _number(group / usage_name)) is not None
        ),
        default=None,
    )


def _groups() -> Iterator[tuple[Path, str, str]]:
    """This process's groups and those above them, with their files' names, of version 2 and 1.

    In a container the path may be the host's. Then the container's own group is at the top.
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
    """In version 1 the number that has those of the groups below in it has a name of its own."""
    sizes = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    return int(sizes.get("total_inactive_file") or sizes.get("inactive_file") or 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
