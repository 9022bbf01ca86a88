"""The timeline of a run: what three processes wrote, on one clock, in the order of cause and effect."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import adamw, differing, state, train, wait_for_coordinator, weights
from programs import CLUSTER, SCRIPTS, run
from small_models import gpt2, language_loss, llama, perceptron, square_loss
from trace_format import check

from hytrain.run import trace
from hytrain.step import offload
from hytrain.step.measure import MIN_STALL_S
from protocol.address import Address
from protocol.placement import CPU, GPU, VISIT
from workers.watch import monitor
from workers.watch.bill import Row, bill
from workers.watch.timeline import of_run

STEPS = 40
#: On a CPU these follow each other for every layer that the optimizer process owns, in every step.
LIFE = ("backward", "D2H", "waiting", "CPU update", "WeightsReady", "H2D")


class Event(NamedTuple):
    """One event of the merged file, its process and track by name, in seconds of the monotonic clock."""

    process: str
    track: str
    name: str
    began_s: float
    ended_s: float
    args: dict[str, Any]


class Timeline(list[Event]):
    @classmethod
    def of(cls, run_dir: Path) -> Timeline:
        """Of a file that follows the format's rules."""
        events = check(run_dir / trace.FILE)
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        return cls(
            Event(
                processes[e["pid"]],
                "counter" if e["ph"] == "C" else tracks[e["pid"], e["tid"]],
                e["name"],
                e["ts"] / 1e6,
                (e["ts"] + e.get("dur", 0.0)) / 1e6,
                e.get("args", {}),
            )
            for e in events
            if e["ph"] != "M"
        )

    def lives(self) -> dict[tuple[int, int], dict[str, list[Event]]]:
        """By step and layer: its events by kind. A message's kind is its name."""
        found: dict[tuple[int, int], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in self:
            if "lid" in event.args and event.track != "planes":
                kind = event.args.get("kind", event.name.split()[0])
                found[event.args["step"], event.args["lid"]][kind].append(event)
        return found

    def placements(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """From which step on layers were placed where, as the coordinator heard it."""
        for event in self:
            if event.process == "coordinator-0" and event.name.endswith("in effect"):
                yield event.args["step"], tuple(event.args["placements"])


def test_a_run_in_which_layers_change_owners_all_the_time(run_dir: Path) -> None:
    model = llama()
    with adamw(model, policy="random", trace=True) as opt:
        for step in range(STEPS):
            train(model, opt, [step])
            wait_for_coordinator(opt)
            opt._engine._handover.wait()  # or fewer layers move on a busy machine
    timeline = Timeline.of(run_dir)
    each_gradient_is_followed_to_its_weights(timeline)
    all_three_processes_are_shown(timeline)
    each_step_adds_up(timeline)
    steps_k_and_plans_are_shown(timeline)
    rows = billed(run_dir)
    assert {key for key, row in rows.items() if row.bound_ms is None} == {"memory", "ranks", "rest"}
    assert all(0.0 <= row.bound_ms <= (row.busy_ms or 0.0) for row in rows.values() if row.bound_ms is not None)


def billed(run_dir: Path) -> dict[str, Row]:
    """The bill, whose parts add up to the steps but for rests that are too short to be drawn."""
    timeline = of_run(run_dir)[0]
    found = bill(timeline)
    rows = {row.key: row for row in found.rows}
    parts = 1 + sum(event.track == "compute" for event in Timeline.of(run_dir))
    assert sum(row.ms or 0.0 for row in found.rows) == pytest.approx(found.step_ms)
    assert abs(rows["rest"].ms or 0.0) * found.steps <= parts * MIN_STALL_S * 1e3
    return rows


def each_gradient_is_followed_to_its_weights(timeline: Timeline) -> None:
    lives = timeline.lives()
    lids = {lid for _, lid in lives}
    assert lids == set(range(len(lids))) and len(lids) > 3
    plans, now = dict(timeline.placements()), tuple[str, ...]()
    assert len(plans) > 2, "layers changed owners"
    placed: Counter[str] = Counter()
    for step in range(STEPS):
        now = plans.get(step, now)
        for lid in lids:
            life, where = lives[step, lid], now[lid]
            placed[where] += 1
            assert len(life["update"]) == (where == "gpu") and len(life["visit"]) == (where == "visit"), (step, lid)
            if where == "cpu":
                check_order(life, step, lid, lives[step + 1, lid].get("forward", []))
            else:
                assert LIFE[1] not in life, (step, lid)
    assert all(placed[placement.name] >= len(lids) / 2 for placement in (GPU, CPU, VISIT)), placed


def check_order(life: dict[str, list[Event]], step: int, lid: int, next_forward: list[Event]) -> None:
    """What a layer went through in a step, each thing after what it follows from."""
    where = f"layer {lid} in step {step}: {life}"
    kinds = LIFE if life.get("backward") else LIFE[1:]
    for kind in kinds:
        assert len(life[kind]) == 1 or (kind == "CPU update" and life[kind]), where
    [departed], [waited], [told], [landed] = (life[kind] for kind in ("D2H", "waiting", "WeightsReady", "H2D"))
    if life.get("backward"):
        assert life["backward"][-1].ended_s <= departed.began_s, where
    assert departed.ended_s <= waited.began_s, where
    assert waited.ended_s == pytest.approx(life["CPU update"][0].began_s, abs=1e-6), where
    assert life["CPU update"][-1].ended_s <= told.began_s <= landed.began_s, where
    if next_forward:
        assert landed.ended_s <= next_forward[-1].ended_s, where


def each_step_adds_up(timeline: Timeline) -> None:
    """What the trainer did and waited for in a step, one after the other, is the step.

    But for rests that are too short to be drawn, which do not become longer on a busy machine.
    """
    steps = {event.args["step"]: event for event in timeline if event.track == "step"}
    for number, step in steps.items():
        parts = [event for event in timeline if event.track == "compute" and event.args["step"] == number]
        parts.sort(key=lambda part: part.began_s)
        assert step.began_s - 1e-6 <= parts[0].began_s and parts[-1].ended_s <= step.ended_s + 1e-6
        ends_s = [step.began_s, *(part.ended_s for part in parts)]
        begins_s = [*(part.began_s for part in parts), step.ended_s]
        for ended_s, begun_s in zip(ends_s, begins_s, strict=True):
            assert -1e-6 <= begun_s - ended_s < MIN_STALL_S + 1e-6, (number, ended_s, parts)


@pytest.mark.parametrize(
    "options",
    [
        {"grad_accumulation": 2},
        {"max_grad_norm": 0.5, "k": 0.5},
        {"overlap": False, "k": 0.5},
        {"visit": 1.0, "k": 0.0},
        {"updates": "step", "k": 0.5},
    ],
    ids=lambda options: "-".join(options),
)
def test_each_step_adds_up_however_it_is_trained(run_dir: Path, options: dict[str, Any]) -> None:
    model = gpt2()
    with adamw(model, trace=True, **options) as opt:
        for step in range(6):
            language_loss(model, 2 * step).backward()
            if "grad_accumulation" in options:
                language_loss(model, 2 * step + 1).backward()
            opt.step()
            opt.zero_grad()
    timeline = Timeline.of(run_dir)
    each_step_adds_up(timeline)
    kinds = {event.args["kind"] for event in timeline if event.track == "compute"}
    assert ("micro-batches" in kinds) is ("grad_accumulation" in options)


def test_of_several_backwards_that_nobody_has_announced_the_last_is_measured(run_dir: Path) -> None:
    model = gpt2()
    with adamw(model, trace=True, updates="step") as opt:
        for step in range(4):
            for part in range(3):
                language_loss(model, 3 * step + part).backward()
            opt.step()
            opt.zero_grad()
    timeline = Timeline.of(run_dir)
    each_step_adds_up(timeline)
    layers = len(opt._session.layers)
    for step in range(4):
        backwards = [e for e in timeline if e.args.get("step") == step and e.args.get("kind") == "backward"]
        lids = [event.args["lid"] for event in backwards if "lid" in event.args]
        assert sorted(lids) == sorted([*range(layers), lids[0]]), "and the first backward's beginning"


def test_copies_are_measured_as_without_a_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights stay from backward on, for their state's visit, until the next forward."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    seen = dict[bool, list[list[int]]]()
    for draws in (False, True):
        model = llama()
        with adamw(model, trace=draws, offload_weights=1.0, k=0.0, visit=1.0) as opt:
            seen[draws] = []
            for step in range(6):
                train(model, opt, [step])
                seen[draws].append([times.lid for times in opt._engine._meter.times if times.h2d_s is not None])
    assert seen[True] == seen[False] and len(seen[True][-1]) > 1


def test_all_copies_of_offloaded_weights_are_drawn(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in the middle of a model come for forward and again for backward; one copy of each counts for plans."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    model = llama()
    with adamw(model, trace=True, offload_weights=1.0, k=0.0) as opt:
        train(model, opt, range(4))
        meter = opt._engine._meter
        assert meter.measured == 3
        [h2d_s] = [times.h2d_s for times in meter.times if times.lid == 1]
    timeline = of_run(run_dir)[0]
    copies = Counter((span.step, span.lid) for span in timeline.of_kind("H2D"))
    assert [copies[step, lid] for step in (1, 2, 3) for lid in (1, 2)] == [2] * 6
    first, _ = (span for span in timeline.of_kind("H2D") if (span.step, span.lid) == (3, 1))
    assert (h2d_s or 0.0) * 1e3 == pytest.approx(first.ended_ms - first.began_ms, abs=1e-5)


def all_three_processes_are_shown(timeline: Timeline) -> None:
    shown: dict[str, set[str]] = defaultdict(set)
    for event in timeline:
        shown[event.process].add(event.track.rstrip(" 0123456789"))
    assert shown == {
        "trainer-0": {"step", "compute", "D2H", "H2D", "visits"},
        "optimizer-0": {"waiting", "CPU update", "messages", "planes"},
        "coordinator-0": {"plans", "counter"},
    }
    [compute] = [{e.args["kind"] for e in timeline if e.track == "compute"}]
    always = {"forward", "backward", "update", "between steps", "after backward", "step()"}
    assert always <= compute <= always | {"stall"}
    named = [{e.name.removeprefix("H2D ") for e in timeline if e.track == "H2D"}]
    named.append({e.name for e in timeline if e.track == "CPU update"})
    assert named[0] == named[1], "layers have one name everywhere"


def steps_k_and_plans_are_shown(timeline: Timeline) -> None:
    steps = [event for event in timeline if event.track == "step"]
    assert [event.name for event in steps] == [f"step {step}" for step in range(STEPS)]
    for before, after in zip(steps, steps[1:], strict=False):
        assert before.ended_s <= after.began_s
    ks = [event for event in timeline if event.name == "k"]
    assert len(ks) == STEPS and len({event.args["k"] for event in ks}) > 2
    for step, event in zip(steps, ks, strict=True):
        assert step.ended_s <= event.began_s, "one clock: k is that of the step that has just ended"
    proposed = [event for event in timeline if event.name.endswith("proposed")]
    held = {event.name.split()[1] for event in timeline if event.name.endswith("in effect")}
    assert held <= {event.name.split()[1] for event in proposed} and all(event.args["reason"] for event in proposed)


def test_without_overlap_backward_ends_before_any_update(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment asks for the timeline."""
    for asked in ("0", "1"):
        monkeypatch.setenv("HYTRAIN_TRACE", asked)
        model = llama()
        with adamw(model, updates="backward", k=0.5, overlap=False) as opt:
            train(model, opt, range(4))
        assert (run_dir / trace.FILE).exists() is (run_dir / trace.FOLDER).is_dir() is (asked == "1")
    timeline = Timeline.of(run_dir)
    for step in range(4):
        events = [event for event in timeline if event.args.get("step") == step]
        begun = [event.began_s for event in events if event.args.get("kind") in ("D2H", "update")]
        backwards = [event for event in events if event.args.get("kind") == "backward"]
        assert len(backwards) == len(begun) > 3
        assert max(event.ended_s for event in backwards) <= min(begun)


def test_a_program_under_the_launcher(run_dir: Path) -> None:
    """The flag stands before the program; an earlier run's events do not come back."""
    earlier = trace.TraceWriter(run_dir, Address("trainer", 7))
    earlier.counter("k", 0.0, k=1.0)
    earlier.close()
    ran = run(sys.executable, CLUSTER, "--trace", SCRIPTS / "plain.py", "hytrain", "6")
    assert ran.returncode == 0, ran.stderr
    assert {event.process for event in Timeline.of(run_dir)} == {"trainer-0", "optimizer-0", "coordinator-0"}


def order(run_dir: Path, *words: str) -> tuple[threading.Thread, list[int]]:
    """`hytrain-monitor`, on a thread, and its exit status once it is done."""
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(monitor.main([str(run_dir), *words])))
    thread.start()
    return thread, status


def train_until_done(model: Any, opt: Any, ordered: tuple[threading.Thread, list[int]], first: int = 0) -> int:
    """Train until the command is done. Returns the number of steps so far."""
    thread, status = ordered
    while thread.is_alive():
        train(model, opt, [first])
        first += 1
    assert status == [0]
    return first


@pytest.mark.usefixtures("own_run")
def test_some_steps_of_a_run_are_drawn_on_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without waiting for the run's end, twice, and with the bits of a run without it."""
    model = llama()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2))
        assert not (run_dir / trace.FOLDER).exists()
        done = 2
        for steps in (3, 2):
            done = train_until_done(model, opt, order(run_dir, "--trace", str(steps)), done)
            said = capsys.readouterr().out.splitlines()
            assert said[:2] == [f"the next {steps} steps are drawn into trace.json", str(run_dir / trace.FILE)]
            assert said[3].startswith(f"{steps} steps from step ")
            assert sum(" of what it took: the time for " in line for line in said) == 1
            timeline = Timeline.of(run_dir)
            drawn = sorted(event.args["step"] for event in timeline if event.track == "step")
            assert len(drawn) == steps and drawn == list(range(drawn[0], drawn[0] + steps))
            assert {event.process for event in timeline} == {"trainer-0", "optimizer-0", "coordinator-0"}
            lives = timeline.lives()
            assert {step for step, _ in lives} == set(drawn)
            assert billed(run_dir)["cpu"].bound_ms, "the rates are drawn, too"
            updated = [lid for (_, lid), life in lives.items() if "CPU update" in life]
            read = of_run(run_dir)[0]
            gradients_bytes = 4 * sum(read.rates["numels"][lid] for lid in updated)
            assert 0 < gradients_bytes <= read.to_host_bytes < 1.01 * gradients_bytes, "and samples of weights"
            for (step, lid), life in lives.items():
                if "update" not in life:
                    check_order(life, step, lid, lives[step + 1, lid].get("forward", []) if step + 1 in drawn else [])
        size = sum(path.stat().st_size for path in (run_dir / trace.FOLDER).iterdir())
        train(model, opt, range(done, done + 4))
        opt.synchronize()
        assert sum(path.stat().st_size for path in (run_dir / trace.FOLDER).iterdir()) == size, "off costs nothing"
        traced = state(opt) | weights(model)
    model = llama()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(done + 4))
        assert differing(state(opt) | weights(model), traced) == []


@pytest.mark.usefixtures("own_run")
def test_a_timeline_that_is_drawn_can_be_ended(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = perceptron()
    with adamw(model, trace=True) as opt:
        train(model, opt, range(2), loss_of=square_loss)
        thread, status = order(run_dir, "--trace", "5")
        thread.join()
        assert status == [2] and "trace 0 ends it" in capsys.readouterr().err
        ordered, last = order(run_dir, "--trace", "0"), 2
        while ordered[0].is_alive():
            train(model, opt, [last], loss_of=square_loss)
            last += 1
        steps = [event.args["step"] for event in Timeline.of(run_dir) if event.track == "step"]
        assert steps[:2] == [0, 1] and len(steps) <= last
        for words, refusal in (
            (["0"], "no timeline is drawn"),
            (["1001"], "up to 1000"),
            (["few"], "a number of steps"),
        ):
            thread, status = order(run_dir, "--trace", *words)
            thread.join()
            assert status == [2] and refusal in capsys.readouterr().err
