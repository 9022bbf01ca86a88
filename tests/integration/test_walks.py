"""The pages' walks through the code, against what a run really calls.

A walk is a numbered list below a heading: each item names a file and a function. They are compared with the functions
that the processes of a run enter for one layer, in the order in which each is entered first.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import followed
import pytest
from helpers import adamw, train
from small_models import perceptron, square_loss
from torch import nn

import hytrain
from hytrain.memory.transfer import CudaTransfers
from hytrain.run import cluster

ROOT: Final = Path(__file__).resolve().parents[2]
ITEM: Final = re.compile(r"^\d+\. `([\w/]+\.py)`, `([\w.]+)`", re.MULTILINE)


class Walk(NamedTuple):
    """Where it is described, the optimizer's options, what is done, and the layer that is followed.

    `act` returns when the walk begins.
    """

    page: str
    heading: str
    options: dict[str, Any]
    act: Callable[[nn.Module, hytrain.AdamW], int]
    layer: int


def from_backward_to_forward(model: nn.Module, opt: hytrain.AdamW) -> int:
    loss, began_ns = square_loss(model, 5), time.monotonic_ns()
    loss.backward()
    opt.step()
    opt.zero_grad()
    square_loss(model, 6)
    return began_ns


def a_step(model: nn.Module, opt: hytrain.AdamW) -> int:
    began_ns = time.monotonic_ns()
    train(model, opt, [5], square_loss)
    return began_ns


WALKS: Final = {
    "a gradient": Walk("README.md", "## Follow one gradient", {"k": 0.0}, from_backward_to_forward, 4),
    "a block's weights": Walk(
        "docs/architecture.md", "### Follow one block's weights", {"k": 0.0, "offload_weights": 1.0}, a_step, 4
    ),
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
    page, heading, options, act, layer = WALKS[walk]
    for name, value in followed.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "Popen", subprocess.Popen)  # each of its processes starts an interpreter
    model = perceptron(depth=8)
    with followed.noting(), adamw(model, **options) as opt:
        train(model, opt, range(3), square_loss)
        opt.synchronize()
        began_ns = act(model, opt)
    told, calls = described(page, heading), followed.read(tmp_path, layer, since_ns=began_ns)
    assert len(told) >= 5
    assert [each for each in told if each not in calls] == []
    assert sorted(told, key=calls.index) == told
