"""Under Lightning, with nothing but another optimizer: torch's bits, checkpoints, what it refuses."""

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
from hytrain.errors import UnsupportedError, UsageError
from hytrain.integrations.lightning import adopt

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
        elif self.options.pop("adopted", False):
            opt = adopt(self, self.net, lr=1e-2, run_dir=self.run_dir, **self.options)
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


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("clipped", [None, 0.05])
def test_an_optimizer_like_any_other(accumulated: int, clipped: float | None, tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches."""
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulated, "gradient_clip_val": clipped}
    ours = fit(Net(tmp_path), **options)
    assert ours == fit(Net(None), **options) and len(ours) == 3 * SAMPLES // BATCH


def test_its_checkpoints_go_on_exactly(tmp_path: Path) -> None:
    whole = fit(Net(tmp_path / "whole"), max_epochs=4)
    first = fit(Net(tmp_path / "first"), max_epochs=2, saved=tmp_path / "saved.ckpt")
    assert first + fit(Net(tmp_path / "second", k=1.0), max_epochs=4, resumed=tmp_path / "saved.ckpt") == whole


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("clipped", [None, 0.05])
def test_an_adopted_one_follows_the_trainer(accumulated: int, clipped: float | None, tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches. Some steps are clipped, some are not."""
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": accumulated, "gradient_clip_val": clipped}
    ours, theirs = Net(tmp_path, adopted=True, k=0.5), Net(None)
    assert fit(ours, **options) == fit(theirs, **options)
    assert all(map(torch.equal, ours.net.state_dict().values(), theirs.net.state_dict().values()))


def test_what_the_trainer_goes_on_doing_after_backward(tmp_path: Path) -> None:
    """It clips by value."""
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    ours, theirs = Net(tmp_path, adopted=True), Net(None)
    assert fit(ours, **options) == fit(theirs, **options)
    assert all(map(torch.equal, ours.net.state_dict().values(), theirs.net.state_dict().values()))


@pytest.mark.parametrize("adopted", [True, False])
def test_a_scaler_skips_what_overflows(adopted: bool, tmp_path: Path) -> None:
    """As with precision="16-mixed", which Lightning has on GPUs alone. The scale is too large at first."""

    def scaled(net: Net) -> tuple[list[float], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        precision = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        losses = fit(net, max_epochs=2, gradient_clip_val=0.05, plugins=[precision])
        return losses, scaler.get_scale()

    class Reference(Net):
        def configure_optimizers(self) -> dict[str, Any]:
            made = super().configure_optimizers()
            made["optimizer"]._step_supports_amp_scaling = False  # or Lightning would not clip
            return made

    ours, theirs = Net(tmp_path, **{"adopted": True} if adopted else {}), Reference(None)
    expected = scaled(theirs)
    assert scaled(ours) == expected and expected[1] < 2.0**24
    assert all(map(torch.equal, ours.net.state_dict().values(), theirs.net.state_dict().values()))


def fabrics_loop(ours: bool, folder: Path, resumed: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """As litgpt's: the rate is set before forward, micro-batches, clipping, a checkpoint in the middle."""
    fabric = lightning.Fabric(accelerator="cpu")
    net, losses = Net(None).net, []
    raw: Any = hytrain.AdamW if ours else torch.optim.AdamW
    model, opt = fabric.setup(net, made := raw(net.parameters(), lr=1e-2, fused=True))
    state = {"model": model, "optimizer": opt, "step": 0}
    if resumed:
        fabric.load(folder / "half.ckpt", state)
    for step in range(state["step"], 8):
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for part in range(3):
            with fabric.no_backward_sync(model, enabled=part < 2):
                x, y = DATA[:, (3 * step + part) % 6 :: 6]
                loss = nn.functional.mse_loss(model(x), y) / 3
                fabric.backward(loss)
                losses.append(float(loss))
        fabric.clip_gradients(model, opt, max_norm=0.05)
        opt.step()
        opt.zero_grad()
        if step == 3:
            fabric.save(folder / "half.ckpt", {**state, "step": step + 1})
    if ours:
        made.close()
    return {name: value.clone() for name, value in net.state_dict().items()}, losses


def test_fabrics_own_loop(tmp_path: Path) -> None:
    expected, losses = fabrics_loop(False, tmp_path)
    for resumed in (False, True):
        found, seen = fabrics_loop(True, tmp_path, resumed)
        assert seen == losses[-len(seen) :] and len(seen) == (12 if resumed else 24)
        assert all(map(torch.equal, found.values(), expected.values()))


class Changing(lightning.Callback):  # type: ignore[misc, name-defined]
    """Another number of micro-batches in each epoch, as `GradientAccumulationScheduler` has it."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = trainer.current_epoch + 1


def test_another_number_of_micro_batches_in_each_epoch(tmp_path: Path) -> None:
    ours = fit(Net(tmp_path, adopted=True), max_epochs=4, callbacks=[Changing()])
    assert ours == fit(Net(None), max_epochs=4, callbacks=[Changing()])


class ByHand(Net):
    """Clips in a loop of its own."""

    def __init__(self, run_dir: Path | None, norm: float, **options: Any) -> None:
        super().__init__(run_dir, **options)
        self.automatic_optimization, self.norm = False, norm

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        opt = self.optimizers()
        loss = super().training_step(batch, index)
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, self.norm, "norm")
        opt.step()
        return loss


def test_a_loop_of_ones_own_that_clips(tmp_path: Path) -> None:
    ours = fit(ByHand(tmp_path, 0.05, adopted=True, max_grad_norm=0.05), max_epochs=2)
    assert ours == fit(ByHand(None, 0.05), max_epochs=2)
    with pytest.raises(UsageError, match="comes too late for HyTrain, which clips to 0.05: .* max_grad_norm=0.1 to ad"):
        fit(ByHand(tmp_path, 0.1, adopted=True, max_grad_norm=0.05), max_epochs=1)


def test_two_norms_to_clip_to(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="max_grad_norm=2.0 beside gradient_clip_val=1.0: leave"):
        fit(Net(tmp_path, adopted=True, max_grad_norm=2.0), max_epochs=1, gradient_clip_val=1.0)


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
