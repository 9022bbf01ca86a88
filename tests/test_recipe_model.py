"""Models from a recipe, what they cost and need, and the schedule of their learning rate."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import get_scheduler

from hytrain.errors import ConfigError
from hytrain.memory.batch import StepMemory
from hytrain.memory.capacity import GPU_MARGIN
from hytrain.memory.visits import ring_bytes
from hytrain.model.deferred import Piece, recording, replay
from hytrain.readable import gib
from hytrain.recipe import adapters, config, model
from hytrain.recipe.estimate import estimate, need, planes_of
from hytrain.recipe.optimizer import factors, scheduler
from hytrain.step.offload import SLOTS
from protocol.handles import Precision
from protocol.messages import Segment

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 64, **SIZES}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize(("fields", "dtype"), [(LLAMA, "float32"), (GPT2, "bfloat16")], ids=["llama", "gpt2"])
def test_new_model_trains_in_the_dtype_asked_for(fields: dict[str, Any], dtype: str) -> None:
    """Its matrices decay and its vectors do not."""
    wanted = config.Model.model_validate({"config": fields, "dtype": dtype, "gradient_checkpointing": True})
    hf = model.configuration(wanted, 256, 64)
    module = model.build(wanted, hf, CPU)
    assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}
    assert module.training and hf.vocab_size == 256
    assert any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    tokens = torch.arange(24).view(2, 12)
    module(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in module.parameters())
    decaying, plain = model.decay_groups(module, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2} and {p.ndim for p in plain["params"]} == {1}
    assert len(decaying["params"]) + len(plain["params"]) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({**LLAMA, "tie_word_embeddings": True}, "float32"),
        (GPT2, "bfloat16"),
        ({"model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}, "bfloat16"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 2, **SIZES}, "float32"),
    ],
    ids=["tied", "gpt2", "gptj", "mixtral"],
)
def test_a_recorded_model_gets_the_values_of_a_built_one(fields: dict[str, Any], dtype: str) -> None:
    """Parameters and buffers, also those that depend on the default dtype, and the random generator afterwards."""
    wanted = config.Model.model_validate({"config": fields, "dtype": dtype})
    hf = model.configuration(wanted, 256, 64)
    torch.manual_seed(3)
    built = model.build(wanted, hf, CPU)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with recording() as calls:
        recorded = model.build(wanted, hf, CPU)
    assert not torch.equal(torch.get_rng_state(), after), "nothing has been made yet"
    pieces = {name: Piece.of(fake) for name, fake in [*recorded.named_parameters(), *recorded.named_buffers()]}
    values: dict[int, torch.Tensor] = {}
    replay(calls, {piece.storage: piece for piece in pieces.values()}, values.__setitem__)
    expected = dict([*built.named_parameters(), *built.named_buffers()])
    assert pieces.keys() == expected.keys() and torch.equal(torch.get_rng_state(), after)
    assert [name for name in pieces if not torch.equal(values[pieces[name].storage], expected[name])] == []


def test_model_from_a_folder(tmp_path: Path) -> None:
    local = config.Model(path=tmp_path)
    model.require_folder(tmp_path)
    words = "hf download meta-llama/Llama-3.2-1B --local-dir meta-llama/Llama-3.2-1B"
    with pytest.raises(ConfigError, match=f"There is no folder .* run `{words}` first"):
        model.require_folder(tmp_path / "meta-llama" / "Llama-3.2-1B")
    with pytest.raises(ConfigError, match="no config.json"):
        model.configuration(local, 256, 64)
    new = config.Model(config=LLAMA)
    hf = model.configuration(new, 256, 64)
    hf.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="No model can be loaded") as caught:
        model.build(local, hf, CPU)
    assert "\n" not in str(caught.value)
    first = model.build(new, hf, CPU)
    first.save_pretrained(tmp_path)
    again = model.build(local, model.configuration(local, 256, 64), CPU)
    assert again.training
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    (tmp_path / "model.safetensors").unlink()
    torch.save(first.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="No model can be loaded .* HyTrain reads no weights from a pickle"):
        model.build(local, hf, CPU)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors: HyTrain reads no adapters from a pickle"):
        adapters.adapt(first, config.Lora(), tmp_path)


@pytest.mark.parametrize(
    ("fields", "vocab_size", "length", "part"),
    [
        (GPT2, 256, 65, "takes at most 64"),
        (LLAMA | {"vocab_size": 100}, 256, 64, "vocabulary of 100 is smaller"),
        (LLAMA | {"hiden_size": 3}, 256, 64, 'did you mean "hidden_size"'),
        (LLAMA | {"model_type": "lama"}, 256, 64, 'did you mean "llama"'),
        (LLAMA | {"hidden_size": "big"}, 256, 64, "not a valid llama"),
        (LLAMA | {"num_attention_heads": 0}, 256, 64, "not a valid llama"),
    ],
)
def test_impossible_models_are_one_sentence(fields: dict[str, Any], vocab_size: int, length: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        model.configuration(config.Model(config=fields), vocab_size, length)
    assert "\n" not in str(caught.value)


def test_no_model_sees_the_tokens_that_it_predicts() -> None:
    """Transformers has encoders among its causal models."""
    fields = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    wanted = config.Model(config=fields | {"intermediate_size": 64, "max_position_embeddings": 64})
    built = model.build(wanted, model.configuration(wanted, 256, 64), CPU).eval()
    tokens = torch.arange(16)[None]
    others = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], dim=1)
    one, other = (built(input_ids=ids).logits[:, :-1] for ids in (tokens, others))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "fields",
    [GPT2 | {"n_head": 5}, LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3}],
    ids=["gpt2", "llama"],
)
def test_fields_that_do_not_fit_together_are_one_sentence(fields: dict[str, Any]) -> None:
    """The one raises when the model is made, the other in its first forward."""
    wanted = config.Model(config=fields)
    with pytest.raises(ConfigError, match=rf"model\.config makes no working {fields['model_type']}: ") as caught:
        hf = model.configuration(wanted, 256, 64)
        model.try_out(model.build(wanted, hf, CPU), hf, 64)
    assert "\n" not in str(caught.value)


def test_missing_gpu_is_refused_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model.device("auto") == model.device("cpu") == CPU
    with pytest.raises(ConfigError, match="no GPU"):
        model.device("cuda")


def test_cost_of_a_token() -> None:
    """The 3.4 B Llama at 0.534 s a step of 8 x 1024 tokens makes 323 TFLOP/s, a third of an H200's peak."""
    recipe = config.load(Path(__file__).parent.parent / "examples" / "llama-3b-random.yaml")
    hf = model.configuration(recipe.model, None, 1024)
    cost = model.cost(model.build_empty(recipe.model, hf), hf, 1024)
    rate = 8 * 1024 / 0.534
    assert cost.parameters == 3_426_473_600
    assert cost.tflops(rate) == pytest.approx(323, abs=1)
    assert cost.mfu(rate, model.peak_of("NVIDIA H200")) == pytest.approx(0.327, abs=0.001)
    assert cost.mfu(rate, None) is None


def test_biases_of_experts_do_not_decay_though_they_are_fused() -> None:
    """A row for each expert makes a matrix of them."""
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
    wanted = config.Model(config={"model_type": "gpt_oss", **experts, **SIZES})
    module = model.build_empty(wanted, model.configuration(wanted, 256, 64))
    decaying, plain = model.decay_groups(module, 0.1)
    names = {id(p): name for name, p in module.named_parameters()}
    assert {p.ndim for p in plain["params"]} == {1, 2}
    assert not any("bias" in names[id(p)] for p in decaying["params"])
    assert {names[id(p)].rpartition(".")[2] for p in plain["params"] if p.ndim == 2} == {
        "gate_up_proj_bias",
        "down_proj_bias",
    }


def test_a_token_costs_what_the_experts_cost_that_it_is_routed_to() -> None:
    """Two of eight cost as much as two of two, but for the router; so do experts that are modules of their own."""

    def flops(experts: int, chosen: int) -> float:
        sizes = {"num_key_value_heads": 2, "num_local_experts": experts, "num_experts_per_tok": chosen, **SIZES}
        wanted = config.Model(config={"model_type": "mixtral", **sizes})
        hf = model.configuration(wanted, 256, 64)
        module = model.build_empty(wanted, hf)
        found = model.cost(module, hf, 64)
        assert found.parameters == sum(p.numel() for p in module.parameters())
        for layer in module.model.layers:
            layer.mlp.experts = nn.ModuleList(nn.Linear(32, 3 * 64, bias=False) for _ in range(experts))
        assert model.cost(module, hf, 64) == found
        return found.flops_per_token

    router = 6 * SIZES["num_hidden_layers"] * SIZES["hidden_size"]
    assert flops(8, 2) - flops(2, 2) == router * (8 - 2)
    assert flops(8, 8) - flops(8, 2) == 6 * SIZES["num_hidden_layers"] * 6 * 3 * 32 * 64


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0)],
)
def test_peak_by_name(gpu: str, peak: float) -> None:
    assert model.peak_of(gpu) == peak
    assert model.peak_of("An Unknown GPU") is None


def test_schedule_warms_up_and_ends_at_the_floor_and_resumes_where_it_was() -> None:
    train = config.Train(steps=100, lr=1.0, min_lr=0.1, warmup_steps=10)
    factor = factors(train)
    assert [factor(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert factor(55) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1)
    assert all(factor(s) >= factor(s + 1) for s in range(9, 100))
    for step in range(10, 101):
        assert factor(step) == 0.1 + (1 - 0.1) * (1 + math.cos(math.pi * ((step - 10) / 90))) / 2, "the same bits"
    for start in (0, 7, 40):
        opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=123.0)
        schedule = scheduler(opt, train, start)
        for step in range(start, 60):
            assert opt.param_groups[0]["lr"] == factor(step)
            opt.step()
            schedule.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("constant", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
    ],
)
def test_other_schedules_are_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    """From the end of the warm-up on, and the same after a resume."""
    train = config.Train.model_validate(
        {"steps": 100, "lr": 0.5, "warmup_steps": 10, "schedule": name, "schedule_options": options}
    )
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5) for _ in range(3)]
    theirs, ours, resumed = optimizers
    library = get_scheduler("constant_with_warmup" if name == "constant" else name, theirs, 10, 100, options)
    whole, late = scheduler(ours, train, 0), None
    for step in range(100):
        late = scheduler(resumed, train, 60) if step == 60 else late
        expected = theirs.param_groups[0]["lr"] if step >= 10 else 0.5 * (step + 1) / 10
        assert ours.param_groups[0]["lr"] == expected
        assert late is None or resumed.param_groups[0]["lr"] == expected
        for optimizer, schedule in ((theirs, library), (ours, whole), (resumed, late)):
            optimizer.step()
            if schedule is not None:
                schedule.step()


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [("warmup_stable_decay", {}, "num_decay_steps"), ("linear", {"power": 2}, "power")],
)
def test_options_of_another_schedule_are_one_sentence(name: str, options: dict[str, Any], part: str) -> None:
    train = config.Train.model_validate({"steps": 10, "schedule": name, "schedule_options": options})
    with pytest.raises(ConfigError, match=rf"do not fit train\.schedule: {name}: .*{part}"):
        factors(train)


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
    undone = need(planes_of(dtype, second_bank=True), 1000, 0, 0.0)
    assert (undone.host - nothing.host, undone.trainer) == (1000 * gpu_owned, nothing.trainer)
    assert undone.shared - nothing.shared == 1000 * gpu_resident
    assert need(planes_of("float32", "bfloat16"), 1000, 0, 0.0).host == 14_000, "gradients in half the bytes"
    smaller = planes_of("bfloat16", "auto", Precision("bfloat16"))
    assert [need(smaller, 1000, 0, k).host for k in (0.0, 1.0)] == [10_000, 0]
    assert need(smaller, 1000, 0, 1.0).trainer == 8_000
    assert need(planes_of("bfloat16", "auto", Precision("bfloat16", "bfloat16")), 1000, 0, 0.0).host == 8_000
    for rule, fewer in (("sgd", 8), ("sgd_momentum", 4), ("lion", 4)):
        others = planes_of(dtype, rule=rule)
        assert need(others, 1000, 0, 0.0).host == nothing.host - 1000 * fewer
        assert need(others, 1000, 0, 1.0).trainer == everything.trainer - 1000 * fewer


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
    needs = {n.name: n for n in result.needs}
    lean = ("0, visit=1", "0, offload_weights=1", "0, visit=1, offload_weights=1")
    assert result.trainable > 70e9 and needs.keys() == {"0", *lean, "0.25", "1"}
    block = 2 * (4 * 8192**2 + 3 * 8192 * 28672 + 2 * 8192)
    assert needs["0"].trainer - needs["0, offload_weights=1"].trainer == (80 - SLOTS) * block
    assert needs["0"].host - needs["0, visit=1"].host == 2 * result.trainable, "no gradients in host memory"
    ring = needs["0, visit=1"].trainer - needs["0"].trainer
    assert ring == ring_bytes([Segment(name="w", numel=1 << 26, dtype="bfloat16", grads_dtype="bfloat16", group=0)])
    page = result.render()
    for word in ("remainder", "exp_avg_sq", "trainer (GPU)", "0.25", "Free now", f"{result.trainable:,}"):
        assert word in page


def test_estimate_of_activations_in_host_memory(tmp_path: Path) -> None:
    """All blocks' inputs but the last one's, of one backward and rank."""
    path = tmp_path / "long.yaml"
    tree = {
        "model": {"config": LLAMA | {"num_hidden_layers": 5}, "dtype": "bfloat16", "gradient_checkpointing": True},
        "data": {"kind": "random", "sequence_length": 64, "batch_size": 8},
        "train": {"steps": 1, "device": "cuda", "grad_accumulation": 2},
        "optimizer": {"offload_activations": True},
    }
    path.write_text(yaml.safe_dump(tree))
    result = estimate(config.load(path))
    assert result.activations == 4 * 4 * 64 * LLAMA["hidden_size"] * 2
    assert f"the inputs of blocks go to host memory: {gib(result.activations)}." in result.render()
    need = result.needs[0]
    room = replace(result, bound_host=need.host + result.activations, free_device=None)
    assert room.fits(need) == "on the host"
    assert replace(room, bound_host=room.bound_host - 1).fits(need) == "not on the host"
    assert estimate(config.load(path, ["parallel.data_replicate=2"]), 2).activations == result.activations // 2
    unknown = estimate(config.load(path, ["model.gradient_checkpointing=false"])).render()
    assert "model.gradient_checkpointing makes it less" in unknown
    assert "go to host memory" not in estimate(config.load(path, ["optimizer.offload_activations=false"])).render()


def test_estimate_says_the_largest_batch(tmp_path: Path) -> None:
    """By its own arithmetic: what is free, less a margin, less what is placed, over what a token takes."""
    path = tmp_path / "small.yaml"
    tree = {
        "model": {"config": LLAMA | {"num_hidden_layers": 8}, "dtype": "bfloat16"},
        "data": {"kind": "random", "sequence_length": 64},
        "train": {"steps": 1, "device": "cuda"},
    }
    path.write_text(yaml.safe_dump(tree))
    found = estimate(config.load(path))
    assert "largest batch" not in found.render(), "there is no GPU here"
    here = replace(found, free_device=8 << 30, bound_host=1 << 40)
    assert here.step is not None and "largest batch, of" in here.render()
    sizes = {need.name: here.largest_batch(need) for need in here.needs}
    in_parts = estimate(config.load(path, ["model.split_batch=4"])).step
    assert in_parts == here.step._replace(parts=4)
    for each in here.needs:
        room = (8 << 30) - int(GPU_MARGIN * (8 << 30)) - each.trainer - here.step.fixed_bytes
        tokens = sizes[each.name]
        assert tokens is not None
        assert here.step.token_bytes(tokens) <= room < here.step.token_bytes(tokens + 2)
    assert sizes["0"] > sizes["1"] > 0  # type: ignore[operator]
    assert replace(here, bound_host=0).largest_batch(here.needs[0]) == 0
    assert replace(here, free_device=None).largest_batch(here.needs[0]) is None


def test_a_batch_is_larger_if_activations_are_not_kept() -> None:
    """And again if blocks compute it in parts."""
    kinds = [{"keeps": True}, {"keeps": False}, {"keeps": False, "on_host": True}]
    kinds.append({"keeps": False, "on_host": True, "parts": 4})
    most = [StepMemory(64, 128, 8, 50_000, 256, **kind).most_tokens(1 << 24) for kind in kinds]
    assert most == sorted(set(most))
    assert StepMemory(64, 128, 8, 50_000, 256).most_tokens(0) == 0


def test_estimate_says_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    deep = LLAMA | {"num_hidden_layers": 64, "vocab_size": 64}
    tree: dict[str, Any] = {"model": {"config": deep, "dtype": "bfloat16"}, "train": {"steps": 1, "device": "cuda"}}
    tree["data"] = {"kind": "random", "sequence_length": 64}
    path.write_text(yaml.safe_dump(tree))
    result = replace(estimate(config.load(path)), free_device=None)
    needs = {n.name: n for n in result.needs}
    between = (needs["0"].host + needs["0, visit=1"].host) // 2
    assert result.fits(needs["0"]) == "on the host" and replace(result, device="CPU").fits(needs["0"]) == "yes"
    assert replace(result, device="CPU", bound_host=needs["0"].host).fits(needs["0"]) == "not on the host"
    short = replace(result, bound_host=between, free_device=needs["1"].trainer - 1)
    assert [short.fits(needs[name]) for name in ("0", "0, visit=1", "1")] == [
        "not on the host",
        "yes",
        "not on the GPU",
    ]
    assert replace(short, free_device=0).fits(needs["0"]) == "not on the host and GPU"
    assert result.render().startswith("It fits this machine's host memory, exact, with any of: k=0; ")
    fits = "It fits this machine, {}; without activations, with any of: k=0, visit=1; k=0, visit"
    assert short.render().startswith(fits.format("exact"))
    rough = replace(short, precision=Precision("bfloat16"), peak_tflops=1.0, flops_per_step=2e12)
    words = "not exact, with moments in bfloat16, in steps of at least 2.000 s at the GPU's peak of 1 TFLOP/s"
    assert rough.render().startswith(fits.format(words)) and "2.000 TFLOP per step, at least 2.000 s" in rough.render()
    lacking = replace(short, free_device=0, bound_host=0).render()
    assert lacking.startswith("It does not fit this machine, where planes may take 0.0 MiB of host memory: ")
    bytes_of_one = 12
    assert short.most == pytest.approx((between + needs["1"].trainer - 1) / bytes_of_one / 1e9)


def test_estimate_of_each_rank(tmp_path: Path) -> None:
    """Shards divide what a rank needs, replicas do not."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": {"config": LLAMA | {"vocab_size": 64}}, "train": {"steps": 1}}))
    data = ["data={kind: random, batch_size: 8}", "data.sequence_length=16", "train.device=cpu"]
    alone = estimate(config.load(recipe, data))
    four = estimate(config.load(recipe, [*data, "parallel.data_replicate=2"]), 4)
    for one, each in zip(alone.needs, four.needs, strict=True):
        assert (
            each.name == one.name
            and each.host == pytest.approx(one.host / 2, rel=1e-3)
            and each.trainer == pytest.approx(one.trainer / 2, rel=1e-3)
        )
    parts = estimate(config.load(recipe, [*data, "parallel.context=2", "parallel.data_shard=1"]), 2)
    assert [each.trainer for each in parts.needs] == [each.trainer for each in four.needs]
    assert "all 4 ranks, data_replicate 2 x data_shard 2" in four.render() and "rank" not in alone.render()
    assert "planes of each rank may take" in replace(four, bound_host=0).render()


def test_one_memory_is_counted_once(tmp_path: Path) -> None:
    """What is enough for the host and for the GPU is not enough for both, if they are one."""
    path = tmp_path / "recipe.yaml"
    tree = {"model": {"config": LLAMA, "dtype": "bfloat16"}, "train": {"steps": 1}}
    path.write_text(yaml.safe_dump({**tree, "data": {"kind": "random", "batch_size": 8, "sequence_length": 16}}))
    found = replace(estimate(config.load(path)), device="GPU")
    [cpu, gpu] = [need for need in found.needs if need.name in ("0", "1")]
    apart = replace(found, free_device=cpu.trainer, bound_host=cpu.host)
    assert apart.fits(cpu) == "yes" and "GPU" in apart.fits(gpu)
    assert replace(apart, is_integrated=True).fits(cpu) == "not on the host"
    one = replace(found, free_device=gpu.trainer, bound_host=gpu.host + gpu.trainer, is_integrated=True)
    assert (
        one.fits(gpu) == "yes"
        and one.fits(cpu) == "not on the host"
        and one.most < replace(one, is_integrated=False).most
    )


def test_estimate_of_shards_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of three blocks' shards stays on each GPU. Ranks share the memory of their machine."""
    monkeypatch.setattr("hytrain.recipe.estimate.host_bound", lambda limit, ranks=1: (1 << 40) // ranks)
    path = tmp_path / "recipe.yaml"
    tree = {"model": {"config": LLAMA | {"num_hidden_layers": 8}, "dtype": "bfloat16"}, "train": {"steps": 1}}
    path.write_text(yaml.safe_dump({**tree, "data": {"kind": "random", "batch_size": 8, "sequence_length": 16}}))
    alone, four = (estimate(config.load(path), ranks) for ranks in (1, 4))
    saved = []
    for result in (alone, four):
        needs = {need.name: need for need in result.needs}
        saved.append(needs["0"].trainer - needs["0, offload_weights=1"].trainer)
    assert 4 * saved[1] == saved[0] > 0
    assert (alone.bound_host, four.bound_host) == (1 << 40, 1 << 38)
    assert estimate(config.load(path), 4, node_ranks=2).bound_host == 1 << 39
    tensor = estimate(config.load(path, ["parallel.tensor=2"]), 2)
    assert not any(need.offloaded for need in tensor.needs), "modules compute with such shards"
