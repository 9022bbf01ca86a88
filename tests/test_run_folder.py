"""A run's folder: claimed by one run at a time, cleared for a fresh one, pruned when it is old."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from hytrain.errors import ConfigError
from hytrain.kernels.build import cache_folder
from workers import run_folder
from workers.run_folder import (
    bring_back,
    claim,
    claim_for_node,
    claim_or_beside,
    create,
    default,
    find,
    metrics_file,
    prune,
    recent_records,
    set_aside,
)


def test_a_folder_is_one_run_s_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    lock = claim(folder)
    with pytest.raises(ConfigError, match="another run is using .*/runs/demo: give this one another"):
        claim(folder)
    os.close(claim(tmp_path / "runs" / "other"))
    os.close(lock)
    os.close(claim(folder))


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics-1.jsonl", "metrics-replaced.jsonl"])
def test_records_go_into_files_of_the_folder(name: str, tmp_path: Path) -> None:
    """Not through a link into another run's."""
    makers = (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(tmp_path / "other"))
    for number, make in enumerate(makers):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        with pytest.raises(ConfigError, match=f"{name} is not a file of this folder"):
            claim(folder)
    assert not (tmp_path / "other").exists()
    (tmp_path / "metrics_of_mine.jsonl").symlink_to(tmp_path / "nowhere")
    os.close(claim(tmp_path))


def test_an_empty_home_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "HYTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    own = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert default() == own / ".local/state/hytrain/runs" and cache_folder({}) == own / ".cache/hytrain"
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="set HOME, or HYTRAIN_RUN_DIR"):
        default()


def test_machines_of_one_job_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(run_folder, "SETTLE_S", 0.0)
    folder = tmp_path / "run"
    assert claim_for_node(folder, "42@node7") == folder
    assert claim_for_node(folder, "42@node7") == folder / "node-here"
    with pytest.raises(ConfigError, match="another run is using .*/run: give this one another"):
        claim_for_node(folder, "43@node7")


def test_what_a_run_left_steps_aside_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert set_aside(folder) is None
    (folder / "logs").mkdir(parents=True)
    assert set_aside(folder) is None and (folder / "logs").is_dir(), "nothing has run in it"
    (tmp_path / "demo.2").symlink_to(tmp_path / "nowhere")
    for number in (1, 3):
        (folder / "checkpoints" / "step-5").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f"run {number}")
        (folder / "my notes").touch()
        assert set_aside(folder) == tmp_path / f"demo.{number}"
        assert [path.name for path in folder.iterdir()] == ["my notes"]
    assert (tmp_path / "demo.1" / "metrics.jsonl").read_text() == "run 1"
    assert (tmp_path / "demo.3" / "checkpoints" / "step-5").is_dir()


def test_what_was_set_aside_comes_back_if_nothing_was_trained(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("a run")
    aside = set_aside(folder)
    assert aside is not None
    (folder / "metrics.jsonl").touch()
    (folder / "logs").mkdir()
    assert bring_back(folder, aside)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "metrics.jsonl"] and not aside.exists()
    assert (folder / "metrics.jsonl").read_text() == "a run"
    assert set_aside(folder) == aside
    (folder / "metrics.jsonl").write_text("another run")
    assert not bring_back(folder, aside) and (folder / "metrics.jsonl").read_text() == "another run"


def test_recent_records_are_the_last_ones_and_those_with_plans_before(tmp_path: Path) -> None:
    metrics = metrics_file(tmp_path, 0)
    assert recent_records(metrics, 3, 3) == [], "there is none yet"
    lines = [{"step": step, **({"reason": "a plan"} if step % 2 else {})} for step in range(1, 11)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "rea')
    assert [one["step"] for one in recent_records(metrics, 4, 2)] == [5, 7, 8, 9, 10], "the last line is cut off"
    assert metrics_file(tmp_path, 3).name == "metrics-3.jsonl"


def test_a_second_optimizer_of_a_program_gets_a_folder_beside(tmp_path: Path) -> None:
    locks = claim(tmp_path / "run"), claim(tmp_path / "run-2")
    assert claim_or_beside(tmp_path / "run") == tmp_path / "run-3"
    assert claim_or_beside(tmp_path / "other") == tmp_path / "other"
    for lock in locks:
        os.close(lock)


@pytest.mark.parametrize("take", [claim, claim_or_beside])
def test_a_folder_that_cannot_be_written_to(take: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run cannot be written to: Not a directory"):
        take(tmp_path / "file" / "run")


def made(folder: Path, *, at_s: float, others: tuple[str, ...] = ()) -> Path:
    """The folder of a run that has ended, last written to at `at_s`."""
    (folder / "logs").mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "k": 0.5}\n{"step": 3, "lo')
    for name in others:
        (folder / name).touch()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (at_s, at_s))
    return folder


def test_runs_are_found_with_what_they_did(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", at_s=1e9), made(tmp_path / "new", at_s=2e9, others=("model.pt",))
    (tmp_path / "no run").mkdir()
    lock = claim(tmp_path / "live")
    live, second, third = find(tmp_path)
    assert (live.folder, live.live, live.steps, live.loss) == (tmp_path / "live", True, None, None)
    assert (second.folder, second.own, second.prunable) == (new, False, False), "a program's own files are kept"
    assert (third.folder, third.steps, third.loss, third.at_s, third.prunable) == (old, 2, 2.0, 1e9, True)
    assert find(old) == [third] and find(tmp_path / "nothing") == []
    assert not prune(live) and prune(third) and not old.exists()
    os.close(lock)
    assert prune(live)


def test_a_program_s_run_has_a_folder_of_its_own_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one of a run that goes on, nor one with checkpoints or the program's files."""
    held = list[int]()
    monkeypatch.setattr(run_folder, "claim", lambda folder: held.append(claim(folder)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = default()
    assert runs == tmp_path / "hytrain" / "runs"
    made(runs / "kept", at_s=1e9, others=("model.pt",))
    made(runs / "saved", at_s=1e9, others=("checkpoints",))
    made(runs / "first", at_s=2e9)
    made(runs / "second", at_s=3e9)
    running = claim(runs / "running")
    assert create("train", 6) == runs / "train" and len(find(runs)) == 6, "there is room"
    assert create("train", 4) == runs / "train-2"
    left = {"kept", "saved", "running", "second", "train", "train-2"}
    assert {run.folder.name for run in find(runs)} == left
    create("train", 1)
    assert {run.folder.name for run in find(runs)} == left - {"second"} | {"train-3"}
    for descriptor in (*held, running):
        os.close(descriptor)
    create("train", 1)
    assert {run.folder.name for run in find(runs)} == {"kept", "saved", "train-4"}
    os.close(held[-1])
