"""Tables in Markdown out of rows. Numbers come from rows alone; what was not measured is said to be missing."""

from __future__ import annotations

from typing import Final

from benchmarks import goals
from benchmarks.goals import AUTO, is_steady, predicted, reaction
from benchmarks.idle import CAUSES
from benchmarks.parts import NO_CLIPPING
from benchmarks.rows import Rows, group, ratio
from benchmarks.words import MISSING, NOTHING, markdown, number, share

POLICY_HEAD: Final = ("k", "s/step", "predicted s", "GPU peak GB", "host GB")


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


def all_systems(rows: Rows) -> str:
    """The main part and the peers' at batch 8, a table for each host that measured some of them."""
    parts = [part for part in dict.fromkeys(row["part"] for row in rows) if part in ("main", "peers", "peers-slow")]
    chosen = [rows.of_part(part) for part in parts]
    groups = dict.fromkeys(group(row) for part in chosen for row in part)
    found = []
    for pair in groups:
        there = [row for part in chosen for row in part if group(row) == pair]
        wanted = {row["system"] for row in there} | {"no-offload", AUTO}
        mine = Rows(row for row in rows if group(row) == pair and row["system"] in wanted)
        found.append(f"Host {pair[0]}, commit {pair[1]}:\n\n" + systems(mine.where(batch=8, label="")))
    return "\n\n".join(found) or NOTHING


def hosts(rows: Rows) -> str:
    """The main part on each host: how fast its CPU is, alone and while it trains, and what the planner makes of it."""
    body = []
    for pair in dict.fromkeys(group(row) for row in rows.where(part="main")):
        here = Rows(row for row in rows.where(part="main", batch=8) if group(row) == pair)
        ours, base, cpu = (here.where(system=system) for system in (AUTO, "no-offload", "hytrain:0"))
        if not (ours.values("step_s") and base.values("step_s")):
            continue
        rate = ratio(cpu.median("parameters"), cpu.median("cpu_busy_s"))
        body.append(
            [
                *pair,
                number(None if rate is None else rate / 1e9, 1),
                number(ours.median("k"), 2),
                number(ratio(ours.median("step_s"), base.median("step_s"))),
                share(ratio(ours.median("gpu_peak_gb"), base.median("gpu_peak_gb"))),
            ]
        )
    return markdown(["host", "commit", "CPU, Gparam/s", "k", "s/step to no offload", "of its GPU memory"], body)


def sweep(rows: Rows) -> str:
    """Static k and the planner's in one process."""
    here = rows.of_part("sweep")
    best = min((value for label in here.labels() if (value := here.where(label=label).median("step_s"))), default=None)
    body = [
        [
            f"**{label}**" if label.startswith("auto") else label,
            number(mine.median("k"), 3),
            number(mine.median("step_s"), 4),
            number(ratio(mine.median("step_s"), best)),
            number(mine.median("predicted_step_s"), 4),
            number(mine.median("gpu_peak_gb"), 1),
            number(mine.median("host_gb"), 1),
        ]
        for label in here.labels()
        for mine in [here.where(label=label)]
    ]
    head = ["asked for", "k, in whole layers", "s/step", "to the best", "predicted s", "GPU peak GB", "host GB"]
    return markdown(head, body)


def policies(rows: Rows) -> str:
    """Policies at batch sizes: seconds a step and GPU memory."""
    here = rows.of_part("policies")
    body = [
        [str(batch), label, *_policy(here.where(batch=batch, label=label))]
        for batch in sorted({row["batch"] for row in here})
        for label in here.labels()
    ]
    return markdown(["batch", "policy", *POLICY_HEAD], body)


def objectives(rows: Rows) -> str:
    here = rows.of_part("objectives")
    body = [[label, *_policy(here.where(label=label))] for label in here.labels()]
    return markdown(["objective", *POLICY_HEAD], body)


def _policy(rows: Rows) -> list[str]:
    if error := rows.error():
        return [MISSING, f"failed: {error}", MISSING, MISSING, MISSING]
    places = (("k", 2), ("step_s", 4), ("predicted_step_s", 4), ("gpu_peak_gb", 1), ("host_gb", 1))
    return [number(rows.median(field), digits) for field, digits in places]


def batches(rows: Rows) -> str:
    """Batch sizes, each on the host that measured it: HyTrain between no offload and no update at all."""
    body = []
    for batch in sorted({row["batch"] for row in rows.where(part="batches")}):
        here = rows.where(batch=batch).of_part("batches")
        ours, base = here.where(system=AUTO, batch=batch), here.where(system="no-offload", batch=batch)
        limit, torchao = (here.where(system=name, batch=batch) for name in ("forward-backward", "torchao-fp32"))
        times = [rows.median("step_s") for rows in (ours, base, limit, torchao)]
        memory = [rows.median("gpu_peak_gb") for rows in (ours, base)]
        body.append(
            [
                str(batch),
                str((ours.last() or {}).get("host", MISSING)),
                number(ours.median("k"), 2),
                *(number(value, 4) for value in times),
                number(ratio(times[0], times[1])),
                *(number(value, 1) for value in memory),
                share(ratio(memory[0], memory[1])),
            ]
        )
    head = ["batch", "host", "k", "HyTrain s", "no offload s", "forward + backward s", "torchao fp32 s"]
    return markdown([*head, "HyTrain / no offload", "HyTrain GPU GB", "no offload GPU GB", "of its memory"], body)


def threads(rows: Rows) -> str:
    """Each moment of the threads part, and how long the run took to get near the best static k."""
    here, body = rows.of_part("threads"), []
    for label in here.labels():
        mine = here.where(label=label)
        steps = reaction(here, label, label)[0] if label in ("halved", "given back") else None
        body.append([label, *_policy(mine)[:3], MISSING if steps is None else f"step {steps}"])
    return markdown(["moment", "k", "s/step", "predicted s", "near the best after"], body)


def prediction(rows: Rows) -> str:
    """Predicted beside measured, wherever the planner's default policy was at rest."""
    body = [
        [row["part"], str(row["batch"]), row["label"] or "auto", number(row["k"], 2)]
        + [number(row["predicted_step_s"], 4), number(row["step_s"], 4)]
        + [number(ratio(row["predicted_step_s"], row["step_s"])), number(row.get("stall_s"), 4)]
        + ["yes" if is_steady(row) else "no"]
        for row in predicted(rows)
    ]
    head = ["part", "batch", "what", "k", "predicted s", "measured s", "predicted / measured", "stall s", "steady"]
    return markdown(head, body)


def idle(rows: Rows) -> str:
    """The GPU's idle share by cause, on each host; with HyTrain's own measure of its stalls beside it."""
    body = []
    for row in rows.where(part="idle"):
        if error := row.get("error"):
            body.append([*group(row), row["system"], f"failed: {error}", *[MISSING] * 7])
        elif measured := row.get("idle"):
            shares = [share(measured.get(cause), 2) for cause in ("share", *CAUSES)]
            stall = share(ratio(row.get("stall_s"), row["step_s"]), 2)
            body.append([*group(row), row["system"], number(row.get("k"), 2), *shares, stall])
    head = ["host", "commit", "system", "k", "idle", *CAUSES]
    return markdown([*head, "stalls by HyTrain's own marks"], body)


def clipping(rows: Rows) -> str:
    """The global norm clipped or not, to HyTrain's step without it."""
    here = rows.of_part("clipping")
    base = here.where(system=AUTO, label=NO_CLIPPING).median("step_s")
    body = [
        [system, label, *_policy(mine), number(ratio(mine.median("step_s"), base))]
        for label in here.labels()
        for system in here.where(label=label).systems()
        for mine in [here.where(label=label, system=system)]
    ]
    return markdown(["system", "the global norm is", *POLICY_HEAD, "to no clipping"], body)


def identical(rows: Rows) -> str:
    body = [
        [row["system"], number(row.get("k"), 2), str(row.get("moved", MISSING)), row.get("digest") or row["error"]]
        for row in rows.of_part("identical")
    ]
    return markdown(["system", "k at the end", "layers moved", "checksum of all weights"], body)


def goals_met(rows: Rows, kernel: dict[str, float]) -> str:
    return markdown(["goal", "bar", "measured", "met?"], goals.table(rows, kernel))


def machines(rows: Rows) -> str:
    """Every host and commit in the set: what it is, what ran there, by which command."""
    found = []
    for pair in dict.fromkeys(group(row) for row in rows):
        mine = [row for row in rows if group(row) == pair]
        hardware, versions = mine[-1]["hardware"], mine[-1]["versions"]
        facts = [f"- {name.replace('_', ' ')}: {value}" for name, value in hardware.items() if value != ""]
        named = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        ran = dict.fromkeys(row["command"] for row in mine)
        head = f"**Host {pair[0]}**, {mine[0]['at'][:10]}, commit {pair[1]}"
        commands = "\n".join(["```sh", *ran, "```"])
        found.append("\n".join([head, "", *facts, f"- versions: {named}", "", commands]))
    return "\n\n".join(found) or NOTHING
