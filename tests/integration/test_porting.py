"""The code of the pages about loops runs as it stands, and trains to the same bits before and after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LR, differing, weights
from small_models import llama, tokens
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hytrain

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("nanogpt", "porting", "clipping", "saving", "studies", "errors")
HEADING = re.compile(r"^#{2,3} (.+)\n", re.MULTILINE)
CODE = re.compile(r'^```python title="([^"]+)"\n(.+?)^```', re.MULTILINE | re.DOTALL)

_, *_parts = HEADING.split("\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES))
#: By heading and title, the pages' code.
SECTIONS = {
    name: code for name, text in zip(_parts[::2], _parts[1::2], strict=True) if (code := dict(CODE.findall(text)))
}
BATCHES = [{"input_ids": tokens(step), "labels": tokens(step)} for step in range(6)]


class NanoGPT(nn.Module):
    """A model that is called as nanoGPT's is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = llama()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = self.body(input_ids=x, labels=y)
        return output.logits, output.loss


def nanogpt(folder: Path) -> dict[str, Any]:
    model, batches = NanoGPT(), iter(range(1000))

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        batch = tokens(next(batches))
        return batch, batch

    @torch.no_grad()
    def estimate_loss() -> float:
        return float(model(tokens(1000), tokens(1000))[1])

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return {
        **{"model": model, "device": "cpu", "dtype": "float32", "ctx": nullcontext(), "get_batch": get_batch},
        "groups": [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        **{"learning_rate": LR, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "gradient_accumulation_steps": 3},
        **{"max_iters": 4, "eval_interval": 2, "get_lr": lambda step: LR / (1 + step), "losses": []},
        "estimate_loss": estimate_loss,
    }


def plain(folder: Path) -> dict[str, Any]:
    names = {"AveragedModel": AveragedModel, "get_ema_multi_avg_fn": get_ema_multi_avg_fn, "nullcontext": nullcontext}
    names |= {"checkpoint": checkpoint, "cross_entropy": cross_entropy, "device": "cpu", "split": split}
    return {"model": llama(), "loader": BATCHES, "held_out": BATCHES[0], "losses": [], **names}


def split(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Four micro-batches."""
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*(tensor.chunk(4) for tensor in batch.values()))]


WORLDS = {"From nanoGPT's loop": nanogpt}


def run(section: str, side: str, folder: Path) -> dict[str, Any]:
    """The names that one side of a section leaves. It gets an optimizer, unless it makes one itself."""
    torch.manual_seed(0)
    (folder / side).mkdir()
    world, code = WORLDS.get(section, plain), SECTIONS[section]
    names = {"torch": torch, "nn": nn, "hytrain": hytrain, "folder": folder / side, **world(folder / side)}
    text = "".join(code.get(title, "") for title in (side, "unchanged"))
    if world is plain and not re.search(r"^opt = ", text, re.MULTILINE):
        model, ours = names["model"], side == "after"
        opt = hytrain.AdamW(model, lr=LR, k=0.5) if ours else torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        names["opt"] = opt
    if section == "Exceptions":
        prepare_for_a_failure(names)
    exec(compile(text, section, "exec"), names)
    return names


def prepare_for_a_failure(names: dict[str, Any]) -> None:
    """A checkpoint, and a batch whose backward fails after some updates."""
    model, opt, batch = names["model"], names["opt"], BATCHES[0]
    model(**batch).loss.backward()
    opt.step()
    opt.zero_grad()
    torch.save(model.state_dict(), names["folder"] / "model.pt")
    opt.save(names["folder"] / "optimizer")

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("as a device does")

    def fails(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        output.register_hook(fail)

    handle = model.model.layers[0].register_forward_hook(fails)
    names["batch"] = batch


@pytest.fixture
def closed() -> Iterator[list[Any]]:
    """Optimizers that are closed at the end of the test."""
    optimizers: list[Any] = []
    yield optimizers
    for opt in optimizers:
        opt.close()


def results(names: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], float | None]:
    """Weights and averaged weights, losses, and the last norm."""
    norm = names.get("norm")
    averaged = weights(names["ema"]) if "ema" in names else {}
    return weights(names["model"]) | averaged, names.get("losses", []), None if norm is None else float(norm)


def check(section: str, folder: Path, closed: list[Any]) -> None:
    """What "before" and "after" leave, or "unchanged" with both optimizers, is the same in every bit."""
    after = run(section, "after", folder)
    closed.append(after["opt"] if "opt" in after else after["optimizer"])
    ours = results(after)
    if SECTIONS[section].keys() & {"before", "unchanged"}:
        theirs = results(run(section, "before", folder))
        assert ours[1:] == theirs[1:]
        assert differing(ours[0], theirs[0]) == []
    if section == "Exceptions":
        assert differing(ours[0], torch.load(folder / "after/model.pt")) == [], "what was loaded after the failure"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section(section: str, tmp_path: Path, closed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for title, code in SECTIONS[section].items():
        if title.endswith(".py"):  # a module that the others import
            (tmp_path / title).write_text(code)
            monkeypatch.syspath_prepend(tmp_path)
    check(section, tmp_path, closed)
