"""Numbers, sizes, times, cores and tables as text, for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final

GIB: Final = 1 << 30
#: Fewer bytes without a unit are a mistake.
LEAST: Final = 1 << 20
#: Of a word that is suggested: with difflib's 0.6, `epochs` would be `eps`.
NEAR: Final = 0.75


def gib(size: int) -> str:
    """Bytes in GiB, or in MiB if they are fewer."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"


def size(given: int | str) -> int:
    """Bytes, from a number of them or a text with a unit. Raises `ValueError`."""
    if not isinstance(given, str):
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", given.strip(), re.IGNORECASE)
    if match is None or not (match[2] or (match[1].isdecimal() and not 0 < int(match[1]) < LEAST)):
        raise ValueError('a size has a unit, as in "24GiB" or "24GB"')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power) if power else int(match[1])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A text table. Columns are as wide as their widest cell; the first is aligned left, the others right."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def seconds(duration_s: float) -> str:
    """A duration in seconds or milliseconds."""
    return f"{duration_s:.2f} s" if duration_s >= 1.0 else f"{duration_s * 1e3:z.1f} ms"


def age(seconds_ago: float) -> str:
    """A time span in its largest unit."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds_ago >= unit_s:
            return f"{seconds_ago / unit_s:.0f} {unit}"
    return f"{max(seconds_ago, 0):.0f} s"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What may be meant by an unknown word, or None."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=NEAR)), None)


def format_threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"


def format_cores(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 3, 8) as "0-3,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
