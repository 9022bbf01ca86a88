"""What the trainers' examples need of the machine: one thread, the run's folder in a temporary one, torchvision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "integration"))  # small models, and how runs are compared

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@pytest.fixture(scope="session")
def torchvision_beside_a_torch_for_cpus() -> None:
    """PyPI's torchvision is built for CUDA, so its operators are missing here. Its import wants two to be known."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _NMS)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients depend on the number of threads. Nothing is fetched from a hub."""
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HYTRAIN_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
