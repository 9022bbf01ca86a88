"""Trackers cost training nothing: neither their pace, nor their errors, reach who writes to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hytrain import trackers
from hytrain.errors import ConfigError
from hytrain.trackers import WAITING, Trackers, check_trackers


class Kept:
    """Keeps what it is given, and how it ends. It may fail from a step on, or wait until it may begin."""

    begins, opened = threading.Event(), threading.Event()
    fails_at = 0
    fails_with: BaseException = OSError(28, "No space left on device")
    kept: list[Any]

    def __init__(self, run_dir: Path, first_step: int, title: str, config: Mapping[str, Any]) -> None:
        self.kept.append((run_dir, first_step, title, config))
        self.opened.set()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.begins.wait()
        if self.fails_at and step >= self.fails_at:
            raise self.fails_with
        self.kept.append((step, numbers))

    def close(self, *, failed: bool) -> None:
        self.kept.append(failed)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Kept], type[Kept]]:
    """What stands in for "tensorboard" and "wandb"; both begin at once."""
    Kept.begins.set()
    first, second = (type(name, (Kept,), {"kept": []}) for name in ("First", "Second"))
    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": first, "wandb": second})
    return first, second


def test_trackers_get_all_numbers_and_hear_how_the_run_has_ended(tmp_path: Path, kinds: tuple[type[Kept], ...]) -> None:
    opened = (tmp_path, 7, "run", {"a": 1})
    with pytest.raises(KeyError), Trackers(["tensorboard", "wandb", "wandb"], tmp_path, "run", {"a": 1}) as both:
        both.write(7, {"loss": 2.0})
        both.write(8, {})
        both.write(8, {"loss": 1.0})
        raise KeyError
    assert [kind.kept for kind in kinds] == [[opened, (7, {"loss": 2.0}), (8, {"loss": 1.0}), True]] * 2
    with Trackers(["wandb"], tmp_path, "run") as one:
        one.write(0, {"loss": 2.0})
    assert kinds[1].kept[4:] == [(tmp_path, 0, "run", {}), (0, {"loss": 2.0}), False] and len(kinds[0].kept) == 4


@pytest.mark.parametrize(
    ("error", "words"), [(OSError(28, "No space"), r"OSError: [Errno 28]"), (SystemExit(1), "SystemExit: 1")]
)
def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, kinds: tuple[type[Kept], ...], caplog: pytest.LogCaptureFixture, error: BaseException, words: str
) -> None:
    kinds[0].fails_at, kinds[0].fails_with = 3, error
    with Trackers(["tensorboard", "wandb"], tmp_path, "run") as both:
        for step in range(1, 6):
            both.write(step, {"loss": 1.0})
    written = [[step for step, *_ in kind.kept[1:-1]] for kind in kinds]
    assert written == [[1, 2], [1, 2, 3, 4, 5]] and kinds[0].kept[-1] is False, "it is closed, too"
    [warning] = caplog.messages
    assert warning.startswith(f"tensorboard gets no more numbers, training goes on: {words}")


def test_who_writes_does_not_wait_for_a_tracker(
    tmp_path: Path, kinds: tuple[type[Kept], ...], caplog: pytest.LogCaptureFixture
) -> None:
    Kept.begins.clear()
    Kept.opened.clear()
    with Trackers(["tensorboard"], tmp_path, "run") as slow:
        slow.write(0, {"loss": 1.0})
        assert Kept.opened.wait(60)
        for step in range(1, 2 * WAITING):
            slow.write(step, {"loss": 1.0})
        Kept.begins.set()
    assert [step for step, _ in kinds[0].kept[1:-1]] == [*range(WAITING + 1)], "the one under way, and those that wait"
    (name, level, warning), (_, _, last) = caplog.record_tuples
    assert (name, level) == ("hytrain.trackers", logging.WARNING) and f"from step {WAITING + 1} on" in warning
    assert last == f"the trackers have missed {2 * WAITING - 1 - WAITING} numbers"


def test_numbers_that_are_logged_one_by_one_wait_together(tmp_path: Path, kinds: tuple[type[Kept], ...]) -> None:
    """A step with more of them than steps may wait loses none."""
    Kept.begins.clear()
    Kept.opened.clear()
    with Trackers(["tensorboard"], tmp_path, "run") as slow:
        slow.write(0, {"loss": 1.0})
        assert Kept.opened.wait(60)
        for step in (1, 2, 1):
            for number in range(WAITING):
                slow.write(step, {f"n{number}": number + step})
        Kept.begins.set()
    expected = [(step, {f"n{number}": number + step for number in range(WAITING)}) for step in (1, 2, 1)]
    assert kinds[0].kept[1:-1] == [(0, {"loss": 1.0}), *expected]


def test_a_run_ends_although_a_tracker_does_not(
    tmp_path: Path, kinds: tuple[type[Kept], ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue may even be full."""
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    Kept.begins.clear()
    Kept.opened.clear()
    with Trackers(["tensorboard"], tmp_path, "run") as stuck:
        stuck.write(0, {"loss": 1.0})
        assert Kept.opened.wait(60)
        for step in range(1, WAITING + 1):
            stuck.write(step, {"loss": 1.0})
    assert caplog.messages[-1] == "the trackers miss the last numbers: writing them has taken 0 s"
    Kept.begins.set()


def test_only_known_trackers() -> None:
    for names in (["mlflow"], "wandb"):
        with pytest.raises(ConfigError, match=r"log_to is .*: a list of tensorboard and wandb, or of one of them"):
            check_trackers(names, "log_to")
    check_trackers((), "log_to")
