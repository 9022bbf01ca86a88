"""Whole runs, with torch's own AdamW in the place of HyTrain's: records, checkpoints, resuming, the report."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hytrain.errors import ConfigError
from hytrain.recipe import checkpoint, config, loop, report
from hytrain.recipe.batches import Batch
from hytrain.recipe.config import Recipe
from hytrain.recipe.journal import History
from hytrain.recipe.model import decay_groups
from hytrain.recipe.optimizer import Process
from hytrain.recipe.progress import Progress, Speed
from hytrain.recipe.readout import Readout
from hytrain.recipe.schedule import factor
from hytrain.recipe.task import assemble
from hytrain.recipe.validation import Validation, evaluate
from workers import trainer

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, **DROPOUT}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 32, **SIZES}


@dataclass
class Statistics:
    k: float = 0.25
    stall_s: float = 0.001


class StandIn(torch.optim.AdamW):
    """torch's fused AdamW with the extra methods of HyTrain's, and the record of their calls."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        train = recipe.train
        groups = decay_groups(model, train.weight_decay)
        super().__init__(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)
        self.records: list[tuple[int, dict[str, float]]] = []
        self.grad_norm: torch.Tensor | None = None
        self.loss_scale: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def synchronize(self) -> None: ...

    def log(self, step: int, **numbers: float) -> None:
        self.records.append((step, numbers))

    def statistics(self) -> Statistics:
        return Statistics()

    def save(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        self.load_state_dict(torch.load(folder / "state.pt"))

    def processes(self) -> list[Process]:
        return [("trainer", os.getpid(), [0, 1])]


class Runs:
    """Trains recipes over one text, each in a folder of its own, and keeps the optimizers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = random.Random(1).choices(["the", "people", "of", "these", "states", "shall", "prosper"], k=2000)
        (folder / "text.txt").write_text(" ".join(words))
        self.recipe_file = folder / "recipe.yaml"
        tree: dict[str, Any] = {
            "run": {"seed": 5, "threads": 1},
            "model": {"config": GPT2},
            "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 4},
            "train": {"steps": 12, "lr": 1e-2, "warmup_steps": 3, "eval_batches": 2, "device": "cpu"},
        }
        self.recipe_file.write_text(yaml.safe_dump(tree))
        self.optimizers: list[StandIn] = []

    def train(self, name: str, *overrides: str) -> report.Summary:
        (self.folder / name).mkdir(exist_ok=True)
        recipe = config.load(self.recipe_file, overrides)
        return loop.train(recipe, self.folder / name, self.optimizer, terminal=False)

    def optimizer(self, model: nn.Module, recipe: Recipe) -> StandIn:
        self.optimizers.append(StandIn(model, recipe))
        return self.optimizers[-1]

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(self.folder / name / "checkpoints" / f"step-{step}")
        return dict(model.state_dict())


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    threads = torch.get_num_threads()
    yield Runs(tmp_path)
    torch.set_num_threads(threads)


def test_run_learns_and_records_every_step_once(runs: Runs) -> None:
    llama = f"model.config={json.dumps(LLAMA)}"
    summary = runs.train("run", "train.steps=30", "train.eval_every=10", "model=null", llama)
    records = runs.optimizers[0].records
    assert [step for step, _ in records] == list(range(1, 31))
    assert records[-1][1]["loss"] < records[0][1]["loss"] - 1
    assert [step for step, numbers in records if "validation_loss" in numbers] == [10, 20, 30]
    assert all({"loss", "lr", "tokens_per_s", "tflops"} <= numbers.keys() for _, numbers in records)
    assert "mfu" not in records[0][1]  # the peak of a CPU is unknown
    assert summary.validation is not None
    assert summary.validation.nats_per_token == records[-1][1]["validation_loss"]
    assert summary.training_loss == records[-1][1]["loss"] and summary.step == 30
    assert 0.2 < summary.validation.accuracy <= 1
    assert summary.validation.nats_per_byte == pytest.approx(summary.validation.nats_per_token)


def test_losses_are_those_of_a_plain_loop(runs: Runs) -> None:
    runs.train("run")
    recipe = config.load(runs.recipe_file)
    task = assemble(recipe, None)
    opt = StandIn(task.model, recipe)
    expected = []
    for step in range(12):
        for group in opt.param_groups:
            group["lr"] = recipe.train.lr * factor(step, recipe.train)
        tokens = task.batch(step).tokens
        loss = task.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    assert [numbers["loss"] for _, numbers in runs.optimizers[0].records] == expected


def test_a_batch_in_parts_gives_the_whole_one_s_losses(runs: Runs) -> None:
    plain = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
    whole, parts = runs.train("whole", *plain), runs.train("parts", *plain, "train.grad_accumulation=2")
    assert parts.training_loss == pytest.approx(whole.training_loss, rel=1e-3) and parts.step == whole.step


@pytest.mark.parametrize("tokenizer", ["{kind: bytes}", "{kind: bpe, vocab_size: 270}"])
def test_resumed_run_is_the_uninterrupted_run(runs: Runs, tokenizer: str) -> None:
    """Dropout is on, so the random generator must be as it was, too."""
    common = f"tokenizer={tokenizer}"
    runs.train("whole", common)
    runs.train("parts", common, "train.stop_at=5")
    torch.manual_seed(99)
    random.seed(99)
    runs.train("parts", common, "train.resume=latest")
    whole, first, second = (optimizer.records for optimizer in runs.optimizers)
    losses = [(step, n["loss"], n["lr"]) for step, n in whole]
    assert losses == [(step, n["loss"], n["lr"]) for step, n in first + second]
    expected, resumed = runs.weights("whole", 12), runs.weights("parts", 12)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_checkpoint_is_complete_and_loads_without_hytrain(runs: Runs) -> None:
    summary = runs.train("run", "train.checkpoint_every=4", "tokenizer={kind: bpe, vocab_size: 270}")
    folders = runs.folder / "run" / "checkpoints"
    assert sorted(path.name for path in folders.iterdir()) == ["step-12", "step-4", "step-8"]
    assert checkpoint.latest(runs.folder / "run") == summary.checkpoint == folders / "step-12"
    words = AutoTokenizer.from_pretrained(folders / "step-12")
    assert words.decode(words("the people")["input_ids"]) == "the people"
    state = json.loads((folders / "step-8" / "trainer_state.json").read_text())
    assert state["step"] == 8 and Recipe.model_validate(state["recipe"]) == config.load(
        runs.recipe_file, ["train.checkpoint_every=4", "tokenizer={kind: bpe, vocab_size: 270}"]
    )


def test_resume_from_an_earlier_step_replaces_the_later_ones(runs: Runs) -> None:
    runs.train("run", "train.checkpoint_every=4")
    before, folders = runs.weights("run", 12), runs.folder / "run" / "checkpoints"
    runs.train("run", f"train.resume={folders}/step-4", "train.checkpoint_every=4")
    assert [step for step, _ in runs.optimizers[-1].records] == list(range(5, 13))
    after = runs.weights("run", 12)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not [path for path in folders.iterdir() if path.name.startswith(".")]


def test_interrupted_checkpoint_does_not_count(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(self: StandIn, folder: Path) -> None:
        raise OSError("disk full")

    runs.train("run", "train.stop_at=4")
    folders = runs.folder / "run" / "checkpoints"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(StandIn, "save", break_off)
        runs.train("run", "train.resume=latest", "train.stop_at=8")
    assert checkpoint.latest(runs.folder / "run") == folders / "step-4"
    runs.train("run", "train.resume=latest", "train.stop_at=8")
    assert checkpoint.latest(runs.folder / "run") == folders / "step-8"


def test_impossible_resumes_are_one_sentence(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        runs.train("run", "train.resume=latest")
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        runs.train("run", f"train.resume={runs.folder}")
    runs.train("run")
    with pytest.raises(ConfigError, match=r"another model\.config"):
        runs.train("run", "train.resume=latest", "model.config.n_layer=1")
    with pytest.raises(ConfigError, match=r"at step 12 and the run ends at 12"):
        runs.train("run", "train.resume=latest")


@pytest.mark.parametrize("autocast", [False, True])
def test_random_tokens_need_no_text(runs: Runs, autocast: bool) -> None:
    """With parameters in bfloat16; or in float32, where autocast leaves them."""
    override = "{kind: random, paths: [], sequence_length: 16}"
    dtype = {"autocast": True} if autocast else {"dtype": "bfloat16", "gradient_checkpointing": True}
    model = json.dumps({**dtype, "config": {"vocab_size": 64}})
    summary = runs.train("run", f"data={override}", f"model={model}", "train.steps=4")
    assert summary.validation is None and summary.sample is None
    [found] = {weight.dtype for weight in runs.weights("run", 4).values()}
    assert found is (torch.float32 if autocast else torch.bfloat16)


def test_sample_and_summary(runs: Runs) -> None:
    options = ("sample={prompt: 'the people', tokens: 40}", "train.steps=4")
    first, second = (runs.train(name, *options) for name in ("one", "two"))
    assert first.sample is not None and first.sample.startswith("the people") and len(first.sample) > 20
    assert first.sample == second.sample
    page = first.render()
    assert "0.5000 nats per byte (2.0000 per token), top-1 accuracy 41.0%" in str(Validation(2.0, 0.5, 0.41))
    assert str(first.validation) in page
    assert report.smoothed([3.0] * 200) == pytest.approx([3.0] * 200)
    assert [report.ranges(cores) for cores in ([], [3], [0, 1, 2, 5, 7, 8])] == ["", "3", "0-2,5,7-8"]
    for word in ("trainer", str(os.getpid()), "0-1", first.sample, "step-4", "loss.png"):
        assert word in page
    with Image.open(first.curve) as picture:
        assert picture.size == (1200, 675)


def test_history_is_read_back_up_to_the_checkpoint(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": 10.0 - step, "k": 0.5} for step in (1, 2, 3, 4)]
    records[1]["validation_loss"] = 7.0
    again = {"step": 3, "loss": 0.25, "k": 0.5}
    lines = [json.dumps(record) for record in records] + ['{"step": 5, "lo', json.dumps(again), ""]
    lines.insert(0, '{"step": 0, "loss": null, "validation_loss": null}')  # they were not finite
    metrics.write_text("\n".join(lines))
    history = History.read(metrics, until=3)
    assert history.training == [(1, 9.0, 0.5), (2, 8.0, 0.5), (3, 0.25, 0.5)]
    assert history.validation == [(2, 7.0)]
    assert History.read(metrics, until=0) == History.read(tmp_path / "missing", until=3) == History()


def test_numbers_arrive_one_step_late() -> None:
    readout = Readout(torch.device("cpu"))
    assert readout.take() is None
    assert readout.swap({"loss": torch.tensor(1.5)}) is None
    two = {"loss": torch.tensor(2.5, dtype=torch.bfloat16), "grad_norm": torch.tensor(0.25)}
    assert readout.swap(two) == {"loss": 1.5}
    assert readout.swap({"loss": torch.tensor(3.5)}) == {"loss": 2.5, "grad_norm": 0.25}
    assert readout.take() == {"loss": 3.5} and readout.take() is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_numbers_are_read_from_the_gpu_without_waiting() -> None:
    readout = Readout(torch.device("cuda"))
    losses = [torch.tensor(float(step), device="cuda", requires_grad=True) for step in range(5)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = [readout.swap({"loss": loss, "norm": loss * 2}) for loss in losses]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [{"loss": float(step), "norm": 2.0 * step} for step in range(5)]
    assert seen == [None, *expected[:4]] and readout.take() == expected[4]


def test_an_interrupted_recipe_says_how_to_go_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    folder = runs.folder / "run"
    monkeypatch.setattr(sys, "argv", ["trainer", str(runs.recipe_file), "--run-dir", str(folder)])
    for said in (
        "no checkpoint to resume from: train.checkpoint_every=N",
        f"--set train.resume=latest resumes from {folder / 'checkpoints' / 'step-4'}",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train", interrupt)
            assert trainer.main() == 130
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error
        runs.train("run", "train.steps=4")


def test_progress_is_a_bar_or_lines(capsys: pytest.CaptureFixture[str]) -> None:
    speed = Speed(tokens_per_s=12345.6, tflops=1.25, mfu=0.31, k=0.4, stall_s=0.0021)
    for terminal in (True, False):
        with Progress(0, 40, terminal) as progress:
            for step in range(1, 41):
                progress.show(step, 1.5, speed)
            progress.say("a line")
        shown = capsys.readouterr().err
        assert all(part in shown for part in ("a line", "12,346 tok/s", "1.25 TFLOP/s", "MFU 31%", "k 0.40", "2.1 ms"))
        assert ("step 40/40: loss 1.5000" in shown) is not terminal
        assert shown.count("loss 1.5") == 20 or terminal


def test_training_goes_on_with_dropout_after_an_evaluation() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            assert not self.training
            return SimpleNamespace(loss=torch.zeros(()), logits=torch.zeros(*input_ids.shape, 8))

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    corpus = SimpleNamespace(bytes_per_token=1.0, validation=[Batch(tokens, tokens)])
    task: Any = SimpleNamespace(model=Model(), corpus=corpus, device=torch.device("cpu"), autocast=nullcontext)
    assert evaluate(task) is not None and task.model.training
