"""A run begins with the plan with which the last one like it ended, if there is as much memory, and keeps its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_planner_placements import GB, Machine, Run, require_a_good_plan

from hytrain.planner.contention import USUAL_STEPS
from protocol import messages as m
from protocol.placement import Places
from workers.coordinate.last_plans import LastPlans
from workers.planning.last import LastPlan, same

MACHINE = Machine(work_s=1.2, cap=25 * GB, others=7 * GB, host=118 * GB, blocks=24)  # both memories are full
LEAN = "the first plan, before a step is measured"
LAST = "the plan with which the last run like this one ended"


@pytest.fixture(scope="module")
def first() -> Run:
    run = Run(MACHINE, seed=1)
    run.steps(60)
    return run


@pytest.fixture(scope="module")
def last(first: Run) -> LastPlan:
    return first.remembered[-1]


def began(last: LastPlan | None, machine: Machine = MACHINE) -> Run:
    return Run(machine, seed=2, last=last)


def test_a_plan_is_kept_when_it_rests(first: Run, last: LastPlan) -> None:
    assert last == LastPlan(places=first.now.places, shares=first.planning._shares, gpu_bytes=MACHINE.cap)
    assert len(first.remembered) == 1, "each is told once, and those that soon gave way are not"
    first.steps(USUAL_STEPS)
    assert len(first.remembered) == 1


def test_the_next_run_is_at_rest_from_its_first_step_on(first: Run, last: LastPlan) -> None:
    again = began(last)
    assert (again.now.reason, again.now.places) == (LAST, last.places)
    again.steps(40)
    assert again.moved == 0 and again.remembered == [last]
    assert sum(again.steps_s[:20]) < 0.9 * sum(first.steps_s[:20])
    require_a_good_plan(again)


def test_another_machine_is_noticed(last: LastPlan) -> None:
    again = began(last, replace(MACHINE, cpu=0.5 * MACHINE.cpu, visits=0.7 * MACHINE.visits))
    again.steps(60)
    assert again.now.places != last.places and again.remembered[-1].places == again.now.places
    require_a_good_plan(again)


@pytest.mark.parametrize(
    "change",
    [
        lambda last: {"gpu_bytes": last.gpu_bytes + (1 << 30)},
        lambda last: {"places": Places(last.places.names[:-1])},
        lambda last: {"places": Places(("gpu",) * len(last.places))},
        lambda last: {"places": Places(("cpu",) * len(last.places))},
    ],
    ids=["less GPU memory than then", "another table", "too much for the GPU", "too much for the host"],
)
def test_a_plan_that_may_not_fit_is_left(last: LastPlan, change: Callable[[LastPlan], dict[str, Any]]) -> None:
    changed = replace(last, **change(last))
    assert began(changed).now.reason == LEAN


def test_matrices_of_muon_stay_with_the_gpu(last: LastPlan) -> None:
    on_cpu = replace(last, places=Places(("cpu", "gpu") * (len(last.places) // 2)), gpu_bytes=0)
    assert began(on_cpu, replace(MACHINE, of_muon=1, cap=500 * GB, host=500 * GB)).now.reason == LEAN


@pytest.mark.parametrize(("name", "value"), [("k", "0.3"), ("objective", "gpu-memory"), ("threads", "3")])
def test_what_was_commanded_is_not_kept(name: str, value: str) -> None:
    run = Run(MACHINE, seed=1)
    run.steps(3)
    reply, commands = run.planning.command(name, value)
    assert reply.ok
    run._follow(commands)
    run.steps(40)
    assert not run.remembered


@pytest.fixture
def table(first: Run) -> m.LayerTable:
    return first.table


def test_a_file_is_taken_once(
    table: m.LayerTable, last: LastPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends with this plan leaves none to the next one."""
    plans = LastPlans(str(tmp_path / "plans"), b"machine")
    assert plans.take(table) is None and not caplog.messages
    plans.keep(table, last.places, last.shares)
    [path] = (tmp_path / "plans").iterdir()
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700 and path.suffix == ".json"
    assert LastPlans(str(tmp_path / "plans"), b"another").take(table) is None
    assert plans.take(replace(table, k=0.5)) is None
    assert plans.take(replace(table, inbox="trainer-0-77", gpu_bytes=3, host_bytes=None, hold_bytes=5)) == last
    assert plans.take(table) is None and not path.exists()


def test_tables_of_the_same_training(table: m.LayerTable) -> None:
    layers = (replace(table.layers[0], name="another"), *table.layers[1:])
    assert len({same(table), same(replace(table, layers=layers)), same(replace(table, gpu="GPU-1"))}) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: {},
        lambda content: content | {"places": ["nowhere"]},
        lambda content: content | {"shares": [0.0]},
        lambda content: content | {"shares": [0.0, 1.5]},
        lambda content: content | {"gpu_bytes": "many"},
    ],
)
def test_a_damaged_file_is_no_plan(
    damage: Callable[[Any], Any], table: m.LayerTable, last: LastPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans = LastPlans(str(tmp_path), b"machine")
    plans.keep(table, last.places, last.shares)
    [path] = tmp_path.iterdir()
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert plans.take(table) is None
    assert "the last run's plan cannot be read" in caplog.text and not path.exists()


def test_a_folder_that_cannot_be_written(
    table: m.LayerTable, last: LastPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    plans = LastPlans(str(tmp_path / "file" / "plans"), b"machine")
    plans.keep(table, last.places, last.shares)
    assert "which cannot be kept" in caplog.text
    assert plans.take(table) is None
    nowhere = LastPlans("", b"machine")
    nowhere.keep(table, last.places, last.shares)
    assert nowhere.take(table) is None
