"""How systems save what they need to train on, and load it again, for the part "saving".

Each way is the one that its system documents for this. `systems` says who has which, `saving` measures them. Packages
are imported where they are needed, as in `systems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Saving:
    """One way to save. For the table: `how` is what is called, `whole` what is true of the files in the end.

    `save(folder)` returns when training may go on. Its future is done when the state in `folder` is whole.
    `load(folder)` brings that state back into the running model and optimizer. `settle()` returns when all updates have
    arrived in the parameters.
    """

    how: str
    whole: str
    save: Callable[[Path], Future[Any]]
    load: Callable[[Path], None]
    settle: Callable[[], None] = lambda: None


def of_a_recipe(model: Any, optimizer: Any) -> Saving:
    """HyTrain's: what a recipe does with `train.checkpoint_every`, and with `train.resume=latest`."""

    def save(folder: Path) -> Future[Any]:
        from hytrain.recipe import checkpoint
        from hytrain.recipe.parallel import Job
        from hytrain.state.saver import Saver

        return checkpoint.save(folder, 1, model, None, optimizer, _recipe(), Job(), Saver())

    def load(folder: Path) -> None:
        from hytrain.recipe import checkpoint
        from hytrain.recipe.parallel import Job

        found = checkpoint.find(folder, _recipe())
        assert found is not None, "find raises if there is none"
        _load_weights(model, found)
        checkpoint.restore(found, optimizer, Job())

    how = "a recipe's checkpoint: weights for from_pretrained, opt.async_save"
    return Saving(how, "fsynced, SHA-256", save, load, optimizer.synchronize)


def _recipe() -> Any:
    """A checkpoint has the recipe of its run, which decides nothing here but what to resume."""
    from hytrain.recipe.config import Recipe

    parts = {"model": {"config": {"model_type": "llama"}}, "data": {"kind": "random"}}
    return Recipe.model_validate({**parts, "train": {"steps": 1, "resume": "latest"}})


def _load_weights(model: nn.Module, folder: Path) -> None:
    from safetensors import safe_open

    named = dict(model.named_parameters())
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  (no mapping)
                named[name].copy_(file.get_tensor(name))


def of_torch(model: nn.Module, masters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Saving:
    """torch's: `async_save` as it is by default, with a copy of the state in pageable memory. Loading is in place."""

    def state() -> dict[str, Any]:
        named = dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))
        return {"model": model.state_dict(), "masters": named, "optimizer": optimizer.state_dict()}

    def save(folder: Path) -> Future[Any]:
        import torch.distributed.checkpoint as dcp

        found = dcp.async_save(state(), checkpoint_id=folder)
        assert isinstance(found, Future), "staged by default before async_save returns"
        return found

    def load(folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        found = state()
        dcp.load(found, checkpoint_id=folder)
        optimizer.load_state_dict(found["optimizer"])

    return Saving("torch.distributed.checkpoint.async_save", "fsynced", save, load)


def of_deepspeed(engine: Any) -> Saving:
    """DeepSpeed's: training waits for it. Its documented settings have no writer that works behind training."""

    def save(folder: Path) -> Future[Any]:
        engine.save_checkpoint(str(folder))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def load(folder: Path) -> None:
        path, _ = engine.load_checkpoint(str(folder))
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {folder}")

    return Saving("engine.save_checkpoint, synchronous", "written, not fsynced", save, load)
