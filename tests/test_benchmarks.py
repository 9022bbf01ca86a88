"""The benchmarks' own arithmetic, bookkeeping and watchfulness. No time that is measured here is looked at."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_rows import jobs_of, made_up, row

from benchmarks import (
    checkpoints,
    curves,
    growing,
    guard,
    host,
    idle,
    memory,
    monitors,
    parts,
    power,
    report,
    saving,
    several,
    step,
    suite,
    systems,
    watcher,
)
from benchmarks.columns import NOTHING
from benchmarks.goals import Goal, Verdict
from benchmarks.parts import COMPILED, EAGER, Job, Segment
from benchmarks.report import GOALS
from benchmarks.rows import Rows
from hytrain.recipe import config

GB = 10**9
UNBOUNDED = guard.Bounds(timeout_s=100.0, floor_bytes=0)


# ---------------------------------------------------------------- idle


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_union_and_gaps_are_the_whole(pairs: list[tuple[int, int]]) -> None:
    """As counted microsecond by microsecond."""
    intervals = [(float(start), float(start + length)) for start, length in pairs]
    busy = idle.union(intervals)
    covered = {moment for start, length in pairs for moment in range(start, start + length)}
    assert sum(end - start for start, end in busy) == len(covered)
    lost = sum(end - start for start, end in idle.gaps(busy))
    assert lost == max(covered) + 1 - min(covered) - len(covered)


def event(category: str, start: float, end: float, name: str = "", **args: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}


def kernel(start: float, end: float, correlation: int) -> dict[str, Any]:
    return event("kernel", start, end, correlation=correlation)


def launch(returned: float, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", returned - 1, returned, correlation=correlation)


def copy(way: str, end: float) -> dict[str, Any]:
    return event("gpu_memcpy", end - 5, end, f"Memcpy {way} (x -> y)")


def shares(*events: dict[str, Any]) -> dict[str, float]:
    """Of a trace with a kernel from 0 to 100, these events, and a kernel from 200 to 300."""
    return idle.idle_shares(
        idle.Trace.read([kernel(0, 100, 1), *events, kernel(200, 300, 2), {"ph": "M", "name": "x"}])
    )


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([launch(50, 2), copy("HtoD", 199)], "weights"),
        ([launch(150, 2), copy("HtoD", 120)], "launch"),
        ([launch(195, 2)], "launch"),
        ([launch(50, 2), copy("HtoD", 90)], "other"),
        ([launch(50, 2), copy("DtoH", 102)], "copies"),
        ([launch(50, 2), copy("DtoH", 199)], "copies"),
        ([launch(50, 2), copy("DtoH", 205)], "other"),
        ([launch(50, 2), copy("DtoD", 50)], "other"),
        ([], "other"),
    ],
)
def test_a_gap_has_a_cause(events: list[dict[str, Any]], cause: str) -> None:
    found = shares(*events)
    assert found[cause] == found["share"] == pytest.approx(1 / 3)


def test_short_gaps_are_turnaround_and_overlap_is_busy() -> None:
    found = shares(kernel(50, 198, 3), copy("DtoH", 202))
    assert found["turnaround"] == found["share"] == pytest.approx(2 / 300)
    within, filled = event("gpu_memcpy", 100, 160, "Memcpy DtoD (x -> y)"), event("gpu_memset", 160, 199)
    assert shares(within, filled)["share"] == pytest.approx(1 / 300), "copies and fills within the device are its work"
    assert idle.idle_shares(idle.Trace()) == {}


# ---------------------------------------------------------------- guard


def child(program: str) -> list[str]:
    """A program that writes rows with `say`."""
    head = "import os, subprocess, sys, time\nsay = lambda text: open(sys.argv[-1], 'a').write(text)\n"
    return [sys.executable, "-c", head + program]


@pytest.mark.spawns
def test_rows_arrive_whole_and_a_failure_is_told_by_its_last_exception(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("OldError: of another child\n")
    program = "print('to the log'); say('{\"a\": 1}\\n{\"b\"'); say(': 2}\\nhalf a line'); sys.exit(3)"
    outcome = guard.watch(child(program), UNBOUNDED, log)
    assert outcome.error == "to the log"
    assert [json.loads(line) for line in outcome.lines] == [{"a": 1}, {"b": 2}]
    assert guard.watch(child("sys.exit(3)"), UNBOUNDED, log).error == "exit status 3"
    assert guard.watch(child("pass"), UNBOUNDED, log).error is None
    program = "raise ModuleNotFoundError(\"No module named 'torchao'\")"
    assert guard.watch(child(program), UNBOUNDED, log).error == "ModuleNotFoundError: No module named 'torchao'"


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        (guard.Bounds(timeout_s=100.0, floor_bytes=10**18), "stopped: host memory"),
        (guard.Bounds(timeout_s=100.0, floor_bytes=8 * GB, total=GB), "stopped: host memory"),
        (guard.Bounds(timeout_s=0.0, floor_bytes=0), "stopped: took longer than 0 s"),
    ],
)
def test_a_child_out_of_bounds_is_ended_with_all_that_it_started(
    tmp_path: Path, bounds: guard.Bounds, error: str
) -> None:
    program = "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True); time.sleep(1000)"
    log = tmp_path / "log.txt"
    outcome = guard.watch(child(program), bounds, log)
    assert outcome.error is not None and outcome.error.startswith(error)
    assert not any(psutil.pid_exists(int(pid)) for pid in log.read_text().split())


def test_what_is_stopped_after_it_had_failed_tells_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took memory while it ended; what ended it is the first thing to know."""
    log = tmp_path / "log.txt"
    later = SimpleNamespace(monotonic=lambda: 4.0 if log.exists() and log.read_text().endswith("\n") else 0.0)
    monkeypatch.setattr(guard, "time", later)
    program = "import time; print('torch.OutOfMemoryError: CUDA out of memory', flush=True); time.sleep(100)"
    outcome = guard.watch(child(program), guard.Bounds(timeout_s=3.0, floor_bytes=0), log)
    assert outcome.error == "OutOfMemoryError: CUDA out of memory; stopped: took longer than 3 s"


def test_curves_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same recipe alone, and whole ones."""
    ran = list[str]()
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append("run"))
    asked = ["train.steps=2", "train.warmup_steps=0", "run.seed=1"]
    recipe = config.dump(config.load(curves.RECIPE, asked))
    (tmp_path / "recipe.yaml").write_text(recipe)
    lines = [json.dumps({"step": 1, "loss": 2.0}), json.dumps({"step": 2, "loss": 1.0, "validation_loss": 1.5})]
    for count, expected in ((1, ["run"]), (2, [])):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:count]) + "\n")
        curves.run("HyTrain", asked, tmp_path)
        assert ran == expected
        ran.clear()
    (tmp_path / "recipe.yaml").write_text(recipe.replace("seed: 1", "seed: 2"))
    curves.run("HyTrain", asked, tmp_path)
    assert ran == ["run"]


def test_the_plain_side_of_curves_has_masters_and_saves(tmp_path: Path) -> None:
    """Of 16-bit weights: single steps are too small for them, and yet they move. Saves are futures."""
    recipe = config.load(curves.RECIPE, ["train.lr=1e-3", "train.weight_decay=0.0"])
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    optimizer = curves.Plain(model, recipe, tmp_path)
    seen = []
    for _ in range(8):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
        seen.append(model.weight[0, 0].item())
    assert seen[0] == 1.0 and seen[-1] == pytest.approx(1 - 8e-3, abs=2**-8)
    optimizer.async_save(tmp_path / "optimizer").result(timeout=60)
    state = torch.load(tmp_path / "optimizer" / "state.pt")["state"]
    assert [entry["exp_avg"].dtype for entry in state.values()] == [torch.float32]


# ---------------------------------------------------------------- host


def test_what_is_left_is_what_machine_and_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with 100 bytes, or in truth 200; each group on the way up may have a limit."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100, available=80))
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    text = host._text
    monkeypatch.setattr(host, "_text", lambda path: "0::/a/b\n" if path == "/proc/self/cgroup" else text(path))
    assert (host.used_bytes(), host.left_bytes(), host.left_bytes(total=200)) == (20, 80, 180)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for folder, limit, used in ((inner, "max", 5), (inner.parent, "50", 40)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
    assert (host.left_bytes(), host.left_bytes(total=200)) == (10, 10)
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 7\nactive_file 2\n")
    assert host.left_bytes() == 19


def test_what_programs_hold_is_counted_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal: 9 kB\nCached: 7 kB\nAnonPages:   2 kB\nShmem: 1 kB\nShmemHugePages: 0 kB\n"
    monkeypatch.setattr(host, "_text", lambda path: text)
    assert host.program_bytes() == 3 * 1024
    monkeypatch.setattr(host, "_text", lambda path: "MemTotal: 9 kB\n")
    monkeypatch.setattr(host, "used_bytes", lambda: 5)
    assert host.program_bytes() == 5


def test_the_innermost_mount_names_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in (("/", "a"), ("/x/y", "b"), ("/x", "c"))
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert [host.file_system(Path(path)) for path in ("/x/y/z", "/x/yy", "/tmp")] == ["b", "c", "a"]


# ---------------------------------------------------------------- jobs, parts, rows


def test_every_part_names_known_systems_survives_the_command_line_and_is_short() -> None:
    from benchmarks import ranks

    assert {system.partition(":")[0] for system in parts.KNOWN} == {*systems.SYSTEMS, *ranks.SYSTEMS}
    for name in parts.PARTS:
        jobs, known = jobs_of(name), ranks.SYSTEMS if name in parts.RANKED else systems.SYSTEMS
        assert {job.system.partition(":")[0] for job in jobs} <= set(known)
        assert all(job.segments and Job.from_json(job.to_json()) == job for job in jobs)
        if name in ("frontier_7b", "frontier_10b"):  # measured cap by cap, each with what is compared below it
            jobs = [job for job in jobs if job.cap_gib == parts.CAPS[0]]
        if name in ("eight", "large", "routed"):  # measured model by model, HyTrain's jobs and the others
            jobs = [job for job in jobs if job.ranks == 4 and job.shape == jobs[-1].shape and job.system == parts.AUTO]
        assert sum(job.expected_s for job in jobs) < 540, f"{name} fits into nine minutes"


def test_ranks_share_one_long_sequence() -> None:
    """Of which each has its share, of the tokens and of the FLOPs."""
    from benchmarks import step

    for job in jobs_of("context"):
        [segment] = job.segments
        tokens, *_ = step.batches(replace(job, device="cpu"), segment)
        assert tokens.shape == (1, 65536) and job.ranks * job.sequence == 65536
        alone = replace(job, ranks=0, context=1, sequence=65536)
        assert step.flops_per_step(job, 10**9, 1) * job.ranks == step.flops_per_step(alone, 10**9, 1)


def test_predicted_memory_is_that_of_the_step_with_the_peak() -> None:
    """Layers moved within the measured steps."""
    records = [{"predicted_gpu_bytes": nbytes, "predicted_step_s": nbytes / 10} for nbytes in (9.0, 1.0, 1.0, 2.0)]
    last = SimpleNamespace(step=4, k=0.5, visiting_layers=(), offloaded_layers=(), moved=3)
    running: Any = SimpleNamespace(optimizer=object(), records=lambda *arguments: records)
    steps: Any = SimpleNamespace(statistics=[last], first=1, loss=0.0)
    found = step.own_account(running, steps, Segment(batch=1, measure=3))
    assert (found["predicted_gpu_bytes"], found["predicted_step_s"]) == (2.0, 0.1)


def test_hosts_are_never_mixed() -> None:
    """The fullest host speaks for a part, of several the newest; and nothing is divided by another host's time."""
    old, new = made_up("main", host="old", at="2026-01"), made_up("main", host="new", at="2026-02")
    assert {found["host"] for found in Rows([*old, *new]).of_part("main")} == {"new"}
    assert {found["host"] for found in Rows([*old, *list(new)[:2]]).of_part("main")} == {"old"}
    apart = Rows([*made_up("peers", host="here").where(system="fsdp2"), *made_up("main", host="there")])
    assert verdict(report.compared("peers", "fsdp2", parts.AUTO, at_least=1.0), apart).met is None
    assert "| fsdp2 | 8 | – | 2.1000 | – |" in report.systems(apart)


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_flops_are_those_of_recipes(shape: str) -> None:
    """Both count what a token meets."""
    from benchmarks import step
    from hytrain.recipe import model

    built: Any = step.build_model(Job(shape=shape, device="cpu"), "float32")
    parameters = sum(parameter.numel() for parameter in built.parameters())
    cost = model.cost(built, built.config, 64)
    assert step.flops_per_step(Job(shape=shape, sequence=64), parameters, 3) == cost.flops_per_token * 3 * 64


def test_speed_over_memory_is_that_of_the_same_gpus() -> None:
    """0.5 s in 19.5 GB, beside 0.6 s in 60 GB."""
    head, _, *lines = several.MEASURED["ranks-pipeline"](made_up("pipeline")).splitlines()
    column = [cell.strip() for cell in head.split("|")].index("speed over GPU memory, relative")
    found = {line.split("|")[1].strip(): line.split("|")[column].strip() for line in lines}
    assert found == {"no-offload": "1.000", "hytrain:auto": f"{0.6 / 0.5 * 60 / 19.5:.3f}"}


def test_experts_that_are_idle_are_counted_with_the_states_alone() -> None:
    """Three matrices each, of three layers."""
    shape = parts.SHAPES["tiny-experts"]
    assert shape.idle_parameters == 3 * 6 * (3 * 64 * 128) and parts.SHAPES["3b"].idle_parameters == 0


# ---------------------------------------------------------------- goals, tables, page


def verdicts(found: Rows) -> dict[str, bool | None]:
    return {goal.what: goal.verdict(found.on_ranks(False)).met for goal in GOALS}


def verdict(judge: report.Judge, found: Rows) -> Verdict:
    return Goal("", "", judge).verdict(found)


def test_goals_are_judged_by_the_rows() -> None:
    assert all(met for what, met in verdicts(made_up()).items() if "balance" not in what and "torchao" not in what)
    assert set(verdicts(Rows([])).values()) == {None}


def slower(found: Rows, factor: float, **fields: Any) -> Rows:
    chosen = [id(one) for one in found.where(**fields)]
    assert chosen

    def changed(one: dict[str, Any]) -> dict[str, Any]:
        settling_s = [value * factor for value in one.get("settling_s", [])]
        return {**one, "step_s": one["step_s"] * factor, "settling_s": settling_s}

    return Rows(changed(one) if id(one) in chosen else one for one in found)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("batch 8: step / no offload", {"system": "hytrain:auto", "label": "", "factor": 1.3}),
        ("k = 1, all on the GPU", {"part": "main", "system": "hytrain:1", "factor": 0.9}),
        ("forward and backward only", {"system": "forward-backward", "factor": 0.9}),
        ("faster than DeepSpeed ZeRO-2 offload", {"part": "peers", "system": "deepspeed-zero2", "factor": 0.7}),
        ("never clipped: ", {"label": "never clipped", "factor": 1.04}),
        (
            "always clipped: step",
            {"part": "clipping", "system": "hytrain:auto", "label": "always clipped", "factor": 1.04},
        ),
        ("always clipped: faster", {"part": "clipping", "system": "deepspeed-zero2", "factor": 0.3}),
        ("than FSDP2", {"system": "fsdp2", "factor": 0.7}),
        ("batch 1: step / no offload", {"part": "batches", "system": "hytrain:auto", "batch": 1, "factor": 2.0}),
        (f"{parts.LEAN[15.5]}: step / no offload", {"label": parts.LEAN[15.5], "factor": 1.3}),
        ("which is not exact", {"label": tuple(parts.LEAN.values()), "factor": 2.1}),
        ("weights in host memory", {"system": parts.OFFLOADED, "factor": 1.4}),
        ("best static k's", {"label": "auto from the start", "factor": 1.1}),
        ("a mixture of experts", {"part": "experts", "system": "deepspeed-zero2", "factor": 0.4}),
        ("Muon: step / no offload", {"system": parts.MUON, "factor": 2.2}),
        ("threads halved", {"label": ("halved, k=0.2", "halved, k=0.3"), "factor": 0.5}),
        ("predicted / measured", {"part": "sweep", "label": "auto", "factor": 1.2}),
        ("the better of balance", {"part": "policies", "label": "deadline", "batch": 4, "factor": 1.02}),
    ],
)
def test_a_goal_can_be_missed(words: str, change: dict[str, Any]) -> None:
    changed = verdicts(slower(made_up(), **change))
    assert {met for what, met in changed.items() if words in what} == {False}


@pytest.mark.parametrize(
    ("missed", "change"),
    [
        ([], {"factor": 1.0}),
        (["step / FSDP2", "efficiency"], {"system": parts.AUTO, "ranks": 4, "clip": 0.0, "factor": 1.1}),
        (["the same with max_grad_norm"], {"system": parts.AUTO, "clip": 1.0, "factor": 1.04}),
        (["faster than DeepSpeed ZeRO-3"], {"system": "deepspeed-zero3", "factor": 0.7}),
        (["Muon"], {"system": parts.MUON, "factor": 1.1}),
        (["7 B with offloaded weights"], {"system": parts.ROAMING, "factor": 1.4}),
        (["pipeline"], {"system": parts.AUTO, "label": "1f1b", "factor": 1.3}),
        (["efficiency"], {"system": parts.AUTO, "ranks": (1, 2), "factor": 0.9}),
    ],
)
def test_goals_of_several_gpus_are_judged_at_the_most_gpus(missed: list[str], change: dict[str, Any]) -> None:
    found = slower(made_up(*parts.RANKED, "main"), **change).on_ranks(True)
    assert [goal.what for goal in several.GOALS if not goal.verdict(found).met] == [
        next(goal.what for goal in several.GOALS if goal.what.startswith(words)) for words in missed
    ]
    assert {goal.verdict(Rows([])).met for goal in several.GOALS} == {None}


def test_different_bits_and_an_idle_gpu_are_missed_goals() -> None:
    found = list(made_up("identical", "idle"))
    found[0]["digest"] = "beef"
    next(one for one in found if one["part"] == "idle")["idle"]["share"] = 0.04
    assert [met for met in verdicts(Rows(found)).values() if met is not None] == [False, False]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("stalls / the save's duration", {"save_stall_share": 0.11}),
        ("more host memory", {"save_host_gb": 1.01}),
        ("bytes per parameter", {"disk_bytes_per_parameter": 14.21}),
    ],
)
def test_a_save_can_cost_too_much(words: str, change: dict[str, float]) -> None:
    found = made_up("saving")
    assert [met for met in verdicts(found).values() if met is not None] == [True] * 3
    changed = Rows(one | change if one["system"] == parts.AUTO else one for one in found)
    assert [what for what, met in verdicts(changed).items() if met is False] == [
        next(goal.what for goal in GOALS if words in goal.what)
    ]


def test_what_failed_after_a_save_is_said() -> None:
    [one, *_] = made_up("saving")
    failed = {"resume_error": "OSError: gone", "resume_s": None, "restored": None}
    lines = [report.saving(Rows([one | change])).splitlines()[-1] for change in ({}, {"restored": False}, failed)]
    assert [line.split(" | ")[-2:] for line in lines] == [
        ["20.0", "yes |"],
        ["20.0", "**no** |"],
        ["failed: OSError: gone", "– |"],
    ]
    assert "failed: no disk" in report.saving(Rows([{**one, "step_s": None, "error": "no disk"}]))


def test_every_table_can_be_made_and_says_when_nothing_was_measured() -> None:
    full, empty = report.blocks(made_up(), {}), report.blocks(Rows([]), {})
    assert [name for name, text in full.items() if text == NOTHING] == ["kernel"]
    assert [name for name, text in empty.items() if text != NOTHING] == ["ranks-goals", "goals"]
    for name, text in full.items():
        widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| ")}
        assert name in ("machines", "kernel") or len(widths) == 1, f"ragged table {name}"


def test_the_page_has_every_block_and_filling_it_twice_changes_nothing() -> None:
    page, texts = report.PAGE.read_text(), report.blocks(made_up(), {})
    once = report.fill(page, texts)
    assert all(text in once for text in texts.values())
    assert report.fill(once, texts) == once
    with pytest.raises(KeyError):
        report.fill("<!-- begin: nobody -->\n<!-- end: nobody -->", texts)


def test_pictures_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    pictures = pytest.importorskip("benchmarks.pictures", exc_type=ImportError)
    assert [name for name, _ in pictures.draw(made_up("sweep"), tmp_path)] == ["sweep"]
    assert [name for name, _ in pictures.draw(made_up(), tmp_path)] == list(pictures.PICTURES)
    assert all((tmp_path / f"bench-{name}.png").stat().st_size > 5000 for name in pictures.PICTURES)


# ---------------------------------------------------------------- fine-tuning under the Trainer


def test_only_answers_are_learned() -> None:
    sft = pytest.importorskip("benchmarks.sft", exc_type=ImportError)
    for line in sft.conversations(3, 300, 2048):
        answers = line["labels"] != sft.IGNORED
        assert answers.tolist() == [place // sft.TURN_TOKENS % 2 == 1 for place in range(300)]
        assert line["labels"][answers].equal(line["input_ids"][answers])
        shifted = (line["input_ids"][: sft.TURN_TOKENS] + 1) % sft.WORDS
        assert shifted.equal(line["labels"][sft.TURN_TOKENS : 2 * sft.TURN_TOKENS])


@pytest.mark.spawns
def test_fine_tuning_has_the_same_loss_with_both_optimizers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from benchmarks import step

    segment = Segment(batch=2, settle=1, measure=3)
    job = Job(shape="demo", sequence=128, device="cpu", clip=1.0, dtype="float32", segments=(segment,))
    systems = ("sft-torch-fp32", "sft-hytrain:k=0.5")
    found = [list(step.rows(replace(job, system=system), str(tmp_path))) for system in systems]
    [[plain], [ours]] = found
    assert plain["loss"] == ours["loss"] and 0.3 < ours["k"] < 0.7
    assert len(ours["steps_s"]) == 3 and "error" not in ours


# ---------------------------------------------------------------- at rest


def test_steps_at_rest_are_counted() -> None:
    """Plans end at step 12, and one comes later; a step of the first thirty is long, and two later ones."""
    steps_s = [3.0] * 10 + [1.0] * 200
    steps_s[20] = steps_s[50] = steps_s[90] = 1.2
    told = {"at": "2026-01-01", "host": "h", "commit": "c", "system": "hytrain:auto", "cap_gib": 15.5}
    row = {**told, "part": "rest", "steps_s": steps_s, "ks": [0.0] * 12 + [0.5] * 88 + [0.25] * 110}
    other = {**told, "part": "rest", "system": "no-offload", "cap_gib": 0.0, "steps_s": [1.0] * 40}
    cells = [line.split(" | ")[2:8] for line in report.at_rest(Rows([row, other])).splitlines()[2:]]
    assert cells == [
        ["hytrain:auto", "15.5 GiB", "1.0000", "2", "2", "1"],
        ["no-offload", "–", "1.0000", "0", "0", "–"],
    ]


# ---------------------------------------------------------------- batches that grow


@pytest.mark.spawns
@pytest.mark.parametrize("label", [parts.RANDOM, parts.FIRST, *parts.FOUR_TIMES, parts.NEIGHBOUR, parts.PARK])
def test_batches_grow_and_others_take_memory(label: str, tmp_path: Path) -> None:
    from benchmarks import step

    steps = Segment(batch=1, settle=3, measure=4, label=label)
    job = Job(system="hytrain-growing:1", shape="demo", sequence=64, device="cpu", dtype="float32", segments=(steps,))
    [row] = step.rows(job, str(tmp_path))
    assert "error" not in row and len(row["steps_s"]) == 4 and row["k"] == 1.0 and row["evicted_gb"] == 0
    told = {**dict.fromkeys(parts.FOUR_TIMES, "extra_s"), parts.NEIGHBOUR: "back_steps", parts.PARK: "attach_s"}
    assert {"extra_s", "back_steps", "attach_s"} & row.keys() == ({told[label]} if label in told else set())


def test_steps_are_as_fast_again_when_some_in_a_row_are() -> None:
    assert growing._back([2.0, 1.0, 2.0, *[1.0] * growing.IN_A_ROW], 1.0) == 3
    assert growing._back([1.0] * 9, 1.0) == 0
    assert growing._back([*[1.0] * (growing.IN_A_ROW - 1), 2.0, 1.0], 1.0) is None


# ---------------------------------------------------------------- saving


SAVES = Job(
    shape="demo", sequence=64, device="cpu", segments=(Segment(batch=2, settle=1, measure=2, label="x", saves=True),)
)


@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("system", "at_least"), [("no-offload", 14.0), ("hytrain:0.5", 12.0)], ids=["no-offload", "hytrain"]
)
def test_a_state_is_saved_while_it_is_trained_and_loaded_again(tmp_path: Path, system: str, at_least: float) -> None:
    from benchmarks import step

    [found] = step.rows(replace(SAVES, system=system), str(tmp_path))
    assert "error" not in found and "resume_error" not in found
    assert found["restored"] and len(found["save_steps_s"]) >= 1
    assert at_least <= found["disk_bytes_per_parameter"] < at_least + 0.5
    assert found["save_stall_s"] == pytest.approx(found["save_stall_share"] * found["save_s"], abs=0.01)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_every_tensor_that_it_saved(tmp_path: Path, masters: torch.dtype) -> None:
    """Two steps after the save, and two after loading: the same masters and moments."""
    model = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    held = [parameter.detach().to(masters) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(held, lr=0.1)

    def trained() -> list[torch.Tensor]:
        for _ in range(2):
            for master in held:
                master.grad = master.detach() + 1
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), held)
        state = optimizer.state_dict()["state"]
        return [each.clone() for values in state.values() for each in (*values.values(), *held)]

    trained()
    way = checkpoints.of_torch(model, held, optimizer)
    way.save(tmp_path).result()
    before = saving.weights_sums(model)
    first = trained()
    assert saving.weights_sums(model) != before
    way.load(tmp_path)
    assert saving.weights_sums(model) == before
    assert all(ours.equal(theirs) for ours, theirs in zip(first, trained(), strict=True))


def test_growth_is_the_most_less_what_was_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks, ends = iter([[5, 50], [9, 40], [7, 60]]), iter([False, False, True])
    monkeypatch.setattr(memory, "_now", lambda: next(looks))
    monkeypatch.setattr(watcher.select, "select", lambda *given: (next(ends), [], []))
    memory.main()
    assert capsys.readouterr().out.splitlines() == ["watching", "[4, 10]"]


@pytest.mark.spawns
def test_growth_is_watched_by_a_process_that_ends_with_the_block() -> None:
    with memory.Growth() as seen:
        pass
    assert min(seen.used, seen.programs) >= 0 and seen._child.returncode == 0


class Ticks:
    """Steps of two seconds each, and one more for the first one's sums; the third finishes the save."""

    def __init__(self, saved: Future[None]) -> None:
        self.count, self._saved = 0, saved

    def run(self) -> None:
        self.count += 1
        if self.count == 3:
            self._saved.set_result(None)

    def times(self) -> list[float]:
        return [3.0, *[2.0] * (self.count - 1)]


@pytest.mark.spawns
@pytest.mark.parametrize(("step_s", "stall_s"), [(1.5, 1.5), (2.5, 0.0)])
def test_stalls_are_what_steps_take_longer_until_the_state_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, stall_s: float
) -> None:
    """By a clock that is a second later at each look: at the start, settled, summed, returned, whole."""
    clock = map(float, itertools.count())
    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model, saved = torch.nn.Linear(2, 2), Future[None]()

    def save(folder: Path) -> Future[None]:
        (folder / "below").mkdir()
        (folder / "below" / "state").write_bytes(bytes(60))
        return saved

    def load(folder: Path) -> None:
        torch.nn.init.zeros_(model.weight)

    way = checkpoints.Saving("a call", "written", save, load)
    found = saving.measure(model, way, tmp_path / "saved", lambda: Ticks(saved), step_s)
    assert (found["save_steps_s"], found["save_stall_s"]) == ([2.0] * 3, stall_s)
    assert (found["save_s"], found["save_call_s"], found["save_stall_share"]) == (3.0, 2.0, stall_s / 3)
    assert (found["disk_bytes"], found["disk_bytes_per_parameter"]) == (60, 10.0)
    assert found["restored"] is False, "loading changed the weights"


@pytest.mark.parametrize(("kind", "free", "why"), [("tmpfs", 10**6, "in memory"), ("ext4", 95, "0 GB left")])
def test_a_state_that_does_not_fit_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, free: int, why: str
) -> None:
    """Six fp32 parameters with 16 bytes each."""
    monkeypatch.setattr(host, "file_system", lambda path: kind)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    way = checkpoints.Saving("", "", lambda folder: pytest.fail("saved"), lambda folder: None)
    with pytest.raises(systems.Unavailable, match=why):
        saving.measure(torch.nn.Linear(2, 2), way, tmp_path / "saved", lambda: pytest.fail("trained"), 1.0)
    assert not (tmp_path / "saved").exists()


# ---------------------------------------------------------------- power


def test_power_is_that_of_the_measured_steps() -> None:
    """From second 11 to 14, with readings before and after; the host's counter is read later than the GPU's."""
    readings = [
        {"at_s": 10.0},
        {"at_s": 12.0, "gpu_watts": 100.0},
        {"at_s": 13.0, "gpu_watts": 400.0, "host_watts": 50.0},
        {"at_s": 13.05, "gpu_watts": 700.0, "host_watts": 150.0},  # too soon to be drawn
        {"at_s": 15.0, "gpu_watts": 700.0, "host_watts": 150.0},
        {"at_s": 16.0, "gpu_watts": 9000.0, "host_watts": 9000.0},
    ]
    found = power.of(readings, 11.0, 14.0, tokens=600)
    assert (found["gpu_watts"], found["gpu_joules_per_token"]) == (400.0, 2.0)
    assert (found["host_watts"], found["host_joules_per_token"]) == (100.0, 0.5)
    over_time = {"at_s": [1.0, 2.0, 4.0], "gpu_watts": [100.0, 400.0, 700.0], "host_watts": [None, 50.0, 150.0]}
    assert found["watts"] == over_time
    assert power.of([{"at_s": 10.0}, {"at_s": 12.0}], 10.5, 12.0, tokens=1) == {}


def test_power_is_read_each_tick_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counters:
        def read(self, gpus: list[str], now_s: float) -> dict[str, dict[str, float]]:
            return {gpu: {"gpu_watts": 100 * now_s, "gpu_utilization": 1.0} for gpu in gpus}

    clock, ends = map(float, itertools.count()), iter([False, True])
    monkeypatch.setattr(power, "Gauges", Counters)
    monkeypatch.setattr(power, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(watcher.select, "select", lambda *given: (next(ends), [], []))
    power.main("GPU-1")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == [{"at_s": at_s, "gpu_watts": 100 * at_s} for at_s in (0.0, 1.0, 2.0)]


@pytest.mark.spawns
def test_a_machine_that_does_not_tell_its_power_has_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import step

    class Blind(power.Power):
        told = property(lambda self: [{"at_s": 0.0}, {"at_s": 1e9}], lambda self, told: looks.append(told))

    looks: list[Any] = []
    monkeypatch.setattr(step, "Power", Blind)
    steps = Segment(batch=2, settle=1, measure=2, power=True)
    [found] = step.rows(Job(system="torch", shape="demo", sequence=64, device="cpu", segments=(steps,)), str(tmp_path))
    assert found["error"] == "nothing here tells its power: of a GPU, nvidia-ml-py does"
    assert len(looks) == 1 and len(looks[0]) >= 2


# ---------------------------------------------------------------- launches


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
def test_compiled_blocks_are_compiled_once_for_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    from benchmarks import step

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    steps = Segment(batch=2, settle=1, measure=2, launches=True)
    job = Job(system="torch", shape="tiny", sequence=32, device="cpu", dtype="float32", segments=(steps,))
    losses = []
    for blocks, graphs in ((EAGER, 0), (COMPILED, 1)):
        [found] = step.rows(replace(job, blocks=blocks), str(tmp_path))
        assert found["call_s"] > 0 and "idle" not in found and counter.frame_count == graphs
        losses.append(found["loss"])
    assert losses[0] == losses[1]


def test_a_step_has_kernels_and_their_seconds() -> None:
    """Of three steps, the last two: in each a launch that comes late, and two kernels of 100 us."""
    profile = idle.Profile.__new__(idle.Profile)
    profile._steps, profile._events = 3, []
    for turn in range(3):
        for start, returned in ((0, -1), (150, 140)):
            number, at = len(profile._events), 300 * turn + start
            profile._events += [launch(300 * turn + returned, number), kernel(at, at + 100, number)]
    found = profile.result()
    assert (found["steps"], found["kernels"], found["busy_s"]) == (2, 2.0, 200e-6)
    assert found["launch"] > 0


# ---------------------------------------------------------------- monitors


@pytest.mark.spawns
def test_monitors_read_while_steps_are_measured_and_every_second_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import step

    class Seen(monitors.Monitors):
        def __exit__(self, *error: object) -> None:
            states.extend(psutil.Process(process.pid).status() for process, _ in self._all)
            while (reads := self.read())[0] == 1:  # it may be behind
                time.sleep(0.01)
            counts.append(reads)
            super().__exit__(*error)

    states: list[str] = []
    counts: list[list[int]] = []
    monkeypatch.setattr(step, "Monitors", Seen)
    before, beside = Segment(batch=2, settle=1, measure=2), Segment(batch=2, settle=0, measure=8, monitors=2)
    job = Job(system="hytrain:0.5", shape="demo", sequence=64, device="cpu", segments=(before, beside))
    plain, found = step.rows(job, str(tmp_path))
    assert "error" not in found and "monitors_read" not in plain
    assert [state == psutil.STATUS_STOPPED for state in states] == [False, True]
    assert min(found["monitors_read"]) == 1 and counts[0][1] == 1


def test_what_monitors_cost_is_seen_beside_what_steps_differ_anyway() -> None:
    rows = made_up("monitors")
    for one, step_s in zip(rows, (1.0, 1.011, 1.01), strict=True):
        one["step_s"] = step_s
    text, met = report.watched(rows)
    assert met is False and text == "1.0060; without, before and after differ by 1.00 %"
    rows[1]["step_s"] = 1.01
    assert report.watched(rows) == ("1.0050; without, before and after differ by 1.00 %", True)


# ---------------------------------------------------------------- suite


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that the suite started; each answers with rows at once, but systems called fsdp2 fail."""
    started: list[Job] = []

    def watch(command: list[str], bounds: Any, log: Path) -> guard.Outcome:
        job = Job.from_json(command[3])
        started.append(job)
        if job.system == "fsdp2":
            return guard.Outcome([], "boom", 4 * GB, 0.1)
        return guard.Outcome([json.dumps(child_row(job, each)) for each in job.segments], None, 4 * GB, 0.1)

    clock = itertools.count()
    monkeypatch.setattr(suite, "_now", lambda: f"2026-01-01T{next(clock):09}")
    monkeypatch.setattr(guard, "watch", watch)
    return started


def child_row(job: Job, segment: Segment) -> dict[str, Any]:
    """What a child says; the rest is the suite's."""
    found = row("", job, segment)
    own = ("batch", "label", "step_s", "steps_s", "settling_s", "tflops", "gpu_peak_gb", "k", "ks")
    return {name: found[name] for name in own if name in found} | {"versions": {"torch": "9.9"}}


def run_suite(folder: Path, *words: str) -> None:
    assert suite.main(["--results", str(folder), "--commit", "c0ffee", *words]) == 0


def test_a_host_measures_nothing_twice_and_rounds_are_repeats(tmp_path: Path, watched: list[Job]) -> None:
    run_suite(tmp_path, "main")
    run_suite(tmp_path, "main", "peers")
    assert [job.system for job in watched][4:6] == ["hytrain:0", "torchao-fp32"]
    assert len(watched) == 10
    run_suite(tmp_path, "--again", "peers")
    assert len(watched) == 17
    run_suite(tmp_path, "--rounds", "4", "--systems", "forward-backward")
    assert len(watched) == 20, "one of the rounds was in main"
    failed = Rows.read(tmp_path).where(system="fsdp2")[-1]
    assert (failed["error"], failed["exact"], failed["host_peak_gb"]) == ("boom", "yes", 4.0)


def test_hytrain_is_not_told_to_be_exact_with_smaller_moments() -> None:
    named = ("hytrain:auto", "hytrain:auto,state_dtype=float32", "hytrain:0,state_dtype=bfloat16,visit=1")
    assert [parts.about(system).exact for system in named] == ["yes", "yes", "no: bfloat16 moments"]
    assert parts.about("hytrain:auto,state_dtype=float8").exact == "no: float8 moments"
    alone, both = (f"hytrain:0,{more}master_dtype=bfloat16" for more in ("", "state_dtype=bfloat16,"))
    assert [parts.about(one).exact for one in (alone, both)] == ["no: no masters", "no: bfloat16 moments, no masters"]
    options = systems.parse_options("auto,visit=auto,state_dtype=bfloat16,host_memory_limit=58000000000")
    assert options == {"k": "auto", "visit": "auto", "state_dtype": "bfloat16", "host_memory_limit": 58 * GB}
    assert systems.parse_options("0,offload_activations") == {"k": 0.0, "offload_activations": True}


def test_a_budget_starts_nothing_that_would_end_late(
    tmp_path: Path, watched: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    cheap = min(job.expected_s for job in parts.PARTS["main"](Job()))
    run_suite(tmp_path, "main", "--budget-s", str(cheap + suite.MARGIN_S + 5))
    assert [job.system for job in watched] == ["no-offload", "forward-backward"]
    assert "not started" in capsys.readouterr().out
    run_suite(tmp_path, "main")
    assert [job.system for job in watched][2:] == ["hytrain:auto", "hytrain:1", "hytrain:0"]


def test_what_was_measured_below_several_caps_is_told_cap_by_cap(
    tmp_path: Path, watched: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    run_suite(tmp_path, "frontier_10b")
    told = capsys.readouterr().out
    assert all(f"| 10b | {cap} GiB | {parts.ROAMING} |" in told for cap in parts.CAPS)
    watched.clear()
    run_suite(tmp_path, "frontier_10b", "--cap-gib", "8", "--again")
    assert [(job.cap_gib, job.system) for job in watched] == [(8.0, parts.ROAMING), (8.0, parts.LEANEST)]
