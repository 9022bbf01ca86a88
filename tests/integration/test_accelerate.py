"""Under Accelerate's plain loop: the bits of `torch.optim.AdamW`, `save_state` and `load_state`, refusals."""

from __future__ import annotations

import math
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import LR, differing, weights
from small_models import gpt2, llama, perceptron, square_loss, tokens
from torch import nn

pytest.importorskip("accelerate")
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.integrations.accelerate import adopt

MAX_NORM = 1.0


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate's settings outlive the Accelerator that made them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def given(accelerator: Accelerator, model: nn.Module, of: str) -> tuple[Any, Any]:
    """HyTrain's optimizer in the place of torch's: of the parameters, or of the model."""
    opt = hytrain.AdamW(model.parameters() if of == "parameters" else model, lr=LR, k=0.5)
    _, *both = accelerator.prepare(model, opt, schedule(opt))
    return both[0], both[1]


@pytest.mark.parametrize("how", ["adopted", "parameters", "model"])
@pytest.mark.parametrize(("precision", "accumulated"), [("no", 1), ("bf16", 1), ("no", 4)])
def test_the_plain_loop_has_the_bits_of_torchs_adamw(precision: str, accumulated: int, how: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated)
    expected, model = gpt2(), gpt2()
    opt = torch.optim.AdamW(expected.parameters(), lr=LR, fused=True)
    expected, opt, scheduler = accelerator.prepare(expected, opt, schedule(opt))
    norms = train(accelerator, expected, opt, scheduler, range(20))

    opt, scheduler = prepared(accelerator, model, k=0.5) if how == "adopted" else given(accelerator, model, how)
    assert train(accelerator, model, opt, scheduler, range(20)) == norms
    opt.optimizer.close()
    assert differing(weights(model), weights(expected)) == []


@pytest.mark.parametrize("how", ["adopted", "parameters"])
def test_a_scaler_skips_what_overflows(how: str) -> None:
    """For fp16, which Accelerate has on GPUs alone. The scale is too large at first."""

    def run(ours: bool) -> tuple[dict[str, torch.Tensor], list[float], list[bool]]:
        accelerator = Accelerator(cpu=True)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        model = gpt2()
        if ours:
            opt, scheduler = prepared(accelerator, model) if how == "adopted" else given(accelerator, model, how)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=LR)
            for group in opt.param_groups:
                group["fused"] = True  # but it leaves unscaling to the scaler
            _, opt, scheduler = accelerator.prepare(model, opt, schedule(opt))
        norms, skipped = [], []
        for step in range(12):
            norms += train(accelerator, model, opt, scheduler, range(step, step + 1))
            skipped.append(opt.step_was_skipped)
        if ours:
            opt.optimizer.close()
        return weights(model), norms, skipped

    (expected, norms, skipped), (got, others, seen) = run(False), run(True)
    assert any(skipped) and not all(skipped)
    assert seen == skipped
    assert [math.isfinite(norm) for norm in norms] == [not each for each in skipped]
    assert [norm for norm in others if math.isfinite(norm)] == [norm for norm in norms if math.isfinite(norm)]
    assert differing(got, expected) == []


def test_another_algorithm_has_its_bits_too() -> None:
    accelerator = Accelerator(cpu=True)
    expected, model = gpt2(), gpt2()
    opt = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    expected, opt, scheduler = accelerator.prepare(expected, opt, schedule(opt))
    norms = train(accelerator, expected, opt, scheduler, range(10))

    made = adopt(
        accelerator, accelerator.prepare(model), optimizer=hytrain.SGD, lr=0.1, momentum=0.9, max_grad_norm=MAX_NORM
    )
    ours, scheduler = accelerator.prepare(made, schedule(made))
    assert train(accelerator, model, ours, scheduler, range(10)) == norms
    made.close()
    assert differing(weights(model), weights(expected)) == []


def optimizer(accelerator: Accelerator, model: nn.Module, ours: bool, lr: float) -> Any:
    if ours:
        return adopt(accelerator, model, lr=lr, max_grad_norm=0.1)
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train_epochs(ours: bool, until_epoch_end: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Three epochs of nine batches, four to a step; an epoch's last one is a step of its own, or the next epoch's."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=until_epoch_end)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader: Any = accelerator.prepare_data_loader(DataLoader(range(9), batch_size=1))
    model = perceptron()
    raw = optimizer(accelerator, model, ours, LR)
    opt: Any = accelerator.prepare(raw)
    norms = []
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                square_loss(model, 9 * epoch + int(batch)).backward()
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                opt.step()
                opt.zero_grad()
    if ours:
        raw.close()
    return weights(model), norms


@pytest.mark.parametrize("until_epoch_end", [True, False])
def test_accelerate_says_which_micro_batch_is_the_last(until_epoch_end: bool) -> None:
    """Whatever their number: it is another one at the end of an epoch."""
    expected, norms = train_epochs(False, until_epoch_end)
    got, ours = train_epochs(True, until_epoch_end)
    assert len(norms) == (9 if until_epoch_end else 6)
    assert ours == norms and min(norms) > 0.1
    assert differing(got, expected) == []


def test_a_checkpoint_of_one_that_was_not_adopted(tmp_path: Path) -> None:
    """It has the whole state, in `optimizer.bin`."""
    first, second = gpt2(), gpt2()
    accelerator = Accelerator(cpu=True)
    opt, scheduler = given(accelerator, first, "parameters")
    train(accelerator, first, opt, scheduler, range(10))
    accelerator.save_state(str(tmp_path))
    train(accelerator, first, opt, scheduler, range(10, 20))
    opt.optimizer.close()
    assert {path.name for path in tmp_path.glob("optimizer*")} == {"optimizer.bin"}

    accelerator = Accelerator(cpu=True)
    opt, scheduler = given(accelerator, second, "parameters")
    accelerator.load_state(str(tmp_path))
    train(accelerator, second, opt, scheduler, range(10, 20))
    opt.optimizer.close()
    assert differing(weights(second), weights(first)) == []


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


def run_two(folder: Path, *, ours: bool, resume: bool = False) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Six steps of two models in one Accelerator, or the last three from `folder`. Their weights, and all norms."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    models = accelerator.prepare(perceptron(), perceptron())
    adopted = [optimizer(accelerator, model, ours, lr) for model, lr in zip(models, [1e-2, 3e-3], strict=True)]
    opts = [accelerator.prepare(opt) for opt in reversed(adopted)][::-1]
    norms = []
    if resume:
        accelerator.load_state(str(folder))
    for step in range(3 if resume else 0, 6):
        for index, (model, opt) in enumerate(zip(models, opts, strict=True)):
            accelerator.backward(square_loss(model, 10 * step + index))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            opt.step()
            opt.zero_grad()
        if step == 2:
            accelerator.save_state(str(folder))
    for opt in adopted if ours else []:
        opt.close()
    return {f"{index}.{name}": t for index, model in enumerate(models) for name, t in weights(model).items()}, norms


def test_two_optimizers_in_one_accelerator(tmp_path: Path) -> None:
    """Each has a folder and a norm of its own, in whatever order they are prepared."""
    expected, norms = run_two(tmp_path / "torch", ours=False)
    whole, ours = run_two(tmp_path / "ours", ours=True)
    assert ours == norms and min(norms) > 0.1
    assert differing(whole, expected) == []
    assert {path.name for path in (tmp_path / "ours").glob("hytrain*")} == {"hytrain", "hytrain_1"}
    resumed, ours = run_two(tmp_path / "ours", ours=True, resume=True)
    assert ours == norms[6:]
    assert differing(resumed, whole) == []


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 1.0}, {"k": 0.5, "overlap": False}], ids=str)
def test_the_norm_of_this_step_where_a_backward_leaves_its_graph(options: dict[str, Any]) -> None:
    """Such a backward only sums, since others may come through the graph. Asked for the norm, the step goes on."""

    def run(opt: Any) -> list[float]:
        model, norms = accelerator._models[-1], []
        prepared = accelerator.prepare(opt)
        for step in range(6):
            if step != 2:  # which has no gradients
                loss = square_loss(model, step)
                accelerator.backward(loss, retain_graph=step % 3 == 0)
                if step == 3:  # two of one graph
                    accelerator.backward(loss, retain_graph=True)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            prepared.step()
            prepared.zero_grad()
        return norms

    accelerator = Accelerator(cpu=True)
    expected = accelerator.prepare(perceptron())
    norms = run(torch.optim.AdamW(expected.parameters(), lr=LR, fused=True))
    model = accelerator.prepare(perceptron())
    opt = adopt(accelerator, model, lr=LR, max_grad_norm=0.1, **options)
    assert run(opt) == norms
    opt.close()
    assert differing(weights(model), weights(expected)) == []


@pytest.mark.parametrize("announced", [True, False])
def test_clipping_between_the_micro_batches_of_a_step(announced: bool) -> None:
    """torch clips sums that are not complete. It is refused, and the step goes on without it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, expected = accelerator.prepare(perceptron()), perceptron()
    opt = adopt(accelerator, model, lr=LR, max_grad_norm=0.1)
    prepared: Any = accelerator.prepare(opt)
    for step in range(3):
        with accelerator.accumulate(model) if announced else nullcontext():
            accelerator.backward(square_loss(model, step))
            if step < 2:
                with pytest.raises(UsageError, match="if accelerator.sync_gradients"):
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                assert differing(weights(model), weights(expected)) == []
            elif announced:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            if step == 2 or announced:
                prepared.step()
                prepared.zero_grad()
    theirs = torch.optim.AdamW(expected.parameters(), lr=LR, fused=True)
    for step in range(3):
        (square_loss(expected, step) / 3).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    theirs.step()
    opt.close()
    assert differing(weights(model), weights(expected)) == []


def test_clipping_of_another_model_is_accelerates() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = perceptron(), perceptron()
    first[0].requires_grad_(False)  # which is no matter to the norm
    opt = adopt(accelerator, first, lr=LR, max_grad_norm=0.1)
    accelerator.backward(square_loss(first, 0) + square_loss(second, 1))
    first_norm, second_norm = (float(accelerator.clip_grad_norm_(m.parameters(), 0.1)) for m in (first, second))
    assert first_norm == float(opt.grad_norm or 0.0) != second_norm
    gradients = [parameter.grad for parameter in second.parameters() if parameter.grad is not None]
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.1, rel=1e-3)
    assert first_norm == accelerator.clip_grad_norm_([p for p in first.parameters() if p.requires_grad], 0.1)
    refused = r"clip_grad_norm_ got only some of the parameters of an optimizer of HyTrain, or others as well"
    for parameters in (first[1].parameters(), [*first.parameters(), *second.parameters()]):
        with pytest.raises(UsageError, match=refused):
            accelerator.clip_grad_norm_(parameters, 0.1)
    opt.close()


@pytest.mark.spawns
@pytest.mark.parametrize("closed", [True, False])
def test_trials_one_after_another_leave_nothing(closed: bool, tmp_path: Path) -> None:
    """Closed, or dropped: the hooks are gone, the processes have ended, the first folder is free."""
    accelerator = Accelerator(cpu=True)
    plain = accelerator.clip_grad_norm_
    for trial in range(2):
        model = perceptron()
        opt = adopt(accelerator, model, lr=LR, max_grad_norm=0.1)
        wrapped = accelerator.prepare(opt)
        accelerator.backward(square_loss(model, trial))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        wrapped.step()
        accelerator.save_state(str(tmp_path / str(trial)))
        assert [path.name for path in (tmp_path / str(trial)).glob("hytrain*")] == ["hytrain"]
        if closed:
            opt.close()
        accelerator.free_memory()
        gone = weakref.ref(opt)
        del opt, wrapped
        assert gone() is None, "nothing but this test has held it"
        assert accelerator.clip_grad_norm_ == plain
        assert not accelerator._save_model_state_pre_hook and not accelerator._load_model_state_pre_hook


# ---------------------------------------------------------------- refusals


#: (what the accelerator's state has, its value, the words that help); the real ones need other packages, or GPUs
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("deepspeed_plugin", object(), "DeepSpeed has an optimizer of its own"),
        ("fsdp_plugin", SimpleNamespace(fsdp_version=1), "FSDP1 replaces the parameters by flat ones: use FSDP2"),
        ("fsdp_plugin", SimpleNamespace(fsdp_version=2, cpu_offload=CPUOffloadPolicy()), "cpu_offload .* leave it out"),
        ("distributed_type", DistributedType.MULTI_GPU, "several processes without FSDP2, where each would hold all"),
        ("_mixed_precision", "fp8", "fp8 is not supported yet"),
    ],
)
def test_settings_that_hytrain_cannot_follow(
    name: str, value: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnsupportedError, match=r"the model is on meta, not cpu: accelerator.prepare\(model\) first"):
        adopt(accelerator, perceptron().to("meta"))
    of = type(accelerator.state) if name == "deepspeed_plugin" else accelerator.state
    monkeypatch.setattr(of, name, value, raising=False)
    with pytest.raises(UnsupportedError, match=sentence):
        adopt(accelerator, perceptron())


@pytest.mark.parametrize("how", [{"max_norm": 0.1}, {"max_norm": MAX_NORM, "norm_type": 1}])
def test_clipping_to_something_else(how: dict[str, float]) -> None:
    accelerator = Accelerator(cpu=True)
    model = gpt2()
    opt, _ = prepared(accelerator, model)
    accelerator.backward(model(input_ids=tokens(0), labels=tokens(0)).loss)
    with pytest.raises(UsageError, match="comes too late for HyTrain, which clips to 1.0"):
        accelerator.clip_grad_norm_(model.parameters(), **how)
    opt.optimizer.close()
