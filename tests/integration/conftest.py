"""What every integration test gets: one thread for torch, the run's folder in its own temporary one, a leak check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spawns)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Gradients depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, for whichever process starts the cluster."""
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HYTRAIN_THREADS", "1")
    return tmp_path / "run"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets processes of a role that are started from now on sleep before each message."""

    def slow_down(role: str, seconds: float = 0.03) -> None:
        folder, known = str(Path(__file__).parent / "slow"), os.environ["PYTHONPATH"]
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{known}")
        monkeypatch.setenv("SLOW_ROLE", role)
        monkeypatch.setenv("SLOW_S", str(seconds))

    return slow_down
