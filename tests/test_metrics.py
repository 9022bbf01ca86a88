"""metrics.jsonl has one line per step, in order, however a loop counts, logs and resumes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hytrain.step.numbers import StepNumbers
from protocol import messages as m
from workers.coordinate.metrics_file import BLOCK_BYTES, MetricsFile
from workers.coordinate.records import LOG_PATIENCE_STEPS, Records
from workers.effects import Amend


class Training:
    """One process that trains: the way from `step()` and `opt.log` to the file, without the processes between."""

    def __init__(self, path: Path, restored: int | None = None) -> None:
        self.finished, self.numbers, self.records, self.file = 0, StepNumbers(), Records(0), MetricsFile(path)
        self.between, self.made = True, 0
        if restored is not None:
            self.load(restored)

    def load(self, steps: int) -> None:
        self.finished = steps
        self.numbers.restored(steps)

    def backward(self) -> None:
        self.between = False

    def step(self) -> None:
        self.finished, self.between, self.made = self.finished + 1, True, self.made + 1
        self._write(self.records.add({"step": self.finished, "made": self.made}))

    def log(self, step: int, **numbers: float) -> None:
        place = self.numbers.place(step, self.finished, between=self.between)
        if place.renames is not None:
            self.finished += step - place.renames
        self._write(self.records.log(m.Log(step=step, numbers=numbers, renames=place.renames, ahead=place.ahead)))

    def _write(self, lines: Any) -> None:
        for line in lines:
            if isinstance(line, Amend):
                self.file.amend(line.step, line.numbers)
            else:
                self.file.append(line.line)

    def close(self) -> int:
        self._write(self.records.close())
        assert self.file.write_late() == []
        self.file.close()
        return self.finished


def after_the_step(run: Training, steps: range) -> None:
    for step in steps:
        run.backward()
        run.step()
        run.log(step, loss=step)


def before_the_step(run: Training, steps: range) -> None:
    for step in steps:
        run.backward()
        run.log(step, loss=step)
        run.step()


def before_the_forward(run: Training, steps: range) -> None:
    for step in steps:
        run.log(step, loss=step)
        run.backward()
        run.step()


def a_step_late(run: Training, steps: range) -> None:
    for step in steps:
        run.backward()
        run.step()
        if step > steps.start:
            run.log(step - 1, loss=step - 1)
    run.log(steps[-1], loss=steps[-1])


def much_later(run: Training, steps: range) -> None:
    for step in steps:
        run.backward()
        run.step()
        if step >= steps.start + 2 * LOG_PATIENCE_STEPS:
            run.log(step - 2 * LOG_PATIENCE_STEPS, loss=step - 2 * LOG_PATIENCE_STEPS)
    for step in steps[-2 * LOG_PATIENCE_STEPS :]:
        run.log(step, loss=step)


Loop = Callable[[Training, range], None]
EACH_STEP: tuple[Loop, ...] = (after_the_step, before_the_step, before_the_forward)
LATE: tuple[Loop, ...] = (a_step_late, much_later)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "metrics.jsonl"
    for file in tmp_path.iterdir():
        assert all("made" in record for record in lines(file)), "each line has a step that was made"


LOOPS = [
    *((loop, first, restores) for loop in EACH_STEP for first in (0, 1) for restores in (True, False)),
    *((loop, 1, True) for loop in LATE),  # a count that comes late and is not restored can't be told from another one
]


@pytest.mark.parametrize(("loop", "first", "restores"), LOOPS)
def test_a_loop_that_is_resumed_twice(loop: Loop, first: int, restores: bool, path: Path) -> None:
    """From a checkpoint of 20 steps, when 30 were made; and at the end. Its own count goes on, or is restored too."""
    run = Training(path)
    loop(run, range(first, first + 20))
    saved = run.finished
    loop(run, range(first + 20, first + 30))
    run.close()
    run = Training(path, saved if restores else None)
    loop(run, range(first + 20, first + 40))
    saved = run.close()
    run = Training(path, saved if restores else None)
    loop(run, range(first + 40, first + 45))
    run.close()
    made = [*range(1, 21), *range(1, 21), *range(1, 6)]
    expected = [{"step": first + n, "made": made[n], "loss": first + n} for n in range(45)]
    assert lines(path) == expected
    replaced = lines(path.with_name("metrics-replaced.jsonl"))
    assert [record["step"] for record in replaced] == list(range(first + 20, first + 30))


def test_a_loop_that_does_not_log_goes_on_with_the_restored_count(path: Path) -> None:
    for restored in (0, 7, 5):
        run = Training(path, restored)
        for _ in range(7):
            run.step()
        run.close()
    assert [record["step"] for record in lines(path)] == list(range(1, 13))


def test_another_run_in_the_same_folder_counts_from_the_beginning(path: Path) -> None:
    for _ in range(2):
        run = Training(path)
        after_the_step(run, range(12))
        run.close()
    assert [record["step"] for record in lines(path)] == list(range(12))
    assert len(lines(path.with_name("metrics-replaced.jsonl"))) == 12


def test_a_loop_that_goes_back_in_the_same_process(path: Path) -> None:
    run = Training(path)
    after_the_step(run, range(1, 11))
    run.load(5)
    after_the_step(run, range(6, 9))
    run.close()
    assert [(record["step"], record["made"]) for record in lines(path)] == [*((n, n) for n in range(1, 6)), (6, 11)] + [
        (7, 12),
        (8, 13),
    ]
    assert [record["made"] for record in lines(path.with_name("metrics-replaced.jsonl"))] == list(range(6, 11))


def test_a_loop_that_counts_micro_batches_or_says_where_it_begins(path: Path) -> None:
    run = Training(path)
    run.log(100)
    for micro_batch in range(100, 112):
        run.backward()
        run.log(micro_batch, loss=micro_batch)
        if micro_batch % 4 == 3:
            run.step()
    run.close()
    assert lines(path) == [{"step": step, "made": n, "loss": step} for n, step in enumerate((103, 107, 111), 1)]


def test_numbers_for_a_step_that_never_came_go_to_the_last(path: Path) -> None:
    run = Training(path)
    after_the_step(run, range(3))
    run.log(3, validation=0.5)
    run.log(1, loss=9.0, accuracy=0.25)
    run.close()
    assert lines(path) == [
        {"step": 0, "made": 1, "loss": 0},
        {"step": 1, "loss": 1, "accuracy": 0.25, "made": 2},
        {"step": 2, "validation": 0.5, "made": 3, "loss": 2},
    ]


def test_a_line_that_a_crash_has_cut_off_goes(path: Path) -> None:
    path.write_text('{"step": 1, "made": 1}\n{"step": 2, "ma')
    file = MetricsFile(path)
    assert path.read_text().endswith('"ma'), "nothing happens before the first record"
    file.append('{"step": 2, "made": 1}')
    file.close()
    assert [record["step"] for record in lines(path)] == [1, 2]


def test_lines_are_found_from_the_end_of_a_long_file(path: Path) -> None:
    file = MetricsFile(path)
    many = range(1, BLOCK_BYTES // 8)
    for step in many:
        file.append(json.dumps({"step": step, "made": step}))
    assert path.stat().st_size > 2 * BLOCK_BYTES
    for step in (2, 0, many[-1]):
        file.amend(step, {"loss": float(step)})
    assert file.write_late() == [0], "the only one without a line"
    file.append(json.dumps({"step": 3, "made": 0}))
    file.close()
    assert lines(path) == [{"step": 1, "made": 1}, {"step": 2, "made": 2, "loss": 2.0}, {"step": 3, "made": 0}]
    replaced = lines(path.with_name("metrics-replaced.jsonl"))
    assert [record["step"] for record in replaced] == list(many[2:]) and replaced[-1]["loss"] == many[-1]


def test_late_numbers_cost_as_much_as_the_lines_that_they_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, and whatever their order: the file is read and written once, as for one of them."""
    file, written = MetricsFile(path), list[int]()
    for step in range(1, 401):
        file.append(json.dumps({"step": step, "made": step}))
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda at, data, start: written.append(len(data)) or pwrite(at, data, start))
    for name in range(20):
        for step in range(400, 0, -1):
            file.amend(step, {f"n{name}": step, "made": 0})
    assert file.write_late() == file.write_late() == [] and len(written) == 1
    file.close()
    expected = {f"n{name}" for name in range(20)} | {"step", "made"}
    assert all(line["made"] == line["n7"] == line["step"] and line.keys() == expected for line in lines(path))


def test_a_full_disk_leaves_whole_lines_and_a_counted_gap(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes three bytes more, then none."""
    pwrite, file = os.pwrite, MetricsFile(path)
    for step in range(1, 8):
        if step not in (3, 4, 6):
            file.append(json.dumps({"step": step, "made": step}))
            continue
        full_at, whole = path.stat().st_size + 3, path.read_bytes()

        def until_full(descriptor: int, data: bytes, start: int, full_at: int = full_at) -> int:
            if start >= full_at and data:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, data[: full_at - start], start)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", until_full)
            with pytest.raises(OSError):
                file.append(json.dumps({"step": step, "made": step}))
            assert path.read_bytes() == whole
            file.amend(1, {"loss": 1.0})
            with pytest.raises(OSError):
                file.write_late()
            assert path.read_bytes() == whole
    file.amend(2, {"loss": 2.0})
    assert file.write_late() == []
    file.close()
    assert [record["step"] for record in lines(path)] == [1, 2, 5, 7]
    assert [record.get("missing_records", 0) for record in lines(path)] == [0, 0, 2, 1]
    assert [record.get("loss") for record in lines(path)] == [1.0, 2.0, None, None], "late numbers wait for room"
