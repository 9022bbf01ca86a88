"""A recipe's folder: claimed by one run at a time, cleared for a fresh one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hytrain.errors import ConfigError
from workers.run_folder import bring_back, claim, claim_or_beside, set_aside


def test_a_folder_is_one_run_s_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    lock = claim(folder)
    with pytest.raises(ConfigError, match="another run is using .*/runs/demo: give this one another"):
        claim(folder)
    os.close(claim(tmp_path / "runs" / "other"))
    os.close(lock)
    os.close(claim(folder))


def test_what_a_run_left_steps_aside_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert set_aside(folder) is None
    for number in (1, 2):
        (folder / "checkpoints" / "step-5").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f"run {number}")
        (folder / "my notes").touch()
        assert set_aside(folder) == tmp_path / f"demo.{number}"
        assert [path.name for path in folder.iterdir()] == ["my notes"]
    assert (tmp_path / "demo.1" / "metrics.jsonl").read_text() == "run 1"
    assert (tmp_path / "demo.2" / "checkpoints" / "step-5").is_dir()


def test_a_folder_in_which_nothing_ran_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo" / "logs").mkdir(parents=True)
    assert set_aside(tmp_path / "demo") is None and (tmp_path / "demo" / "logs").is_dir()


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
