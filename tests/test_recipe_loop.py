"""Whole runs, with torch's own AdamW in the place of HyTrain's: records, checkpoints, resuming, the report."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hytrain.errors import ConfigError, MissingPackage, SavingError
from hytrain.memory.capacity import GpuMemory, Room, gpu_memory
from hytrain.readable import format_cores
from hytrain.recipe import checkpoint, config, loop, report
from hytrain.recipe.batches import Batch
from hytrain.recipe.config import Recipe
from hytrain.recipe.ending import Ended, Ending
from hytrain.recipe.journal import Divergence, History, Readout
from hytrain.recipe.model import decay_groups
from hytrain.recipe.optimizer import Process, factors
from hytrain.recipe.parallel import Job
from hytrain.recipe.task import assemble
from hytrain.recipe.validation import Validation, evaluate
from hytrain.run.saved import latest
from hytrain.state import manifest, tensor_file
from hytrain.statistics import Statistics
from protocol.metrics import BY_NAME
from workers.train import trainer

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, **DROPOUT}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 32, **SIZES}


class StandIn(torch.optim.AdamW):
    """torch's fused AdamW with the extra methods of HyTrain's, and the record of their calls."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        train = recipe.train
        groups = decay_groups(model, train.weight_decay)
        super().__init__(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)
        self.records: list[tuple[int, dict[str, float]]] = []
        self.grad_norm: torch.Tensor | None = None
        self.loss_scale: torch.Tensor | None = None
        self.requests: list[bool] = []  # one for each step, in its order; then none

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def synchronize(self) -> None: ...

    def checkpoint_requested(self) -> bool:
        return bool(self.requests) and self.requests.pop(0)

    def log(self, step: int, **numbers: float) -> None:
        self.records.append((step, numbers))

    def statistics(self) -> Statistics:
        return Statistics(k=0.25, stall_s=0.001)

    def async_save(self, folder: Path) -> Future[None]:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "state.pt")
        saved = Future[None]()
        saved.set_result(None)
        return saved

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

    def train(self, name: str, *overrides: str, ending: Ending | None = None) -> report.Summary:
        (self.folder / name).mkdir(exist_ok=True)
        recipe = config.load(self.recipe_file, overrides)
        return loop.train(recipe, self.folder / name, self.optimizer, terminal=False, ending=ending)

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


def test_what_there_is_before_the_first_step_is_not_looked_through_for_cycles(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_through, run_steps = list[int](), loop.run_steps
    monkeypatch.setattr(
        loop, "run_steps", lambda *args: (looked_through.append(len(gc.get_objects())), run_steps(*args))[1]
    )
    before = gc.get_freeze_count()
    runs.train("run", "train.steps=4")
    assert looked_through[0] < 1000 and bool(gc.get_freeze_count()) is bool(before)


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
            group["lr"] = recipe.train.lr * factors(recipe.train)(step)
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
    chunks = runs.train("chunks", *plain, "train.loss_chunks=3", "sample.prompt=the", "sample.temperature=0")
    assert chunks.training_loss == pytest.approx(whole.training_loss, rel=1e-3)
    assert whole.validation is not None and chunks.validation is not None
    assert chunks.validation.nats_per_token == pytest.approx(whole.validation.nats_per_token, rel=1e-3)
    assert chunks.validation.accuracy == pytest.approx(whole.validation.accuracy, abs=0.02) and chunks.sample


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
    assert sorted(path.name for path in folders.glob("step-*")) == ["step-12", "step-4", "step-8"]
    assert latest(runs.folder / "run") == summary.checkpoint == folders / "step-12"
    words = AutoTokenizer.from_pretrained(folders / "step-12")
    assert words.decode(words("the people")["input_ids"]) == "the people"
    state = json.loads((folders / "step-8" / "trainer_state.json").read_text())
    assert state["step"] == 8 and Recipe.model_validate(state["recipe"]) == config.load(
        runs.recipe_file, ["train.checkpoint_every=4", "tokenizer={kind: bpe, vocab_size: 270}"]
    )
    assert (state["run"], state["parent"], state["versions"]["torch"]) == ("run", "step-4", torch.__version__)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [10**9, 20_000], ids=["one file", "several files"])
def test_the_folder_is_the_one_that_transformers_writes(
    size: int, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order of the tensors in a file: they are written from where they lie."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", size)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1000)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    like = AutoConfig.for_model("llama", vocab_size=100, num_key_value_heads=4, tie_word_embeddings=tied, **sizes)
    model = AutoModelForCausalLM.from_config(like).bfloat16()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(checkpoint, "_export_converted", None)
    for name, each in (("first", model), ("ours", again)):
        checkpoint.export(each, tmp_path / name, Job())
    assert {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()
    }
    ours, theirs = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and (len(ours) > 4) == (size < 10**9)
    for name, path in ours.items():
        if path.suffix == ".json":
            assert json.loads(path.read_text()) == json.loads(theirs[name].read_text())
            continue
        found, expected = load_file(path), load_file(theirs[name])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_weights_may_change_while_a_copy_of_them_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuMemory, "room", lambda _: Room(1 << 40, 0))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=100, **sizes))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write = checkpoint.export(model, tmp_path, Job())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    write()
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in before.items())
    assert gpu_memory(torch.device("cpu"))._lent == 0


def test_a_checkpoint_of_another_version_is_told(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    runs.train("run", "train.steps=4")
    folder = runs.folder / "run" / "checkpoints" / "step-4"
    path = folder / "trainer_state.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    (folder / manifest.SUMS).unlink()
    manifest.seal(folder, manifest.files_in(folder))
    runs.train("run", "train.resume=latest")
    assert "step-4 was saved with torch 1.0: the bits may differ from here on" in caplog.messages


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
        patch.setattr(StandIn, "async_save", break_off)
        runs.train("run", "train.resume=latest", "train.stop_at=8")
    assert latest(runs.folder / "run") == folders / "step-4"
    runs.train("run", "train.resume=latest", "train.stop_at=8")
    assert latest(runs.folder / "run") == folders / "step-8"


def test_a_checkpoint_counts_from_its_rename_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens right after it."""
    runs.train("run", "train.stop_at=4")
    folders, sync = runs.folder / "run" / "checkpoints", manifest.sync

    def killed(folder: Path) -> None:
        sync(folder)
        if (folders / "step-8").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest, "sync", killed)
        runs.train("run", "train.resume=latest", "train.stop_at=8")
    assert latest(runs.folder / "run") == folders / "step-8"
    runs.train("run", "train.resume=latest", "train.stop_at=9")


def test_latest_follows_the_run_s_own_history(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_off(self: StandIn, folder: Path) -> None:
        raise KeyboardInterrupt

    runs.train("run", "train.checkpoint_every=4")
    folders = runs.folder / "run" / "checkpoints"
    back = f"train.resume={folders}/step-4"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StandIn, "async_save", break_off)
        runs.train("run", back)
    assert latest(runs.folder / "run") == folders / "step-4"
    assert [line for line in caplog.messages if "abandons step-8, step-12:" in line]
    runs.train("run", "train.resume=latest", "train.stop_at=6")
    runs.train("run", "train.resume=latest", "train.stop_at=7")
    assert [step for step, _ in runs.optimizers[-1].records] == [7]
    assert {path.name for path in folders.glob("*step*")} == {f"step-{step}" for step in (4, 6, 7, 8, 12)}


def test_the_newest_checkpoints_are_kept(runs: Runs) -> None:
    folders = runs.folder / "run" / "checkpoints"

    def kept() -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in folders.glob("step-*"))

    runs.train("run", "train.checkpoint_every=2", "train.keep_last=1", "train.keep_every=4")
    assert kept() == [4, 8, 12]
    shutil.rmtree(folders)
    runs.train("run", "train.checkpoint_every=2", "train.keep_last=3")
    assert kept() == [8, 10, 12]
    runs.train("run", f"train.resume={folders}/step-8", "train.keep_last=1", "train.stop_at=9")
    assert kept() == [9, 10, 12], "what it started from is not needed any more, what it abandoned is not its own"
    runs.train("other", f"train.resume={folders}/step-9", "train.keep_last=1")
    assert kept() == [9, 10, 12], "another run's folder"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_or_refused_before_anything_starts(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused if it is named; for "latest" the one before is whole, and without one it is refused, too."""
    runs.train("run", "train.checkpoint_every=4")
    folders = runs.folder / "run" / "checkpoints"
    resume = (f"train.resume={folders}/step-12", "train.steps=16")
    step, whole = folders / "step-12", runs.folder / "whole"
    shutil.copytree(step, whole)
    for name in ("model.safetensors", "config.json", "trainer_state.json", "optimizer/state.pt", manifest.SUMS):
        for damage in (flip_a_bit, lambda file: shutil.copy(folders / "step-8" / name, file)):  # noqa: B023
            damage(step / name)
            if (step / name).read_bytes() != (whole / name).read_bytes():
                with pytest.raises(ConfigError, match=str(step)) as refused:
                    runs.train("run", *resume)
                assert name == manifest.SUMS or name in str(refused.value)
            shutil.copy(whole / name, step / name)
    (step / "trainer_state.json").write_text("{}")
    manifest.seal(step, manifest.files_in(step))
    with pytest.raises(ConfigError, match="trainer_state"):
        runs.train("run", *resume)
    assert len(runs.optimizers) == 1
    runs.train("run", "train.resume=latest", "train.stop_at=9")
    assert [number for number, _ in runs.optimizers[-1].records] == [9]
    assert [line for line in caplog.messages if line.startswith("skipped step-12: ") and "trainer_state" in line]
    for kept in (4, 8, 9):
        flip_a_bit(folders / f"step-{kept}" / "model.safetensors")
    for name in ("latest", "auto"):
        with pytest.raises(ConfigError, match="step-9/model.safetensors is damaged"):
            runs.train("run", f"train.resume={name}")


def test_a_folder_of_checkpoints_may_have_anything(runs: Runs) -> None:
    """Strangers are left alone, those with a checkpoint's name give way, and a history names only checkpoints."""
    folders, elsewhere = runs.folder / "run" / "checkpoints", runs.folder / "elsewhere"
    runs.train("run", "train.stop_at=2")
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (folders / "step-4").symlink_to(elsewhere)
    (folders / "step-6").touch()
    (folders / "step-8").symlink_to(runs.folder / "nowhere")
    for name in (".step-9", ".step-4.partial", ".step-x.partial", ".history.partial"):
        (folders / name).touch()
    (folders / ".step-5.partial").symlink_to(elsewhere)
    (folders / "history").write_text("..\n.\n../..\nstep-2\n/\n" + f"{folders}/../checkpoints\nstep-2/..\n\0\n")
    runs.train("run", "train.resume=latest", "train.stop_at=10", "train.checkpoint_every=2", "train.keep_last=2")
    found = {path.name for path in folders.iterdir()}
    assert found == {"step-8", "step-10", "history", ".step-9", ".step-x.partial"}
    assert (elsewhere / "kept").exists() and (runs.folder / "text.txt").exists()
    assert re.fullmatch(r"(step-[0-9]+\n)+", (folders / "history").read_text())
    (folders / "history").unlink()
    os.mkfifo(folders / "history")  # reading it would wait for ever
    assert latest(runs.folder / "run") == folders / "step-10"
    runs.train("run", "train.resume=latest", "train.stop_at=12")
    assert latest(runs.folder / "run") == folders / "step-12"


def test_a_checkpoint_that_another_run_resumes_from_is_not_removed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    load, folders = StandIn.load, runs.folder / "run" / "checkpoints"

    def slowly(self: StandIn, folder: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(StandIn, "load", load)
            runs.train("run", "train.resume=latest", "train.stop_at=6", "train.keep_last=1")
        load(self, folder)

    runs.train("run", "train.stop_at=4")
    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "load", slowly)
        runs.train("other", f"train.resume={folders}/step-4", "train.stop_at=5")
    assert [step for step, _ in runs.optimizers[-1].records] == [5, 6]
    assert sorted(path.name for path in folders.glob("step-*")) == ["step-4", "step-6"]
    runs.train("run", "train.resume=latest", "train.stop_at=8", "train.keep_last=1")
    assert sorted(path.name for path in folders.glob("step-*")) == ["step-8"]


STATE_EDITS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda state: state.update(step=2.5), "step"),
    (lambda state: state.update(step="4"), "step"),
    (lambda state: state.update(step=-4), "step"),
    (lambda state: state.update(random={}), "random"),
    (lambda state: state.update(random="x"), "random"),
    (lambda state: state["random"][0].update(torch="AAAA"), "random.*: .*no generator has this state"),
    (lambda state: state["random"][0].update(torch="?"), "random"),
    (lambda state: state["random"][0]["python"][1].pop(), "random.*: .*no generator has this state"),
    (lambda state: state["recipe"].pop("model"), "recipe"),
    (lambda state: state["recipe"].update(model=3), "recipe"),
    (lambda state: state.update(versions=[1]), "versions"),
]


def test_a_checkpoint_that_somebody_has_edited_is_refused_before_anything_is_loaded(runs: Runs) -> None:
    runs.train("run", "train.stop_at=4")
    step, made = runs.folder / "run" / "checkpoints" / "step-4", len(runs.optimizers)
    whole = (step / "trainer_state.json").read_text()

    def edited(text: str) -> None:
        (step / "trainer_state.json").write_text(text)
        manifest.seal(step, manifest.files_in(step))

    for edit, told in STATE_EDITS:
        state = json.loads(whole)
        edit(state)
        edited(json.dumps(state))
        with pytest.raises(ConfigError, match=f"is damaged: trainer_state.json: {told}"):
            runs.train("run", "train.resume=latest")
    assert len(runs.optimizers) == made
    edited(whole)
    runs.train("run", "train.resume=latest", "train.stop_at=5")


def test_impossible_resumes_are_one_sentence(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        runs.train("run", "train.resume=latest")
    assert runs.train("new", "train.resume=auto", "train.stop_at=2").step == 2
    assert runs.train("new", "train.resume=auto", "train.stop_at=4").step == 4
    assert [step for step, _ in runs.optimizers[-1].records] == [3, 4]
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
    assert [format_cores(cores) for cores in ((), (3,), (0, 1, 2, 5, 7, 8))] == ["", "3", "0-2,5,7-8"]
    for word in ("trainer", str(os.getpid()), "0-1", first.sample, "step-4", "loss.png"):
        assert word in page
    with Image.open(first.curve) as picture:
        assert picture.size == (1200, 675)


def test_history_is_read_back_up_to_the_checkpoint(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": 10.0 - step, "k": 0.5} for step in (1, 2, 3, 4)]
    records[1]["validation_loss"] = 7.0
    lines = [json.dumps(record) for record in records] + ['{"step": 5, "lo']
    lines.insert(0, '{"step": 0, "loss": null, "validation_loss": null}')  # they were not finite
    metrics.write_text("\n".join(lines))
    history = History.read(metrics, until=3)
    assert history.training == [(1, 9.0, 0.5), (2, 8.0, 0.5), (3, 7.0, 0.5)]
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
    def interrupt(*arguments: Any, ending: Ending, **options: Any) -> None:
        ending.on_signal(signal.SIGINT)

    def interrupted_import(*arguments: Any, ending: Ending, **options: Any) -> None:
        try:
            ending.on_signal(signal.SIGINT)
        except Ended:
            raise ConfigError("model.config makes no working llama: cannot import a half of it") from None

    monkeypatch.setattr(trainer, "on_endings", lambda *signals: None)
    folder = runs.folder / "run"
    monkeypatch.setattr(sys, "argv", ["trainer", str(runs.recipe_file), "--run-dir", str(folder)])
    for said in (
        "no checkpoint to resume from: train.checkpoint_every=N",
        f"--set train.resume=latest resumes from {folder / 'checkpoints' / 'step-4'}",
    ):
        for how in (interrupt, interrupted_import):
            with monkeypatch.context() as patch:
                patch.setattr(loop, "train", how)
                assert trainer.main() == 130
            error = capsys.readouterr().err
            assert said in error and "Traceback" not in error
        runs.train("run", "train.steps=4")


def test_a_signal_ends_a_run_before_its_first_step_though_the_exception_was_caught(runs: Runs) -> None:
    ending = Ending()
    with suppress(Ended):
        ending.on_signal(signal.SIGTERM)
    with pytest.raises(Ended, match="interrupted"):
        runs.train("run", ending=ending)
    assert not (runs.folder / "run" / "checkpoints").exists()


def test_a_run_that_is_told_to_end_ends_with_a_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step; in a save, which is then the last; in a step whose checkpoint cannot be saved; in the last step."""
    folders, save = runs.folder / "run" / "checkpoints", StandIn.async_save

    def train(*overrides: str, within: str, at: int, fails: bool = False) -> str:
        """The sentence of a run that two signals tell to end, in this method of its optimizer, after `at` records."""
        ending = Ending()
        act = getattr(StandIn, within)

        def told(self: StandIn, *arguments: Any) -> Any:
            if len(self.records) >= at:
                ending.on_signal(signal.SIGTERM)
                ending.on_signal(signal.SIGTERM)
            return act(self, *arguments)

        def save_or_fail(self: StandIn, folder: Path) -> Future[None]:
            if fails:
                raise SavingError("no room")
            return save(self, folder)

        with monkeypatch.context() as patch:
            patch.setattr(StandIn, "async_save", save_or_fail)
            patch.setattr(StandIn, within, told)
            try:
                runs.train("run", *overrides, ending=ending)
            except Ended as ended:
                assert ended.number == signal.SIGTERM
                return ended.how
        return f"trained, told by {ending.number}"

    assert train(within="scale", at=2) == "ended after step 4, and saved a checkpoint"
    assert [path.name for path in folders.glob("step-*")] == ["step-4"]
    resume = "train.resume=latest"
    within_a_save = train(resume, "train.checkpoint_every=3", within="async_save", at=0)
    assert within_a_save == "ended after step 6, and saved a checkpoint"
    assert latest(runs.folder / "run") == folders / "step-6"
    unsaved = "without a checkpoint of this step: no room"
    assert train(resume, within="scale", at=0, fails=True) == f"ended after step 7, {unsaved}"
    assert latest(runs.folder / "run") == folders / "step-6"
    diverging = ("train.lr=1e30", "train.on_divergence=continue")
    assert train(*diverging, within="scale", at=3).endswith("of this step: its weights are not finite")
    assert train(within="scale", at=10) == f"trained, told by {signal.SIGTERM}"


def test_training_goes_on_with_dropout_after_an_evaluation() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
            assert not self.training and not use_cache
            return SimpleNamespace(loss=torch.zeros(()), logits=torch.zeros(*input_ids.shape, 8))

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    corpus = SimpleNamespace(bytes_per_token=1.0, validation=[Batch(tokens, tokens)])
    task: Any = SimpleNamespace(
        model=Model(), corpus=corpus, device=torch.device("cpu"), autocast=nullcontext, job=Job()
    )
    assert evaluate(task) is not None and task.model.training


def test_a_diverged_run_stops_and_keeps_the_last_good_checkpoint(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.folder / "run"
    folder.mkdir()
    options = ["--set", "train.lr=1e30", "--set", "train.checkpoint_every=1"]
    resolved = folder / "recipe.yaml"
    resolved.write_text(config.dump(config.load(runs.recipe_file, options[1::2])))
    monkeypatch.setattr(sys, "argv", ["trainer", str(resolved), "--run-dir", str(folder)])
    monkeypatch.setattr(trainer, "on_endings", lambda *signals: None)
    train = loop.train
    monkeypatch.setattr(loop, "train", lambda *args, **named: train(*args, runs.optimizer, **named))
    assert trainer.main() == 3
    said, records = capsys.readouterr(), runs.optimizers[0].records
    step, numbers = records[-1]
    assert re.search(rf"training has diverged: the (loss of|weights after) step {step} ", said.err), said.err
    assert numbers["diverged_at"] == step and not any("diverged_at" in before for _, before in records[:-1])
    kept = latest(folder)
    assert kept is not None and kept.name == f"step-{step - 1}" and f"resumes from {kept}" in said.err
    assert all(weight.isfinite().all() for weight in runs.weights("run", step - 1).values())


def test_a_run_that_shall_go_on_after_diverging_saves_no_broken_weights(runs: Runs) -> None:
    summary = runs.train("run", "train.lr=1e30", "train.on_divergence=continue", "sample={prompt: the}")
    assert summary.step == 12 and summary.checkpoint is None and summary.sample is None
    assert "none, because the weights are not finite" in summary.render()
    assert latest(runs.folder / "run") is None
    marks = [numbers.get("diverged_at") for _, numbers in runs.optimizers[0].records]
    assert marks[0] is None and len({*marks}) == 2, "the step that diverged, and all after it"


@pytest.mark.parametrize(("options", "seen"), [({}, 5), ({"on_nonfinite": "skip"}, 26), ({"loss_scale": 8}, 26)])
def test_one_bad_batch_is_no_divergence_where_it_is_skipped(options: dict[str, Any], seen: int) -> None:
    divergence = Divergence(config.Train.model_validate({"steps": 40, **options}))
    for step in range(1, 41):
        good = step < 4 or step == 6
        loss, norm = (math.nan, 1.0) if step % 2 else (1.0, math.inf)
        divergence.look_at_step(step, *((1.0, 1.0) if good else (loss, norm)))
    assert divergence.step == seen and f"step {seen} " in divergence.sign


def test_tensorboard_has_the_numbers_of_the_records(runs: Runs) -> None:
    """Across a resume."""
    options = ["train.steps=4", "train.eval_every=2"]
    runs.train("run", *options, "train.stop_at=2", "run.log_to=[tensorboard]")
    runs.train("run", *options, "train.resume=latest", "run.log_to=[tensorboard]")
    events = EventAccumulator(str(runs.folder / "run" / "tensorboard"))
    events.Reload()
    expected = runs.optimizers[0].records + runs.optimizers[1].records
    for name in ("loss", "lr", "validation_loss"):
        found = [(scalar.step, pytest.approx(scalar.value)) for scalar in events.Scalars(name)]
        assert [(step, numbers[name]) for step, numbers in expected if name in numbers] == found
    scalars, left = {*events.Tags()["scalars"]}, {"steps", "remaining_s", "tokens"}
    assert {"k", "stall_s", *expected[0][1]} - left <= scalars and not left & scalars, "these draw no curve"
    assert scalars <= BY_NAME.keys()


def test_wandb_is_offline_and_leaves_no_process(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    children = psutil.Process().children(recursive=True)
    runs.train("run", "train.steps=4", "train.eval_every=2", "run.log_to=[wandb]")
    [offline] = (runs.folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"validation_loss" in offline.read_bytes()
    ends_s = time.monotonic() + 60
    while (left := psutil.Process().children(recursive=True)) != children and time.monotonic() < ends_s:
        time.sleep(0.01)  # it may be ending
    assert left == children


def test_records_tell_how_far_the_run_has_come(runs: Runs) -> None:
    """To where this run stops, not to where its schedule ends."""
    runs.train("run", "train.steps=8", "train.stop_at=4")
    [optimizer] = runs.optimizers
    told = [(step, numbers["steps"], numbers["remaining_s"]) for step, numbers in optimizer.records]
    assert [(step, steps) for step, steps, _ in told] == [(step, 4) for step in range(1, 5)]
    remaining_s = [left_s for *_, left_s in told]
    assert min(remaining_s[:-1]) > 0.0 == remaining_s[-1]


def test_missing_trackers_are_one_sentence(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingPackage, match=rf"run.log_to: \[{name}\] needs .*pip install '.*\[{name}\]'"):
            runs.train("run", f"run.log_to=[{name}]")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # that PEFT reads
def test_adapters_alone_are_trained_and_saved_and_resume_bit_for_bit(runs: Runs) -> None:
    new = f"model.config={json.dumps(LLAMA)}"
    base = runs.train("base", "model=null", new, "train.steps=4").checkpoint
    given = [
        f"model={{path: {base}, config: null, dtype: bfloat16}}",
        "lora={r: 2, dropout: 0.1, target_modules: [q_proj, v_proj]}",
    ]
    runs.train("whole", *given, "train.steps=6")
    first = runs.train("parts", *given, "train.steps=6", "train.stop_at=3").checkpoint
    with pytest.raises(ConfigError, match="made with another lora"):
        runs.train("parts", *given, "lora.r=4", "train.resume=latest")
    torch.manual_seed(99)
    runs.train("parts", *given, "train.steps=6", "train.resume=latest")
    _, whole, *parts = (optimizer for optimizer in runs.optimizers if optimizer.records)
    losses = [(step, numbers["loss"]) for step, numbers in whole.records]
    assert losses == [(step, numbers["loss"]) for part in parts for step, numbers in part.records]
    [expected, resumed] = [
        load_file(runs.folder / name / "checkpoints" / "step-6" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    ]
    assert expected.keys() == resumed.keys() and len(expected) == 2 * 2 * 2, "two matrices, two modules, two layers"
    assert all(expected[name].equal(resumed[name]) and resumed[name].dtype is torch.bfloat16 for name in expected)
    assert sum(len(group["params"]) for group in whole.param_groups) == 8, "the base has no state"
    assert first is not None and not (first / "model.safetensors").exists()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), first)
    assert adapted(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()


def test_modules_that_the_model_has_not_are_one_sentence(runs: Runs) -> None:
    base = runs.train("base", "train.steps=4").checkpoint
    with pytest.raises(ConfigError, match="lora does not fit the model: .*nothing"):
        runs.train("run", f"model={{path: {base}, config: null}}", "lora.target_modules=[nothing]")


def test_a_checkpoint_is_saved_when_a_monitor_asks(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """After that step, besides those that are due, and training is the same."""
    runs.train("undisturbed")

    def asked(model: nn.Module, recipe: Recipe) -> StandIn:
        optimizer = runs.optimizer(model, recipe)
        optimizer.requests = [False, *(step == 5 for step in range(1, 13))]  # the first is before all steps
        return optimizer

    (runs.folder / "asked").mkdir()
    loop.train(config.load(runs.recipe_file), runs.folder / "asked", asked, terminal=False)
    names = {path.name for path in (runs.folder / "asked" / "checkpoints").iterdir()}
    assert {"step-5", "step-12"} == {name for name in names if name.startswith("step-")}
    assert "step 5: a checkpoint, which a monitor has asked for" in capsys.readouterr().err
    same = runs.weights("undisturbed", 12)
    assert all(torch.equal(tensor, same[name]) for name, tensor in runs.weights("asked", 12).items())
