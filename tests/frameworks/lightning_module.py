"""A module and its data, which LightningCLI makes from its command line."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, torch.arange(200) % 10), batch_size=4)
