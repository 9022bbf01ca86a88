"""When a followed run raises an alert, how often, and with which words; and that the command runs."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_monitor import look, status
from test_report import record

from protocol import messages as m
from workers.watch import monitor
from workers.watch.alerts import CALM, STALLED, STEPS, Alerts
from workers.watch.troubles import Trouble


def at(step: int, share: float = 0.0, **more: Any) -> m.Status:
    return status(record=json.dumps(record(step, step_s=1.0, stall_s=share, **{"policy": "deadline"} | more)))


def told(*statuses: m.Status) -> list[Trouble]:
    alerts = Alerts()
    return [alert for one in statuses for alert in alerts.look(look(one))]


def steps(count: int, share: float, start: int = 1, **more: Any) -> Iterator[m.Status]:
    return (at(step, share, **more) for step in range(start, start + count))


def test_long_waits_are_told_once() -> None:
    high, low = STALLED + 0.05, CALM - 0.05
    assert told(*steps(STEPS - 1, high)) == [], "too few steps to tell"
    [alert] = told(*steps(3 * STEPS, high))
    assert alert.about == "stall" and alert.text.startswith(f"35% of the {STEPS} steps up to step {STEPS} were spent")
    between = told(*steps(STEPS, high), *steps(STEPS, 0.22, 100), *steps(STEPS, high, 200))
    assert len(between) == 1, "it was never well in between"
    again = told(*steps(STEPS, high), *steps(STEPS, low, 100), *steps(STEPS, high, 200))
    assert [alert.about for alert in again] == ["stall"] * 2
    assert told(*steps(STEPS, 0.0), at(99, 0.99), *steps(STEPS, 0.0, 100)) == [], "one slow step"
    assert told(*[at(1, 0.9)] * STEPS) == [], "the same record again and again"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cpu_busy_s": 0.95}, "give it more cores"),
        ({"cpu_busy_s": 0.1}, "copies between host and GPU"),
        ({"cpu_busy_s": None, "visiting_layers": 0}, "look at a timeline"),
    ],
)
def test_the_likely_cause_is_named(more: dict[str, Any], words: str) -> None:
    [alert] = told(*steps(STEPS, 0.5, **more))
    assert alert.text.endswith(words) or words in alert.text


def test_a_process_that_does_not_answer_and_a_divergence_are_told_at_once() -> None:
    first, *others = at(1).processes
    silent = replace(at(1), processes=(replace(first, silent_s=4.0), *others))
    [alert, *more] = told(silent, silent, at(2), silent)
    assert alert == Trouble("stall", f"{first.address} (process {first.pid}) has not answered for 4 s") == more[0]
    assert told(at(1), at(2, diverged_at=2.0), at(3, diverged_at=2.0)) == [
        Trouble("divergence", "training has diverged at step 2")
    ]
    silent_record = json.loads(at(2).record)
    del silent_record["loss"]
    between = status(record=json.dumps(silent_record))
    assert len(told(at(1, diverged_at=1.0), between, at(3, diverged_at=1.0))) == 1, "the loop logs every other step"
    assert len(told(at(1, diverged_at=1.0), at(2), at(3, diverged_at=3.0))) == 2
    assert told(status(record="{}")) == []


def test_the_command_knows_what_has_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys; print(*(os.environ[f'HYTRAIN_{name}'] for name in ('ALERT', 'TEXT', 'RUN')))"
    out = tmp_path / "out"
    commands = {"stall": None, "divergence": f'{sys.executable} -c "{script}" > {out}.part; mv {out}.part {out}'}
    monitor._follow(
        [*steps(STEPS, 0.9), at(99, diverged_at=98.0)],
        look,
        as_json=False,
        commands=commands,
    )
    ends_s = time.monotonic() + 60
    while not out.exists() and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert out.read_text() == f"divergence training has diverged at step 98 {at(1).run_dir}\n"
    assert len(capsys.readouterr().out.splitlines()) == STEPS + 2


@pytest.mark.parametrize(
    "words",
    [
        ["--on-stall", "true"],
        ["--once", "--on-divergence", "true"],
        ["--web-token-file", "x"],
        ["--once", "one", "two"],
    ],
)
def test_what_belongs_to_another_mode_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        monitor.main(words)
    assert re.search("(are for --follow|is for --web|are for --web)", capsys.readouterr().err)
