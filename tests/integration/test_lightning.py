"""Under Lightning's Trainer, with nothing but another optimizer: torch's bits, checkpoints, what it refuses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hytrain
from hytrain.errors import UsageError

# It warns of its own ways: few workers for the loaders, parts of torch that are deprecated.
pytestmark = [pytest.mark.spawns, pytest.mark.filterwarnings("ignore")]
lightning = pytest.importorskip("lightning")

WIDTH, SAMPLES, BATCH = 48, 96, 16
DATA = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Learns noise. `losses` are those of its training steps."""

    def __init__(self, run_dir: Path | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.run_dir, self.options, self.losses = run_dir, options, list[float]()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, Any]:
        if self.run_dir is None:
            opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        else:
            opt = hytrain.AdamW(self.net, lr=1e-2, run_dir=self.run_dir, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(net: Net, *, resumed: Path | None = None, saved: Path | None = None, **options: Any) -> list[float]:
    """Train and validate; the losses. HyTrain's processes end."""
    quiet = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **options)
    loader = DataLoader(TensorDataset(*DATA), batch_size=BATCH)
    try:
        trainer.fit(net, loader, loader, ckpt_path=resumed)
        if saved is not None:
            trainer.save_checkpoint(saved)
    finally:
        for opt in trainer.optimizers:
            if isinstance(opt, hytrain.AdamW):
                opt.close()
    return net.losses


@pytest.mark.parametrize("accumulated", [1, 3])
def test_an_optimizer_like_any_other(accumulated: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulated}
    ours = fit(Net(tmp_path, grad_accumulation=accumulated), **options)
    assert ours == fit(Net(None), **options) and len(ours) == 3 * SAMPLES // BATCH


def test_its_checkpoints_go_on_exactly(tmp_path: Path) -> None:
    whole = fit(Net(tmp_path / "whole"), max_epochs=4)
    first = fit(Net(tmp_path / "first"), max_epochs=2, saved=tmp_path / "saved.ckpt")
    assert first + fit(Net(tmp_path / "second", k=1.0), max_epochs=4, resumed=tmp_path / "saved.ckpt") == whole


def test_its_own_clipping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass max_grad_norm to hytrain.AdamW"):
        fit(Net(tmp_path), max_epochs=1, gradient_clip_val=1.0)
    clipped = fit(Net(tmp_path / "clipped", max_grad_norm=0.01), max_epochs=1)
    assert clipped == pytest.approx(fit(Net(None), max_epochs=1, gradient_clip_val=0.01), rel=1e-5)


class Own(Net):
    """Gives the optimizer itself."""

    def configure_optimizers(self) -> Any:
        return hytrain.AdamW(self, lr=1e-2, **self.options)


def test_a_module_that_is_its_optimizers_model_leaves_nothing_behind() -> None:
    def fitted() -> list[weakref.ref[Any]]:
        net = Own(None)
        quiet = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False))
        trainer.fit(net, DataLoader(TensorDataset(*DATA), batch_size=BATCH))
        return [weakref.ref(net), *map(weakref.ref, trainer.optimizers)]

    left = fitted()
    gc.collect()
    assert len(left) == 2 and not any(reference() is not None for reference in left)
