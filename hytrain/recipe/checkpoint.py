"""Checkpoints: everything that a run needs to continue bit for bit, in a folder that Hugging Face can load.

    run/checkpoints/step-600/
        config.json  model.safetensors  tokenizer.json …    for from_pretrained
        optimizer/                                          the optimizer's full state
        trainer_state.json                                  step, random generators, recipe

A folder is written under a temporary name, synced to disk and renamed, so a folder with its final name is complete.
The loop calls `save`; at the start of a resumed run it calls `find` and `restore`.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hytrain.errors import ConfigError
from hytrain.recipe.config import Recipe
from hytrain.recipe.optimizer import TrainingOptimizer
from hytrain.recipe.tokenizer import TextTokenizer

STATE_FILE = "trainer_state.json"
OPTIMIZER_FOLDER = "optimizer"


def save(
    run_dir: Path, step: int, model: Any, tokenizer: TextTokenizer | None, opt: TrainingOptimizer, recipe: Recipe
) -> Path:
    """Writes the checkpoint after `step` finished steps and returns its folder."""
    final = _folder(run_dir) / f"step-{step}"
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    opt.synchronize()
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save(partial)
    opt.save(partial / OPTIMIZER_FOLDER)
    state = {"step": step, "random": _random_state(), "recipe": recipe.model_dump(mode="json")}
    (partial / STATE_FILE).write_text(json.dumps(state))
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    _replace(partial, final)
    return final


def latest(run_dir: Path) -> Path | None:
    """The checkpoint with the most steps in a run's folder, or None."""
    steps = {
        int(match[1]): path
        for path in _folder(run_dir).glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and (path / STATE_FILE).is_file()
    }
    return steps[max(steps)] if steps else None


def find(run_dir: Path, recipe: Recipe) -> Path | None:
    """The folder that `train.resume` names, or None to start anew. Raises ConfigError if it is unusable."""
    resume = recipe.train.resume
    if resume is None:
        return None
    folder = latest(run_dir) if resume == Path("latest") else resume
    if folder is None:
        raise ConfigError(f"There is no checkpoint in {run_dir} to resume; leave train.resume out to start anew.")
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"{folder} is not a checkpoint, because it has no {STATE_FILE}; correct train.resume.")
    saved, wanted = _read(folder)["recipe"], recipe.model_dump(mode="json")
    for key in ("config", "dtype"):
        if saved["model"][key] != wanted["model"][key]:
            raise ConfigError(f"The checkpoint {folder} was made with another model.{key}; resume with the same.")
    if saved.get("lora") != wanted["lora"]:
        raise ConfigError(f"The checkpoint {folder} was made with another lora; resume with the same.")
    return folder


def restore(folder: Path, opt: TrainingOptimizer) -> int:
    """Loads the optimizer and the random generators; returns the number of finished steps."""
    state = _read(folder)
    opt.load(folder / OPTIMIZER_FOLDER)
    _set_random_state(state["random"])
    return int(state["step"])


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _read(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The checkpoint {folder} is damaged: {STATE_FILE}: {error}; resume from another.") from None
    return state


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "torch": _encoded(torch.get_rng_state())}
    if torch.cuda.is_available():
        state["cuda"] = _encoded(torch.cuda.get_rng_state())
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_decoded(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(state["cuda"]))


def _encoded(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _replace(partial: Path, final: Path) -> None:
    """Renames the folder to its final name. A folder of the same step, from before a resume, is removed."""
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
