"""A run stopped and resumed is the run that went through, bit for bit, at whatever k; and checkpoints stand alone."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import (
    DEADLINE_S,
    LR,
    Reference,
    adamw,
    differing,
    keep,
    opened,
    saved_and_loaded,
    state,
    train,
    weights,
)
from programs import train_recipe, write_recipe
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import gpt2, llama, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

import hytrain
from hytrain.errors import ConfigError, SavingError, UsageError
from hytrain.memory.capacity import GpuMemory, Room, gpu_memory
from hytrain.model.trained import TrainedParameter
from hytrain.run.ranks import Ranks
from hytrain.state import folders as state_folders
from hytrain.state import manifest, saver, shards, tensor_file
from hytrain.state.shards import OFFSETS, SAVE
from tests.soak import folders


def schedule(opt: torch.optim.Optimizer, last_step: int = -1) -> LambdaLR:
    return LambdaLR(opt, lambda step: 0.98**step, last_epoch=last_step)


@pytest.mark.parametrize(
    ("make", "dtype"), [(gpt2, torch.float32), (llama, torch.bfloat16)], ids=["gpt2-float32", "llama-bfloat16"]
)
def test_saved_at_30_and_resumed_to_60(make: Callable[..., nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    whole = make(dtype)
    with adamw(whole, k=0.3) as opt:
        train(whole, opt, range(60), scheduler=schedule(opt))
        expected = state(opt)

    first = make(dtype)
    with adamw(first, k=0.0) as opt:
        train(first, opt, range(30), scheduler=schedule(opt))
        torch.save(first.state_dict(), tmp_path / "model.pt")
        opt.save(tmp_path / "optimizer")
        train(first, opt, range(90, 93))  # what comes after the save is not in it

    second = make(dtype)
    second.load_state_dict(torch.load(tmp_path / "model.pt"))
    with adamw(second, k=0.7) as opt:
        opt.load(tmp_path / "optimizer")
        train(second, opt, range(30, 60), scheduler=schedule(opt, 29))
        assert opt.statistics().step == 60, "steps are counted from the beginning of training"
        assert differing(state(opt), expected) == []
    assert differing(weights(second), weights(whole)) == []


class InPieces(nn.Module):
    """No blocks: it is cut by size, through its weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32, dtype=dtype), nn.Linear(32, 32, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(perceptron, torch.float32), (perceptron, torch.bfloat16), (InPieces, torch.bfloat16)],
    ids=["float32", "bfloat16", "in pieces"],
)
def test_state_dict_there_and_back(make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    whole = make(dtype=dtype)
    with adamw(whole, k=0.5) as opt:
        train(whole, opt, range(20), square_loss)
        expected = state(opt)

    first, second = make(dtype=dtype), make(dtype=dtype)
    with adamw(first, k=1.0) as opt:
        train(first, opt, range(10), square_loss)
        saved, kept = saved_and_loaded({"model": first.state_dict(), "optimizer": opt.state_dict()}), state(opt)
    second.load_state_dict(saved["model"])
    with adamw(second, k=0.0, lr=0.5) as opt:
        opt.load_state_dict(saved["optimizer"])
        assert opt.param_groups[0]["lr"] == LR
        assert differing(state(opt), kept) == []
        train(second, opt, range(10, 20), square_loss)
        assert differing(state(opt), expected) == []
    assert differing(weights(second), weights(whole)) == []


def test_torch_goes_on_with_the_same_arithmetic() -> None:
    """A loaded group's keys replace torch's own, so that one without `fused` would go on to other bits."""
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        saved = opt.state_dict()
    theirs = torch.optim.AdamW(perceptron().parameters(), fused=True)
    keys = set(theirs.param_groups[0])
    theirs.load_state_dict(saved)
    assert theirs.param_groups[0]["fused"] is True and set(theirs.param_groups[0]) >= keys


def test_state_goes_from_torch_to_hytrain_and_back() -> None:
    whole = gpt2()
    train(whole, Reference(whole, lr=LR), range(45))

    first = gpt2()
    reference = Reference(first, lr=LR)
    train(first, reference, range(15))
    second = gpt2()
    second.load_state_dict(first.state_dict())
    with adamw(second, k=0.5) as opt:
        opt.load_state_dict(reference.state_dict())
        train(second, opt, range(15, 30))
        third = gpt2()
        third.load_state_dict(second.state_dict())
        reference = Reference(third, lr=LR)
        reference.load_state_dict({**reference.state_dict(), "state": opt.state_dict()["state"]})
    train(third, reference, range(30, 45))
    assert differing(weights(third), weights(whole)) == []


@pytest.mark.parametrize("form", ["dictionary", "folder"])
def test_loading_makes_new_groups_as_in_torch(form: str, tmp_path: Path) -> None:
    """Who has kept one from before changes nothing by it."""
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        [kept] = opt.param_groups
        if form == "dictionary":
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        else:
            opt.save(tmp_path)
            opt.load(tmp_path)
        kept["lr"] = 9.0
        train(model, opt, [2], square_loss)
        assert opt.param_groups[0]["lr"] == LR
    expected = perceptron()
    train(expected, Reference(expected, lr=LR), range(3), square_loss)
    assert differing(weights(model), weights(expected)) == []


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """Of other shapes."""
    small, large = perceptron(width=32), perceptron(width=48)
    with adamw(small) as opt:
        train(small, opt, range(2), square_loss)
        loads = [keep(opt, form, tmp_path) for form in ("files", "dictionary")]
        with pytest.raises(ConfigError, match="nothing"):
            opt.load(tmp_path / "nothing")
    with adamw(large) as opt:
        for load in loads:
            with pytest.raises(ConfigError, match="shape"):
                load(opt)
        train(large, opt, range(2), lambda model, step: model(vectors(step, 48)).square().mean())


@pytest.mark.parametrize("form", ["files", "dictionary"])
def test_what_was_trained_may_be_frozen_now_and_the_other_way_round(form: str, tmp_path: Path) -> None:
    """In each run, another block is frozen from the start."""
    expected, model = perceptron(), perceptron()
    reference, load = Reference(expected, lr=LR), None
    for number, frozen in enumerate((0, 3, 1, 3)):
        for each in (expected, model):
            for index in (1, 3):
                each[index].requires_grad_(index != frozen)
        steps = range(2 * number, 2 * number + 2)
        train(expected, reference, steps, square_loss)
        with adamw(model, k=0.4) as opt:
            if load is not None:
                load(opt)
            train(model, opt, steps, square_loss)
            load = keep(opt, form, tmp_path)
        assert differing(weights(model), weights(expected)) == [], number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_rested_without_a_master_can_be_trained_on(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its state has come from torch, whose masters are the weights."""
    model = perceptron(dtype=dtype)
    reference = torch.optim.AdamW(model.parameters(), LR, fused=True)
    train(model, reference, range(2), square_loss)
    model[3].requires_grad_(False)
    with adamw(model) as opt:
        opt.load_state_dict(copy.deepcopy(reference.state_dict()))
        opt.save(tmp_path)
    model[3].requires_grad_(True)
    with adamw(model) as opt:
        opt.load(tmp_path)
        found, expected = opt.state_dict()["state"], reference.state_dict()["state"]
        for index, entry in expected.items():
            assert torch.equal(found[index]["exp_avg"].float(), entry["exp_avg"].float()), index


def test_what_is_in_no_group_any_more_is_told(tmp_path: Path) -> None:
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(tmp_path)
    model[3].requires_grad_(False)
    given = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with hytrain.AdamW(given, LR) as opt:
        square_loss(model, 0)
        with pytest.raises(ConfigError, match=r"has 3\.0\.\w+, which no parameter group has"):
            opt.load(tmp_path)


def test_ctrl_c_comes_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model, restore = perceptron(), TrainedParameter.restore

    def interrupted(known: TrainedParameter, count: int) -> None:
        if known is opt._session.parameters[0]:
            signal.raise_signal(signal.SIGINT)
        restore(known, count)

    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        saved = copy.deepcopy(opt.state_dict())
        train(model, opt, range(2, 5), square_loss)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TrainedParameter, "restore", interrupted)
            opt.load_state_dict(saved)
        assert opt.state_dict()["steps"] == saved["steps"]
        train(model, opt, range(2, 5), square_loss)


def test_what_was_never_trained_is_told(tmp_path: Path) -> None:
    model = perceptron()
    model[3].requires_grad_(False)
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(tmp_path)
    model[3].requires_grad_(True)
    with adamw(model) as opt, pytest.raises(ConfigError, match=r"3\.0\.bias was never trained there"):
        opt.load(tmp_path)


@pytest.mark.parametrize("k", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_is_first_read_in_inference_mode_can_be_loaded(dtype: torch.dtype, k: float) -> None:
    def run(model: Any, opt: Any) -> None:
        train(model, opt, range(3), square_loss)
        with torch.inference_mode():
            kept = copy.deepcopy((model.state_dict(), opt.state_dict()))
        train(model, opt, range(3, 5), square_loss)
        model.load_state_dict(kept[0])
        opt.load_state_dict(kept[1])
        train(model, opt, range(3, 6), square_loss)

    results = []
    for options in ({"k": 1.0}, {"k": k}):
        model = perceptron(dtype=dtype)
        with adamw(model, **options) as opt:
            run(model, opt)
            results.append(state(opt) | weights(model))
    assert differing(*results) == []


def test_a_load_that_fails_half_way_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        saved = copy.deepcopy(opt.state_dict())
        monkeypatch.setattr("hytrain.state.dicts.scatter", Mock(side_effect=OSError("of the disk")))
        with pytest.raises(OSError, match="of the disk"):
            opt.load_state_dict(saved)
        with pytest.raises(UsageError, match="loading was interrupted by OSError"):
            train(model, opt, [2], square_loss)


def test_what_somebody_has_put_into_a_group_does_not_keep_it_from_being_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = perceptron()
    with adamw(model) as opt:
        opt.param_groups[0].update(rates={0: 0.1}, kind=torch.bfloat16, stages=[1, 2], name="all", pair=(3, 4))
        train(model, opt, range(2), square_loss)
        opt.save(tmp_path)
        for key, kind in (("kind", "dtype"), ("rates", "dict")):
            assert f"{key!r} of a parameter group is not saved: {kind} has no place in JSON" in caplog.messages
        opt.param_groups[0].update(kind=torch.float16, stages=[], name="", pair=())
        opt.load(tmp_path)
        found = {key: opt.param_groups[0][key] for key in ("kind", "stages", "name", "pair")}
        assert found == {"kind": torch.float16, "stages": [1, 2], "name": "all", "pair": (3, 4)}


@pytest.mark.parametrize("form", ["files", "dictionary"])
def test_records_go_on_where_the_state_was_saved(form: str, tmp_path: Path) -> None:
    """In the same folder, with the loop's count; each step has one record, that of the run which went on."""
    model, loads, losses = perceptron(), list[Callable[[hytrain.AdamW], None]](), dict[int, float]()

    def go_on(opt: hytrain.AdamW, steps: range) -> None:
        for step in steps:
            losses[step] = train(model, opt, range(step, step + 1), square_loss)[0]
            opt.log(step, loss=losses[step])

    began_s = time.time()
    with adamw(model, run_dir=tmp_path / "records", on_nonfinite="skip") as opt:
        go_on(opt, range(4))
        loads.append(keep(opt, form, tmp_path))
        go_on(opt, range(4, 8))
        opt.log(8, validation=0.5)  # of a step that never comes
    with adamw(model, run_dir=tmp_path / "records", on_nonfinite="skip") as opt:
        loads[0](opt)
        assert opt.state_dict()["steps"] == 3
        go_on(opt, range(4, 6))
        assert opt.statistics().step == 5

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "records" / name).read_text().splitlines()]

    assert [(record["step"], record["loss"]) for record in read("metrics.jsonl")] == list(losses.items())[:6]
    times = [began_s, *(record["wall_time"] for record in read("metrics.jsonl")), time.time()]
    assert times == sorted(times)
    assert [record["step"] for record in read("metrics-replaced.jsonl")] == [4, 5, 6, 7]
    assert read("metrics-replaced.jsonl")[-1]["validation"] == 0.5


@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_state_loaded_where_it_lies_changes_nothing(dtype: torch.dtype, k: float) -> None:
    """`state_dict` gives views."""
    model = perceptron(dtype=dtype)
    with adamw(model, k=k) as opt:
        train(model, opt, range(5), square_loss)
        before = state(opt)
        opt.load_state_dict(opt.state_dict())
        assert differing(state(opt), before) == []


@pytest.mark.parametrize("form", ["files", "dictionary"])
def test_a_state_that_is_saved_right_after_weights_were_loaded(form: str, tmp_path: Path) -> None:
    """It belongs to those weights, also where they are written by hand just before it is loaded."""
    model = perceptron(dtype=torch.bfloat16)
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        model.load_state_dict({name: tensor * 1.25 for name, tensor in model.state_dict().items()})
        load, kept = keep(opt, form, tmp_path), weights(model)
        train(model, opt, range(3, 6), square_loss)
        expected = state(opt) | weights(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        load(opt)
        train(model, opt, range(3, 6), square_loss)
        assert differing(state(opt) | weights(model), expected) == []


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def seal_again(folder: Path) -> None:
    """As if the files were saved like that."""
    manifest.seal(folder, sorted(folder.glob("state-*/[!.]*")))


def saved_in(folder: Path) -> Path:
    """Where the files of the one save are."""
    [found] = folder.glob("state-*")
    return found


def make_flat(file: Path) -> None:
    tensors = {name: tensor.flatten() for name, tensor in load_file(file).items()}
    offsets = {name: {"saved_offsets": [0]} for name in tensors}
    save_file(tensors, file, {SAVE: file.parent.name, OFFSETS: json.dumps(offsets)})
    seal_again(file.parent.parent)


def drop_a_key(file: Path) -> None:
    index = json.loads(file.read_text())
    del index["step_of"]
    file.write_text(json.dumps(index))
    seal_again(file.parent.parent)


def take_that_of_another_step(file: Path) -> None:
    file.write_bytes((saved_in(file.parents[2] / "later") / file.name).read_bytes())


def take_and_seal_that_of_another_step(file: Path) -> None:
    take_that_of_another_step(file)
    seal_again(file.parent.parent)


def make_a_pipe(file: Path) -> None:
    """Reading it would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def put_a_pipe_beside(file: Path) -> None:
    os.mkfifo(file.with_name("shard-00001-model-00009-of-00009.safetensors"))


def name_one_outside(file: Path) -> None:
    """With the right checksum."""
    shutil.copy(saved_in(file.parent) / "index.json", file.parents[1] / "index.json")
    file.write_text(file.read_text().replace(f"{saved_in(file.parent).name}/index.json", "../index.json"))


#: A file, what happens to it, and what the error names.
LAYER = "shard-00001-model-00003-of-00004.safetensors"
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (LAYER, Path.unlink, LAYER),
    (LAYER, cut_in_half, LAYER),
    (LAYER, make_flat, "2.0.weight"),
    (LAYER, flip_a_bit, LAYER),
    (LAYER, take_that_of_another_step, LAYER),
    (LAYER, take_and_seal_that_of_another_step, LAYER),
    (LAYER, make_a_pipe, LAYER),
    (LAYER, put_a_pipe_beside, "model-00009"),
    ("index.json", flip_a_bit, "index.json"),
    ("index.json", drop_a_key, "index.json"),
    ("SHA256SUMS", Path.unlink, "SHA256SUMS"),
    ("SHA256SUMS", make_a_pipe, "SHA256SUMS"),
    ("SHA256SUMS", name_one_outside, "SHA256SUMS is damaged"),
    ("SHA256SUMS", cut_in_half, "SHA256SUMS"),
]


def test_a_damaged_folder_is_named_and_changes_nothing(tmp_path: Path) -> None:
    model, folder = perceptron(dtype=torch.bfloat16), tmp_path / "saved"
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(folder)
        (folder / "model.pt").touch()  # of the user: it neither is checked nor goes away
        (saved_in(folder) / "._shard.safetensors").write_text("of another system")  # which is not read
        shutil.copytree(folder, tmp_path / "whole")
        train(model, opt, range(2, 4), square_loss)
        opt.save(tmp_path / "later")
        before = state(opt)
        for name, damage, told in DAMAGES:
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "whole", folder)
            damage((folder if name == "SHA256SUMS" else saved_in(folder)) / name)
            with pytest.raises(ConfigError, match="optimizer state|opt.save writes|another shape|same save") as refused:
                opt.load(folder)
            assert told in str(refused.value), (name, damage)
            assert differing(state(opt), before) == []
        train(model, opt, range(4, 6), square_loss)


Edit = Callable[[dict[str, Any]], object]
#: What somebody may have made of `index.json`, and what the error names.
EDITS: list[tuple[Edit, str]] = [
    (lambda index: index["param_groups"][0].update(lr=float("nan")), "lr is nan: a number"),
    (lambda index: index["param_groups"][0].update(lr=float("inf")), "lr is inf: a number"),
    (lambda index: index["param_groups"][0].update(lr="0.1"), "lr is '0.1': a number"),
    (lambda index: index["param_groups"][0].update(lr=10**400), "a number"),
    (lambda index: index["param_groups"][0].update(lr=True), "lr is True: a number"),
    (lambda index: index["param_groups"][0].update(lr=None), "lr is None: a number"),
    (lambda index: index["param_groups"][0].update(eps=-1e-8), "must not be negative"),
    (lambda index: index["param_groups"][0].update(maximize="False"), "maximize is 'False': True or False"),
    (lambda index: index["param_groups"][0].update(maximize=0), "maximize is 0: True or False"),
    (lambda index: index["param_groups"][0].update(betas=[0.9, 0.99, 0.999]), "two numbers"),
    (lambda index: index["param_groups"][0].update(betas=[0.9, 1.5]), "betas lie in"),
    (lambda index: index["param_groups"][0].update(betas=["0.9", 0.99]), "a number"),
    (lambda index: index["param_groups"][0].update(betas=0.9), "two numbers"),
    (lambda index: index["param_groups"][0].update(initial_lr="0.1"), "initial_lr is '0.1': a number"),
    (lambda index: index["param_groups"][0].update(amsgrad=True), "amsgrad"),
    (lambda index: index["param_groups"][0].pop("weight_decay"), "it has no 'weight_decay'"),
    (lambda index: index["param_groups"].append(index["param_groups"][0]), "has 2 parameter groups"),
    (lambda index: index.update(param_groups={}), "param_groups"),
    (lambda index: index.update(param_groups=["adamw"]), "param_groups.0"),
    (lambda index: index.update(step_of=dict.fromkeys(index["step_of"], 2.5)), "step_of"),
    (lambda index: index.update(step_of=dict.fromkeys(index["step_of"], "2")), "step_of"),
    (lambda index: index.update(step_of=dict.fromkeys(index["step_of"], -2)), "step_of"),
    (lambda index: index.update(step_of=dict.fromkeys(index["step_of"], True)), "step_of"),
    (lambda index: index.update(step_of=[*index["step_of"]]), "step_of"),
    (lambda index: index.update(resting=None), "resting"),
    (lambda index: index.update(resting={"0.0.weight": 2.0}), "resting"),
    (lambda index: index.update(steps="2"), "steps"),
    (lambda index: index.update(steps=10**300), "steps"),
    (lambda index: index.update(steps=float("inf")), "steps"),
    (lambda index: index.update(loss_scale=65536.0), "loss_scale"),
    (lambda index: index.update(loss_scale={"scale": float("nan"), "good_steps": 1}), "loss_scale.scale"),
    (lambda index: index.update(loss_scale={"scale": 1e300, "good_steps": 1}), "loss_scale.scale"),
    (lambda index: index.update(loss_scale={"scale": 8.0}), "loss_scale.good_steps"),
    (lambda index: index.update(algorithm=1), "algorithm"),
    (lambda index: index.update(algorithm="Adam"), "hytrain.Adam's"),
    (lambda index: index.update(format="3"), "another version"),
    (lambda index: index.update(format=4), "another version"),
    (lambda index: index.update(state_dtype="int4"), "state_dtype"),
    (lambda index: index.update(master_dtype=None), "master_dtype"),
    (lambda index: index.update(speed=1), "speed"),
    (lambda index: index.update(save="state-0123456789abcdef"), "not of the same save"),
    (lambda index: index.clear(), "format"),
]


def test_an_index_that_somebody_has_edited_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, folder = perceptron(), tmp_path / "saved"
    with adamw(model, loss_scale="dynamic") as opt:
        opt.save(folder)
        path, before = saved_in(folder) / "index.json", (state(opt), opt.param_groups[0].copy(), float(opt.loss_scale))
        whole = json.loads(path.read_text())
        for edit, told in EDITS:
            index = copy.deepcopy(whole)
            edit(index)
            path.write_text(json.dumps(index))
            seal_again(folder)
            with pytest.raises(ConfigError) as refused:
                opt.load(folder)
            assert told in str(refused.value), (told, str(refused.value))
        for text in ("", "[" * 100_000, "{", "[]", "null", '"lr"'):
            path.write_text(text)
            seal_again(folder)
            with pytest.raises(ConfigError, match="not what opt.save writes"):
                opt.load(folder)
        assert differing(state(opt), before[0]) == []
        assert (opt.param_groups[0], float(opt.loss_scale)) == before[1:]
        path.write_text(json.dumps(whole))
        seal_again(folder)
        opt.load(folder)


# ---------------------------------------------------------------- several processes, one folder


def begun(opt: hytrain.AdamW, folder: Path, number: int) -> Callable[[], None]:
    """A save whose files are written. What is returned makes it the current one."""
    folders.fill(opt, number)
    return partial(state_folders.save(folder, folders.state(opt), steps=number).finish, Ranks())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_saves_at_once_leave_the_one_that_was_reported_last(order: tuple[int, int], tmp_path: Path) -> None:
    """Neither a mixture nor nothing; and what a third process, which was killed, has left goes away."""
    os.mkfifo(tmp_path / ".SHA256SUMS.partial")  # writing it would wait for ever
    with adamw(perceptron(), k=0.5) as opt:
        begun(opt, tmp_path, 7)()
        begun(opt, tmp_path, 8)  # and never finished
        finishes = [begun(opt, tmp_path, number) for number in (1, 2)]
        for which in order:
            finishes[which]()
            opt.load(tmp_path)
            assert folders.numbers(opt) == {which + 1.0}
        saved_in(tmp_path)


def test_a_load_while_others_save_is_of_one_state(tmp_path: Path) -> None:
    """What it reads is removed by the first save after it."""
    with adamw(perceptron(), k=0.0) as opt, adamw(perceptron(), k=0.0) as other:
        begun(opt, tmp_path, 1)()
        when_checked = opt._import_for_loading

        def overtaken(whole: ExitStack) -> None:
            when_checked(whole)
            for number in (2, 3):
                begun(other, tmp_path, number)()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opt, "_import_for_loading", overtaken)
            opt.load(tmp_path)
        assert folders.numbers(opt) == {1.0}
        opt.load(tmp_path)
        assert folders.numbers(opt) == {3.0}
        begun(other, tmp_path, 4)()
        saved_in(tmp_path)


def test_savers_loaders_and_killers_over_shared_folders(tmp_path: Path) -> None:
    """The short form of `python -m tests.soak.folders`."""
    with ExitStack() as opened:
        opts = [opened.enter_context(adamw(perceptron(), k=0.0)) for _ in range(3)]
        wanted, seen, seeds = (
            {"save, done", "load, done", "save, killed", "load, killed"},
            set[str](),
            itertools.count(1),
        )
        while not wanted <= seen:  # a killer may come too late each time
            (folder := tmp_path / f"seed-{(seed := next(seeds))}").mkdir()
            soak = folders.Soak(folder, [folders.Actor(opt) for opt in opts], random.Random(seed))
            soak.run(turns=40, seconds=DEADLINE_S)
            assert soak.wrong == []
            seen |= soak.counts.keys()


class Killed(BaseException):
    """Nothing of the program runs after it, as no one catches it."""


def killed_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Let the program end after so many calls that change files."""
    left = itertools.count(calls, -1)

    def ending(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return call(*arguments, **options)

        return instead

    for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
        patch.setattr(os, name, ending(getattr(os, name)))
    patch.setattr(shards, "write", ending(shards.write))


def test_a_save_that_is_killed_leaves_the_old_state_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = perceptron(), tmp_path / "state"
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(folder)
        old = state(opt)
        train(model, opt, range(2, 4), square_loss)
        opt.save(tmp_path / "new")
        new, found, ended = state(opt), list[str](), False
        while not ended:
            with monkeypatch.context() as patch:
                killed_after(patch, len(found))
                try:
                    opt.save(folder)
                    ended = True
                except Killed:
                    pass
            gc.collect()  # a program that was killed holds no locks
            opt.load(folder)
            found.append("old" if differing(state(opt), old) == [] else "new")
            assert found[-1] == "old" or differing(state(opt), new) == []
            opt.load(tmp_path / "new")
    assert found.index("new") > 10 and set(found[found.index("new") :]) == {"new"} and len(list(folder.iterdir())) == 2


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """This process cannot write larger files."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_save_that_cannot_be_written_goes_and_the_old_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "state", perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(folder)
        before, files = state(opt), {path.name for path in folder.iterdir()}
        train(model, opt, range(2, 4), square_loss)
        for error, told in ((OSError(errno.ENOSPC, "No space left on device"), "make room"), (None, r"5,000 .*ulimit")):
            with full_disk(5_000), monkeypatch.context() as patch, pytest.raises(SavingError, match=told):
                if error is not None:
                    patch.setattr(tensor_file, "write", Mock(side_effect=error))
                opt.save(folder)
        assert {path.name for path in folder.iterdir()} == files
        train(model, opt, range(4, 6), square_loss)
        opt.load(folder)
        assert differing(state(opt), before) == []
        opt.save(folder)


@contextmanager
def held_back(patch: pytest.MonkeyPatch, *, writing: bool = False) -> Iterator[threading.Event]:
    """No checksums are written until the event is set, as on a slow disk; nor, with `writing`, anything else."""
    on, module, name = threading.Event(), *((tensor_file, "write") if writing else (manifest, "seal"))
    write = getattr(module, name)

    def late(*arguments: Any, **options: Any) -> None:
        assert on.wait(DEADLINE_S)
        write(*arguments, **options)

    with patch.context() as patched:
        patched.setattr(module, name, late)
        yield on


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is memory for a copy. In the end, nothing is lent."""
    monkeypatch.setattr(GpuMemory, "room", lambda _: Room(1 << 40, 0))
    yield
    assert gpu_memory(torch.device("cpu"))._lent == 0


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_training_goes_on_while_a_state_is_saved(
    k: float, has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The state of the step is saved, whatever is trained meanwhile; until then, the old one is in force."""
    model, folder = perceptron(dtype=torch.bfloat16), tmp_path / "state"
    if has_room:
        request.getfixturevalue("room")
    with adamw(model, k=k) as opt, held_back(monkeypatch, writing=has_room) as disk:
        train(model, opt, range(2), square_loss)
        disk.set()
        opt.save(folder)
        disk.clear()
        old = state(opt)
        train(model, opt, range(2, 4), square_loss)
        new = state(opt)
        saved = opt.async_save(folder)
        train(model, opt, range(4, 6), square_loss)
        assert not saved.done()
        shutil.copytree(folder, tmp_path / "meanwhile")
        disk.set()
        saved.result()
        for found, expected in ((tmp_path / "meanwhile", old), (folder, new)):
            opt.load(found)
            assert differing(state(opt), expected) == []


def test_checksums_behind_the_training_take_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, each = perceptron(), list[bool](), saver.each

    def noted(call: Any, items: Any, *, in_parallel: bool) -> Any:
        asked.append(in_parallel)
        return each(call, items, in_parallel=in_parallel)

    monkeypatch.setattr(manifest, "each", noted)
    with adamw(model) as opt:
        opt.async_save(tmp_path / "behind").result()
        opt.save(tmp_path / "waiting")
    assert asked == [False, True]


def test_saves_do_not_overtake_each_other_and_closing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = perceptron(), tmp_path / "state"
    with held_back(monkeypatch) as disk:
        with adamw(model) as opt:
            train(model, opt, range(2), square_loss)
            first = opt.async_save(folder)
            threading.Timer(0.1, disk.set).start()
            second = opt.async_save(folder)
            assert first.done()
            disk.clear()
            threading.Timer(0.1, disk.set).start()
        assert second.done() and second.exception() is None
    with adamw(perceptron()) as opt:
        opt.load(folder)


LAST = """
import sys, torch, hytrain
model = torch.nn.Linear(8, 8)
opt = hytrain.AdamW(model)
model(torch.ones(1, 8)).sum().backward()
opt.step()
opt.async_save(sys.argv[1])
"""


AT_EXIT = LAST.replace("import", "import atexit,", 1).replace(
    "opt.async_save(sys.argv[1])",
    "atexit.register(opt.save, sys.argv[1]); atexit.register(opt.async_save, sys.argv[1] + '-behind')",
)


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize(
    ("script", "saved"), [(LAST, ["state"]), (AT_EXIT, ["state", "state-behind"])], ids=["ends", "at exit"]
)
def test_a_save_is_finished_though_the_program_ends(script: str, saved: list[str], tmp_path: Path) -> None:
    """Also one that begins at exit, when no thread can start."""
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "state"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and ran.stderr == ""
    with adamw(nn.Linear(8, 8)) as opt:
        for name in saved:
            opt.load(tmp_path / name)
            assert opt.state_dict()["state"][0]["step"] == 1


@pytest.mark.usefixtures("room")
def test_a_copy_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its memory is free, though the error is still there."""
    model, folder, lend = perceptron(), tmp_path / "state", GpuMemory.lend
    lent: list[StorageWeakRef] = []

    def lends(self: GpuMemory, nbytes: int) -> Tensor | None:
        buffer = lend(self, nbytes)
        assert buffer is not None
        lent.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(GpuMemory, "lend", lends)
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(folder)
        before = state(opt)
        with full_disk(5_000):
            saved = opt.async_save(folder)
            assert "File too large" in str(saved.exception()) and len(list(folder.iterdir())) == 2
        assert [storage.expired() for storage in lent] == [True]
        train(model, opt, range(2, 4), square_loss)
        opt.load(folder)
        assert differing(state(opt), before) == []


def test_a_save_that_fails_behind_the_training_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = perceptron(), tmp_path / "state"
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        opt.save(folder)
        before = state(opt)
        train(model, opt, range(2, 4), square_loss)
        (folder / ".SHA256SUMS.partial").mkdir()  # so that nothing can be written there
        saved = opt.async_save(folder)
        train(model, opt, range(4, 6), square_loss)
        assert isinstance(saved.exception(), SavingError)
        assert f"the optimizer's state in {folder} was not saved" in caplog.text
        opt.load(folder)
        assert differing(state(opt), before) == []


def test_a_recipe_goes_on_without_a_checkpoint_that_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither the model's weights, nor the optimizer's state, nor the checksums of both. The last one has to be."""
    replace, save_pretrained = manifest.replace, PreTrainedModel.save_pretrained
    full = {".step-4.partial/optimizer/SHA256SUMS", ".step-6.partial/SHA256SUMS"}

    def replaced(file: Path, text: str) -> None:
        if any(str(file).endswith(name) for name in full):
            raise OSError(28, "No space left on device")
        replace(file, text)

    def saved(model: Any, folder: Path, **options: Any) -> None:
        if folder.name == ".step-2.partial":
            (folder / "model.safetensors").write_text("half a file")
            raise SafetensorError("No space left on device")
        save_pretrained(model, folder, **options)

    monkeypatch.setattr(manifest, "replace", replaced)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
    train_recipe(write_recipe(tmp_path, train={"steps": 10, "checkpoint_every": 2}), tmp_path / "run")
    found = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert found == {"step-8", "step-10", "history"}
    assert re.search("step 2: no checkpoint, and training goes on: .*No space left on device", capsys.readouterr().err)
    said = [line for line in caplog.messages if line.startswith("training goes on, but the checkpoint of step")]
    assert [line.split(" was")[0][-6:] for line in said] == ["step 4", "step 6"]
    assert all("No space left on device" in line for line in said)
    with pytest.raises(SavingError, match="No space left"):
        train_recipe(tmp_path / "recipe.yaml", tmp_path / "other", "train.steps=6")
    assert [*(tmp_path / "other" / "checkpoints").iterdir()] == []


def test_the_state_of_another_algorithm_is_refused() -> None:
    parameters = list(perceptron().parameters())
    with adamw(perceptron()) as opt:
        with pytest.raises(ConfigError, match="amsgrad"):
            opt.load_state_dict(torch.optim.AdamW(parameters, amsgrad=True).state_dict())
        with pytest.raises(ConfigError, match="not of AdamW"):
            opt.load_state_dict(torch.optim.Adam(parameters, weight_decay=0.1).state_dict())
        model = perceptron()
        adam = torch.optim.Adam(model.parameters())
        train(model, adam, range(2), square_loss)
        opt.load_state_dict(adam.state_dict())  # without decay the two are one
        assert differing(state(opt), state(adam)) == []
        odd = saved_and_loaded(adam.state_dict())
        odd["state"][3]["step"] = torch.tensor(3.5)
        with pytest.raises(ConfigError, match=r"a step in the loaded state is 3\.5: whole numbers"):
            opt.load_state_dict(odd)
        assert differing(state(opt), state(adam)) == []
    with opened(hytrain.Adam, perceptron(), weight_decay=0.1) as opt:
        with pytest.raises(ConfigError, match=r"not of Adam: go on with hytrain\.AdamW"):
            opt.load_state_dict(torch.optim.AdamW(parameters, weight_decay=0.1).state_dict())
        opt.load_state_dict(torch.optim.Adam(parameters, weight_decay=0.1).state_dict())


Options = dict[str, bool]


def dcp_save(model: nn.Module, opt: torch.optim.Optimizer, folder: Path, options: Options) -> None:
    weights, moments = get_state_dict(model, opt, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def dcp_load(model: nn.Module, opt: torch.optim.Optimizer, folder: Path, options: Options) -> None:
    of = StateDictOptions(**options)
    weights, moments = get_state_dict(model, opt, options=of)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=moments, options=of)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"flatten_optimizer_state_dict": True}),
        (torch.bfloat16, {"full_state_dict": True}),
        (torch.bfloat16, {"full_state_dict": True, "cpu_offload": True}),
        (torch.float16, {}),
    ],
    ids=str,
)
def test_a_distributed_checkpoint_goes_on_exactly(dtype: torch.dtype, options: Options, tmp_path: Path) -> None:
    first, second = perceptron(dtype=dtype), perceptron(dtype=dtype)
    with adamw(first, k=0.5) as opt:
        train(first, opt, range(4), square_loss)
        before = state(opt) | weights(first)
        dcp_save(first, opt, tmp_path, options)
        assert differing(state(opt) | weights(first), before) == []
        train(first, opt, range(4, 8), square_loss)
        expected = state(opt) | weights(first)
    with adamw(second, k=0.0, lr=0.5) as opt:
        dcp_load(second, opt, tmp_path, options)
        train(second, opt, range(4, 8), square_loss)
        assert differing(state(opt) | weights(second), expected) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_go_from_torch_to_hytrain_and_back(tmp_path: Path) -> None:
    whole, first, second, third = perceptron(), perceptron(), perceptron(), perceptron()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=LR, fused=True), range(9), square_loss)
    theirs = torch.optim.AdamW(first.parameters(), lr=LR, fused=True)
    train(first, theirs, range(3), square_loss)
    dcp_save(first, theirs, tmp_path / "torch", {})
    with adamw(second, k=0.5) as opt:
        dcp_load(second, opt, tmp_path / "torch", {})
        train(second, opt, range(3, 6), square_loss)
        dcp_save(second, opt, tmp_path / "hytrain", {})
    theirs = torch.optim.AdamW(third.parameters(), lr=0.5)
    dcp_load(third, theirs, tmp_path / "hytrain", {})
    train(third, theirs, range(6, 9), square_loss)
    assert differing(weights(third), weights(whole)) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bfloat16_state_of_torchs_goes_on_without_remainders(tmp_path: Path) -> None:
    first, second = perceptron(dtype=torch.bfloat16), perceptron(dtype=torch.bfloat16)
    theirs = torch.optim.AdamW(first.parameters(), lr=LR, fused=True)
    train(first, theirs, range(3), square_loss)
    dcp_save(first, theirs, tmp_path, {})
    with adamw(second, k=0.5) as opt:
        train(second, opt, range(2), square_loss)
        kept, moments = get_state_dict(second, opt)
        for entry in moments["state"].values():
            del entry["remainder"]
        dcp.load({"model": kept, "optimizer": moments}, checkpoint_id=tmp_path)
        set_state_dict(second, opt, model_state_dict=kept, optim_state_dict=moments)
        expected = {name: value.float() for name, value in state(theirs).items()}
        found = state(opt)
        assert all(not value.any() for name, value in found.items() if "remainder" in name)
        assert differing({name: value for name, value in found.items() if name in expected}, expected) == []
        assert differing(weights(second), weights(first)) == []


def test_a_state_by_names_is_loaded_by_names_in_any_order() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), square_loss)
        named, expected = get_optimizer_state_dict(model, opt), state(opt)
        named = {"state": copy.deepcopy(named["state"]), "param_groups": copy.deepcopy(named["param_groups"])}
        train(model, opt, range(3, 5), square_loss)
        [group] = named["param_groups"]
        group["params"].reverse()
        opt.load_state_dict(named)
        assert differing(state(opt), expected) == []
        group["params"][0] = "another"
        with pytest.raises(ConfigError, match="parameter groups"):
            opt.load_state_dict(named)
        momentum = torch.optim.SGD(model.parameters(), momentum=0.9).state_dict()
        momentum["state"] = {0: {"momentum_buffer": torch.zeros(())}}
        with pytest.raises(ConfigError, match="not AdamW's: it has momentum_buffer"):
            opt.load_state_dict(momentum)


def test_hooks_on_state_dicts_are_called_as_torch_does() -> None:
    called: list[str] = []
    for make in (lambda model: nullcontext(torch.optim.AdamW(model.parameters())), adamw):
        with make(perceptron()) as opt:
            opt.register_state_dict_pre_hook(lambda opt: called.append("before"))
            opt.register_state_dict_post_hook(lambda opt, state: {**state, "ours": 1})
            opt.register_load_state_dict_pre_hook(lambda opt, state: called.append(f"loads {state['ours']}"))
            opt.register_load_state_dict_post_hook(lambda opt: called.append("after"))
            opt.load_state_dict(opt.state_dict())
    assert called == 2 * ["before", "loads 1", "after"]


def test_the_optimizer_itself_is_neither_copied_nor_pickled_nor_saved_after_its_end(tmp_path: Path) -> None:
    with adamw(perceptron()) as opt:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"state_dict\(\)"):
                how(opt)
    for read in (lambda: opt.save(tmp_path / "late"), opt.state_dict):
        with pytest.raises(UsageError, match="closed"):
            read()


# ---------------------------------------------------------------- through recipes


def checkpoint(run_dir: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by file and name."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return {
        f"{path.name}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_a_recipe_stopped_at_30_and_resumed_to_60(tmp_path: Path) -> None:
    recipe, (whole, parts) = write_recipe(tmp_path), (tmp_path / "whole", tmp_path / "parts")
    train_recipe(recipe, whole, "train.checkpoint_every=30")
    train_recipe(recipe, parts, "train.stop_at=30", "optimizer.k=1")
    at_30 = checkpoint(parts, 30)
    assert at_30 and differing(at_30, checkpoint(whole, 30)) == []
    train_recipe(recipe, parts, "train.resume=latest", "optimizer.k=0")
    at_60 = checkpoint(parts, 60)
    assert differing(at_60, checkpoint(whole, 60)) == []
    assert differing(at_30, {name: at_60[name] for name in at_30}) != []

    def losses(run_dir: Path) -> list[tuple[int, float]]:
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record["loss"]) for record in records]

    assert [step for step, _ in losses(whole)] == list(range(1, 61))
    assert losses(parts) == losses(whole)
