"""What `doctor` answers of a model on a machine that is described: its verdict, the line to paste, the model's size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hytrain import gpus
from hytrain.errors import ConfigError
from protocol.handles import EXACT
from workers.exits import EXIT_USAGE
from workers.watch import doctor
from workers.watch.fits import Answer, answer, described, model_named
from workers.watch.forecast import SHAPES, forecast

GIB = 2**30
PRECISIONS = tuple(doctor.PRECISIONS.values())


def of(model: str, gpu: str = "RTX 4090", ram_gib: int = 64, cores: int = 8, batch: int = 4) -> Answer:
    return answer(model_named(model), described(gpu, ram_gib * GIB, cores, PRECISIONS), batch, 1024)


def test_the_answer_is_the_forecasts() -> None:
    """No second arithmetic: of each precision, what `forecast` says of the rates and the memory of that machine."""
    told = of("7B", ram_gib=128)
    bounds: dict[str, Any] = {"gpu_bytes": told.host.gpu_bytes, "host_bytes": told.host.host_bytes, "tokens": 4096}
    for precision, found in told.found.items():
        assert found == forecast(told.shape, told.host.rates, precision=precision, **bounds)
    precision, found = told.fits or (None, None)
    assert precision == EXACT and found is not None and found.step_s is not None
    assert told.verdict().startswith(
        "Yes: 7 B trains on an RTX 4090 with 128 GiB of host memory and 8 cores: exact, about "
    )
    assert f"{4096 / found.step_s:,.0f} tokens/s" in told.verdict() and told.verdict().endswith("(a forecast).")


def test_what_does_not_fit_exactly_is_told_and_pasted() -> None:
    told = of("llama3-8b")
    assert "not exact, with moments in bfloat16, about" in told.verdict()
    assert 'hytrain.AdamW(model, lr=1e-5, state_dtype="bfloat16", ' in told.paste()
    assert 'offload_weights="auto", device="cuda")' in told.paste(), "its weights leave the GPU no room"
    lines = told.render().splitlines()
    assert lines[0] == told.verdict() and lines[2:4] == told.paste().splitlines()
    assert next(line for line in lines if line.startswith("exact ")).split()[1:3] == ["no", "room"]


def test_the_page_of_small_machines_has_these_answers() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs/small-machines.md").read_text()
    assert of("llama3-8b").verdict() in page
    for size, ram_gib, state in (("3", 64, "exact"), ("7", 64, "moments in bf16"), ("7", 96, "exact")):
        told = of(f"{size}B", ram_gib=ram_gib)
        line = told.paste().splitlines()[-1].removeprefix("opt = ")
        assert f"| {size} B | {ram_gib} GiB | {state} | `{line}` |" in page
        assert told.fits is not None and (told.fits[0] == EXACT) is (state == "exact")


def test_how_much_memory_would_do() -> None:
    """The least size of memory with which it does fit; none if the GPU is too small for a step."""
    told = of("33B")
    [exact, rough] = [
        int(part.split(" GiB")[0].split()[-1]) for part in told.verdict().split(" it needs ")[1].split(";")
    ]
    assert told.verdict().startswith("No: 33 B does not train on an RTX 4090") and rough < exact and told.paste() == ""
    for size, precision in ((exact, EXACT), (rough, PRECISIONS[-1])):
        assert of("33B", ram_gib=size).found[precision].step_s is not None
        assert of("33B", ram_gib=size * 2 // 3).found[precision].step_s is None


def test_a_step_may_alone_take_the_gpus_memory() -> None:
    """However much the host has."""
    told = of("13B", gpu="RTX 4080", ram_gib=1024, batch=64)
    assert told.fits is None and told.remedy() == []
    assert told.verdict().endswith("whose GPU has too little memory for steps of 64 x 1024 tokens.")
    assert of("13B", gpu="RTX 4080", ram_gib=1024).fits is not None


def test_who_needs_no_hytrain_is_told() -> None:
    """If torch's own optimizer has room for masters, moments and gradients. Then nothing else has to be set, either."""
    assert of("350M").verdict().endswith("It fits without HyTrain, too, with torch's AdamW.")
    assert "without HyTrain" not in of("3B").verdict()
    assert of("350M").paste().endswith("opt = hytrain.AdamW(model.parameters(), lr=1e-5)")


def test_sizes_and_shapes_name_models() -> None:
    named = {text: model_named(text) for text in ("7B", "llama-7b", "Llama-2-7b-hf", "7 b", "meta llama3-8b", "70b")}
    sevens = [named.pop(text) for text in ("7B", "llama-7b", "Llama-2-7b-hf", "7 b")]
    assert {shape.name for shape in sevens} == {"7 B"}
    assert [shape.name for shape in named.values()] == ["8 B (Llama 3)", "70 B (Llama 3)"]
    for text, numel in (("2.7B", 2.7e9), ("350M", 350e6), ("Qwen2.5-14B", 14e9), ("405b", 405e9)):
        assert model_named(text).numel == pytest.approx(numel, rel=0.01)
    assert replace(model_named("4096x11008x32x32000"), name="7 B") == next(s for s in SHAPES if s.name == "7 B")
    for text in ("large", "7", "7bit", "4096x32"):
        with pytest.raises(ConfigError, match="is no size such as 7B"):
            model_named(text)


def test_the_models_of_configurations_are_counted(tmp_path: Path) -> None:
    """All parameters, of a model with grouped heads and a tied head, and of one that is no LLaMA."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    shape = model_named(str(tmp_path))
    attention, mlp, norms = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 160, 2 * 64
    assert shape.numel == 3 * (attention + mlp + norms) + 320 * 64 and (shape.blocks, shape.tied) == (3, True)
    host = described("RTX 4090", 64 * GIB, 8, PRECISIONS)
    assert (step_s := host.forecast(shape, 4096, EXACT).step_s) is not None
    assert step_s < (host.forecast(replace(shape, blocks=6), 4096, EXACT).step_s or 0.0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}))
    assert model_named(str(tmp_path)).counted == 12 * 64 * 64 + 13 * 64
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**experts, **sizes, "num_attention_heads": 4}))
    with pytest.raises(ConfigError, match="has experts"):
        model_named(str(tmp_path))
    with pytest.raises(ConfigError, match="hf download org/none config.json"):
        model_named("org/none")


def test_gpus_are_known_by_what_people_and_drivers_call_them() -> None:
    called = {
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "rtx4090": "RTX 4090",
        "4090": "RTX 4090",
        "NVIDIA A100-SXM4-80GB": "A100",
        "A100-PCIE-40GB": "A100 40GB",
        "h100": "H100",
        "6000 ada": "RTX 6000 Ada",
        "NVIDIA GH200 480GB": "GH200",
    }
    assert {text: gpus.named(text) for text in called} == called
    assert [gpus.named(text) for text in ("", "rtx", "GTX 1080", "H1000")] == [None] * 4


def test_a_described_machine_is_as_fast_as_it_is_said_to_be() -> None:
    """More cores update faster, until the memory's channels are what limits; the GPU's rates follow its row."""
    rate = {cores: described("RTX 4090", 64 * GIB, cores, PRECISIONS).rates.cpu_update[EXACT] for cores in (4, 6, 32)}
    assert 2 * rate[4] == rate[6] < rate[32] < 16 * rate[4]
    assert described("H100", 64 * GIB, 32, PRECISIONS).rates.cpu_update[EXACT] > 3 * rate[32]
    fast, slow = (described(gpu, 64 * GIB, 8, PRECISIONS) for gpu in ("H100", "A100"))
    assert fast.rates.product / slow.rates.product == pytest.approx(989 / 312)
    assert fast.rates.to_host / slow.rates.to_host == 2 and fast.gpu_bytes == slow.gpu_bytes == 79 * GIB


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "RTX 4090", "--ram", "64GiB", "--cores", "8"]
    assert doctor.main([*words, "--model", "llama3-8b"]) == 0
    assert capsys.readouterr().out == of("llama3-8b").render() + "\n"
    assert doctor.main([*words, "--model", "3B", "--host-memory-limit", "1GiB", "--gpu-memory-limit", "8GiB"]) == 0
    assert capsys.readouterr().out.startswith("No: 3 B does not train")
    assert doctor.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("LLaMA models in bf16, 4 x 1024 tokens per step") and "on an RTX 4090 with 64 GiB" in said
    for wrong, told in (
        (["--ram", "64GiB"], "name its GPU"),
        (["--gpu", "RTX 4090", "--cores", "2-3"], "the number of cores"),
        (["--gpu", "RTX 4090", "--cores", "0"], "the number of cores"),
        (["--gpu", "RTX 4091"], "did you mean RTX 4090?"),
        (["--gpu", "abacus"], "known are B200, "),
    ):
        assert doctor.main(wrong) == EXIT_USAGE and told in capsys.readouterr().err
