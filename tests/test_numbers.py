"""Numbers on pages are those of the rows in benchmarks/results: each is written here as the rows have it.

If a row comes, or a page is written anew, the failed test shows the text that the page has to have.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from benchmarks.goals import known
from benchmarks.parts import ALWAYS_CLIPPED, AUTO, LEAN, MUON, NEVER_CLIPPED, RESIDENT, ROAMING
from benchmarks.report import FRONTIERS, RESULTS
from benchmarks.rows import Rows, ratio

ROOT: Final = Path(__file__).resolve().parent.parent
ROWS: Final = Rows.read(RESULTS)
#: What looks measured: a number with a fraction, or with a unit.
MEASURED: Final = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+(?! or newer)| (?=%|GB|s\b|TFLOP))[^\s|]*(?: (?:%|GB|s))?")


def spread(values: Iterable[float], digits: int, factor: float = 1.0) -> str:
    found = [f"{factor * value:.{digits}f}" for value in sorted(values)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


class Ratios:
    """Of two systems' step times and GPU memory, on each host that has both."""

    def __init__(self, rows: Rows, above: str, below: str, batch: int = 8) -> None:
        fields = ("step_s", "gpu_peak_gb")
        found = [[here.ratio(above, below, batch, field) for field in fields] for here in rows.by_host()]
        self.found = [(step, memory) for step, memory in found if step is not None and memory is not None]

    def __str__(self) -> str:
        """Two cells of a table."""
        steps, memories = zip(*self.found, strict=True)
        return f"| {spread(steps, 2)} | {spread(memories, 0, 100)} % |"


ALONE: Final = ROWS.on_ranks(False)


def usual() -> str:
    found = Ratios(ALONE.where(shape="3b"), AUTO, "no-offload")
    return f"the default, on {len(found.found)} machines {found}"


def of_no_offload(ratios: Ratios) -> str:
    steps, memories = zip(*ratios.found, strict=True)
    return f"{spread(steps, 2)} of the time without offload, at {spread(memories, 0, 100)} % of its GPU memory"


def missed() -> str:
    found = Ratios(ALONE.where(shape="3b"), AUTO, "no-offload").found
    return f"{sum(memory > 0.4 for _, memory in found)} of {len(found)} hosts"


def clipped(words: str, label: str) -> str:
    rows = Rows(row for row in ALONE if row["label"] == label or row["system"] == "no-offload")
    found = Ratios(rows, f"{AUTO} {label}", "no-offload")
    return f"{words}, on {len(found.found)} machines {found}"


def lean() -> str:
    """Without the host that was busy, which the page of benchmarks names."""
    found = Ratios(ALONE, f"{ROAMING} {LEAN[15.5]}", "no-offload")
    whole = len(found.found)
    found.found.remove(busy := max(found.found))
    return f"limited to 15.5 GiB, on {len(found.found)} of {whole} machines ({busy[0]:.2f} on the busy fourth) {found}"


def lean_alone() -> str:
    found = sorted(Ratios(ALONE, f"{ROAMING} {LEAN[15.5]}", "no-offload").found)[:-1]
    steps, memories = zip(*found, strict=True)
    return (
        f"{spread(steps, 2)} of the time of no offload, at {spread(memories, 0, 100)} % of its memory, on three of four"
    )


def one_of_two_more() -> str:
    return f"{Ratios(ALONE, f'{AUTO} eager', 'no-offload eager', 1).found[-1][0]:.3f} on one of two more"


def batch_1() -> str:
    found = Ratios(ALONE, AUTO, "no-offload", 1)
    found.found += Ratios(ALONE, f"{AUTO} eager", "no-offload eager", 1).found
    return f"batch 1, on {len(found.found)} machines {found}"


def beside_fsdp2(gpus: int, clip: float = 0.0) -> str:
    here = Rows(row for row in ROWS.where(shape="7b", clip=clip, label="") if row.get("ranks") == gpus)
    return str(Ratios(here, AUTO, RESIDENT))


def pipelines() -> str:
    both = [
        Ratios(ROWS.where(part="pipeline"), f"{AUTO} {schedule}", f"no-offload {schedule}")
        for schedule in ("gpipe", "1f1b")
    ]
    each = [pair for ratios in both for pair in ratios.found]
    steps, memories = zip(*each, strict=True)
    return f"| {spread(steps, 2)} | {spread(memories, 0, 100)} % |"


def gpt2(batch: int) -> str:
    return str(Ratios(ROWS.where(part="gpt2", label="", shape="gpt2-large"), AUTO, RESIDENT, batch))


def times_fsdp2(batch: int) -> str:
    return f"{Ratios(ROWS.where(part='gpt2', label='', shape='gpt2-large'), AUTO, RESIDENT, batch).found[0][0]:.2f}"


def times_as_fast(system: str) -> str:
    slower = [here.ratio(system, AUTO) for here in ALONE.where(shape="3b", label="").by_host()]
    return spread((value for value in slower if value is not None), 1)


def peers() -> str:
    return (
        f"it is {times_as_fast('torchao-fp32')} times as fast as torchao in fp32, "
        f"{times_as_fast('deepspeed-zero2')} times as fast as DeepSpeed ZeRO-2 "
        f"and {times_as_fast('fsdp2')} times as fast as FSDP2 with CPU offload"
    )


def large(shape: str, field: str) -> float:
    return known(ROWS.where(part="large", shape=shape, system=AUTO).median(field))


def small(name: str, shape: str) -> str:
    """A row of the table of small machines."""
    here = Rows(row for row in ROWS.where(part="home", shape=shape) if row["system"].startswith(AUTO))
    step_s, tokens = known(here.median("step_s")), here.last("batch") * here.last("sequence")
    memory = " | ".join(f"{known(here.median(field)):.1f}" for field in ("gpu_peak_gb", "host_gb", "host_peak_gb"))
    sizes = f"{here.last('batch')} × {here.last('sequence')}"
    return f"| {name} | {sizes} | {step_s:.2f} | {round(tokens / step_s, -1):,.0f} | {memory} |"


def below_a_cap(cap_gib: float) -> str:
    """A row of the table of the largest models, on one GPU."""
    here = ROWS.where(part="frontier_10b", cap_gib=cap_gib)
    gpu, host, step_s = (known(here.median(field)) for field in ("gpu_peak_gb", "host_gb", "step_s"))
    return f"{gpu:.1f} GB of {cap_gib:.0f} GiB, one GPU | {host:.1f} of 134 GB | {step_s:.2f} | 8 × 1024 |"


def largest() -> str:
    """The same of the largest one."""
    here = ROWS.where(part="largest", label="step 20")
    gpu, host, step_s = (known(here.median(field)) for field in ("gpu_peak_gb", "host_gb", "step_s"))
    return f"| 20.3 B | {gpu:.1f} GB of 141 GB, one GPU | {host:.1f} of 269 GB | {step_s:.2f} | 1 × 1024 |"


def on_two_gpus(name: str, system: str, part: str, clip: float = 0.0) -> str:
    """A row of the table of two GPUs, all of one host."""
    here = ROWS.where(host="a2fd5a9a5de2", part=part, system=system, clip=clip, ranks=2)
    return f"| {name} | {known(here.median('step_s')):.3f} | {known(here.median('gpu_peak_gb')):.1f} GB |"


def scaling(system: str) -> str:
    """How much of its speed is kept from one GPU to two."""
    one, two = (ROWS.where(part="scaling", system=system, ranks=ranks).median("step_s") for ranks in (1, 2))
    return f"{known(ratio(one, two)):.3f}"


def on_four_gpus() -> str:
    found = Ratios(Rows(row for row in ROWS.where(shape="7b", label="") if row.get("ranks") == 4), AUTO, RESIDENT).found
    (less, its_memory), (more, others_memory) = sorted(found)
    return (
        f"7 B takes {less:.2f} times FSDP2's step at {100 * its_memory:.0f} % of its memory, and on another such "
        f"machine {more:.2f} times at {100 * others_memory:.0f} %"
    )


def of_csv(name: str) -> str:
    """The body of a table that is a file as it stands."""
    with (RESULTS / f"{name}.csv").open() as file:
        return "\n".join(f"| {' | '.join(row)} |" for row in list(csv.reader(file))[1:])


def gelu() -> str:
    """How many times as fast a system is as another, in forward and with backward, in each dtype."""
    with (RESULTS / "bias-gelu-h100.csv").open() as file:
        rows = {(row["part"], row["system"], row["dtype"]): row for row in csv.DictReader(file)}
    names = {"step": "step of GPT-2 Large", "cuBLASLt": "cuBLASLt's epilogue, forward only", "F.gelu": "`F.gelu`"}
    compared = (
        *(("bias + GELU", "F.gelu", system) for system in ("HyTrain", "torch.compile")),
        *(("up-projection, bias + GELU", "F.gelu", system) for system in ("HyTrain", "cuBLASLt")),
        *(("MLP", "F.gelu", system) for system in ("HyTrain", "torch.compile")),
        *((part, "F.gelu", "HyTrain") for part in ("block", "step")),
        *(("MLP", "gelu_new", system) for system in ("HyTrain", "F.gelu")),
        *(("block", "gelu_new", "HyTrain"), ("step", "gelu_new", "HyTrain"), ("step", "gelu_new", "F.gelu")),
    )

    def cell(part: str, base: str, system: str, dtype: str) -> str:
        found = [rows.get((part, each, dtype), {}) for each in (base, system)]
        if not all(found):
            return "–"
        pairs = [[row[field] for row in found] for field in ("forward_us", "forward_backward_us")]
        return ", ".join(f"{float(above) / float(below):.2f}" if above and below else "–" for above, below in pairs)

    return "\n".join(
        f"| {names.get(part, part)} | `{base}` | {names.get(system, system)} | "
        f"{' | '.join(cell(part, base, system, dtype) for dtype in ('bfloat16', 'float16', 'float32'))} |"
        for part, base, system in compared
    )


def waits_for_launches() -> str:
    """Steps by batch size and kind of blocks, without offload and with, and how long the GPU waited for launches."""
    lines = []
    for here in sorted(ALONE.of_part("launches").by("batch", "label"), key=lambda rows: rows.last("batch")):
        cells = (
            f"{known(mine.median('step_s')):.3f}, {100 * mine.last('idle')['launch']:.0f} %"
            for mine in (here.where(system=system) for system in ("no-offload", AUTO))
        )
        lines.append(f"| {here.last('batch')} | {here.last('label')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses_of_a_llama(name: str, system: str) -> str:
    with (RESULTS / "curves-llama-1b-h100.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells = [f"{float(rows[step - 1][f'{system}_validation']):.4f}" for step in (250, 1000, 1500, 3000)]
    last = statistics.mean(float(row[system]) for row in rows[-100:])
    return f"| {name} | {' | '.join(cells)} | {last:.4f} |"


def small_batches_of_7b() -> str:
    each = ALONE.where(shape="7b", batch=4, cap_gib=24.0, system=ROAMING).by_host()
    return f"takes {spread((known(here.median('step_s')) for here in each), 2)} s on {len(each)} hosts"


def at_full_speed() -> str:
    here = Rows(row for row in ALONE.where(shape="10b", batch=8) if not row.get("cap_gib"))
    (ours, limit) = here.where(system=ROAMING), here.where(system="forward-backward")
    return (
        f"batch 8 takes {known(ours.median('step_s')):.3f} s at {known(ours.median('gpu_peak_gb')):.1f} GB on an H100, "
        f"{known(ours.median('tflops')):.0f} TFLOP/s; forward and backward alone, in the same call, take "
        f"{known(limit.median('step_s')):.3f} s, {known(limit.median('tflops')):.0f} TFLOP/s"
    )


def long_sequences() -> str:
    """Steps and memory, with activations in host memory and without."""
    found = []
    for tokens in (16384, 32768):
        rows = ALONE.where(part="long", sequence=tokens)
        for offloads in (True, False):
            here = Rows(row for row in rows if row["system"].endswith("offload_activations") == offloads)
            found += [known(here.median("step_s")), known(here.median("gpu_peak_gb"))]
    return (
        "one sequence of 16384 tokens takes {:.2f} s per step at {:.1f} GB of GPU memory, and {:.2f} s at {:.1f} GB "
        "without offloaded activations; 32768 tokens take {:.2f} s at {:.1f} GB and {:.2f} s at {:.1f} GB"
    ).format(*found)


def quality() -> str:
    """How losses end, by state: of each seed, their mean, and their standard deviation."""
    names = {
        "exact": "HyTrain bf16",
        "moments in bf16": "HyTrain bf16, bf16 moments",
        "moments in float8": "HyTrain bf16, float8 moments",
        "moments in bf16, without masters": "HyTrain bf16, bf16 moments, no masters",
        "bitsandbytes: 8-bit moments, without masters": "bitsandbytes, 8-bit moments, no masters",
    }
    with (RESULTS / "curves-states-h100.csv").open() as file:
        *_, last = csv.DictReader(file)
    lines = []
    for name, system in names.items():
        losses = [float(last[f"{system}, seed {seed}"]) for seed in (1, 2, 3)]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {name} | {each} | {statistics.mean(losses):.4f} | {statistics.stdev(losses):.4f} |")
    return "\n".join(lines)


def origin(*each: Rows) -> str:
    """The rows of a table that says where a chart's rows come from, the newest last."""
    hosts = sorted((here for rows in each for here in rows.by_host()), key=lambda here: str(here[0]["at"]))
    lines = (
        f"| {here[0]['hardware']['gpu']} | {here[0]['at'][:10]} | {here[0]['commit']} | `{command}` |"
        for here in hosts
        for command in here.distinct("command")
    )
    return "\n".join(dict.fromkeys(lines))


def muon_base() -> str:
    base = ROWS.where(part="muon", system="no-offload-muon")
    return f"| no offload | – | {known(base.median('step_s')):.3f} | 1 | {known(base.median('gpu_peak_gb')):.1f} | 1 |"


def muon(name: str, system: str) -> str:
    here, base = ROWS.where(part="muon", system=system), ROWS.where(part="muon", system="no-offload-muon")
    step_s, memory = (known(ratio(here.median(each), base.median(each))) for each in ("step_s", "gpu_peak_gb"))
    k = f"{known(here.median('k')):.2f}".replace("1.00", "1").replace("0.00", "0")
    numbers = f"{known(here.median('step_s')):.3f} | {step_s:.3f} | {known(here.median('gpu_peak_gb')):.1f}"
    return f"| {name} | {k} | {numbers} | {100 * memory:.0f} % |"


#: What each page says of rows.
QUOTED: Final[dict[str, list[Callable[[], str]]]] = {
    "README.md": [
        usual,
        partial(clipped, "with `max_grad_norm`, no step needs clipping", NEVER_CLIPPED),
        partial(clipped, "with `max_grad_norm`, every step is clipped (the baseline does not clip)", ALWAYS_CLIPPED),
        lean,
        lambda: f"Muon {Ratios(ALONE, MUON, 'no-offload-muon')}",
        lambda: f"two H200, 7 B, against FSDP2 without offload {beside_fsdp2(2)}",
        lambda: f"two H200, 7 B, against FSDP2 without offload, both with clipping at 1.0 {beside_fsdp2(2, 1.0)}",
        lambda: f"four H100, 7 B, against FSDP2 without offload {beside_fsdp2(4)}",
        batch_1,
        lambda: f"GPT-2 Large on two H200, batch 8, against FSDP2 without offload {gpt2(8)}",
        lambda: f"a pipeline of two stages, on three machines {pipelines()}",
        peers,
        lambda: (
            f"On four H100, 41 B parameters take {large('41b', 'step_s'):.2f} s per step, with "
            f"{large('41b', 'gpu_peak_gb'):.0f} GB of each GPU and {large('41b', 'host_gb'):.0f} GB of host memory"
        ),
    ],
    "docs/results.md": [
        lambda: f"HyTrain's step takes {of_no_offload(Ratios(ALONE.where(shape='3b'), AUTO, 'no-offload'))}",
        lambda: peers().replace("it is", "It is", 1),
        lambda: origin(ALONE.of_part("main"), ALONE.of_part("peers")),
        lambda: origin(*(ALONE.filled(part, "cap_gib", "system") for part in FRONTIERS)),
        lambda: origin(ALONE.of_part("sweep")),
        lambda: origin(ROWS.where(part="large")),
        lambda: (
            f"four H100 of 80 GB, ranks 0 and 3: {large('41b', 'step_s'):.2f} s per step, with "
            f"{large('41b', 'gpu_peak_gb'):.0f} GB of each GPU and {large('41b', 'host_gb'):.0f} GB of host memory"
        ),
    ],
    "docs/several-gpus.md": [
        lambda: on_two_gpus("FSDP2 without offload (fp32 shards, bf16 compute)", RESIDENT, "scaling"),
        lambda: on_two_gpus('HyTrain, `k="auto"`', AUTO, "scaling"),
        lambda: on_two_gpus("FSDP2 without offload, `clip_grad_norm_(1.0)`", RESIDENT, "ranks_clipping", 1.0),
        lambda: on_two_gpus('HyTrain, `k="auto"`, `max_grad_norm=1.0`', AUTO, "ranks_clipping", 1.0),
        lambda: on_two_gpus("FSDP2 with CPU offload", "fsdp2:cpu-offload", "ranks"),
        lambda: on_two_gpus("DeepSpeed ZeRO-2 with optimizer offload", "deepspeed-zero2", "ranks"),
        lambda: f"FSDP2 keeps {scaling(RESIDENT)} of its speed and HyTrain {scaling(AUTO)}",
        lambda: (
            f"batch 8 × 1024 per GPU: {large('41b', 'step_s'):.2f} s per step, {large('41b', 'tflops'):.0f} TFLOP/s "
            f"per GPU, at {large('41b', 'gpu_peak_gb'):.0f} GB of each"
        ),
        lambda: f"with 21 B takes {large('21b', 'step_s'):.2f} s at {large('21b', 'gpu_peak_gb'):.0f} GB",
        on_four_gpus,
        lambda: f"Large takes {times_fsdp2(8)} times FSDP2's step at batch 8, and {times_fsdp2(32)} times at batch 32",
    ],
    "docs/small-machines.md": [
        lambda: small("Llama 7 B, cap 24 GiB", "7b"),
        lambda: small("Llama 3, 8 B, cap 24 GiB", "llama3-8b"),
        lambda: small("Llama 3.4 B, cap 12 GiB", "3b"),
        quality,
    ],
    "docs/studies.md": [
        lambda: f"| 9.8 B, activations in host memory | {below_a_cap(8.0)}",
        lambda: f"| 9.8 B | {below_a_cap(12.0)}",
        lambda: f"| 9.8 B | {below_a_cap(32.0)}",
        largest,
        muon_base,
        lambda: muon('HyTrain, `k="auto"`', MUON),
        lambda: muon("HyTrain, `k=1`", "hytrain-muon:1"),
        lambda: muon("HyTrain, `k=0`", "hytrain-muon:0"),
        gelu,
        waits_for_launches,
        lambda: losses_of_a_llama("torch", "torch"),
        lambda: losses_of_a_llama("HyTrain", "hytrain"),
        *(partial(of_csv, name) for name in ("digits-h200", "decoder-h200", "cotraining-h200", "cotraining-busy-h100")),
    ],
    "docs/memory.md": [long_sequences],
    "docs/benchmarks.md": [missed, lean_alone, one_of_two_more, small_batches_of_7b, at_full_speed],
}
#: Pages whose numbers are the program's own: its limits and defaults, versions, and sentences.
OWN: Final = {
    *("api", "command-line", "contributing", "errors", "monitoring", "options", "records", "reliability", "security"),
    *("semantics", "sources", "trainers", "tree"),
}
PAGES: Final = (
    "README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in OWN),
)
#: Numbers that nobody has measured: sizes of models and GPUs, versions, and, by page, what follows from bytes.
SIZES: Final = r"[\d.]+ [BM]\b|(?:24|32|80) GB|(?:Python|torch|Version|License) \d+\.\d+"
GIVEN: Final[dict[str, str]] = {
    "README.md": r"limited to 15\.5 GiB|14 GB per|12 GB more|24 GiB|"
    r"exactly needs 96 GB|with 64 GB",
    "docs/architecture.md": r"scale (?:is|were) 1\.0|6 % of its memory|Linux 6\.1|within 1 %|(?:below 0\.3|above 1) %",
    "docs/benchmarks.md": r"k = 0\.\d+|at 1\.0|24 or 12 GB|64 GB in|58 or 27 GB|within 10 %|up to 1 %|164 GB per",
    "docs/memory.md": r"(?:6|14 to 25|margin of 2|: 2) %|= (?:3\.7|1\.9)e-9|8\.6 GB|of 141 GB|2\.1 and 4\.2 GB",
    "docs/results.md": "164 GB",
    "docs/several-gpus.md": "164 GB",
    "docs/small-machines.md": r"\b(?:64|84|88|96|54|13\.5|27|1) GB",
    "docs/studies.md": r"norm 1\.0|\b(?:118|252|497|141) GB",
}


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", QUOTED)
def test_a_page_has_the_rows_numbers(page: str) -> None:
    text = flat((ROOT / page).read_text())
    for quote in QUOTED[page]:
        assert flat(quote()) in text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_other_measured_numbers(page: str) -> None:
    """One without a row would not be noticed once it is wrong. A page may repeat what its own tables have."""
    whole = (ROOT / page).read_text()
    quotes = [flat(quote()) for quote in QUOTED.get(page, ())]
    tables = re.findall(r"<!-- begin: ([\w-]+) -->(.*?)<!-- end: \1 -->", whole, re.DOTALL)
    shown = {number for text in (*quotes, *(table for _, table in tables)) for number in MEASURED.findall(text)}
    text = re.sub(
        r"<!-- begin: ([\w-]+) -->.*?<!-- end: \1 -->|^```.*?^```|`[^`]*`|\]\([^)]*\)",
        "",
        whole,
        flags=re.DOTALL | re.M,
    )
    text = flat(text)
    for quote in quotes:
        text = text.replace(re.sub(r"`[^`]*`", "", quote), "")
    text = re.sub(f"{SIZES}|{GIVEN.get(page, SIZES)}", "", text)
    assert [number for number in MEASURED.findall(text) if number not in shown] == []
