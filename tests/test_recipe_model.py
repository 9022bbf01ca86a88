"""Models from a recipe, what they cost and need, and the schedule of their learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hytrain.errors import ConfigError
from hytrain.recipe import config, model
from hytrain.recipe.estimate import estimate, need, planes_of
from hytrain.recipe.schedule import cosine, factor

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_model_trains_in_the_dtype_asked_for(fields: dict[str, Any], dtype: str) -> None:
    wanted = config.Model.model_validate({"config": fields, "dtype": dtype, "gradient_checkpointing": True})
    hf = model.configuration(wanted, 256, 64)
    module = model.build(wanted, hf, CPU)
    assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}
    assert module.training and hf.vocab_size == 256
    assert any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    tokens = torch.arange(24).view(2, 12)
    module(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in module.parameters())


def test_seed_makes_the_weights() -> None:
    wanted = config.Model(config=LLAMA)
    hf = model.configuration(wanted, 256, 64)
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(model.build(wanted, hf, CPU).lm_head.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_model_from_a_folder(tmp_path: Path) -> None:
    new = config.Model(config=LLAMA)
    first = model.build(new, model.configuration(new, 256, 64), CPU)
    first.save_pretrained(tmp_path)
    local = config.Model(path=tmp_path)
    again = model.build(local, model.configuration(local, 256, 64), CPU)
    assert again.training
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("fields", "vocab_size", "length", "part"),
    [
        (LLAMA, 256, 65, "takes at most 64"),
        (GPT2, 256, 65, "takes at most 64"),
        (LLAMA | {"vocab_size": 100}, 256, 64, "vocabulary of 100 is smaller"),
        (LLAMA | {"hiden_size": 3}, 256, 64, 'did you mean "hidden_size"'),
        (LLAMA | {"model_type": "lama"}, 256, 64, 'did you mean "llama"'),
        (LLAMA | {"hidden_size": "big"}, 256, 64, "not a valid llama"),
    ],
)
def test_impossible_models_are_one_sentence(fields: dict[str, Any], vocab_size: int, length: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        model.configuration(config.Model(config=fields), vocab_size, length)
    assert "\n" not in str(caught.value)


def test_unusable_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json"):
        model.configuration(config.Model(path=tmp_path), 256, 64)
    hf = model.configuration(config.Model(config=LLAMA), 256, 64)
    hf.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="No model can be loaded") as caught:
        model.build(config.Model(path=tmp_path), hf, CPU)
    assert "\n" not in str(caught.value)


def test_missing_gpu_is_refused_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model.device("auto") == model.device("cpu") == CPU
    with pytest.raises(ConfigError, match="no GPU"):
        model.device("cuda")


def test_matrices_decay_and_vectors_do_not() -> None:
    wanted = config.Model(config=GPT2)
    module = model.build(wanted, model.configuration(wanted, 256, 64), CPU)
    decaying, plain = model.decay_groups(module, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2} and {p.ndim for p in plain["params"]} == {1}
    assert len(decaying["params"]) + len(plain["params"]) == len(list(module.parameters()))


def test_cost_of_a_token() -> None:
    """The 3.4 B Llama at 0.534 s a step of 8 x 1024 tokens makes 323 TFLOP/s, a third of an H200's peak."""
    recipe = config.load(Path(__file__).parent.parent / "examples" / "llama-3b-random.yaml")
    hf = model.configuration(recipe.model, None, 1024)
    cost = model.cost(model.skeleton(hf, "bfloat16"), hf, 1024)
    rate = 8 * 1024 / 0.534
    assert cost.parameters == 3_426_473_600
    assert cost.tflops(rate) == pytest.approx(323, abs=1)
    assert cost.mfu(rate, model.peak_of("NVIDIA H200")) == pytest.approx(0.327, abs=0.001)
    assert cost.mfu(rate, None) is None


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("An Unknown GPU", None),
    ],
)
def test_peak_by_name(gpu: str, peak: float | None) -> None:
    assert model.peak_of(gpu) == peak


def test_schedule_warms_up_and_ends_at_the_floor() -> None:
    train = config.Train(steps=100, lr=1.0, min_lr=0.1, warmup_steps=10)
    assert [factor(step, train) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert factor(55, train) == pytest.approx(0.55)
    assert factor(100, train) == pytest.approx(0.1)
    assert all(factor(s, train) >= factor(s + 1, train) for s in range(9, 100))


def test_schedule_resumes_where_it_was() -> None:
    train = config.Train(steps=40, lr=0.3, warmup_steps=7)

    def rates(start: int, end: int) -> list[float]:
        opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=123.0)
        schedule = cosine(opt, train, start)
        seen = []
        for _ in range(start, end):
            seen.append(opt.param_groups[0]["lr"])
            opt.step()
            schedule.step()
        return seen

    assert rates(0, 15) + rates(15, 40) == rates(0, 40)
    assert math.isclose(rates(7, 8)[0], 0.3)


@pytest.mark.parametrize(
    ("dtype", "host", "gpu_resident", "gpu_owned"),
    [("bfloat16", 14, 2, 12), ("float16", 16, 2, 14), ("float32", 16, 4, 12)],
)
def test_bytes_per_parameter(dtype: str, host: int, gpu_resident: int, gpu_owned: int) -> None:
    planes = planes_of(dtype)
    nothing, half, everything = (need(planes, 1000, 0, k) for k in (0.0, 0.5, 1.0))
    assert (nothing.host, nothing.trainer) == (1000 * host, 1000 * gpu_resident)
    assert (everything.host, everything.trainer) == (0, 1000 * gpu_owned)
    assert (half.host, half.trainer) == (500 * host, 500 * (gpu_resident + gpu_owned))
    assert need(planes, 1000, 10, 0.0).trainer == 1000 * gpu_resident + 10 * gpu_resident


def test_gradients_may_travel_in_half_the_bytes() -> None:
    assert need(planes_of("float32", "bfloat16"), 1000, 0, 0.0).host == 14_000


def test_a_second_bank_has_all_that_an_update_writes() -> None:
    one, two = (need(planes_of("bfloat16", second_bank=second), 1000, 0, 0.0) for second in (False, True))
    assert (two.host - one.host, two.shared - one.shared, two.trainer - one.trainer) == (12_000, 2_000, 0)


def test_estimate_counts_without_building(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    big = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    tree = {
        "model": {"config": big, "dtype": "bfloat16"},
        "data": {"kind": "random", "sequence_length": 64},
        "train": {"steps": 1, "device": "cuda"},
        "optimizer": {"k": 0.25},
    }
    path.write_text(yaml.safe_dump(tree))
    result = estimate(config.load(path))
    assert result.trainable > 70e9 and {n.k for n in result.needs} == {0.0, 0.25, 1.0}
    page = result.render()
    for word in ("remainder", "exp_avg_sq", "trainer (GPU)", "0.25", "Free now", f"{result.trainable:,}"):
        assert word in page
