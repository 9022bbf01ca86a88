"""Co-training, with all processes: the bits do not depend on who trains a part, whatever happens to the CPU trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from helpers import DEADLINE_S, differing, on_waiting, process, state, wait_for, weights
from programs import started
from torch import Tensor, nn
from variants import slow

from examples.studies.cotraining import recipes, shares
from examples.studies.cotraining.partner import ROOT, WORKER, Partner
from examples.studies.cotraining.planner import Step
from examples.studies.cotraining.wire import TakeBack
from hytrain.errors import CapacityError, ClusterError, UnsupportedError
from hytrain.optim import Optimizer
from hytrain.recipe import config, loop, report
from hytrain.recipe.optimizer import hytrain_optimizer

PARTS, STEPS = 4, 8
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "max_position_embeddings": 32, **SIZES}
#: Tied, and larger than a block, so that it is cut into pieces.
LARGE_EMBEDDING = "model.config.intermediate_size=16", "model.config.tie_word_embeddings=true"
#: With dropout.
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
RANDOM = {
    "run": {"threads": 1},
    "model": {"config": {**LLAMA, "vocab_size": 64}},
    "data": {"kind": "random", "sequence_length": 8, "batch_size": 2},
    "train": {"steps": 1_000_000, "device": "cpu", "grad_accumulation": 2},
}
TREE: dict[str, Any] = {
    "run": {"seed": 5, "threads": 1},
    "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 2 * PARTS},
    "train": {"steps": STEPS, "lr": 1e-2, "eval_batches": 2, "device": "cpu", "grad_accumulation": PARTS},
    "optimizer": {"k": 0.4},
}
#: From each number of parts to another one.
ALL = (0, 1, 3, 2, 0, 3, 1, 2)


class Scheduled:
    """A planner that has the next number of parts in each step."""

    why = "the test says so"

    def __init__(self, parts: int, most: int, after: int) -> None:
        assert (parts, most, after) == (PARTS, PARTS - 1, 1)
        self.cpu_parts, self.observed = -1, list[Step]()
        self._left = iter(self.schedule)

    schedule: Sequence[int] = ()

    def observe(self, step: Step) -> None:
        self.observed.append(step)

    def decide(self) -> bool:
        self.cpu_parts = next(self._left)
        return True


#: What `Trainings.alone` has returned, by its options.
ALONE: dict[tuple[str, ...], dict[str, Tensor]] = {}


class Trainings:
    """Trains recipes over one text. `cpu_parts` has how many parts the CPU trained in the last run's steps."""

    def __init__(self, folder: Path, patches: pytest.MonkeyPatch) -> None:
        self.cpu_parts = list[int | None]()
        self._folder, self._patches = folder, patches
        words = random.Random(1).choices(["the", "people", "of", "these", "states", "shall", "prosper"], k=2000)
        (folder / "text.txt").write_text(" ".join(words))

    def __call__(
        self,
        *overrides: str,
        cpu_parts: int | str | None = None,
        schedule: Sequence[int] | None = None,
        model: Mapping[str, Any] = LLAMA,
    ) -> dict[str, Tensor]:
        """Weights, state and losses after training. With a schedule, the CPU has so many parts in each step."""
        recipe = self._folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({**TREE, "model": {"config": dict(model)}}))
        made = list[Any]()

        def make(module: nn.Module, recipe: config.Recipe) -> Any:
            made.append((module, hytrain_optimizer(module, recipe)))
            return made[-1][1]

        run_dir = self._folder / f"run-{len(list(self._folder.glob('run-*')))}"
        run_dir.mkdir()
        with self._patches.context() as patch:
            patch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
            if schedule is not None:
                cpu_parts = "auto"
                patch.setattr(Scheduled, "schedule", schedule)
                patch.setattr(shares, "CpuPartsPlanner", Scheduled)
                patch.setattr(shares, "FIRST_TRIAL", 10**9)
            try:
                wanted = config.load(recipe, overrides)
                if cpu_parts is None:
                    loop.train(wanted, run_dir, make, terminal=False)
                else:
                    recipes.train(wanted, run_dir, cpu_parts, make)
                [(module, opt)] = made
                opt.synchronize()
                result = {**weights(module), **state(opt)}
            finally:
                made[0][1].close()
        lines = (opt.run_dir / "metrics.jsonl").read_text().splitlines()[-STEPS:]
        records = [json.loads(line) for line in lines]
        self.cpu_parts = [record.get("cpu_parts") for record in records]
        return {**result, "losses": torch.tensor([record["loss"] for record in records], dtype=torch.float64)}

    def alone(self, *options: str) -> dict[str, Tensor]:
        """Without a CPU trainer, once for all tests that compare with it."""
        if options not in ALONE:
            ALONE[options] = self(*options)
        return ALONE[options]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    return Trainings(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        LARGE_EMBEDDING,
        slow(("model.dtype=bfloat16", "optimizer.k=0", "train.max_grad_norm=1e3", "optimizer.speculate=true")),
        slow(
            ("optimizer.k=0", "optimizer.visit=0.5", "optimizer.offload_weights=1", "model.gradient_checkpointing=true")
        ),
        ("optimizer.k=auto", "optimizer.policy=random", "train.loss_chunks=2"),
        slow(("model.autocast=true", "optimizer.visit=0.6", "optimizer.k=0.2")),
    ],
    ids=["pieces", "banks", "offloaded", "moving", "visiting"],
)
def test_the_bits_of_one_process_whatever_the_cpu_trains(options: tuple[str, ...], trained: Trainings) -> None:
    ours = trained(*options, schedule=ALL)
    assert trained.cpu_parts == [*ALL]
    assert differing(ours, trained.alone(*options)) == []


def test_dropout_does_not_depend_on_who_trains_a_part(trained: Trainings) -> None:
    assert differing(trained(schedule=ALL, model=GPT2), trained(schedule=(0,) * STEPS, model=GPT2)) == []


def test_dropout_goes_on_as_it_would_have(trained: Trainings, tmp_path: Path) -> None:
    every = "train.checkpoint_every=4"
    expected = trained(every, cpu_parts=2, model=GPT2)
    ours = trained(every, f"train.resume={tmp_path}/run-0/checkpoints/step-4", cpu_parts=2, model=GPT2)
    assert differing({**ours, "losses": expected["losses"]}, expected) == []


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within rounding, of which AdamW makes more where gradients are close to 0."""
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert (ours[name].double() - values.double()).norm() <= 5e-3 * values.double().norm(), name


def test_parts_make_the_batch_within_rounding(trained: Trainings) -> None:
    assert_close(trained(cpu_parts=2), trained("train.grad_accumulation=1"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer.k=0.4",),
        ("optimizer.k=0", "optimizer.visit=0.5", "optimizer.offload_weights=1"),
        ("optimizer.policy=random",),
    ],
    ids=["resident", "offloaded", "moving"],
)
def test_a_gpu_and_the_cpu_make_the_batch_within_rounding(options: tuple[str, ...], trained: Trainings) -> None:
    options = (*options, "train.device=cuda")
    assert_close(trained(*options, schedule=ALL), trained(*options))


def test_weights_are_lent_once_all_updates_have_ended(trained: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer process is stopped from before a step's updates until somebody waits for one."""
    optimizers, add = list[psutil.Process](), Optimizer.add_gradients

    def added(self: Any, gradients: Any) -> Any:
        optimizers[:] = [process(self, "optimizer")]
        taken = add(self, gradients)
        optimizers[0].suspend()
        return taken

    monkeypatch.setattr(Optimizer, "add_gradients", added)
    on_waiting(monkeypatch, lambda what: optimizers[0].resume() if optimizers else None)
    try:
        ours = trained("optimizer.k=0", cpu_parts=3)
    finally:
        optimizers[0].resume()
    optimizers.clear()
    assert differing(ours, trained.alone("optimizer.k=0")) == []


def test_no_copy_is_made_of_what_the_cpu_owns(trained: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, hand_over = list[int](), Partner.hand_over

    def look(self: Partner, lent: Any, parts: Any) -> list[int]:
        copied.append(sum(each.memory is lent.copies.memory for each in lent.values() if each.kind == "trained"))
        return hand_over(self, lent, parts)

    monkeypatch.setattr(Partner, "hand_over", look)
    trained("optimizer.k=0", cpu_parts=1)
    assert {*copied} == {0}
    trained("optimizer.k=1", cpu_parts=1)
    assert copied[-1] > 0


def kill(partner: Partner) -> None:
    os.kill(partner.pid, signal.SIGKILL)


def stop(partner: Partner) -> None:
    partner._timeout_s = 1.0
    os.kill(partner.pid, signal.SIGSTOP)


def flood(partner: Partner) -> None:
    """More than the socket takes, while it does not read."""
    stop(partner)
    partner._socket.settimeout(1.0)
    while not partner.lost:
        partner._send(TakeBack(memory=99))


def confuse(partner: Partner) -> None:
    partner._send(TakeBack(memory=99))


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (kill, "it was killed by SIGKILL"),
        (stop, "it has not answered for 1 s"),
        (flood, "it has not read for 1 s"),
        (confuse, "KeyError: 99"),
    ],
)
def test_a_cpu_trainer_that_is_lost_costs_no_bit(
    hurt: Callable[[Partner], None],
    said: str,
    trained: Trainings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the third step, when it should have begun with its parts."""
    asked, hand_over = list[None](), Partner.hand_over

    def handed_over(self: Partner, lent: Any, batches: Any) -> list[int]:
        asked.append(None)
        if len(asked) == 3:
            hurt(self)
        return hand_over(self, lent, batches)

    monkeypatch.setattr(Partner, "hand_over", handed_over)
    ours = trained(cpu_parts=2)
    assert trained.cpu_parts == [2, 2, 0, 0, 0, 0, 0, 0]
    assert differing(ours, trained.alone()) == []
    told = [line for line in capsys.readouterr().err.splitlines() if "is lost" in line]
    assert len(told) == 1 and told[0].startswith("step 4: the CPU trainer (process "), told
    assert told[0].endswith(f" is lost: {said}; from here on, all parts are trained without the CPU trainer")


def test_it_ends_with_a_trainer_that_is_killed(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RANDOM))
    words = "--recipe", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path), "--cpu-parts", "1"
    command = sys.executable, "-m", "examples.studies.cotraining", *words
    options: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.STDOUT}
    with started(*command, **options) as trainer:
        metrics = run_dir / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text())
        [helper] = [child for child in psutil.Process(trainer.pid).children() if WORKER in child.cmdline()]
        trainer.kill()
        trainer.wait(DEADLINE_S)
        helper.wait(DEADLINE_S)


def test_auto_measures_and_says_what_it_decides(
    trained: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for what it measures; here steps are so long that answers come in one."""
    receive = Partner.receive
    monkeypatch.setattr(Partner, "receive", lambda self, job, *, wait=True: receive(self, job))
    ours = trained("train.steps=60", "train.lr=1e-3", cpu_parts="auto")
    assert len(told := [line for line in capsys.readouterr().err.splitlines() if "the CPU trains" in line])
    assert "of 4 parts of each batch, since a part takes " in told[0]
    assert differing(ours, trained("train.steps=60", "train.lr=1e-3")) == []


@pytest.mark.parametrize(
    "options",
    [{"parallel": {"context": 2}}, {"train": {"steps": 1, "compile": "blocks"}}],
    ids=["context", "compile"],
)
def test_recipes_that_cannot_be_shared_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    recipe = config.validate({**RANDOM, **options}, "the test")
    with pytest.raises(UnsupportedError, match="^co-training supports neither lora"):
        recipes.train(recipe, tmp_path, 1)


def test_what_cannot_start_is_refused(trained: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"fields": {"model_type": "llama"}, "model": {}, "loss_chunks": 1}
    monkeypatch.setattr(recipes, "describe", lambda task: described)
    with pytest.raises(
        ClusterError, match=r"(?s)^the CPU trainer did not start: ValidationError: .*/cpu_trainer-0.log\n"
    ):
        trained(cpu_parts=1)
    monkeypatch.setattr(shares, "host_bound", lambda *arguments: 0)
    with pytest.raises(CapacityError, match=r"cpu_parts=1 needs 0\.2 MiB of host memory"):
        trained(cpu_parts=1)
