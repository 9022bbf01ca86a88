"""The pictures of a result set, with matplotlib. `report` calls `draw`; a part that was not measured has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402

from benchmarks.parts import AUTO, CAPS, LEANEST, ROAMING, WEIGHTLESS  # noqa: E402
from benchmarks.rows import Rows  # noqa: E402

pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

OURS, THEIRS, LIMIT = "#c8553d", "#8d99ae", "#2b2d42"
POLICY_COLOURS: Final = {"deadline": OURS, "balance": "#588b8b", "cotrain": "#e0a458", "fixed": THEIRS}
WIDTH_IN: Final = 9.0


def draw(rows: Rows, folder: Path) -> Iterator[tuple[str, str]]:
    """Write each picture that there are rows for, of one GPU, as bench-NAME.png. Yields its name and what it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows.on_ranks(False)
    for name, (make, shows) in PICTURES.items():
        figure = make(rows)
        if figure is not None:
            figure.tight_layout()
            figure.savefig(folder / f"bench-{name}.png", dpi=130, bbox_inches="tight")
            pyplot.close(figure)
            yield name, shows


def systems(rows: Rows) -> Any:
    """Step time relative to no offload on the same host, and GPU memory: bars, the shortest step on top."""
    parts = [part for part in dict.fromkeys(row["part"] for row in rows) if part in ("main", "peers")]
    bars: dict[str, tuple[float, float]] = {}
    for part in parts:
        here = rows.of_part(part).beside(rows).where(batch=8, label="")
        base = here.where(system="no-offload").median("step_s")
        for name in rows.of_part(part).distinct("system"):
            mine = here.where(system=name)
            step_s, memory = mine.median("step_s"), mine.median("gpu_peak_gb")
            if base and step_s is not None and memory is not None:
                bars.setdefault(name, (step_s / base, memory))
    if not bars:
        return None
    names = sorted(bars, key=lambda name: -bars[name][0])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH_IN, 0.6 + 0.34 * len(names)), sharey=True)
    colours = [_colour(name) for name in names]
    titles = ("step time, no offload = 1", "{:.2f}"), ("GPU peak, GB", "{:.0f}")
    for index, (axes, (title, form)) in enumerate(zip((left, right), titles, strict=True)):
        found = axes.barh(names, [bars[name][index] for name in names], color=colours)
        axes.bar_label(found, [form.format(bars[name][index]) for name in names], padding=3)
        axes.set_title(title, loc="left")
        axes.margins(x=0.12)
    left.axvline(1.0, color=LIMIT, linewidth=0.8, linestyle=":", zorder=0)
    return figure


def _colour(name: str) -> str:
    return OURS if name.startswith("hytrain") else LIMIT if name in ("no-offload", "forward-backward") else THEIRS


def sweep(rows: Rows) -> Any:
    """Step time and GPU memory over static k, with what the planner chose."""
    here = rows.of_part("sweep")
    static = sorted(_points(here, [label for label in here.distinct("label") if label.startswith("k=")]))
    chosen = _points(here, ["auto"]) or _points(here, ["auto from the start"])
    if not static:
        return None
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(WIDTH_IN, 6), sharex=True)
    ks = [point[0] for point in static]
    for axes, index, title in ((top, 1, "seconds per step"), (bottom, 2, "GPU peak, GB")):
        axes.plot(ks, [point[index] for point in static], "o-", color=LIMIT, label="static k")
        for point in chosen:
            axes.plot(point[0], point[index], "*", color=OURS, markersize=17, label="the planner's choice")
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25)
    for name, style in (("no-offload", ":"), ("forward-backward", "--")):
        if (step_s := here.beside(rows).where(system=name, batch=8, label="").median("step_s")) is not None:
            top.axhline(step_s, color=THEIRS, linestyle=style, label=name)
    bottom.set_xlabel("k, the fraction of the parameters that the GPU owns")
    top.legend(frameon=False)
    return figure


def _points(rows: Rows, labels: list[str]) -> list[tuple[float, ...]]:
    """(k, seconds, GB) of each label."""
    found = [[rows.where(label=label).median(field) for field in ("k", "step_s", "gpu_peak_gb")] for label in labels]
    return [tuple(value for value in point if value is not None) for point in found if None not in point]


def policies(rows: Rows) -> Any:
    """Policies over batch sizes: GPU memory, and step time, relative to no offload where the host has measured it."""
    here = rows.of_part("policies")
    sizes = sorted({row["batch"] for row in here})
    labels = [label for label in here.distinct("label") if here.where(label=label).values("step_s")]
    if not labels:
        return None
    base = {size: here.beside(rows).where(system="no-offload", batch=size).median("step_s") for size in sizes}
    relative = all(base.values())
    units = [(base[size] or 1.0) if relative else 1.0 for size in sizes]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(WIDTH_IN, 6.4), sharex=True)
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        places = [place + (index - (len(labels) - 1) / 2) * width for place in range(len(sizes))]
        mine = [here.where(label=label, batch=size) for size in sizes]
        times = [(found.median("step_s") or 0.0) / unit for found, unit in zip(mine, units, strict=True)]
        memory = [found.median("gpu_peak_gb") or 0.0 for found in mine]
        for axes, values, form in ((top, times, "{:.2f}"), (bottom, memory, "{:.0f}")):
            found = axes.bar(places, values, width * 0.92, color=POLICY_COLOURS.get(label, LIMIT), label=label)
            axes.bar_label(found, [form.format(value) for value in values], padding=2, fontsize=7.5)
    if relative:
        top.axhline(1.0, color=LIMIT, linewidth=0.8, linestyle=":")
    top.set_title("step time, no offload = 1" if relative else "seconds per step", loc="left")
    bottom.set_title("GPU peak, GB", loc="left")
    bottom.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    top.legend(frameon=False, ncols=len(labels), loc="lower right", bbox_to_anchor=(1, 1.0))
    return figure


def threads(rows: Rows) -> Any:
    """Step by step: the optimizer loses half of its threads and gets them back."""
    here = Rows(row for row in rows.of_part("threads") if row["system"].startswith(AUTO) and row.get("ks"))
    moments = [mine[-1] for label in ("all threads", "halved", "given back") if (mine := here.where(label=label))]
    if len(moments) < 3:
        return None
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(WIDTH_IN, 5), sharex=True)
    start = 0
    for row in moments:
        times, ks = [*row["settling_s"], *row["steps_s"]], row["ks"]
        steps = range(start, start + len(times))
        top.plot(steps, times, ".-", color=LIMIT)
        bottom.step(steps, ks, where="mid", color=OURS)
        for axes in (top, bottom):
            axes.axvline(start, color=THEIRS, linewidth=0.8)
        top.text(start + 0.6, 0.02, row["label"], transform=top.get_xaxis_transform())
        start += len(times)
    top.set_title("seconds per step (the static sweeps between are left out)", loc="left", pad=12)
    bottom.set_title("k", loc="left")
    bottom.set_xlabel("step")
    top.set_ylim(bottom=0)
    bottom.set_ylim(0, 1)
    return figure


def frontier(rows: Rows) -> Any:
    """Seconds per step below caps on GPU memory: a line for each model, and its fastest peer."""
    below = {shape: rows.filled(f"frontier_{shape}", "cap_gib", "system") for shape in ("3b", "7b", "10b")}
    measured = {shape: found.where(system=ROAMING) for shape, found in below.items()}
    shapes = [shape for shape, ours in measured.items() if ours.values("step_s")]
    if not shapes:
        return None
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(WIDTH_IN, 3.6), squeeze=False)
    for panel, shape in zip(axes[0], shapes, strict=True):
        here = rows.of_part(f"frontier_{shape}")
        ours = sorted((row["cap_gib"], row["step_s"]) for row in measured[shape] if "error" not in row)
        panel.plot(*zip(*ours, strict=True), "o-", color=OURS, label="HyTrain")
        leanest = [(row["cap_gib"], row["step_s"]) for row in below[shape].where(system=LEANEST)]
        if leanest:
            panel.plot(*zip(*leanest, strict=True), "s", color=OURS, label="HyTrain, activations in host memory")
        if failed := [row["cap_gib"] for row in measured[shape] if "error" in row]:
            panel.plot(failed, [0.0] * len(failed), "x", color=OURS, label="failed", clip_on=False)
        for system, style in zip(WEIGHTLESS, ("--", ":"), strict=True):
            if (step_s := here.where(system=system).median("step_s")) is not None:
                panel.axhline(step_s, color=THEIRS, linestyle=style, label=system)
        base = here.beside(rows).where(system="no-offload", shape=shape, batch=8, label="", clip=0.0).median("step_s")
        if base is not None:
            panel.axhline(base, color=LIMIT, linewidth=0.8, linestyle="-.", label="no offload, without a cap")
        panel.set_title(f"{shape.upper()}: seconds per step", loc="left")
        panel.set_xlabel("cap on GPU memory, GiB")
        panel.set_xlim(0, max(CAPS) + 4)
        panel.set_ylim(0, 1.12 * panel.get_ylim()[1])
        panel.legend(frameon=False, fontsize=8)
    return figure


def power(rows: Rows) -> Any:
    """Watts over time: the GPU's, and the host's processors' where they were read. A line for each system."""
    here = Rows(row for row in rows.of_part("power") if row.get("watts"))
    names = [name for name in ("gpu_watts", "host_watts") if any(name in row["watts"] for row in here)]
    if not names:
        return None
    figure, panels = pyplot.subplots(len(names), 1, figsize=(WIDTH_IN, 3.2 * len(names)), sharex=True, squeeze=False)
    titles = {"gpu_watts": "GPU, W", "host_watts": "the host's processors, W"}
    for axes, name in zip(panels[:, 0], names, strict=True):
        for row in (mine[-1] for mine in here.by("system")):
            if name in row["watts"]:
                colour, label = _colour(row["system"]), f"{row['system']}, mean {row[name]:.0f} W"
                axes.plot(row["watts"]["at_s"], row["watts"][name], color=colour, label=label)
        axes.set_title(titles[name], loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    panels[-1, 0].set_xlabel("seconds")
    return figure


#: by the block of the page that shows it: what draws it, and what it shows
PICTURES: Final[dict[str, tuple[Callable[[Rows], Any], str]]] = {
    "systems": (systems, "step time and GPU memory of each system"),
    "sweep": (sweep, "step time and GPU memory over k, with the planner's choice"),
    "policies": (policies, "step time and GPU memory of the policies at each batch size"),
    "frontier": (frontier, "step time below caps on GPU memory"),
    "power": (power, "power over time of each system"),
    "threads": (threads, "step time and k while threads are taken and given back"),
}
