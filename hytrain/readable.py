"""Numbers and tables as text, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

GIB: Final = 1 << 30


def gib(size: int) -> str:
    """Bytes in GiB, or in MiB if they are fewer."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A text table. Columns are as wide as their widest cell; the first is aligned left, the others right."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
