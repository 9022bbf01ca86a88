"""Tables in Markdown out of rows. Numbers come from rows alone; what was not measured is said to be missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.rows import Rows, ratio

MISSING = "–"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


def number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value * 100:.{digits}f} %"


def systems(rows: Rows) -> str:
    """Every system at each batch size and label beside no-offload, on one host: medians over repeats."""
    head = ["system", "batch", "k", "s/step", "to no offload", "TFLOP/s", "GPU peak GB", "host GB", "exact fp32 AdamW?"]
    return markdown(head, [_system(rows, *place) for place in _places(rows)])


def _places(rows: Rows) -> list[tuple[str, int, str]]:
    return list(dict.fromkeys((row["system"], row["batch"], row["label"]) for row in rows))


def _system(rows: Rows, system: str, batch: int, label: str) -> list[str]:
    mine = rows.where(system=system, batch=batch, label=label)
    last = mine.last() or {}
    name = f"{system} {label}".strip()
    if error := mine.error():
        return [name, str(batch), MISSING, f"failed: {error}", *[MISSING] * 3, _host(mine), last.get("exact", MISSING)]
    base = rows.where(system="no-offload", batch=batch).median("step_s")
    step_s = mine.median("step_s")
    return [
        name,
        str(batch),
        number(mine.median("k"), 2),
        number(step_s, 4),
        number(ratio(step_s, base)),
        number(mine.median("tflops"), 0),
        number(mine.median("gpu_peak_gb"), 1),
        _host(mine),
        last.get("exact", MISSING),
    ]


def _host(rows: Rows) -> str:
    steady, peak = rows.median("host_gb"), rows.median("host_peak_gb")
    return number(steady, 1) if steady is not None else number(peak, 1)
