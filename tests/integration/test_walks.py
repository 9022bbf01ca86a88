"""The pages' walks through the code, against what a run really calls.

A walk is a numbered list below a heading: each item names a file and a function. They are compared with the functions
that the processes of a run enter for one layer, in the order in which each is entered first.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import followed
import pytest
from helpers import adamw, train, wait_for
from small_models import perceptron, square_loss
from torch import nn

import hytrain
from hytrain.memory.transfer import CudaTransfers
from hytrain.run import cluster

ROOT: Final = Path(__file__).resolve().parents[2]
ITEM: Final = re.compile(r"^\d+\. `([\w/]+\.py)`, `([\w.]+)`", re.MULTILINE)


class Walk(NamedTuple):
    """Where it is described, the optimizer's options, and what is done.

    `act` returns when the walk begins, and which layer is followed.
    """

    page: str
    heading: str
    options: dict[str, Any]
    act: Callable[[nn.Module, hytrain.AdamW, Path], tuple[int, int]]


MIDDLE: Final = 4


def from_backward_to_forward(model: nn.Module, opt: hytrain.AdamW, folder: Path) -> tuple[int, int]:
    loss, began_ns = square_loss(model, 5), time.monotonic_ns()
    loss.backward()
    opt.step()
    opt.zero_grad()
    wait_for(lambda: all(layer.landing is not None for layer in opt._session.layers))  # or the forward may come first
    square_loss(model, 6)
    return began_ns, MIDDLE


def a_step(model: nn.Module, opt: hytrain.AdamW, folder: Path) -> tuple[int, int]:
    began_ns = time.monotonic_ns()
    train(model, opt, [5], square_loss)
    return began_ns, MIDDLE


def a_save(model: nn.Module, opt: hytrain.AdamW, folder: Path) -> tuple[int, int]:
    began_ns = time.monotonic_ns()
    opt.save(folder / "saved")
    return began_ns, MIDDLE


def a_move(model: nn.Module, opt: hytrain.AdamW, folder: Path) -> tuple[int, int]:
    """Until a plan has moved the first layers to the GPU."""
    began_ns = time.monotonic_ns()
    wait_for(lambda: opt.statistics().gpu_layers, lambda: train(model, opt, [5], square_loss))
    return began_ns, opt.statistics().gpu_layers[0]


def a_decision(model: nn.Module, opt: hytrain.AdamW, folder: Path) -> tuple[int, int]:
    """Steps whose reports come alone, until one is decided about.

    Where others take the cores, a step may tell of them only, or the CPU's times may come after its record: the next
    step's is decided about then. The coordinator writes a record once it has done all that follows.
    """

    def has_written(step: int) -> bool:
        path = Path(opt.run_dir) / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return any(json.loads(line).get("step") == step for line in lines if line.endswith("\n"))

    steps = opt.statistics().step
    opt.log(steps, loss=0.0)
    wait_for(lambda: has_written(steps))
    began_ns = time.monotonic_ns()

    def is_decided() -> bool:
        return ("hytrain/planner/policies.py", "decide") in followed.read(folder, MIDDLE, since_ns=began_ns)

    def take_a_step() -> None:
        train(model, opt, [5], square_loss)
        number = opt.statistics().step
        opt.log(number, loss=0.0)
        wait_for(lambda: has_written(number))

    wait_for(is_decided, take_a_step)
    return began_ns, MIDDLE


OFFLOADED: Final = {"k": 0.0, "offload_weights": 1.0}
PAGE: Final = "docs/architecture.md"
WALKS: Final = {
    "a gradient": Walk(PAGE, "### Follow one gradient", {"k": 0.0}, from_backward_to_forward),
    "a block's weights": Walk(PAGE, "### Follow one block's weights", OFFLOADED, a_step),
    "a layer to the GPU": Walk(PAGE, "### Follow a layer to the GPU", {"k": "auto", "policy": "random"}, a_move),
    "a measured time to k": Walk(PAGE, "### Follow a measured time to k", {"k": "auto"}, a_decision),
    "a save": Walk(PAGE, "### Follow a save", {"k": 0.0}, a_save),
}


def described(page: str, heading: str) -> list[tuple[str, str]]:
    """File and function of each of a walk's items. Where there is no GPU, a copy's is that of a CPU's copies."""
    _, found, text = (ROOT / page).read_text().partition(f"{heading}\n")
    assert found, f"{page} has no {heading}"
    items = ITEM.findall(re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0])
    for _, name in items:
        assert not name.startswith("CudaTransfers.") or hasattr(CudaTransfers, name.partition(".")[2]), name
    return [(file, name.replace("CudaTransfers.", "HostTransfers.")) for file, name in items]


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_what_a_run_does(walk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, heading, options, act = WALKS[walk]
    told = described(page, heading)
    for name, value in followed.environment(tmp_path, told).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HYTRAIN_REPLAN_EVERY", "1")
    monkeypatch.setattr(cluster, "Popen", subprocess.Popen)  # each of its processes starts an interpreter
    model = perceptron(depth=8)
    with followed.noting(), adamw(model, **options) as opt:
        if act is not a_move:
            train(model, opt, range(3), square_loss)
            opt.synchronize()
        began_ns, layer = act(model, opt, tmp_path)
        opt.synchronize()
    calls = followed.read(tmp_path, layer, since_ns=began_ns)
    assert len(told) >= 9
    assert [each for each in told if each not in calls] == []
    assert sorted(told, key=calls.index) == told
