"""Recipes as files: defaults, overrides, paths, and one sentence for each way of getting them wrong."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hytrain
from hytrain.errors import ConfigError
from hytrain.extras import importing
from hytrain.recipe import config
from hytrain.recipe.template import EXAMPLE, template
from workers.launch import launcher

EXAMPLES = Path(__file__).parent.parent / "examples"
MINIMAL: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"paths": ["text.txt"]},
    "train": {"steps": 10},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence[-1] in ".?", sentence
    return sentence


def test_defaults_and_overrides(recipe_file: Path) -> None:
    recipe = config.load(recipe_file)
    assert recipe.optimizer.k == "auto" and recipe.sample is None
    assert recipe.train.resume is None and recipe.train.loss_scale is None
    for text, k in (("0", 0.0), ("1", 1.0), ("5e-1", 0.5), ("auto", "auto")):
        assert config.load(recipe_file, [f"optimizer.k={text}"]).optimizer.k == k
    for text, scale in (("dynamic", "dynamic"), ("1024", 1024.0), ("null", None)):
        assert config.load(recipe_file, [f"train.loss_scale={text}"]).train.loss_scale == scale
    overrides = ["model.config.hidden_size=64", "train.steps=5", "train.steps=6", "train.lr=3e-4"]
    recipe = config.load(recipe_file, [*overrides, "data.batch_size=6", "train.grad_accumulation=3"])
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 64}
    assert (recipe.train.steps, recipe.train.lr, recipe.train.grad_accumulation) == (6, 3e-4, 3)


def test_yaml_that_means_something_else_is_refused(recipe_file: Path) -> None:
    """YAML has the last of two keys, and Python has true as 1."""
    written = recipe_file.read_text()
    recipe_file.write_text(f"{written}train:\n  steps: 5\n")
    assert 'the key "train" is there twice' in refusal(recipe_file)
    recipe_file.write_text(written)
    assert 'the key "a" is there twice' in refusal(recipe_file, "model.config={a: 1, a: 2}")
    for key in ("train.steps", "train.lr", "run.threads"):
        assert f'"{key}" is True, but it should be a number, not true or false.' in refusal(recipe_file, f"{key}=true")
    assert config.load(recipe_file, ["model.autocast=true"]).model.autocast
    assert "run.seed" in refusal(recipe_file, f"run.seed={1 << 63}")
    for value, part in (("[" * 5000, "recursion"), ("2020-13-45", "month must be in 1..12")):
        assert part in refusal(recipe_file, f"model.config={value}")
    recipe_file.write_text(f"a: &a {{b: 1}}\nc: &c {{d: 1}}\ne: {{<<: *a, <<: *c, b: 2}}\n{written}")
    assert 'unknown key "a"' in refusal(recipe_file), "two of others may be merged"
    recipe_file.write_text("a: " + "[" * 5000)
    assert "recursion" in refusal(recipe_file)


def test_a_path_may_begin_with_a_home(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = config.load(recipe_file, ["run.dir=~/runs", "data.paths=[~/a.txt, ~draft.txt]"])
    assert recipe.run.dir == Path("/somewhere/runs")
    assert recipe.data.paths == (Path("/somewhere/a.txt"), Path.cwd() / "~draft.txt")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.stpes", "train.steps"),
        ("trian.steps", "train"),
        ("lr", "train.lr"),
        ("train.batchsize", "data.batch_size"),
        ("optimizer.learning", None),
        ("train.epsilons", None),
        ("data.block_size", None),
        ("data.dataset", None),
        ("sample.top_p", None),
        ("sample.token", "sample.tokens"),
    ],
)
def test_unknown_key_comes_with_a_suggestion(recipe_file: Path, key: str, meant: str | None) -> None:
    sentence = refusal(recipe_file, f"{key}=1")
    assert f'unknown key "{key if meant != "train" else "trian"}"' in sentence
    section, _, _ = key.rpartition(".")
    assert (f'did you mean "{meant}"?' if meant else f"the keys of {section} are") in sentence


K = 'must be "auto" or a number from 0 to 1'
SCALE = 'the loss\'s scale must be "dynamic" or a number'


@pytest.mark.parametrize(
    ("override", "part"),
    [
        *((f"optimizer.k={k}", K) for k in ("1.5", "nan", "half", "true", "[0]", "")),
        *((f"train.loss_scale={scale}", SCALE) for scale in ("static", "0", "nan", "true")),
        ("train.grad_accumulation=5", "multiple of train.grad_accumulation"),
        ("train.steps=many", '"train.steps" is'),
        ("train.steps=0", "greater than or equal to 1"),
        ("train.lr=.inf", "finite"),
        ("train.betas=[0.9]", '"train.betas'),
        ("train.optimizer=adam", "'lion'"),
        ("train.momentum=0.9", "train.momentum is no hyperparameter of train.optimizer: adamw"),
        ("train={steps: 5, optimizer: sgd, eps: 0.1}", "train.eps is no hyperparameter of train.optimizer: sgd"),
        ("train={steps: 5, optimizer: sgd, nesterov: true}", "train.nesterov needs a train.momentum"),
        ("train.warmup_steps=10", "smaller than train.steps"),
        ("train.min_lr=1", "not be above train.lr"),
        ("train.stop_at=11", "not be above train.steps"),
        ("train.device=tpu", "'cpu'"),
        ("train.schedule=cosin", "'warmup_stable_decay'"),
        ("train.on_divergence=stay", "'continue'"),
        ("run.log_to=[mlflow]", "'wandb'"),
        ("lora.r=4", "lora needs model.path"),
        ("optimizer.master_dtype=bfloat16", "is for model.dtype: bfloat16"),
        ("model.path=x", "either a path or a config"),
        ("model.config.model_type=3", "needs a model_type"),
        ("model={config: {model_type: llama}, dtype: bfloat16, autocast: true}", "autocast"),
        ("tokenizer.kind=path", "tokenizer.path"),
        ("tokenizer.vocab_size=10", "greater than or equal to 256"),
        ("data.kind=random", "none for kind: random"),
        ("data.validation=1", "less than 1"),
        ("optimizer.policy=fixed", "needs optimizer.k"),
        ("run.name=a/b", "run.name"),
        ("train=null", '"train"'),
        ("nothing", "section.key=value"),
        ("=3", "section.key=value"),
        ("train.steps=[1", "invalid value"),
    ],
)
def test_bad_values_are_one_sentence(recipe_file: Path, override: str, part: str) -> None:
    assert part in refusal(recipe_file, override)


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.yaml")
    path = tmp_path / "recipe.yaml"
    for content, part in (("[1, 2]", "mapping"), ("a: [", "YAML"), ("", "mapping"), ("train: {steps: 1}", "missing")):
        path.write_text(content)
        assert part in refusal(path)
    path.write_text("run: {}\ntrain:\n  steps: 5\n data: {}\n")
    assert f'{path} is not valid YAML in line 4, column 2, "data: {{}}": expected <block end>' in refusal(path)
    path.write_text(yaml.safe_dump(MINIMAL | {"data": {"kind": "random"}}))
    assert config.load(path).data.paths == ()
    assert "sample needs" in refusal(path, "sample.prompt=x")
    assert "torch fails to compile such blocks" in refusal(path, "train.compile=blocks", "parallel.tensor=2")
    chat = ("data={kind: chat, paths: [a.jsonl], packing: true}", "parallel.context=2")
    assert "packed examples would see each other" in refusal(path, *chat)
    assert "eval_every needs" in refusal(path, "train.eval_every=5")


def test_paths_start_where_they_were_written(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert config.load(recipe_file).data.paths == (tmp_path / "text.txt",)
    recipe = config.load(recipe_file, ["data.paths=[own.txt, /absolute]", "train.resume=latest"])
    assert recipe.data.paths == (elsewhere / "own.txt", Path("/absolute"))
    assert recipe.train.resume == Path("latest")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_dump_is_the_same_recipe(example: Path, tmp_path: Path) -> None:
    recipe = config.load(example)
    copy = tmp_path / "resolved.yaml"
    copy.write_text(config.dump(recipe))
    assert config.load(copy) == recipe
    assert all(path.exists() for path in recipe.data.paths)


def test_reading_a_recipe_does_not_import_torch() -> None:
    code = "import sys, hytrain.recipe.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_template_has_every_key_with_its_default(tmp_path: Path) -> None:
    """It loads as it is; and with the optional sections, it is the recipe that has none of these keys."""
    path = tmp_path / "recipe.yaml"
    path.write_text(template())
    assert config.load(path).train.steps
    everything = re.sub(r"^# (?=\w+:|  )", "", template(), flags=re.MULTILINE)
    tree = yaml.safe_load(everything) | {"model": {"path": "folder"}}
    assert tree.keys() == config.Recipe.model_fields.keys()
    sections = config.validate(tree, "the template")
    for name, section in sections:
        assert {*yaml.safe_load(everything)[name]} == {*type(section).model_fields}, name
    short = {name: values for name, values in EXAMPLE.items() if name != "model"} | {"lora": {}, "model": tree["model"]}
    assert config.validate(short, "the shortest") == sections
    for line in ("max_grad_norm: null  # clips the global norm\n", "on_divergence: stop  # or continue; "):
        assert line in everything


def test_init_writes_a_recipe_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert launcher.main(["init", str(path)]) == 0 and path.read_text() == template()
    path.write_text("mine")
    assert launcher.main(["init", str(path)]) == 2 and path.read_text() == "mine"
    assert launcher.main(["init", str(tmp_path / "mine.py")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "File exists" in said[0] and "name a .yaml file" in said[1]
    with pytest.raises(SystemExit) as ended:
        launcher.main(["init", "--help"])
    assert ended.value.code == 0 and "Write a recipe with every key" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["chat.jsonl", "text.txt", "shards/1.parquet"])
def test_data_in_place_of_a_program_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main([name, "--lr", "3"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert f"{name} is no program" in said and "data.paths" in said


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(["--version"])
    assert ended.value.code == 0 and hytrain.__version__ in capsys.readouterr().out


def test_garbage_is_collected_again_after_a_long_import() -> None:
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled(), "the program has disabled it"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("workers.train.trainer", "transformers", "recipe"),
        ("hytrain.integrations.accelerate", "accelerate", "hf"),
    ],
)
def test_a_missing_extra_is_one_sentence(module: str, missing: str, extra: str, recipe_file: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import {module}; sys.exit({module}.main())"
    command = [sys.executable, "-c", code, str(recipe_file), "--run-dir", str(recipe_file.parent)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    *_, last = (line for line in said.stderr.splitlines() if not line.startswith("docs/errors.md#"))
    assert (
        f"needs {missing}, which is not installed: python -m pip install '{Path(hytrain.__file__).parents[1]}[{extra}]'"
        in last
    )
    assert said.returncode and ("Traceback" in said.stderr) == (extra == "hf"), "an import raises; a recipe says it"


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ([], 4, (1, 4, 1, 1)),
        (["parallel.data_shard=-1", "parallel.tensor=2"], 8, (1, 4, 1, 2)),
        (["parallel.data_replicate=2", "parallel.data_shard=2"], 4, (2, 2, 1, 1)),
        (["parallel.context=2"], 4, (1, 2, 2, 1)),
        (["parallel.tensor=2", "parallel.data_shard=1"], 2, (1, 1, 1, 2)),
    ],
)
def test_the_mesh_of_a_job(recipe_file: Path, overrides: list[str], ranks: int, expected: tuple[int, ...]) -> None:
    recipe = config.load(recipe_file, overrides)
    assert tuple(recipe.parallel.sizes(ranks).values()) == expected
    config.check_ranks(recipe, ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks", "part"),
    [
        (["parallel.tensor=3"], 4, "asks for 3 ranks (tensor 3), but this job has 4"),
        (["parallel.tensor=2"], 1, "start it with --nproc-per-node 2"),
        (["data.batch_size=6"], 4, "6, which 4 ranks cannot share: make it a multiple of 4"),
        (["train.grad_accumulation=4"], 4, "in 4 parts: make it a multiple of 16"),
        (["model.split_batch=2"], 2, "model.split_batch is for one rank, but this job has 2"),
    ],
)
def test_ranks_that_do_not_fit_are_one_sentence(recipe_file: Path, overrides: list[str], ranks: int, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.check_ranks(config.load(recipe_file, overrides), ranks)
    assert part in str(caught.value)
