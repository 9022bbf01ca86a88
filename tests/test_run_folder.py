"""A recipe's folder: claimed by one run at a time, cleared for a fresh one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hytrain.errors import ConfigError
from workers.run_folder import claim, set_aside


def test_a_folder_is_one_run_s_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    lock = claim(folder)
    with pytest.raises(ConfigError, match="a run is going on in .*/runs/demo: give this one another"):
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
