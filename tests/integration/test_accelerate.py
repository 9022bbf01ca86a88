"""Under Accelerate's plain loop: the bits of `torch.optim.AdamW`, `save_state` and `load_state`, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import LR, differing, gpt2, llama, tokens, weights
from torch import nn

pytest.importorskip("accelerate")
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.optim.lr_scheduler import LambdaLR

from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.integrations.accelerate import adopt

MAX_NORM = 1.0


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate's settings outlive the Accelerator that made them."""
    AcceleratorState._reset_state(reset_partial_state=True)


def schedule(opt: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(opt, lambda step: 0.9**step)


def train(accelerator: Accelerator, model: nn.Module, opt: Any, scheduler: Any, steps: range) -> list[float]:
    """Accelerate's loop, as its guide has it. Returns the gradients' norms."""
    norms = []
    for step in steps:
        torch.manual_seed(step)
        batch = tokens(step)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            opt.step()
            scheduler.step()
            opt.zero_grad()
    return norms


def prepared(accelerator: Accelerator, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """HyTrain's optimizer and its scheduler, in Accelerate's wrappers."""
    opt = adopt(accelerator, accelerator.prepare(model), lr=LR, max_grad_norm=MAX_NORM, **options)
    both: tuple[Any, Any] = accelerator.prepare(opt, schedule(opt))
    return both


@pytest.mark.parametrize(("precision", "accumulated"), [("no", 1), ("bf16", 1), ("no", 4)])
def test_the_plain_loop_has_the_bits_of_torchs_adamw(precision: str, accumulated: int) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated)
    expected, model = gpt2(), gpt2()
    opt = torch.optim.AdamW(expected.parameters(), lr=LR, fused=True)
    expected, opt, scheduler = accelerator.prepare(expected, opt, schedule(opt))
    norms = train(accelerator, expected, opt, scheduler, range(20))

    opt, scheduler = prepared(accelerator, model, k=0.5)
    assert train(accelerator, model, opt, scheduler, range(20)) == norms
    opt.optimizer.close()
    assert differing(weights(model), weights(expected)) == []


def test_saved_and_loaded_at_another_k(tmp_path: Path) -> None:
    first, second = llama(torch.bfloat16), llama(torch.bfloat16)
    accelerator = Accelerator(cpu=True)
    opt, scheduler = prepared(accelerator, first, k=0.0)
    train(accelerator, first, opt, scheduler, range(10))
    accelerator.save_state(str(tmp_path))
    train(accelerator, first, opt, scheduler, range(10, 20))
    opt.optimizer.close()
    assert (tmp_path / "optimizer.bin").stat().st_size < 10_000, "no moments in it"

    accelerator = Accelerator(cpu=True)
    opt, scheduler = prepared(accelerator, second, k=1.0)
    train(accelerator, second, opt, scheduler, range(3))
    accelerator.load_state(str(tmp_path))
    train(accelerator, second, opt, scheduler, range(10, 20))
    opt.optimizer.close()
    assert differing(weights(second), weights(first)) == []


def test_a_small_state_without_its_folder_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    opt, _ = prepared(accelerator, gpt2())
    small = opt.state_dict()
    opt.load_state_dict(small)  # its own, as when it is prepared
    with pytest.raises(ConfigError, match="this state has no moments"):
        opt.load_state_dict({**small, "hytrain": "another optimizer's"})
    opt.optimizer.close()


# ---------------------------------------------------------------- refusals


def with_deepspeed(accelerator: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(accelerator.state), "deepspeed_plugin", object())  # the real one needs DeepSpeed


def with_fsdp_offload(accelerator: Accelerator, patch: pytest.MonkeyPatch) -> None:
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True)
    patch.setattr(accelerator.state, "fsdp_plugin", plugin, raising=False)


def with_two_gpus(accelerator: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerator.state, "distributed_type", DistributedType.MULTI_GPU)


def with_fp16(accelerator: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerator.state, "_mixed_precision", "fp16")  # which is refused without a GPU


def with_compile(accelerator: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerator.state, "dynamo_plugin", SimpleNamespace(backend="INDUCTOR"))


@pytest.mark.parametrize(
    ("set_up", "sentence"),
    [
        (with_deepspeed, "DeepSpeed has an optimizer of its own"),
        (with_fsdp_offload, "FSDP and its CPU offload have a place for the state already"),
        (with_two_gpus, "more than one process is not supported yet"),
        (with_fp16, "fp16 comes with a GradScaler"),
        (with_compile, "hooks break the graph of a whole compiled model"),
    ],
)
def test_settings_that_hytrain_cannot_follow(set_up: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    set_up(accelerator, monkeypatch)
    with pytest.raises(UnsupportedError, match=sentence):
        adopt(accelerator, gpt2())


def test_a_model_that_is_somewhere_else() -> None:
    with pytest.raises(UnsupportedError, match=r"the model is on meta, not cpu: accelerator.prepare\(model\) first"):
        adopt(Accelerator(cpu=True), gpt2().to("meta"))


@pytest.mark.parametrize("how", [{"max_norm": 0.1}, {"max_norm": MAX_NORM, "norm_type": 1}])
def test_clipping_to_something_else(how: dict[str, float]) -> None:
    accelerator = Accelerator(cpu=True)
    model = gpt2()
    opt, _ = prepared(accelerator, model)
    accelerator.backward(model(input_ids=tokens(0), labels=tokens(0)).loss)
    with pytest.raises(UsageError, match="comes too late for HyTrain, which clips to 1.0"):
        accelerator.clip_grad_norm_(model.parameters(), **how)
    opt.optimizer.close()
