"""Accelerate and the Trainer with their FSDP2 plugin, on two ranks: as with torch's AdamW, bit for bit.

Accelerate shards models only on GPUs. Here two CPUs pretend to be some.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import LR, differing, late_weights
from ranks import RankGroup
from sharded_models import Decoder, local, next_token_loss
from small_models import VOCAB, llama
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR

import hytrain

Results = dict[str, Tensor]

STEPS, SAVED = 8, 6
FIRST_SCALE = 2.0**122  # too large for a loss that is as large
NO_CLIPPING = 1e3  # the norm is computed, and changes no bit


@contextmanager
def two_gpus() -> Iterator[None]:
    """What Accelerate sees. Its settings outlive the Accelerator that made them, in the environment too."""
    from accelerate.state import AcceleratorState, GradientState

    with mock.patch.dict(os.environ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        pretend()
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def pretend() -> None:
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def results(model: nn.Module, opt: torch.optim.Optimizer) -> Results:
    """This rank's parts of weights and state."""
    found = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
    for number, entry in opt.state_dict()["state"].items():
        found |= {f"{number}.{plane}": local(torch.as_tensor(value)).clone() for plane, value in entry.items()}
    return found


def no_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of parameters that are not sharded yet."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "norm" not in name]},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
    ]


class Loop:
    """Accelerate's loop, as its guide has it, with HyTrain's or torch's AdamW."""

    def __init__(
        self,
        ours: bool,
        max_norm: float,
        accumulated: int = 1,
        precision: str = "no",
        adopted: bool = True,
        scaled: bool = False,
        **plugin: Any,
    ) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        from hytrain.integrations.accelerate import adopt

        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
        self.accelerator = Accelerator(
            mixed_precision=precision,
            gradient_accumulation_steps=accumulated,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped, **plugin),
        )
        if scaled:  # as with fp16, which Accelerate has on GPUs alone
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"
            self.accelerator.scaler = ShardedGradScaler("cpu", init_scale=FIRST_SCALE)
        model = Decoder()
        self.max_norm, self.norms, k = max_norm, list[float](), float(dist.get_rank())
        if ours and not adopted:
            self.raw = hytrain.AdamW(no_decay(model), lr=LR, k=k)
        elif ours:
            self.raw = adopt(self.accelerator, model, no_decay(model), lr=LR, max_grad_norm=max_norm, k=k)
        else:
            self.raw = torch.optim.AdamW(no_decay(model), lr=LR, fused=True)
            self.raw._step_supports_amp_scaling = False  # it leaves unscaling to the scaler, too
        schedule = LambdaLR(self.raw, lambda step: 0.9**step)
        self.model, self.opt, self.schedule = self.accelerator.prepare(model, self.raw, schedule)

    def train(self, steps: range) -> Results:
        for step in steps:
            with self.accelerator.accumulate(self.model):
                loss = next_token_loss(self.model, step)
                self.accelerator.backward(loss if self.accelerator.scaler is None else 64 * loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.norms.append(float(norm))
                self.opt.step()
                self.schedule.step()
                self.opt.zero_grad()
        return results(self.model, self.raw)

    def close(self) -> None:
        if isinstance(self.raw, hytrain.AdamW):
            self.raw.close()


def train_and_load(folder: Path, options: dict[str, Any]) -> None:
    """The same bits; also after going on from one's own checkpoint, and from the other's."""
    expected: Results = {}
    norms: list[float] = []
    for ours in (False, True):
        with two_gpus(), late_weights() if ours else nullcontext():
            loop = Loop(ours, NO_CLIPPING, **options)
            loop.train(range(SAVED))
            loop.accelerator.save_state(str(folder / str(ours)))
            found = loop.train(range(SAVED, STEPS))
            expected, norms = expected or found, norms or list(loop.norms)
            assert differing(found, expected) == []
            assert loop.norms == pytest.approx(norms, rel=1e-6)
            for checkpoint in (ours, False):
                loop.accelerator.load_state(str(folder / str(checkpoint)))
                assert differing(loop.train(range(SAVED, STEPS)), expected) == [], checkpoint
            loop.close()


PLUGINS: dict[str, dict[str, Any]] = {
    "not adopted": {"adopted": False},
    "not adopted, accumulated": {"adopted": False, "accumulated": 2},
    "sharded checkpoints, accumulated": {"accumulated": 2},
    "whole checkpoints, mixed precision, from rank 0's weights": {
        "precision": "bf16",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": True,
    },
}


@pytest.mark.parametrize("name", PLUGINS)
def test_the_plain_loop_has_the_bits_of_torchs_adamw(name: str, two_ranks: RankGroup, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    two_ranks.run(train_and_load, tmp_path, PLUGINS[name])


def train_scaled(adopted: bool) -> None:
    """Steps that overflow are skipped on all ranks."""
    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")  # by torch's scaler
    found = []
    for ours in (False, True):
        with two_gpus(), late_weights() if ours else nullcontext():
            loop = Loop(ours, NO_CLIPPING, adopted=adopted, scaled=True)
            found.append((loop.train(range(STEPS)), loop.accelerator.scaler.get_scale()))
            loop.close()
    (expected, scale), (got, other) = found
    assert scale == other < FIRST_SCALE
    assert differing(got, expected) == []


@pytest.mark.parametrize("adopted", [True, False])
def test_a_scaler(adopted: bool, two_ranks: RankGroup) -> None:
    pytest.importorskip("accelerate")
    two_ranks.run(train_scaled, adopted)


def clipped() -> tuple[list[float], list[float]]:
    """Norms before clipping, with torch's AdamW and HyTrain's."""
    found, norms = [], []
    for ours in (False, True):
        with two_gpus():
            loop = Loop(ours, 0.76)
            found.append(loop.train(range(STEPS)))
            norms.append(loop.norms)
            loop.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return norms[0], norms[1]


def test_clipping(two_ranks: RankGroup) -> None:
    """Norms are sums in another order than torch's."""
    pytest.importorskip("accelerate")
    for expected, norms in two_ranks.run(clipped):
        assert min(expected) < 0.76 < max(expected), "some steps are clipped, some are not"
        assert norms == pytest.approx(expected, rel=1e-5)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": row, "labels": row} for row in torch.randint(VOCAB, (48, 9), generator=generator)]


def trainer(folder: Path, ours: bool, checkpoint: Path | None = None) -> tuple[Results, list[dict[str, float]]]:
    """Weights, state and history after training, evaluating and saving on the way."""
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging

    from hytrain.integrations.transformers import adopt

    logging.disable_progress_bar()
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=NO_CLIPPING,
        optim="adamw_torch_fused",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        fsdp=True,
        fsdp_config={"version": 2},
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
    pretend()  # the arguments have looked at the machine again
    made = Trainer(llama(), arguments, train_dataset=rows(), eval_dataset=rows()[:4])
    opt = adopt(made, k=float(dist.get_rank())) if ours else None
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    found = results(made.model, opt or made.optimizer.optimizer)
    if opt is not None:
        opt.close()
    kept = ("step", "loss", "learning_rate", "eval_loss")
    return found, [{name: entry[name] for name in kept if name in entry} for entry in made.state.log_history]


def compare_trainers(folder: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    expected, history = {}, []
    for name, ours, checkpoint in (
        ("torch", False, None),
        ("ours", True, None),
        ("resumed", True, folder / "ours/checkpoint-2"),
    ):
        with two_gpus():
            found, log = trainer(folder / name, ours, checkpoint)
        expected, history = expected or found, history or log
        assert differing(found, expected) == [], name
        assert log == history, name


def test_a_trainer_has_the_bits_of_torchs_adamw(two_ranks: RankGroup, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    two_ranks.run(compare_trainers, tmp_path)
